"""How large the demo is: one full version, and a quick one that checks the machinery in a minute and claims no accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Sizes and step counts of a demo run.

    The router chooses on axes whose submodels are pure views of the parent's weights. Mamba heads and attention heads are left
    whole: their parts of a fused projection are not next to each other, so that a submodel that cuts them holds a copy.

    Attributes:
        budgets: Share of the parent's parameters that each nested size may have.
        axes: Candidates of each axis, as shares of the parent's width.
    """

    parent_steps: int
    search_steps: int
    settle_steps: int
    rows: int
    text_chars: int
    held_out: int
    hidden: int = 128
    expert_ffn: int = 64
    shared_ffn: int = 128
    pattern: str = "MEM*EME"
    length: int = 48  # tokens a row: the longest chain takes 47
    batch_size: int = 32
    peak_lr: float = 3e-3
    elastic_lr: float = 1e-3
    seed: int = 0
    quick: bool = False
    budgets: dict[str, float] = field(default_factory=lambda: {"full": 1.0, "mid": 0.75, "small": 0.5})
    axes: dict[str, tuple[float, ...]] = field(
        default_factory=lambda: {
            "hidden": (1, 0.875, 0.75, 0.625, 0.5),
            "expert_ffn": (1, 0.75, 0.5),
            "shared_ffn": (1, 0.75, 0.5),
        }
    )


FULL = Settings(parent_steps=400, search_steps=120, settle_steps=150, rows=20_000, text_chars=2_000_000, held_out=240)
QUICK = Settings(
    quick=True,
    parent_steps=12,
    search_steps=24,
    settle_steps=6,
    rows=400,
    text_chars=60_000,
    held_out=16,
    hidden=64,
    expert_ffn=32,
    shared_ffn=64,
)
