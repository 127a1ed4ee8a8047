"""What scoring found, for people and for files: the share of importance that a cut keeps, and which experts stayed idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from star_elastic.axes import Axis
from star_elastic.layout import Layout
from star_elastic.units import format_count

FRACTIONS = (0.75, 0.5)
"""Parts of the parent's width at which the kept share is shown."""


@dataclass(frozen=True)
class ScoreReport:
    """What ``score_parent`` did.

    Attributes:
        out: the folder written.
        tokens: real tokens read, over all samples.
        samples: sequences read.
        kept: for each key of ``scores.safetensors``, width -> share of the summed importance that its best channels hold.
        idle_experts: by layer, the experts that no calibration token reached.
        facts: everything else that ``scores.json`` records.
    """

    out: Path
    tokens: int
    samples: int
    kept: dict[str, dict[int, float]]
    idle_experts: dict[int, list[int]]
    facts: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The content of ``scores.json``."""
        return {
            **self.facts,
            "tokens": self.tokens,
            "samples": self.samples,
            "kept": {key: {str(width): share for width, share in shares.items()} for key, shares in self.kept.items()},
            "idle_experts": {str(layer): experts for layer, experts in self.idle_experts.items()},
        }


def axis_of(key: str, layout: Layout) -> Axis:
    """The axis that a key of ``scores.safetensors`` ranks: ``hidden``, ``layers.3.expert_ffn``."""
    return layout.axes[key.rsplit(".", 1)[-1]]


def kept_shares(scores: Mapping[str, Tensor], layout: Layout) -> dict[str, dict[int, float]]:
    """For each key, the share of its summed importance held by the best channels, at legal widths near ``FRACTIONS``."""
    return {key: _shares(score, axis_of(key, layout)) for key, score in scores.items()}


def _shares(score: Tensor, axis: Axis) -> dict[int, float]:
    best_first = score.double().sort(descending=True).values
    total = float(best_first.sum())
    widths = (axis.at_most(fraction * axis.size) for fraction in FRACTIONS)
    return {width: float(best_first[:width].sum()) / total if total else 1.0 for width in widths}


def print_report(report: ScoreReport, layout: Layout, console: Console) -> None:
    """Print one line per axis, the mean over its layers and the layer that loses most, and any idle experts."""
    table = Table(title=f"importance from {format_count(report.tokens)} tokens in {report.samples} samples")
    table.add_column("axis")
    table.add_column("width", justify="right")
    table.add_column("share kept", justify="right")
    table.add_column("least kept", justify="right")
    for name in layout.width_axes:
        keys = [key for key in report.kept if axis_of(key, layout).name == name]
        widths = report.kept[keys[0]] if keys else {}
        for width in widths:
            shares = {key: report.kept[key][width] for key in keys}
            worst = min(shares, key=lambda key: shares[key])
            where = f"{shares[worst]:.1%} ({worst.rsplit('.', 1)[0]})" if len(keys) > 1 else ""
            table.add_row(name, f"{width} of {layout.axes[name].size}", f"{sum(shares.values()) / len(shares):.1%}", where)
    console.print(table)
    for layer, experts in report.idle_experts.items():
        note = f"note: no calibration token reached experts {experts} of layer {layer}; they had no say in its order"
        console.print(note, soft_wrap=True, highlight=False)
    console.print(f"wrote {report.out}: {len(report.kept)} orders", soft_wrap=True, highlight=False)
