"""What the demo prints per size: cost, and quality before and after each step of the method."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from star_elastic.train.data import Calibration, calibration_batches
from star_elastic.units import format_bytes, format_count

STAGES = ("unsorted", "sorted", "trained")
FULL_SIZE_TOLERANCE = 1.02  # the largest size starts as the parent, and must not get worse than this times its loss
MAX_NEW_TOKENS = 40  # the longest thought takes 32 tokens, its end and the answer 3


@dataclass(frozen=True)
class Quality:
    """Held-out loss in nats per token, and share of held-out questions answered exactly."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Size:
    """One nested size: its cost, and its quality as a slice of each stage's checkpoint."""

    name: str
    widths: dict[str, int]
    params: int
    active_params: int
    nbytes: int
    quality: dict[str, Quality]

    @property
    def improved(self) -> bool:
        """Whether training beat the sorted one-shot slice (for the parent's own size: kept its loss)."""
        before, after = self.quality["sorted"].loss, self.quality["trained"].loss
        is_parent = self.quality["sorted"] == self.quality["unsorted"]
        return after <= before * FULL_SIZE_TOLERANCE if is_parent else after < before


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


def describe_size(layout: Layout, settings: Settings, name: str, quality: dict[str, Quality]) -> Size:
    """Put cost and quality of a nested size together."""
    widths = layout.complete(settings.widths(name))
    return Size(
        name=name,
        widths=widths,
        params=cost.params(layout, widths),
        active_params=cost.active_params(layout, widths),
        nbytes=int(cost.weight_bytes(layout, widths, dtype="fp32")),
        quality=quality,
    )


def measure_sizes(models: dict[str, ElasticModel], examiner: Examiner, settings: Settings, advance: Any) -> list[Size]:
    """Measure every nested size of every stage's model, as views."""
    sizes = []
    for name in settings.cuts:
        quality = {}
        for stage, model in models.items():
            quality[stage] = examiner.measure(model, name)
            advance(1)
        sizes.append(describe_size(models["trained"].layout, settings, name, quality))
    return sizes


def print_sizes(sizes: Sequence[Size], parent: Quality, console: Console) -> None:
    """The table: one row a size, one-shot slices beside trained ones, the parent below."""
    table = Table(title="Held-out loss (nats per token) and exact answers of each size", title_justify="left")
    table.add_column("size")
    for column in ("total", "active", "bytes", "one-shot, unsorted", "one-shot, sorted", "elastic", "better?"):
        table.add_column(column, justify="right")
    for size in sizes:
        cells = [f"{q.loss:.3f} / {q.accuracy:4.0%}" for q in (size.quality[stage] for stage in STAGES)]
        verdict = "yes" if size.improved else "NO"
        counts = (format_count(size.params), format_count(size.active_params), format_bytes(size.nbytes))
        table.add_row(size.name, *counts, *cells, verdict)
    table.add_row("parent", "", "", "", "", "", f"{parent.loss:.3f} / {parent.accuracy:4.0%}", "")
    console.print(table)


def print_facts(facts: Sequence[Fact], console: Console) -> None:
    """The three facts, each with its measurement."""
    for number, fact in enumerate(facts, 1):
        console.print(
            f"{number}. {'holds' if fact.holds else 'FAILS'}: {fact.claim} ({fact.measured})", highlight=False
        )


def as_json(sizes: Sequence[Size], parent: Quality, facts: Sequence[Fact]) -> dict[str, Any]:
    """The same numbers as the printed table."""
    return {
        "parent": asdict(parent),
        "sizes": {size.name: {**asdict(size), "improved": size.improved} for size in sizes},
        "facts": [asdict(fact) for fact in facts],
    }
