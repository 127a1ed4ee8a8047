"""The nested models that just fit a budget: a coarse grid over all axes but one, which takes what is left.

The axis whose smallest width leaves the least cost is the *lead*: of parameters usually ``hidden``; of memory, where caches or
states are most of it, perhaps depth or Mamba heads. For every combination of the other axes' widths, taken from a few fractions
of the parent's, the lead has its largest legal width at or under the budget. A combination is left out where another one keeps
as much on every axis and more on one: it cannot be better.

All combinations are priced at once: costs are polynomials of the widths, so widths may be arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from star_elastic.axes import DEPTH
from star_elastic.errors import WidthError
from star_elastic.ladder import Budget
from star_elastic.layout import Layout
from star_elastic.submodel import Submodel

FRACTIONS = (1.0, 0.875, 0.75, 0.625, 0.5)
"""Parts of the parent's width at which every axis but the lead is tried."""


@dataclass(frozen=True)
class Grid:
    """Nested models that just fit a budget.

    Attributes:
        space: what they are chosen from.
        widths: of every member along every axis of ``space``, (members, axes).
        text: what they are, for people.
    """

    space: Space
    widths: np.ndarray
    text: str

    @property
    def shares(self) -> np.ndarray:
        """Part of the parent's width that each member keeps of each axis, (members, axes)."""
        return self.widths / np.array([self.space.layout.axes[name].size for name in self.space.legal])

    def member(self, number: int) -> Submodel:
        """One of them."""
        submodel = self.space.submodel(dict(zip(self.space.legal, self.widths[number].tolist(), strict=True)))
        submodel.check(self.space.layout)
        return submodel


class Space:
    """The axes that a search may cut, with what each may be cut to.

    Args:
        layout: the parent's table.
        budget: the limit.
        axes: names; ``depth`` only with an order.
        depth_order: layers from most to least important; a depth of n keeps the first n.
    """

    def __init__(self, layout: Layout, budget: Budget, axes: Sequence[str], depth_order: Sequence[int] | None) -> None:
        self.layout, self.budget = layout, budget
        self.order = tuple(depth_order or ())
        self.legal = {name: np.array(layout.axes[name].legal()) for name in axes}
        if DEPTH in self.legal:
            usable = [depth for depth in self.legal[DEPTH].tolist() if self._runs(depth)]
            self.legal[DEPTH] = np.array(usable)

    def layers(self, depth: int) -> tuple[int, ...]:
        """The layers that a depth keeps, ascending."""
        return tuple(sorted(self.order[:depth]))

    def price(self, widths: Mapping[str, np.ndarray]) -> np.ndarray:
        """Cost of every combination; ``widths`` holds one array per axis, all of one shape."""
        plain: dict[str, Any] = {name: width for name, width in widths.items() if name != DEPTH}
        prices = np.empty(_shape(widths))
        if DEPTH not in widths:
            prices[...] = self.budget.price(self.layout, plain)
            return prices
        for depth in np.unique(widths[DEPTH]):
            here = widths[DEPTH] == depth
            own = {name: width[here] for name, width in plain.items()}
            prices[here] = self.budget.price(self.layout, own, self.layers(int(depth)))
        return prices

    def fits(self, widths: Mapping[str, np.ndarray]) -> np.ndarray:
        """Whether the widths of every combination fit together."""
        full: dict[str, Any] = {name: widths.get(name, axis.size) for name, axis in self.layout.axes.items()}
        held = [coupling.holds(full) for coupling in self.layout.couplings]
        return np.logical_and.reduce([np.broadcast_to(np.asarray(ok), _shape(widths)) for ok in [*held, True]])

    def submodel(self, widths: Mapping[str, int]) -> Submodel:
        """The nested model of one combination."""
        depth = widths.get(DEPTH)
        layers = None if depth in (None, self.layout.num_layers) else self.layers(int(depth or 0))
        return Submodel(widths={name: int(width) for name, width in widths.items() if name != DEPTH}, layers=layers)

    def _runs(self, depth: int) -> bool:
        try:
            self.layout.check({}, self.layers(depth))
        except WidthError:  # the first layers of the order lack a kind that the model needs
            return False
        return True


