"""What a trained router has chosen: the most probable widths whose cost is inside the budget's tolerance.

The most probable width of each axis, taken alone, may miss the budget together with the others, or not fit them. So combinations
are looked at from the most to the least probable one, until one fits and is inside.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from star_elastic.budget import Budget
from star_elastic.combinations import Combinations, Key
from star_elastic.errors import ElasticError
from star_elastic.submodel import Submodel

MOST_TRIED = 20_000  # combinations, in order of probability
AT_ONCE = 256  # that are priced together


class BudgetMissed(ElasticError, ValueError):
    """No combination of candidates is inside a budget's tolerance."""


@dataclass(frozen=True)
class Frozen:
    """The widths that a router has chosen for a budget.

    Attributes:
        budget: its name.
        submodel: the widths and layers.
        cost: in the budget's kind.
        error: cost / target - 1.
        probability: that the noise-free router gives to this combination.
        is_argmax: whether every axis has its most probable width.
    """

    budget: str
    submodel: Submodel
    cost: float
    error: float
    probability: float
    is_argmax: bool


def freeze(
    space: Combinations, budget: Budget, log_probabilities: Mapping[Key, Sequence[float]], tolerance: float = 0.05
) -> Frozen:
    """The most probable combination that fits together and costs within ``tolerance`` of a budget's target.

    The full budget is always the whole model. Where there are too many combinations to look at each (layers that choose for
    themselves), and none of the most probable ones is inside, single widths are changed one by one, those first that lose the
    least probability for the error that they remove.

    Args:
        space: what can be chosen.
        budget: the target.
        log_probabilities: of each candidate, by key, without noise. As logarithms, because late in training most are tiny.
        tolerance: how far from the target the cost may be, as a part of it.

    Raises:
        BudgetMissed: nothing is inside the tolerance; says by how much the most probable one misses, and which is nearest.
    """
    logs = [np.asarray(log_probabilities[key], dtype=np.float64) for key in space.keys]
    argmax = np.array([int(log.argmax()) for log in logs], dtype=np.int64)
    chosen: np.ndarray | None = np.zeros_like(argmax)  # candidates descend, so this is the whole model
    if not budget.is_full:
        chosen = most_probable(space, budget, logs, tolerance)
    if chosen is None:
        raise BudgetMissed(missed(space, budget, argmax, tolerance))
    cost = float(space.price(budget, chosen[None])[0])
    return Frozen(
        budget=budget.name,
        submodel=space.submodel(chosen),
        cost=cost,
        error=cost / budget.target - 1,
        probability=math.exp(sum(log[n] for log, n in zip(logs, chosen, strict=True))),
        is_argmax=bool((chosen == argmax).all()),
    )


def most_probable(
    space: Combinations, budget: Budget, log_probabilities: Sequence[np.ndarray], tolerance: float
) -> np.ndarray | None:
    """The picks [keys] of the most probable combination that fits and is inside the tolerance; None if none is found."""
    ordered = itertools.islice(best_first(log_probabilities), MOST_TRIED)
    count = 0
    for rows in batched(ordered, AT_ONCE):
        picks = np.array(rows, dtype=np.int64).reshape(len(rows), len(space.keys))
        inside = np.abs(space.price(budget, picks) / budget.target - 1) <= tolerance
        inside &= space.fits(picks)
        if inside.any():
            return picks[int(inside.argmax())]
        count += len(rows)
    if count < MOST_TRIED:
        return None  # these were all
    argmax = np.array([int(log.argmax()) for log in log_probabilities], dtype=np.int64)
    for near in (
        space.approach(budget, argmax, tolerance, log_probabilities),
        space.approach(budget, space.nearest_even(budget), tolerance),
    ):
        if abs(space.price(budget, near[None])[0] / budget.target - 1) <= tolerance and space.fits(near[None])[0]:
            return near
    return None


def best_first(log_probabilities: Sequence[np.ndarray]) -> Iterator[tuple[int, ...]]:
    """All combinations of independent choices, from the most to the least probable, each once.

    A combination is written as the rank of each choice. Its successors raise one rank by one, at or after the place that was
    raised last: every combination then has exactly one predecessor, which is at least as probable.
    """
    orders = [np.argsort(-log, kind="stable") for log in log_probabilities]
    losses = [log[order[0]] - log[order] for log, order in zip(log_probabilities, orders, strict=True)]
    heap: list[tuple[float, tuple[int, ...], int]] = [(0.0, (0,) * len(orders), 0)]
    while heap:
        loss, ranks, last = heapq.heappop(heap)
        yield tuple(int(order[rank]) for order, rank in zip(orders, ranks, strict=True))
        for place in range(last, len(ranks)):
            rank = ranks[place] + 1
            if rank < len(orders[place]):
                more = losses[place][rank] - losses[place][rank - 1]
                heapq.heappush(heap, (loss + more, (*ranks[:place], rank, *ranks[place + 1 :]), place))


def batched(items: Iterator[tuple[int, ...]], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Consecutive lists of at most ``size``."""
    while batch := list(itertools.islice(items, size)):
        yield batch


def missed(space: Combinations, budget: Budget, argmax: np.ndarray, tolerance: float) -> str:
    """What to say where nothing is inside: how far off the most probable combination is, and the nearest one."""
    nearest = space.approach(budget, space.nearest_even(budget), tolerance)
    told = [
        f"{label} ({space.text(pick)}) costs {budget.text(cost)}, {cost / budget.target - 1:+.1%}"
        for label, pick in (("the most probable choice", argmax), ("the nearest that can be had", nearest))
        for cost in [float(space.price(budget, pick[None])[0])]
    ]
    return (
        f"budget {budget.name!r} of {budget.text(budget.target)} is missed by more than {tolerance:.0%}: {'; '.join(told)}: "
        "search longer, or add candidates"
    )
