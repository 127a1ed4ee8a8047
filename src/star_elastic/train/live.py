"""The table above the progress bar of a run: each nested model's loss, budget and widths, and the numbers of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from star_elastic.train.report import RECENT, Losses
from star_elastic.units import format_bytes


class LiveTable:
    """Shows the newest line of metrics, and of each nested model what its own newest lines said.

    Args:
        names: The nested models.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._losses = {name: Losses() for name in names}
        self._errors: dict[str, float] = {}
        self._widths: dict[str, str] = {}
        self._line: Mapping[str, Any] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of metrics."""
        if line["phase"] != self._line.get("phase"):  # what the router said of a stage before no longer holds
            self._errors, self._widths = {}, {}
        self._line = line
        for name, loss in line["kd"].items():
            self._losses[name].add(loss)
        self._errors |= line.get("budget_error", {})
        for name, widths in line.get("widths", {}).items():
            self._widths[name] = widths_text(widths, line["width_probabilities"][name])

    def __rich__(self) -> Group:
        table = Table()
        table.add_column("submodel")
        table.add_column("steps", justify="right")
        table.add_column(f"KD last {RECENT}", justify="right")
        if self._widths:
            table.add_column("budget error", justify="right")
            table.add_column("widths (probability)")
        for name, losses in self._losses.items():
            recent = f"{sum(losses.recent) / len(losses.recent):.4f}" if losses.recent else "-"
            row = [name, f"{losses.steps:,}", recent]
            if self._widths:
                error = self._errors.get(name)
                row += ["-" if error is None else f"{error:+.1%}", self._widths.get(name, "-")]
            table.add_row(*row)
        return Group(table, Text(step_text(self._line)))


def step_text(line: Mapping[str, Any]) -> str:
    """The numbers of a step that belong to no nested model."""
    if not line:
        return ""
    parts = [f"step {line['step']:,}", line["phase"]]
    parts += [f"{name} {line[name]:.3g}" for name in ("tau", "scale") if name in line]
    parts += [f"lr {line['lr']:.2e}", f"gradient norm {line['grad_norm']:.3g}"]
    parts += [f"{line['tokens_per_second']:,.0f} tokens/s", format_bytes(line["memory_bytes"])]
    return "   ".join(parts)


def widths_text(widths: Mapping[str, int], probabilities: Mapping[str, list[float]]) -> str:
    """The most probable width of each axis; of one on which layers choose for themselves, the range and the mean probability.

    Example:
        >>> widths_text({"hidden": 48, "ffn.0": 16, "ffn.3": 32}, {"hidden": [0.1, 0.9], "ffn.0": [0.6], "ffn.3": [0.8]})
        'hidden 48 (0.90), ffn 16-32 (0.70)'
    """
    axes: dict[str, list[str]] = {}
    for key in widths:
        axes.setdefault(key.partition(".")[0], []).append(key)
    parts = []
    for axis, keys in axes.items():
        least, most = min(widths[key] for key in keys), max(widths[key] for key in keys)
        mean = sum(max(probabilities[key]) for key in keys) / len(keys)
        parts.append(f"{axis} {least if least == most else f'{least}-{most}'} ({mean:.2f})")
    return ", ".join(parts)
