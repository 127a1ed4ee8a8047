"""The largest nested model that fits a budget, chosen from a ladder that is stated, not searched.

Where a checkpoint names its nested models, the ladder is those: they are what it was trained for. Otherwise it is a uniform
ladder: one member for each legal ``hidden`` width, in which the other FFN-like axes take their largest legal width at or under
the same fraction of the parent's. Heads, Mamba and experts stay whole, as in the published family.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from star_elastic import cost
from star_elastic.axes import Widths
from star_elastic.errors import WidthError
from star_elastic.layout import Layout
from star_elastic.submodel import Submodel
from star_elastic.units import format_bytes, format_count

UNIFORM_FOLLOWERS = ("ffn", "expert_ffn", "shared_ffn")


@dataclass(frozen=True)
class Budget:
    """An upper bound on one kind of cost.

    Attributes:
        kind: ``params``, ``active_params`` or ``memory``.
        limit: parameters, or bytes.
        dtype: format of the weights, for ``memory``.
        context: tokens per sequence, for ``memory``.
        batch: sequences at once, for ``memory``.
    """

    kind: str
    limit: int
    dtype: str = "bf16"
    context: int = 8192
    batch: int = 1

    def cost(self, layout: Layout, submodel: Submodel) -> int:
        """What a nested model costs in this budget's kind."""
        return int(self.price(layout, submodel.keyed_widths, submodel.layers))

    def price(self, layout: Layout, widths: Widths, layers: Sequence[int] | None = None) -> Any:
        """The same for widths that may be arrays, not rounded."""
        if self.kind == "params":
            return cost.params(layout, widths, layers)
        if self.kind == "active_params":
            return cost.active_params(layout, widths, layers)
        return cost.memory_bytes(layout, widths, layers, dtype=self.dtype, context=self.context, batch=self.batch)

    def text(self, value: float) -> str:
        """A cost of this kind, for people, with the exact number of parameters."""
        if self.kind == "memory":
            where = f"{self.dtype} weights and caches of {self.batch} x {self.context} tokens"
            return f"{format_bytes(value)} ({where})"
        return f"{format_count(value)} {'parameters' if self.kind == 'params' else 'active parameters'} ({value:,.0f})"


@dataclass(frozen=True)
class Choice:
    """A member of a ladder, and how it came to be chosen, in one line each.

    Attributes:
        name: the member's name.
        submodel: its widths.
        cost: what it costs in the budget's kind.
        ladder: what the ladder was.
        summary: the member, its widths and its cost beside the limit.
    """

    name: str
    submodel: Submodel
    cost: int
    ladder: str
    summary: str


def choose(layout: Layout, submodels: Mapping[str, Submodel], budget: Budget) -> Choice:
    """The largest member, by the budget's kind of cost, at or under its limit.

    Args:
        layout: the parent's table.
        submodels: named nested models, which then are the ladder; empty for the uniform ladder.
        budget: the limit.

    Raises:
        WidthError: even the smallest member costs more; says how much.
    """
    members, ladder = (dict(submodels), named_ladder(submodels)) if submodels else uniform_ladder(layout)

    def price(name: str) -> int:
        return budget.cost(layout, members[name])

    # The uniform ladder has hundreds of members but ascends, so that few need to be counted; named ones are put in order.
    names = sorted(members, key=price) if submodels else list(members)
    limit = budget.text(budget.limit)
    place = bisect_right(names, budget.limit, key=price)
    if place == 0:
        smallest = f"{names[0]} with {budget.text(price(names[0]))}"
        raise WidthError(f"nothing fits {limit}: the smallest of {ladder} is {smallest}")
    name = names[place - 1]
    summary = f"{name}: {budget.text(price(name))}, at most {limit} wanted"
    return Choice(name, members[name], price(name), ladder, summary)


def named_ladder(submodels: Mapping[str, Submodel]) -> str:
    """Describe a ladder of named nested models."""
    return f"the {len(submodels)} named submodels {', '.join(submodels)}"


def uniform_ladder(layout: Layout) -> tuple[dict[str, Submodel], str]:
    """The uniform ladder, smallest first, and its description."""
    lead = layout.stream
    followers = [layout.axes[name] for name in UNIFORM_FOLLOWERS if name in layout.axes]
    members = {}
    for width in lead.legal():
        widths = {axis.name: axis.at_most(axis.size * width // lead.size) for axis in followers}
        if layout.fits({lead.name: width, **widths}):
            members[f"{lead.name} {width}"] = Submodel(widths={lead.name: width, **widths})
    followed = f" with {', '.join(axis.name for axis in followers)} at the same fraction" if followers else ""
    return members, f"the uniform ladder of {len(members)} {lead.name} widths{followed}"
