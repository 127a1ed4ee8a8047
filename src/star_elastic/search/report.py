"""What a search found: a table of the best, and the command that cuts the first."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from star_elastic.axes import DEPTH
from star_elastic.ladder import Budget
from star_elastic.layout import Layout
from star_elastic.submodel import FULL, Submodel
from star_elastic.units import format_bytes, format_count

SHOWN = 10


@dataclass(frozen=True)
class Candidate:
    """One nested model that was measured.

    Attributes:
        submodel: its widths, every axis spelled out, and layers.
        cost: in the budget's kind.
        params: total parameters.
        active_params: parameters that a token uses.
        loss: held-out loss, nats per token.
    """

    submodel: Submodel
    cost: int
    params: int
    active_params: int
    loss: float


@dataclass(frozen=True)
class SearchReport:
    """What ``search_parent`` did.

    Attributes:
        parent: the folder searched.
        layout: its table.
        budget: the limit.
        axes: those that could be cut.
        ladder: what was chosen from, in one line.
        notes: what a user should know, one line each.
        whole: the parent itself.
        candidates: all that were measured, lowest loss first.
        measured: how many losses were measured now; the others come from the cache.
        tokens: held-out tokens.
        data_sha256: of their rows.
    """

    parent: Path
    layout: Layout
    budget: Budget
    axes: tuple[str, ...]
    ladder: str
    notes: tuple[str, ...]
    whole: Candidate
    candidates: tuple[Candidate, ...]
    measured: int
    tokens: int
    data_sha256: str

    @property
    def best(self) -> Candidate:
        """The candidate of lowest loss."""
        return self.candidates[0]

    @property
    def command(self) -> str:
        """The command line that cuts the best candidate out."""
        return slice_command(self.parent, self.layout, self.best.submodel)

    def as_json(self) -> dict[str, Any]:
        """One JSON object; numbers are exact."""
        return {
            "parent": str(self.parent),
            "budget": asdict(self.budget),
            "axes": list(self.axes),
            "ladder": self.ladder,
            "notes": list(self.notes),
            "whole": _candidate_json(self.whole),
            "candidates": [_candidate_json(candidate) for candidate in self.candidates],
            "measured": self.measured,
            "tokens": self.tokens,
            "data_sha256": self.data_sha256,
            "command": self.command,
        }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {**asdict(candidate), "submodel": candidate.submodel.model_dump(mode="json")}


def slice_command(parent: Path, layout: Layout, submodel: Submodel) -> str:
    """The ``slice`` command of a nested model, with only the axes that it cuts."""
    words = [f"--width {name}={width}" for name, width in submodel.widths.items() if width != layout.axes[name].size]
    if submodel.layers is not None:
        words.append(f"--layers {','.join(map(str, submodel.layers))}")
    out = parent.with_name(f"{parent.resolve().name}-cut")
    return f"star-elastic slice {shlex.quote(str(parent))} {shlex.quote(str(out))} {' '.join(words) or f'--to {FULL}'}"


def show_search(report: SearchReport, *, as_json: bool) -> None:
    """Print a report on stdout, for people or for programs."""
    if as_json:
        print(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        print_search(report, Console())


def print_search(report: SearchReport, console: Console) -> None:
    """Print what was tried, the best, and how to cut it."""
    for note in report.notes:
        _line(console, f"note: {note}")
    _line(console, f"budget: at most {report.budget.text(report.budget.limit)}")
    _line(console, f"ladder: {report.ladder}")
    console.print(_table(report))
    losses = len({candidate.submodel.model_dump_json() for candidate in (*report.candidates, report.whole)})
    _line(console, f"losses: {report.measured} measured now, {losses - report.measured} from the cache")
    _line(console, f"to cut the best: {report.command}")


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _table(report: SearchReport) -> Table:
    kind = {"params": "parameters", "active_params": "active parameters", "memory": "memory"}[report.budget.kind]
    table = Table(title=f"best by held-out loss (nats per token), {format_count(report.tokens)} tokens")
    for heading in (kind, "loss", "more than whole"):
        table.add_column(heading, justify="right")
    table.add_column("cut", overflow="fold")
    for candidate in (*report.candidates[:SHOWN], report.whole):
        if candidate is report.whole:
            table.add_section()
        numbers = (f"{candidate.loss:.4f}", f"{candidate.loss - report.whole.loss:+.4f}")
        table.add_row(_cost(report, candidate.cost), *numbers, _cuts(report, candidate))
    return table


def _cuts(report: SearchReport, candidate: Candidate) -> str:
    """The axes that a candidate cuts, with what it keeps."""
    widths = dict(candidate.submodel.widths)
    if candidate.submodel.layers is not None:
        widths[DEPTH] = len(candidate.submodel.layers)
    cut = [f"{name} {width}" for name, width in widths.items() if width != report.layout.axes[name].size]
    return ", ".join(cut) or "nothing: the whole model"


def _cost(report: SearchReport, cost: float) -> str:
    return format_bytes(cost) if report.budget.kind == "memory" else format_count(cost)
