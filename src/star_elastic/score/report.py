"""What scoring found, for people and for files: what cuts would keep, the order of layers, and which experts stayed idle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from star_elastic.layout import Layout
from star_elastic.score.curve import axis_of
from star_elastic.score.methods import IDLE_RULE
from star_elastic.score.probe import ProbeReport
from star_elastic.units import format_count


@dataclass(frozen=True)
class ScoreReport:
    """What ``score_parent`` did.

    Attributes:
        out: the folder written.
        tokens: real tokens read, over all samples.
        samples: sequences read.
        kept: for each key of ``scores.safetensors``, width -> share of the summed importance that its best members hold.
        idle_experts: by layer, the experts that no calibration token reached.
        depth_order: layers from most to least important; None where depth was not ranked.
        depth_errors: by number of layers kept, the change of the logits or predictions; only from iterative removal.
        facts: everything else that ``scores.json`` records.
        probe: held-out loss of one-shot cuts, where it was asked for; it goes to ``probe.json``.
    """

    out: Path
    tokens: int
    samples: int
    kept: dict[str, dict[int, float]]
    idle_experts: dict[int, list[int]]
    depth_order: tuple[int, ...] | None
    depth_errors: dict[int, float]
    facts: dict[str, Any]
    probe: ProbeReport | None = None

    def as_json(self) -> dict[str, Any]:
        """The content of ``scores.json``."""
        return {
            **self.facts,
            "tokens": self.tokens,
            "samples": self.samples,
            "kept": {key: {str(width): share for width, share in shares.items()} for key, shares in self.kept.items()},
            "depth_order": None if self.depth_order is None else list(self.depth_order),
            "depth_errors": {str(kept): error for kept, error in self.depth_errors.items()},
            "idle_experts": {str(layer): experts for layer, experts in self.idle_experts.items()},
            **({"idle_rule": IDLE_RULE} if self.idle_experts else {}),
        }


def print_report(report: ScoreReport, layout: Layout, console: Console) -> None:
    """Print the redundancy curve of each axis, the order of layers, and any idle experts."""
    console.print(_curve_table(report, layout))
    for line in (*_depth_lines(report), *_idle_lines(report)):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"wrote {report.out}: {len(report.kept)} orders", soft_wrap=True, highlight=False)


def _curve_table(report: ScoreReport, layout: Layout) -> Table:
    """One line per axis and width: the mean over its layers, and the layer that loses most."""
    table = Table(title=f"importance kept, from {format_count(report.tokens)} tokens in {report.samples} samples")
    table.add_column("axis")
    table.add_column("width", justify="right")
    table.add_column("of", justify="right")
    table.add_column("share kept", justify="right")
    table.add_column("least kept")
    for name, axis in layout.axes.items():
        keys = [key for key in report.kept if axis_of(key, layout).name == name]
        for width in report.kept[keys[0]] if keys else ():
            shares = {key: report.kept[key][width] for key in keys}
            mean = sum(shares.values()) / len(shares)
            first = width == next(iter(report.kept[keys[0]]))
            table.add_row(name if first else "", str(width), str(axis.size), f"{mean:.1%}", _least(shares))
        if keys:
            table.add_section()
    return table


def _least(shares: Mapping[str, float]) -> str:
    worst = min(shares, key=lambda key: shares[key])
    return f"{shares[worst]:.1%} ({worst.rsplit('.', 1)[0]})" if len(shares) > 1 else ""


def _depth_lines(report: ScoreReport) -> list[str]:
    if report.depth_order is None:
        return []
    lines = [f"layers, most important first: {', '.join(map(str, report.depth_order))}"]
    if report.depth_errors:
        errors = ", ".join(f"{kept}: {error:.3g}" for kept, error in report.depth_errors.items())
        what = (
            "KL divergence from the whole model"
            if report.facts["methods"]["depth"] == "kl"
            else "relative squared change of the logits"
        )
        lines.append(f"{what} by layers kept: {errors}")
    return lines


def _idle_lines(report: ScoreReport) -> list[str]:
    return [
        f"note: no calibration token reached experts {experts} of layer {layer}; they rank last, by their router weights"
        for layer, experts in report.idle_experts.items()
    ]
