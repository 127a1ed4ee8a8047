"""Which nested models a run trains: those of fixed widths, or budgets whose widths a router will choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from star_elastic.budget import Budget
from star_elastic.candidates import candidates, check_budget, default_spec, snapped, unseen_axes
from star_elastic.combinations import Combinations
from star_elastic.errors import RecipeError, ReservedNameError, UnknownNameError, WidthError
from star_elastic.latency import LatencyTable
from star_elastic.layout import Layout
from star_elastic.submodel import FULL, ElasticConfig, Submodel, check_named
from star_elastic.train.budget_loss import MOST_CHOICES, can_list
from star_elastic.train.recipe import Recipe


@dataclass(frozen=True)
class Targets:
    """The nested models of a run; either ``submodels`` or ``budgets`` is empty.

    Attributes:
        submodels: Fixed widths, all spelled out.
        budgets: What the others may cost.
        candidates: Axis -> widths that a router may choose, descending.
        notes: What the user should know.
    """

    submodels: dict[str, Submodel] = field(default_factory=dict)
    budgets: dict[str, Budget] = field(default_factory=dict)
    candidates: dict[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the nested models, in the recipe's order."""
        return (*self.submodels, *self.budgets)


def resolve_targets(recipe: Recipe, layout: Layout, elastic: ElasticConfig, known: ElasticConfig) -> Targets:
    """Check a recipe's submodels or budgets against the parent.

    Args:
        recipe: What to do.
        layout: The parent's table.
        elastic: The parent's ``elastic.json``.
        known: Submodels that can be named without widths.

    Raises:
        WidthError, UnknownNameError: widths or axes that the parent cannot be cut along.
        BudgetError: a budget that no combination of candidates meets; says the reachable range.
        RecipeError: nothing to train.
        ReservedNameError: a nested model ``full`` that is not the whole model.
    """
    if recipe.budgets is None:
        submodels = _submodels(recipe, layout, known)
        return Targets(submodels=submodels, notes=_unsorted(elastic, _cut_axes(layout, submodels)))
    spec = default_spec(layout) if recipe.router.axes is None else recipe.router.axes
    found = candidates(layout, spec, depth_order=elastic.depth_order)
    budgets = {name: _budget(recipe, layout, name) for name in recipe.budgets}
    options = {"per_layer": recipe.router.per_layer, "depth_order": elastic.depth_order}
    for budget in budgets.values():
        check_budget(layout, found, budget, tolerance=recipe.router.tolerance, **options)  # type: ignore[arg-type]
    unseen = sorted({axis for budget in budgets.values() for axis in unseen_axes(layout, found, budget)})
    notes = _unsorted(elastic, set(found) - {"depth"})
    if unseen:
        notes += (
            f"a budget of active parameters does not see {', '.join(unseen)}: the router picks them by chance; "
            "take params or memory, or leave the axis out of router.axes",
        )
    space = Combinations(layout, found, recipe.router.per_layer, elastic.depth_order)
    if recipe.router.loss == "choices" and not can_list(space):
        notes += (
            f"router.loss is expected, not choices: the router has more than {MOST_CHOICES:,} combinations of widths to "
            "choose from",
        )
    moved = snapped(layout, spec, depth_order=elastic.depth_order) if recipe.router.axes is not None else []
    return Targets(budgets=budgets, candidates=found, notes=(*notes, *moved))


def _budget(recipe: Recipe, layout: Layout, name: str) -> Budget:
    given = (recipe.budgets or {})[name]
    table = None if given.table is None else _table(given.table, layout)
    budget = Budget.resolve(
        layout, name, given.kind, given.value, context=given.context, batch=given.batch, dtype=given.dtype, table=table
    )
    if name == FULL and not budget.is_full:
        raise ReservedNameError(f"budget {FULL!r} always means the whole model: give it 1.0, or choose another name")
    return budget


def _table(path: Path, layout: Layout) -> LatencyTable:
    table = LatencyTable.load(path)
    table.check(layout)
    return table


def _submodels(recipe: Recipe, layout: Layout, known: ElasticConfig) -> dict[str, Submodel]:
    """The nested models to train, in the recipe's order, all widths spelled out."""
    if recipe.submodels is None:
        if not known.submodels:
            raise RecipeError(
                f"no submodels: {recipe.parent} has no elastic.json that lists any; give 'submodels', 'budgets' or 'preset'"
            )
        return {name: submodel.completed(layout) for name, submodel in known.submodels.items()}
    chosen = {}
    for name, entry in recipe.submodels.items():
        if entry.widths is None and entry.layers is None:
            try:
                chosen[name] = known.get(name).completed(layout)
            except UnknownNameError as error:
                raise UnknownNameError(f"{error}; for a new submodel give widths, such as {{hidden: 48}}") from None
            continue
        submodel = Submodel(widths=entry.widths or {}, layers=entry.layers)
        try:
            check_named(name, submodel, layout)
        except (WidthError, UnknownNameError, ReservedNameError) as error:
            raise type(error)(f"submodel {name!r}: {error}") from None
        chosen[name] = submodel.completed(layout)
    return chosen


def _cut_axes(layout: Layout, submodels: Mapping[str, Submodel]) -> set[str]:
    full = layout.complete({})
    return {axis for submodel in submodels.values() for axis, width in submodel.widths.items() if width < full[axis]}


def _unsorted(elastic: ElasticConfig, cut: set[str]) -> tuple[str, ...]:
    """Axes that are cut although the parent was never sorted along them."""
    unsorted = sorted(cut - set(elastic.sorted_axes))
    if not unsorted:
        return ()
    return (
        f"the parent is not sorted along {', '.join(unsorted)}: submodels keep arbitrary members there; run `sort` first",
    )
