"""The widths that a router may choose from, per axis, and whether they can meet a budget. Plain Python and numpy.

Candidates are written as fractions of the parent's width, which snap to the nearest legal one, or as whole numbers, which must
be legal as they are. ``depth`` counts kept layers: the first of the order from most to least important.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from star_elastic.axes import DEPTH, Axis
from star_elastic.budget import Budget, BudgetError
from star_elastic.combinations import Combinations
from star_elastic.errors import UnknownNameError, WidthError, nearest
from star_elastic.layout import Layout

Spec = Mapping[str, Sequence[float] | None]
"""Axis -> fractions and whole numbers; None for the published fractions."""

FRACTIONS = (1.0, 0.75, 0.5)
NARROW_FRACTIONS = {"hidden": (1.0, 0.714, 0.517), "expert_ffn": (1.0, 0.714, 0.517)}
"""Candidates of the published runs (training scripts that accompany arXiv 2605.07182); other axes have ``FRACTIONS``."""


def candidates(layout: Layout, spec: Spec, *, depth_order: Sequence[int] | None = None) -> dict[str, tuple[int, ...]]:
    """The widths that a router may choose from.

    Args:
        layout: the parent's table.
        spec: axis -> fractions in (0, 1] and whole numbers above 1; 1 is the parent's own width. Axes left out stay whole.
        depth_order: layers from most to least important, for ``depth``.

    Returns:
        Axis -> legal widths, descending, without repeats; the parent's own is always among them, first.

    Raises:
        UnknownNameError: an axis that the model does not have.
        WidthError: a number that is no fraction and no legal width; fractions of which none leaves less than the parent's; or
            ``depth`` without an order of layers.
    """
    found = {}
    for name, values in spec.items():
        if name not in layout.axes:
            raise UnknownNameError(f"candidates: this model has no axis {name!r}: {nearest(name, layout.axes)}")
        axis = layout.axes[name]
        legal = legal_widths(layout, axis, depth_order)
        values = usual_fractions(name) if values is None else values
        widths = {axis.size, *(_width(axis, legal, value) for value in values)}
        if len(widths) == 1 and any(value < 1 for value in values):
            less = f"the next legal width is {legal[-2]}" if len(legal) > 1 else "it has no other legal width"
            raise WidthError(f"candidates of {name}: {_listed(values)} all come to the parent's {axis.size}: {less}")
        found[name] = tuple(sorted(widths, reverse=True))
    return found


def default_spec(layout: Layout) -> dict[str, tuple[float, ...]]:
    """The published fractions for every width axis that can be cut so."""
    cuttable = {}
    for name, axis in layout.width_axes.items():
        fractions = usual_fractions(name)
        if any(_nearest(axis.legal(), fraction * axis.size) < axis.size for fraction in fractions):
            cuttable[name] = fractions
    return cuttable


def usual_fractions(name: str) -> tuple[float, ...]:
    """The published fractions of one axis."""
    return NARROW_FRACTIONS.get(name, FRACTIONS)


def snapped(layout: Layout, spec: Spec, *, depth_order: Sequence[int] | None = None) -> list[str]:
    """What became of fractions that are not legal widths as they stand, one line per axis, for people."""
    lines = []
    for name, values in spec.items():
        axis = layout.axes[name]
        legal = legal_widths(layout, axis, depth_order)
        moved = [
            f"{value:g} ({value * axis.size:.4g}) -> {_width(axis, legal, value)}"
            for value in (usual_fractions(name) if values is None else values)
            if value <= 1 and not np.isclose(value * axis.size, _width(axis, legal, value))
        ]
        if moved:
            lines.append(f"{name}: nearest legal widths: {', '.join(moved)}")
    return lines


def legal_widths(layout: Layout, axis: Axis, depth_order: Sequence[int] | None) -> list[int]:
    """All widths that an axis may have, ascending; of ``depth``, those whose first layers make a model.

    Raises:
        WidthError: ``depth`` without an order of layers.
    """
    if axis.name != DEPTH:
        return axis.legal()
    if depth_order is None:
        raise WidthError("candidates of depth: layers are not ranked here; score with --method depth=removal, and sort")

    def runs(depth: int) -> bool:
        try:
            layout.check({}, sorted(depth_order[:depth]))
        except WidthError:  # a kind of layer that every model needs is missing
            return False
        return True

    return [depth for depth in axis.legal() if runs(depth)]


def _width(axis: Axis, legal: Sequence[int], value: float) -> int:
    """The width that a fraction or a whole number stands for."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise WidthError(f"candidates of {axis.name}: {value!r} is no fraction in (0, 1] and no whole number above 1")
    if value <= 1:
        return _nearest(legal, value * axis.size)
    if value not in legal:
        around = [width for width in legal if width < value][-1:] + [width for width in legal if width > value][:1]
        told = " and ".join(str(width) for width in around)
        own = ", all that the parent has" if value > axis.size else ""
        raise WidthError(f"candidates of {axis.name}: {value:g} is no legal width: nearest legal: {told}{own}")
    return int(value)