def make_grid(
    layout: Layout,
    budget: Budget,
    axes: Sequence[str],
    depth_order: Sequence[int] | None = None,
    fractions: Sequence[float] = FRACTIONS,
) -> Grid:
    """Every combination of a coarse grid that just fits a budget and is not dominated.

    Args:
        layout: the parent's table.
        budget: the limit.
        axes: which axes may be cut.
        depth_order: layers from most to least important, for ``depth``.
        fractions: of the axes other than the lead; the largest legal width at or under each is tried.

    Raises:
        WidthError: nothing fits; says what can be reached.
    """
    space = Space(layout, budget, axes, depth_order)
    lead = min(axes, key=lambda name: float(space.price({name: space.legal[name][:1]})[0]))
    others = {name: _coarse(space.legal[name], fractions) for name in axes if name != lead}
    widths = dict(zip(others, np.meshgrid(*others.values(), indexing="ij"), strict=True))
    place = _largest_fitting(space, lead, widths)  # shape of the grid; -1 where nothing fits
    if (place < 0).all():
        raise WidthError(_out_of_reach(space, lead, widths, fractions))
    kept = (place >= 0) & ~_dominated(place)
    widths[lead] = space.legal[lead][place]
    columns = np.stack([widths[name][kept] for name in axes], axis=1)  # (members, axes)
    tried = f"{', '.join(others)} at {', '.join(f'{part:g}' for part in fractions)} of the parent's; " if others else ""
    text = f"{tried}{lead} as large as fits: {len(columns)} that no other contains"
    return Grid(space, columns, text)


def _shape(widths: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """The shape of all combinations; of one, where no axis is on the grid."""
    return np.broadcast_shapes((1,), *(width.shape for width in widths.values()))


def _coarse(legal: np.ndarray, fractions: Sequence[float]) -> np.ndarray:
    """The largest legal widths at or under each fraction, descending, without repeats."""
    places = np.searchsorted(legal, np.array(fractions) * legal[-1] + 1e-9, side="right") - 1
    return np.unique(legal[np.maximum(places, 0)])[::-1]


def _largest_fitting(space: Space, lead: str, others: Mapping[str, np.ndarray]) -> np.ndarray:
    """Per combination of the other axes, the place of the lead's largest legal width within the budget; -1 for none."""
    legal = space.legal[lead]
    low, high = np.full(_shape(others), -1), np.full(_shape(others), len(legal) - 1)
    while (low < high).any():  # low is known to fit, or is -1; all above high do not
        middle = (low + high + 1) // 2
        fits = space.price({**others, lead: legal[middle]}) <= space.budget.limit
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    while True:  # downwards to where widths that depend on each other agree
        wrong = (low >= 0) & ~space.fits({**others, lead: legal[low]})
        if not wrong.any():
            return low
        low = low - wrong


def _dominated(place: np.ndarray) -> np.ndarray:
    """Where a combination that keeps more on the other axes leaves the lead as large. The grid descends along every axis."""
    most = place  # the lead's largest place over all combinations that keep at least as much
    for number in range(place.ndim):
        most = np.maximum.accumulate(most, axis=number)
    worse = np.zeros(place.shape, dtype=bool)
    for number in range(place.ndim):
        larger, own = np.moveaxis(most, number, 0)[:-1], np.moveaxis(place, number, 0)[1:]
        np.moveaxis(worse, number, 0)[1:] |= larger >= own
    return worse


def _out_of_reach(space: Space, lead: str, others: Mapping[str, np.ndarray], fractions: Sequence[float]) -> str:
    budget, legal = space.budget, space.legal[lead]
    least = float(space.price({**others, lead: np.full(_shape(others), legal[0])}).min())
    full = float(budget.cost(space.layout, Submodel()))
    floor = f"{', '.join(others)} down to {min(fractions):g} and " if others else ""
    return (
        f"nothing fits {budget.text(budget.limit)}: {floor}{lead} down to {legal[0]} reach from {budget.text(least)} "
        f"to {budget.text(full)}"
    )
