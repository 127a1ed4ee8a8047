"""Which axes a search may cut, and what a user should know about them. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence

from star_elastic.axes import DEPTH
from star_elastic.errors import UnknownNameError, nearest
from star_elastic.ladder import Budget
from star_elastic.layout import Layout
from star_elastic.selection import RequestError
from star_elastic.submodel import ElasticConfig

EXPERTS = "experts"


def choose_axes(
    layout: Layout, elastic: ElasticConfig, budget: Budget, wanted: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that a search may cut, in the table's order, and notes on them.

    Raises:
        UnknownNameError: an axis that the model does not have.
        RequestError: an axis twice, none at all, or ``depth`` where layers are not ranked.
    """
    names = wanted if wanted is not None else _usual(layout, elastic, budget)
    for name in names:
        if name not in layout.axes:
            raise UnknownNameError(f"--axes: this model has no axis {name!r}: {nearest(name, layout.axes)}")
        if list(names).count(name) > 1:
            raise RequestError(f"--axes names {name} twice")
    if not names:
        raise RequestError("--axes names no axis")
    if DEPTH in names and elastic.depth_order is None:
        raise RequestError("--axes depth: layers are not ranked here; score with --method depth=removal, and sort")
    notes = []
    unsorted = [name for name in names if name != DEPTH and name not in elastic.sorted_axes]
    if unsorted:
        where = ", ".join(unsorted)
        notes.append(f"the parent is not sorted along {where}: arbitrary members stay; run `score` and `sort` first")
    if EXPERTS in layout.axes and budget.kind == "active_params":
        blind = "a budget on active parameters does not see experts beyond their rows of the router"
        told = "cutting them saves next to nothing" if EXPERTS in names else "they stay whole"
        notes.append(f"{blind}: {told}; --params and --memory see them")
    return tuple(name for name in layout.axes if name in names), tuple(notes)


def _usual(layout: Layout, elastic: ElasticConfig, budget: Budget) -> list[str]:
    names = list(elastic.sorted_axes or layout.width_axes)
    if elastic.depth_order is not None:
        names.append(DEPTH)
    if budget.kind == "active_params" and names != [EXPERTS]:
        names = [name for name in names if name != EXPERTS]
    return names
