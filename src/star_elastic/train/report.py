"""What a run did, as numbers: kept while it runs, written to ``training.json``, printed as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from star_elastic.units import format_bytes, format_count, format_milliseconds

RECENT = 20
SHORT = {"memory": format_bytes, "latency": format_milliseconds}  # other budgets are counts


@dataclass
class Losses:
    """Distillation losses of one submodel (KL in nats per token).

    Attributes:
        steps: Steps that trained it.
        first: Loss of its first step.
        total: Sum over its steps.
        recent: Losses of its last 20 steps.
    """

    steps: int = 0
    first: float | None = None
    total: float = 0.0
    recent: list[float] = field(default_factory=list)

    def add(self, loss: float) -> None:
        """Count one step."""
        self.first = loss if self.first is None else self.first
        self.steps += 1
        self.total += loss
        self.recent = [*self.recent, loss][-RECENT:]


@dataclass(frozen=True)
class Choice:
    """The widths that a router chose for a budget.

    Attributes:
        kind: What the budget counts.
        target: Parameters, bytes or seconds.
        cost: Of the chosen widths.
        error: cost / target - 1.
        choice_probability: That the router gives to these widths together.
        is_most_probable: Whether it gives more to no other widths on any axis; else those miss the budget.
        cut: Chosen widths of the axes on which there was a choice.
        text: Cost and target for people.
    """

    kind: str
    target: float
    cost: float
    error: float
    choice_probability: float
    is_most_probable: bool
    cut: Mapping[str, int]
    text: str


@dataclass(frozen=True)
class SubmodelReport:
    """One submodel's training.

    Attributes:
        params: Parameters, all of them.
        probability: Chance of a step to train it, mean over all planned steps.
        steps: Steps that did.
        kd_first: Distillation loss of its first step, nats per token; None if it was never drawn.
        kd_recent: Mean of its last 20 steps.
        kd_mean: Mean of all its steps.
        choice: What was learned for it; None for fixed widths.
    """

    params: int
    probability: float
    steps: int
    kd_first: float | None
    kd_recent: float | None
    kd_mean: float | None
    choice: Choice | None = None

    @classmethod
    def of(cls, params: int, probability: float, losses: Losses, choice: Choice | None = None) -> SubmodelReport:
        """Summarise one submodel."""
        trained = losses.steps > 0
        return cls(
            params=params,
            probability=probability,
            steps=losses.steps,
            kd_first=losses.first,
            kd_recent=sum(losses.recent) / len(losses.recent) if trained else None,
            kd_mean=losses.total / losses.steps if trained else None,
            choice=choice,
        )


@dataclass(frozen=True)
class TrainReport:
    """A finished run.

    Attributes:
        output: The elastic checkpoint.
        steps: Optimizer steps.
        tokens: Real tokens seen; each was seen by one submodel and the teacher.
        seconds: Time spent in steps, over all resumptions.
        submodels: By name.
        notes: What the user should know.
    """

    output: Path
    steps: int
    tokens: int
    seconds: float
    submodels: Mapping[str, SubmodelReport]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready content, without the place where it lies."""
        content = asdict(self)
        del content["output"]
        return {**content, "tokens_per_second": self.tokens / self.seconds if self.seconds else None}

    def write(self, folder: Path) -> None:
        """Write ``training.json`` into a folder."""
        (folder / "training.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def print(self, console: Console | None = None) -> None:
        """Print the same numbers as a table."""
        console = console or Console()
        rate = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else ""
        table = Table(
            title=f"{self.steps:,} steps, {self.tokens:,} tokens, {self.seconds:,.0f} s{rate}", title_justify="left"
        )
        table.add_column("submodel")
        for heading in ("params", "probability", "steps", "KD first", f"KD last {RECENT}", "KD mean"):
            table.add_column(heading, justify="right")
        for name, entry in self.submodels.items():
            losses = (entry.kd_first, entry.kd_recent, entry.kd_mean)
            shown = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
            table.add_row(name, f"{entry.params:,}", f"{entry.probability:.3f}", f"{entry.steps:,}", *shown)
        console.print(table)
        if any(entry.choice for entry in self.submodels.values()):
            console.print(self._choices())
            for name, entry in self.submodels.items():
                if entry.choice is not None:
                    widths = ", ".join(f"{axis} {width}" for axis, width in entry.choice.cut.items())
                    console.print(f"{name}: {widths}", markup=False, highlight=False, soft_wrap=True)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        console.print(f"wrote {self.output}", markup=False, soft_wrap=True)

    def _choices(self) -> Table:
        """What was learned for each budget; widths, which may be many, stand below it."""
        table = Table(title="learned widths", title_justify="left")
        table.add_column("submodel")
        table.add_column("budget")
        for heading in ("target", "cost", "error", "probability"):
            table.add_column(heading, justify="right")
        for name, entry in self.submodels.items():
            if (choice := entry.choice) is not None:
                show = SHORT.get(choice.kind, format_count)
                numbers = (f"{choice.error:+.1%}", f"{choice.choice_probability:.3f}")
                table.add_row(name, choice.kind, show(choice.target), show(choice.cost), *numbers)
        return table