def _nearest(legal: Sequence[int], width: float) -> int:
    """The nearest legal width; the larger of two that are equally near."""
    return min(legal, key=lambda option: (abs(option - width), -option))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def reachable(
    layout: Layout,
    widths: Mapping[str, Sequence[int]],
    budget: Budget,
    *,
    per_layer: Collection[str] = (),
    depth_order: Sequence[int] | None = None,
) -> tuple[float, float]:
    """The smallest and the largest cost of any combination of candidates whose widths fit together.

    Args:
        layout: the parent's table.
        widths: candidates, as ``candidates`` gives them.
        budget: what is counted.
        per_layer: axes on which every layer chooses for itself; the range is the same.
        depth_order: layers from most to least important, for ``depth``.
    """
    space = Combinations(layout, widths, per_layer, depth_order)
    prices = space.price(budget, space.even())
    return float(prices.min()), float(prices.max())


def check_budget(
    layout: Layout,
    widths: Mapping[str, Sequence[int]],
    budget: Budget,
    *,
    tolerance: float = 0.05,
    per_layer: Collection[str] = (),
    depth_order: Sequence[int] | None = None,
) -> None:
    """Refuse a budget that no combination of candidates meets.

    Args:
        layout: the parent's table.
        widths: candidates, as ``candidates`` gives them.
        budget: the target.
        tolerance: how far from the target a model may cost, as a part of it.
        per_layer: axes on which every layer chooses for itself.
        depth_order: layers from most to least important, for ``depth``.

    Raises:
        BudgetError: says which costs can be reached, and the nearest.
    """
    space = Combinations(layout, widths, per_layer, depth_order)
    best = space.approach(budget, space.nearest_even(budget), tolerance)
    cost = float(space.price(budget, best[None])[0])
    if abs(cost / budget.target - 1) <= tolerance:
        return
    least, most = reachable(layout, widths, budget, depth_order=depth_order)
    raise BudgetError(
        f"budget {budget.name!r}: no candidates come within {tolerance:.0%} of {budget.text(budget.target)}: they reach "
        f"from {budget.text(least)} to {budget.text(most)}, the nearest costs {budget.text(cost)} "
        f"({space.text(best)}): add candidates or change the budget"
    )


def unseen_axes(layout: Layout, widths: Mapping[str, Sequence[int]], budget: Budget) -> list[str]:
    """Axes among the candidates that a budget on active parameters does not see beyond router rows: nothing but the loss holds
    them, so the choice is left to chance. Warn about them, or budget all parameters or memory."""
    if budget.kind != "active_params":
        return []
    routed = {axis for _, row in layout.tensors() if row.routed for axis in row.dims[0].axes}
    return [name for name in widths if name in routed]
