"""What probing found, for people and for files: a table, ``probe.json``, and a plot where matplotlib is installed."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from star_elastic.score.probe import Point, ProbeReport
from star_elastic.units import format_count

PROBE_FILE = "probe.json"
PLOT_FILE = "probe.png"
FORMAT_VERSION = 1


def write_probe(folder: Path, report: ProbeReport) -> None:
    """Write ``probe.json`` into a folder, and ``probe.png`` where matplotlib is installed."""
    content = {"format_version": FORMAT_VERSION, **asdict(report)}
    (folder / PROBE_FILE).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if can_plot():
        plot_probe(folder / PLOT_FILE, report)


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def print_probe(report: ProbeReport, console: Console) -> None:
    """Print one line per cut: what is left, and what it costs."""
    title = f"held-out loss of one-shot slices, {format_count(report.tokens)} tokens (nats per token)"
    table = Table(title=title)
    table.add_column("axis", no_wrap=True)
    for heading in ("width", "of", "parameters", "active", "loss", "more than whole"):
        table.add_column(heading, justify="right")
    table.add_row("none", "", "", "", "", f"{report.full:.4f}", "")
    table.add_section()
    for axis, points in by_axis(report).items():
        for point in points:
            name = axis if point is points[0] else ""
            counts = (format_count(point.params), format_count(point.active_params))
            more = f"{point.loss - report.full:+.4f}"
            table.add_row(name, str(point.width), str(point.size), *counts, f"{point.loss:.4f}", more)
        table.add_section()
    console.print(table)
    if not can_plot():
        console.print(
            f"no {PLOT_FILE}: it needs matplotlib, which is in the extra 'report'", soft_wrap=True, highlight=False
        )


def by_axis(report: ProbeReport) -> dict[str, list[Point]]:
    """The points of each axis, widest first."""
    found: dict[str, list[Point]] = {}
    for point in report.points:
        found.setdefault(point.axis, []).append(point)
    return found


def plot_probe(path: Path, report: ProbeReport) -> None:
    """Draw loss against the share of the axis that is kept, and against the parameters that are left."""
    # Not pyplot, which keeps global state and may look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    kept, left = figure.subplots(1, 2, sharey=True)
    for axis, points in by_axis(report).items():
        losses = [report.full, *(point.loss for point in points)]
        kept.plot([1.0, *(point.width / point.size for point in points)], losses, marker="o", label=axis)
        left.plot([1.0, *(point.params / report.params for point in points)], losses, marker="o", label=axis)
    kept.set(xlabel="share of the axis kept", ylabel="held-out loss (nats per token)")
    left.set(xlabel="share of the parameters kept")
    for plot in (kept, left):
        plot.axhline(report.full, color="0.7", linewidth=1, zorder=0)
        plot.grid(alpha=0.3)
        plot.invert_xaxis()
    kept.legend()
    figure.savefig(path, dpi=120)
