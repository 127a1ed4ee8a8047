"""What the demo prints per size: cost, and quality before and after each step of the method."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from star_elastic import cost
from star_elastic.demo.facts import Fact
from star_elastic.demo.pretrain import mixture
from star_elastic.demo.settings import Settings
from star_elastic.demo.task import HELD_OUT_ROWS, HELD_OUT_TEXT
from star_elastic.elastic import ElasticModel
from star_elastic.evaluate import exact_match, held_out_loss
from star_elastic.layout import Layout
from star_elastic.submodel import Submodel
from star_elastic.train.data import Calibration, calibration_batches
from star_elastic.train.report import Choice
from star_elastic.units import format_bytes

STAGES = ("unsorted", "sorted", "trained")
FULL_SIZE_TOLERANCE = 1.02  # the largest size starts as the parent, and must not get worse than this times its loss
MAX_NEW_TOKENS = 30  # the longest thought takes 24 tokens, its end and the answer 3


@dataclass(frozen=True)
class Quality:
    """Held-out loss in nats per token, and share of held-out questions answered exactly."""

    loss: float
    accuracy: float

    def __str__(self) -> str:
        return f"{self.loss:.3f} / {self.accuracy:4.0%}"


@dataclass(frozen=True)
class Size:
    """One nested size: what the router chose for its budget, its cost, and its quality as a slice of each stage's checkpoint."""

    name: str
    choice: Choice
    widths: dict[str, int]
    params: int
    active_params: int
    nbytes: int
    quality: dict[str, Quality]
    is_parent: bool

    @property
    def improved(self) -> bool:
        """Whether training beat the sorted one-shot slice; the parent's own size must keep the parent's loss instead."""
        before, after = self.quality["sorted"].loss, self.quality["trained"].loss
        return after <= before * FULL_SIZE_TOLERANCE if self.is_parent else after < before

    @property
    def verdict(self) -> str:
        """``improved`` in a word."""
        return ("kept" if self.is_parent else "better") if self.improved else "WORSE"


class Examiner:
    """Holds the held-out data and measures models on it."""

    def __init__(self, data: Path, tokenizer: Any, settings: Settings) -> None:
        self.tokenizer = tokenizer
        recipe = mixture(data, reasoning=HELD_OUT_ROWS, text=HELD_OUT_TEXT)
        self.held_out: Calibration = calibration_batches(
            recipe, tokenizer, samples=2 * settings.held_out, seq_len=settings.length, batch_size=settings.batch_size
        )
        rows = (data / HELD_OUT_ROWS).read_text(encoding="utf-8").splitlines()
        self.conversations = [json.loads(row)["messages"] for row in rows]

    def measure(self, model: ElasticModel, name: str) -> Quality:
        """Loss and accuracy of one nested size."""
        accuracy = exact_match(model.submodel(name), self.tokenizer, self.conversations, max_new_tokens=MAX_NEW_TOKENS)
        return Quality(held_out_loss(model, self.held_out, submodel=name), accuracy)


def describe_size(layout: Layout, name: str, submodel: Submodel, choice: Choice, quality: dict[str, Quality]) -> Size:
    """Put choice, cost and quality of a nested size together."""
    widths = layout.complete(submodel.widths)
    return Size(
        name=name,
        choice=choice,
        widths=widths,
        params=cost.params(layout, widths),
        active_params=cost.active_params(layout, widths),
        nbytes=int(cost.weight_bytes(layout, widths, dtype="fp32")),
        quality=quality,
        is_parent=widths == layout.complete({}),
    )


def measure_sizes(
    models: dict[str, ElasticModel], examiner: Examiner, choices: Mapping[str, Choice], advance: Callable[[int], None]
) -> list[Size]:
    """Measure every nested size of every stage's model, as views."""
    sizes = []
    trained = models["trained"]
    for name, choice in choices.items():
        quality = {}
        for stage, model in models.items():
            quality[stage] = examiner.measure(model, name)
            advance(1)
        sizes.append(describe_size(trained.layout, name, trained.config.get(name), choice, quality))
    return sizes


def print_choices(sizes: Sequence[Size], console: Console) -> None:
    """What each budget asked for, what the router chose for it, and the probability that it gives to this choice."""
    axes = list(sizes[0].choice.cut)
    table = Table(title="Parameters asked and reached, and the widths that the router chose", title_justify="left")
    table.add_column("size")
    for column in ("budget", "reached", "error", *axes, "sure"):
        table.add_column(column, justify="right")
    for size in sizes:
        choice = size.choice
        numbers = (f"{choice.target:,.0f}", f"{choice.cost:,.0f}", f"{choice.error:+.1%}")
        widths = (str(choice.cut[axis]) for axis in axes)
        table.add_row(size.name, *numbers, *widths, f"{choice.choice_probability:.0%}")
    console.print(table)


def print_sizes(sizes: Sequence[Size], parent: Quality, console: Console) -> None:
    """Two tables: what each size costs, and how good it is before and after each step."""
    costs = Table(title="Sizes", title_justify="left")
    costs.add_column("size")
    for column in ("total", "active", "bytes"):
        costs.add_column(column, justify="right")
    for size in sizes:
        costs.add_row(size.name, f"{size.params:,}", f"{size.active_params:,}", format_bytes(size.nbytes))
    console.print(costs)
    table = Table(title="Held-out loss in nats per token / exact answers", title_justify="left")
    for column in ("size", "one-shot, unsorted", "one-shot, sorted", "elastic", ""):
        table.add_column(column, justify="left" if column in ("size", "") else "right")
    for size in sizes:
        table.add_row(size.name, *(str(size.quality[stage]) for stage in STAGES), size.verdict)
    table.add_row("parent", "", "", str(parent), "")
    console.print(table)


def print_facts(facts: Sequence[Fact], console: Console) -> None:
    """The facts, each with its measurement."""
    for number, fact in enumerate(facts, 1):
        verdict = "holds" if fact.holds else "FAILS"
        console.print(f"{number}. {verdict}: {fact.claim} ({fact.measured})", highlight=False, soft_wrap=True)


def as_json(sizes: Sequence[Size], parent: Quality, facts: Sequence[Fact]) -> dict[str, Any]:
    """The same numbers as the printed table."""
    return {
        "parent": asdict(parent),
        "sizes": {size.name: {**asdict(size), "improved": size.improved} for size in sizes},
        "facts": [asdict(fact) for fact in facts],
    }
