"""Freezing: the most probable combination inside the tolerance, against every combination looked at one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from tiny import tiny_granitemoehybrid, tiny_model

from star_elastic.budget import Budget
from star_elastic.combinations import Combinations
from star_elastic.families import layout_of
from star_elastic.router import Router
from star_elastic.router_freeze import BudgetMissed, best_first, freeze
from star_elastic.submodel import Submodel

CANDIDATES = {"hidden": (64, 48, 32), "experts": (8, 4), "expert_ffn": (32, 16), "mamba_heads": (8, 6, 4)}


@pytest.fixture(scope="module")
def layout():
    return layout_of(tiny_model().config.to_dict())


def budget(layout, value=0.6):
    return Budget.resolve(layout, "small", "params", value)


def logs(space, seed):
    """Random log-probabilities of each key's candidates."""
    rng = np.random.default_rng(seed)
    return {
        key: np.log(rng.dirichlet(np.ones(len(options))))
        for key, options in zip(space.keys, space.options, strict=True)
    }


def test_combinations_come_in_order_of_probability_each_once():
    rng = np.random.default_rng(0)
    choices = [np.log(rng.dirichlet(np.ones(n))) for n in (3, 2, 4, 1)]
    seen = list(best_first(choices))
    assert sorted(seen) == list(itertools.product(range(3), range(2), range(4), range(1)))
    odds = [sum(log[n] for log, n in zip(choices, picks, strict=True)) for picks in seen]
    assert all(one >= two - 1e-12 for one, two in itertools.pairwise(odds))


@pytest.mark.parametrize("seed", range(8))
def test_the_most_probable_combination_inside_the_tolerance(layout, seed):
    space, wanted = Combinations(layout, CANDIDATES), budget(layout)
    odds = logs(space, seed)
    best, argmax = None, None
    for picks in itertools.product(*(range(len(widths)) for widths in CANDIDATES.values())):
        widths = {axis: options[n] for (axis, options), n in zip(CANDIDATES.items(), picks, strict=True)}
        one = (sum(odds[axis][n] for axis, n in zip(widths, picks, strict=True)), widths)
        argmax = one if argmax is None or one[0] > argmax[0] else argmax
        if abs(wanted.cost(layout, widths) / wanted.target - 1) <= 0.05 and (best is None or one[0] > best[0]):
            best = one
    frozen = freeze(space, wanted, odds)
    assert frozen.submodel == Submodel(widths=best[1])
    assert frozen.probability == pytest.approx(math.exp(best[0]))
    assert frozen.cost == wanted.cost(layout, best[1])
    assert frozen.is_argmax == (best[1] == argmax[1])


def test_what_is_frozen_need_not_be_the_argmax(layout):
    """Hidden 64 is likeliest and 40% over the budget; hidden 48 and 32 are both unlikely, and only 48 is inside."""
    space = Combinations(layout, {"hidden": (64, 48, 32)})
    wanted = budget(layout, 1.02 * budget(layout).cost(layout, {"hidden": 48}))
    frozen = freeze(space, wanted, {"hidden": np.log([0.8, 0.05, 0.15])})
    assert frozen.submodel.widths == {"hidden": 48}
    assert not frozen.is_argmax and frozen.probability == pytest.approx(0.05)
    assert frozen.error == pytest.approx(1 / 1.02 - 1, abs=1e-6)


def test_a_missed_budget_says_by_how_much_and_what_is_nearest(layout):
    space = Combinations(layout, {"hidden": (64, 48, 32)})
    cost = [budget(layout).cost(layout, {"hidden": width}) for width in (64, 48, 32)]
    wanted = budget(layout, (0.6 * cost[1] + 0.4 * cost[2]))
    with pytest.raises(BudgetMissed) as caught:
        freeze(space, wanted, {"hidden": np.log([0.1, 0.1, 0.8])})
    told = str(caught.value)
    assert "\n" not in told
    for words in (
        "missed by more than 5%",
        f"(hidden 32) costs {wanted.text(cost[2])}, {cost[2] / wanted.target - 1:+.1%}",
        f"(hidden 48) costs {wanted.text(cost[1])}, {cost[1] / wanted.target - 1:+.1%}",
    ):
        assert words in told


