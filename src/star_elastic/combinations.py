"""All combinations of candidate widths: what they cost, which fit together, and how to come nearer to a budget.

A combination is a row of *picks*: for each key (an axis, or an (axis, layer) where layers choose for themselves) the number of
the candidate taken. Costs are polynomials of the widths, so many combinations are priced at once, as arrays.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from star_elastic.axes import DEPTH, widths_of
from star_elastic.budget import Budget
from star_elastic.errors import UnknownNameError, WidthError, nearest
from star_elastic.layout import Layout
from star_elastic.submodel import Submodel

Key = str | tuple[str, int]
"""An axis, or (axis, layer)."""

MOST_EVEN = 100_000  # combinations that are priced one by one; beyond, only the ends and the middle of each axis


class Combinations:
    """Every combination of candidates of one model.

    Args:
        layout: the parent's table.
        candidates: axis -> legal widths, descending.
        per_layer: axes on which every layer that has them chooses for itself.
        depth_order: layers from most to least important; ``depth`` keeps the first.

    Attributes:
        keys: what is chosen, in a fixed order.
        options: the candidates of each key.

    Raises:
        UnknownNameError: an axis of ``per_layer`` without candidates.
        WidthError: an axis of ``per_layer`` that is one for the whole model, or ``depth`` without an order.
    """

    def __init__(
        self,
        layout: Layout,
        candidates: Mapping[str, Sequence[int]],
        per_layer: Collection[str] = (),
        depth_order: Sequence[int] | None = None,
    ) -> None:
        check_per_layer(layout, candidates, per_layer)
        if DEPTH in candidates and depth_order is None:
            raise WidthError("candidates of depth need the order of layers, from most to least important")
        self.layout = layout
        self.candidates = {name: tuple(widths) for name, widths in candidates.items()}
        self.keys: list[Key] = []
        for name in candidates:
            self.keys += [(name, layer) for layer in layout.layers_with(name)] if name in per_layer else [name]
        self.options = [np.array(self.candidates[axis_of(key)], dtype=np.int64) for key in self.keys]
        self._order = tuple(depth_order or ())

    def even(self) -> np.ndarray:
        """Combinations in which all layers agree and whose widths fit together, (combinations, keys).

        All of them, or where they are too many those of each axis's first, middle and last candidate.
        """
        numbers = {name: range(len(widths)) for name, widths in self.candidates.items()}
        if math.prod(map(len, numbers.values())) > MOST_EVEN:
            numbers = {name: sorted({0, len(all_) // 2, len(all_) - 1}) for name, all_ in numbers.items()}  # type: ignore[misc]
        shared = np.array(list(itertools.product(*numbers.values())), dtype=np.int64)
        column = {name: number for number, name in enumerate(numbers)}
        picks = shared[:, [column[axis_of(key)] for key in self.keys]]
        return picks[self.fits(picks)]

    def widths(self, picks: np.ndarray) -> tuple[dict[Key, np.ndarray], dict[int, np.ndarray] | None]:
        """Widths by key and depth gates by layer (None where depth is no axis) of combinations (N, keys), as arrays [N]."""
        chosen = {
            key: options[picks[:, n]] for n, (key, options) in enumerate(zip(self.keys, self.options, strict=True))
        }
        depth = chosen.pop(DEPTH, None)
        if depth is None:
            return chosen, None
        return chosen, {layer: (place < depth).astype(np.int64) for place, layer in enumerate(self._order)}

    def price(self, budget: Budget, picks: np.ndarray) -> np.ndarray:
        """Exact cost of each combination (N, keys), [N]."""
        if budget.kind == "latency":  # a measured table need not take arrays
            return np.array([self._price_one(budget, pick) for pick in picks], dtype=np.float64)
        widths, layers = self.widths(picks)
        return np.broadcast_to(np.asarray(budget.cost(self.layout, widths, layers), dtype=np.float64), len(picks))

    def _price_one(self, budget: Budget, pick: np.ndarray) -> float:
        widths, depth = self._plain(pick)
        return float(budget.cost(self.layout, widths, None if depth is None else self.layers(depth)))

    def fits(self, picks: np.ndarray) -> np.ndarray:
        """Whether the widths of each combination fit together, in every layer, [N]."""
        chosen, _ = self.widths(picks)
        sizes: dict[str, Any] = {name: axis.size for name, axis in self.layout.axes.items()}
        held = np.ones(len(picks), dtype=bool)
        layers = sorted({key[1] for key in chosen if isinstance(key, tuple)})
        places = [{**sizes, **widths_of(chosen, layer)} for layer in layers] or [{**sizes, **widths_of(chosen, None)}]
        # One config says the widest widths of all layers, so these must fit too.
        widest = {name: functools.reduce(np.maximum, [own[name] for own in places]) for name in sizes}
        for coupling in self.layout.couplings:
            for own in [*places, widest]:
                held &= coupling.holds(own)
        return held

    def nearest_even(self, budget: Budget) -> np.ndarray:
        """The picks [keys] of the ``even`` combination whose cost is nearest to a budget."""
        even = self.even()
        return even[np.argmin(np.abs(self.price(budget, even) - budget.target))]

    def approach(
        self, budget: Budget, pick: np.ndarray, tolerance: float, log_probabilities: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Walk from a combination towards a budget, one change at a time, until it is inside the tolerance or no change helps.

        Each step takes the change that loses the least probability per unit of error; without probabilities, the one that
        leaves the smallest error.
        """
        error = self._errors(budget, pick[None])[0]
        while error > tolerance:
            near, key_of = self._changes(pick)
            errors = self._errors(budget, near)
            errors[~self.fits(near)] = np.inf
            if not (errors < error).any():
                return pick
            price = errors
            if log_probabilities is not None:
                lost = np.array(
                    [
                        log_probabilities[k][pick[k]] - log_probabilities[k][row[k]]
                        for row, k in zip(near, key_of, strict=True)
                    ]
                )
                price = np.where(errors < error, np.maximum(lost, 0) / np.maximum(error - errors, 1e-12), np.inf)
            best = int(np.argmin(price))
            pick, error = near[best], errors[best]
        return pick

    def _changes(self, pick: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """All combinations that differ in one key, and that key's number."""
        rows, keys = [], []
        for number, options in enumerate(self.options):
            for other in range(len(options)):
                if other != pick[number]:
                    row = pick.copy()
                    row[number] = other
                    rows.append(row)
                    keys.append(number)
        return np.array(rows).reshape(-1, len(pick)), keys

    def _errors(self, budget: Budget, picks: np.ndarray) -> np.ndarray:
        return np.abs(self.price(budget, picks) / budget.target - 1)

    def layers(self, depth: int) -> tuple[int, ...]:
        """The layers that a depth keeps, ascending."""
        return tuple(sorted(self._order[:depth]))

    def _plain(self, pick: Sequence[int] | np.ndarray) -> tuple[dict[Key, int], int | None]:
        """Widths by key as plain numbers, and the depth."""
        widths = {key: int(options[n]) for key, options, n in zip(self.keys, self.options, pick, strict=True)}
        return widths, widths.pop(DEPTH, None)

    def submodel(self, pick: Sequence[int] | np.ndarray) -> Submodel:
        """The nested model of one combination."""
        widths, depth = self._plain(pick)
        layers = None if depth in (None, self.layout.num_layers) else self.layers(int(depth or 0))
        return Submodel.of(widths, layers)

    def text(self, pick: Sequence[int] | np.ndarray) -> str:
        """One combination, for people; layers that chose for themselves in order."""
        widths, depth = self._plain(pick)
        told = []
        for name in self.candidates:
            own = [width for key, width in widths.items() if isinstance(key, tuple) and key[0] == name]
            value = "/".join(map(str, own)) if own else depth if name == DEPTH else widths[name]
            told.append(f"{name} {value}")
        return ", ".join(told)


def axis_of(key: Key) -> str:
    """The axis of a key."""
    return key if isinstance(key, str) else key[0]


def check_per_layer(layout: Layout, candidates: Collection[str], per_layer: Collection[str]) -> None:
    """Refuse axes on which layers cannot choose for themselves.

    Raises:
        UnknownNameError: an axis without candidates.
        WidthError: an axis that is one for the whole model.
    """
    for name in per_layer:
        if name not in candidates:
            raise UnknownNameError(f"per_layer: no candidates for {name!r}: {nearest(name, candidates)}")
        if layout.axes[name].scope != "layer":
            own = [axis for axis in candidates if layout.axes[axis].scope == "layer"]
            raise WidthError(
                f"per_layer: {name} is one axis for the whole model; layers can choose {', '.join(own) or 'none'}"
            )
