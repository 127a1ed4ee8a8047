"""How large the demo is: one full version, and a quick one that checks the machinery in a minute and claims no accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Sizes and step counts of a demo run; the nested sizes are cut on axes whose submodels are pure views."""

    parent_steps: int
    elastic_steps: int
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
    cuts: dict[str, dict[str, float]] = field(
        default_factory=lambda: {
            "full": {},
            "mid": {"hidden": 0.75},
            "small": {"hidden": 0.5, "expert_ffn": 0.5, "shared_ffn": 0.5},
        }
    )

    def widths(self, name: str) -> dict[str, int]:
        """Widths of a nested size."""
        return {axis: round(share * getattr(self, axis)) for axis, share in self.cuts[name].items()}


FULL = Settings(parent_steps=400, elastic_steps=300, rows=20_000, text_chars=2_000_000, held_out=240)
QUICK = Settings(
    quick=True,
    parent_steps=12,
    elastic_steps=12,
    rows=400,
    text_chars=60_000,
    held_out=16,
    hidden=64,
    expert_ffn=32,
    shared_ffn=64,
)