def test_the_full_budget_is_the_whole_model_whatever_the_router_thinks(layout):
    space = Combinations(layout, {"hidden": (64, 60)})
    frozen = freeze(space, budget(layout, 1.0), {"hidden": np.log([0.1, 0.9])}, tolerance=0.2)
    assert frozen.submodel.is_full(layout) and frozen.error == 0
    assert not frozen.is_argmax and frozen.probability == pytest.approx(0.1)


def test_widths_that_do_not_fit_together_are_not_frozen():
    """Granite: 6 Mamba heads of 16 are no multiple of hidden 64, however likely."""
    layout = layout_of(tiny_granitemoehybrid().config.to_dict())
    space = Combinations(layout, {"hidden": (64, 32), "mamba_heads": (8, 6)})
    odds = {"hidden": np.log([0.9, 0.1]), "mamba_heads": np.log([0.1, 0.9])}
    frozen = freeze(space, budget(layout, 0.95), odds, tolerance=0.06)
    assert frozen.submodel.widths == {"hidden": 64, "mamba_heads": 8}


def test_depth_is_frozen_as_the_layers_that_stay(layout):
    space = Combinations(layout, {"depth": (5, 3)}, depth_order=(2, 4, 0, 1, 3))
    wanted = budget(layout, budget(layout).cost(layout, {}, (0, 2, 4)))
    frozen = freeze(space, wanted, {"depth": np.log([0.9, 0.1])})
    assert frozen.submodel.layers == (0, 2, 4) and frozen.error == 0


def test_layers_that_choose_for_themselves_are_frozen_each(layout):
    space = Combinations(layout, {"experts": (8, 2)}, ["experts"])
    full, small = (budget(layout).cost(layout, {"experts": n}) for n in (8, 2))
    odds = {("experts", 1): np.log([0.8, 0.2]), ("experts", 4): np.log([0.7, 0.3])}
    frozen = freeze(space, budget(layout, (full + small) / 2), odds, tolerance=0.01)
    assert frozen.submodel == Submodel.of({("experts", 1): 8, ("experts", 4): 2})
    frozen.submodel.check(layout)


def test_too_many_combinations_to_look_at_are_walked_through():
    """24 layers of experts that choose for themselves, sure of everything and far over the budget: many must change."""
    layout = layout_of(tiny_model(pattern="ME" * 24 + "*").config.to_dict())
    space = Combinations(layout, {"experts": (8, 2)}, ["experts"])
    rng = np.random.default_rng(0)
    sure = rng.uniform(0.9, 0.999, len(space.keys))
    odds = {key: np.log([p, 1 - p]) for key, p in zip(space.keys, sure, strict=True)}
    wanted = budget(layout, 0.75)
    frozen = freeze(space, wanted, odds)
    assert abs(frozen.error) <= 0.05 and frozen.error > 0.0, "it stops at the border"
    narrow = {key for key, width in frozen.submodel.keyed_widths.items() if width == 2}
    least_sure = sorted(space.keys, key=lambda key: odds[key][0])[: len(narrow)]
    assert narrow == set(least_sure), "layers of one size: the least sure ones change"


def test_a_saturated_router_still_ranks_what_it_did_not_choose(layout):
    """At tau 0.05 and scale 10 all but one probability are 0 in fp32; the order of the others must not get lost."""
    wanted = budget(layout)
    router = Router(layout, CANDIDATES, [wanted], std=1.0)
    cold, warm = router.freeze(wanted, tau=0.05, scale=10.0), router.freeze(wanted)
    assert cold.submodel == warm.submodel
    assert not cold.is_argmax
