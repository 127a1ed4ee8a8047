"""Widths for a budget between the trained ones, from the router that an elastic checkpoint keeps in ``router.safetensors``.

The router is asked with a mix of its two neighbouring budgets (``budget.interpolate``), and its most probable widths within the
tolerance are taken. They stay between the neighbours' on every axis: so the new size holds the smaller neighbour and is a part of
the larger one, as trained sizes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from star_elastic import ladder, router_files
from star_elastic.axes import DEPTH
from star_elastic.budget import Budget, interpolate
from star_elastic.combinations import Key
from star_elastic.errors import CheckpointError, ElasticError
from star_elastic.layout import Layout
from star_elastic.router import Router
from star_elastic.router_freeze import BudgetMissed, most_probable
from star_elastic.submodel import ElasticConfig, Submodel

TOLERANCE = 0.05  # where elastic.json does not say with which one the router was trained
NEVER = 1e9  # what a width that is not between the neighbours' loses in log-probability


class LearnedBudgetError(ElasticError, ValueError):
    """A budget of another kind, or for other sequences, than those that a router was trained for."""


@dataclass(frozen=True)
class Learned:
    """What a router chose for a budget.

    Attributes:
        submodel: the widths and layers.
        lines: how they were found, for people.
    """

    submodel: Submodel
    lines: tuple[str, ...]


def choose_learned(folder: Path, layout: Layout, elastic: ElasticConfig, asked: ladder.Budget) -> Learned:
    """Ask a folder's router for a budget.

    Args:
        folder: an elastic checkpoint that a search wrote.
        layout: its table.
        elastic: its ``elastic.json``.
        asked: the budget, as a target; of memory, the format of the weights is what the router was trained for.

    Raises:
        CheckpointError: no router in the folder, a damaged one, or one of another model.
        UnknownNameError: ``elastic.json`` lacks a size that the router was trained for.
        LearnedBudgetError: the router was trained for another kind of budget, or for other sequences.
        BudgetError: the budget is below or above all trained ones; says their range.
        BudgetMissed: no widths between the neighbouring sizes' are within the tolerance.
    """
    if not (folder / router_files.FILE_NAME).exists():
        raise CheckpointError(
            f"{folder} holds no {router_files.FILE_NAME}: --learned asks the router of a checkpoint whose widths were learned "
            "(star-elastic train, with budgets)"
        )
    router = Router.load(folder, layout)
    trained = comparable(router, asked)
    weights = interpolate(trained, asked.limit)
    budget = replace(trained[0], name="learned", target=float(asked.limit))
    neighbours = [elastic.get(name) for name in weights]
    tolerance, space = trained_tolerance(elastic), router.combinations
    free = [np.array(row) for row in router.log_probabilities(weights).values()]
    inside = between(router, neighbours)
    pick = most_probable(space, budget, [row - NEVER * ~ok for row, ok in zip(free, inside, strict=True)], tolerance)
    if pick is None or not all(ok[n] for ok, n in zip(inside, pick, strict=True)):
        raise BudgetMissed(
            f"no widths between those of {' and '.join(weights)} cost {budget.text(asked.limit)} within {tolerance:.0%}: "
            f"take a trained size (--to {next(iter(weights))}), or leave out --learned"
        )
    cost = float(space.price(budget, pick[None])[0])
    mix = " and ".join(f"{weight:.0%} {name}" for name, weight in weights.items())
    is_argmax = all(row.argmax() == n for row, n in zip(free, pick, strict=True))
    how = "" if is_argmax else f" that lie between theirs and within {tolerance:.0%} of the budget"
    return Learned(
        space.submodel(pick),
        (
            f"router: {mix}: the most probable widths{how}",
            f"budget: {budget.text(cost)}, {cost / asked.limit - 1:+.1%} of the {budget.text(asked.limit)} asked for",
        ),
    )


def comparable(router: Router, asked: ladder.Budget) -> list[Budget]:
    """The trained budgets that can be compared with ``asked``; the whole model, which any kind of budget can mean, comes last.

    Raises:
        LearnedBudgetError: there are none but the whole model.
    """
    nested = [budget for budget in router.budgets.values() if not budget.is_full]
    same = [budget for budget in nested if load(budget) == load(asked)]
    if not same:
        trained = " and ".join(dict.fromkeys(f"{budget.name} of {load_text(budget)}" for budget in nested))
        option = f"--{asked.kind.replace('_', '-')}"
        raise LearnedBudgetError(
            f"{option}: the router knows no budget of {load_text(asked)}, only {trained or 'the whole model'}"
        )
    like = replace(same[0], target=float(same[0].cost(router.layout, {})), fraction=1.0)
    return [*same, *(replace(like, name=budget.name) for budget in router.budgets.values() if budget.is_full)]


def load(budget: Budget | ladder.Budget) -> tuple[str | int, ...]:
    """What two budgets must agree on to be compared: the kind, and for memory the sequences."""
    return (budget.kind, budget.context, budget.batch) if budget.kind == "memory" else (budget.kind,)


def load_text(budget: Budget | ladder.Budget) -> str:
    """The same, for people."""
    return f"memory with --context {budget.context} --batch {budget.batch}" if budget.kind == "memory" else budget.kind


def between(router: Router, neighbours: Sequence[Submodel]) -> list[np.ndarray]:
    """Which candidates of each key are at least the narrowest neighbour's width, and at most the widest's: [C] each."""
    found = []
    for key, options in zip(router.combinations.keys, router.combinations.options, strict=True):
        widths = [width_at(one.completed(router.layout), key, router.layout) for one in neighbours]
        found.append((options >= min(widths)) & (options <= max(widths)))
    return found


def width_at(submodel: Submodel, key: Key, layout: Layout) -> int:
    """A nested model's width on an axis, or on that of one layer: none where it drops the layer."""
    if key == DEPTH:
        return submodel.depth(layout)
    if isinstance(key, str):
        return submodel.widths[key]
    axis, layer = key
    if submodel.layers is not None and layer not in submodel.layers:
        return 0
    return submodel.layer_widths.get(axis, {}).get(layer, submodel.widths[axis])


def trained_tolerance(elastic: ElasticConfig) -> float:
    """With which tolerance the router was trained, as ``elastic.json`` records the recipe."""
    found: object = elastic.provenance
    for name in ("training", "recipe", "router", "tolerance"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, float) and 0 < found < 1 else TOLERANCE
