"""Candidate widths by hand, and what they reach against every combination counted one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tiny import tiny_granitemoehybrid, tiny_model

from star_elastic.budget import Budget, BudgetError
from star_elastic.candidates import candidates, check_budget, default_spec, reachable, snapped, unseen_axes
from star_elastic.combinations import Combinations
from star_elastic.errors import UnknownNameError, WidthError
from star_elastic.families import layout_of
from star_elastic.presets import NEMOTRON_3_NANO

ORDER = (2, 0, 1, 3, 4)  # of ME*ME: the attention layer first


@pytest.fixture(scope="module")
def layout():
    return layout_of(tiny_model().config.to_dict())


def budget(layout, value, kind="params", **more):
    return Budget.resolve(layout, "small", kind, value, **more)


def test_fractions_snap_whole_numbers_stay_and_repeats_merge(layout):
    spec = {"hidden": (0.76, 1, 32, 0.5), "mamba_heads": (0.7,), "depth": (0.6, 4)}
    assert candidates(layout, spec, depth_order=ORDER) == {
        "hidden": (64, 48, 32),
        "mamba_heads": (8, 6),
        "depth": (5, 4, 3),
    }
    told = snapped(layout, spec, depth_order=ORDER)
    assert told == [
        "hidden: nearest legal widths: 0.76 (48.64) -> 48",
        "mamba_heads: nearest legal widths: 0.7 (5.6) -> 6",
    ]


def test_the_published_lists_on_the_published_model():
    nano = NEMOTRON_3_NANO.layout
    found = candidates(nano, default_spec(nano))
    assert found["hidden"] == (2688, 1920, 1392)
    assert found["expert_ffn"] == (1856, 1328, 960)
    assert found["experts"] == (128, 96, 64)
    assert found["mamba_heads"] == (64, 48, 32)
    assert candidates(nano, {"hidden": None}) == {"hidden": found["hidden"]}


def test_axes_that_cannot_be_cut_are_no_candidates_by_default():
    layout = layout_of(tiny_model(num_attention_heads=2, num_key_value_heads=2).config.to_dict())
    assert "heads" not in default_spec(layout)
    assert "hidden" in default_spec(layout)


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ({"hiden": (0.5,)}, UnknownNameError, "did you mean 'hidden'"),
        ({"hidden": (30,)}, WidthError, "30 is no legal width: nearest legal: 28 and 32"),
        ({"hidden": (65,)}, WidthError, "65 is no legal width: nearest legal: 64, all that the parent has"),
        ({"mamba_heads": (7,)}, WidthError, "nearest legal: 6 and 8"),
        ({"hidden": (0,)}, WidthError, "0 is no fraction"),
        ({"hidden": (-0.5,)}, WidthError, "-0.5 is no fraction"),
        ({"hidden": (True,)}, WidthError, "True is no fraction"),
        ({"hidden": ("half",)}, WidthError, "'half' is no fraction"),
        ({"mamba_heads": (0.95, 0.9)}, WidthError, "0.95, 0.9 all come to the parent's 8: the next legal width is 6"),
        ({"depth": (0.5,)}, WidthError, "layers are not ranked"),
    ],
)
def test_mistakes_are_refused_in_one_line(layout, spec, error, words):
    with pytest.raises(error, match=words) as caught:
        candidates(layout, spec)
    assert "\n" not in str(caught.value)


def test_depths_that_leave_no_model_are_no_candidates(layout):
    """The first layers of this order hold attention only at a depth of 3, and every model needs attention."""
    assert candidates(layout, {"depth": (0.2, 0.6)}, depth_order=(0, 1, 2, 3, 4))["depth"] == (5, 3)


def by_hand(layout, spec, wanted):
    """Cost of every combination that fits, one by one, with plain numbers."""
    costs = {}
    for picks in itertools.product(*spec.values()):
        widths = dict(zip(spec, picks, strict=True))
        depth = widths.pop("depth", None)
        if layout.fits(widths):
            costs[picks] = wanted.cost(layout, widths, None if depth is None else tuple(sorted(ORDER[:depth])))
    return costs


@pytest.mark.parametrize("kind", ["params", "active_params", "memory"])
def test_range_and_prices_equal_single_counts(layout, kind):
    spec = candidates(
        layout, {"hidden": (0.75, 0.5), "experts": (4,), "mamba_heads": (4,), "depth": (3, 4)}, depth_order=ORDER
    )
    wanted = budget(layout, 0.5, kind)
    costs = by_hand(layout, spec, wanted)
    assert reachable(layout, spec, wanted, depth_order=ORDER) == (min(costs.values()), max(costs.values()))
    space = Combinations(layout, spec, depth_order=ORDER)
    assert space.price(wanted, space.even()).tolist() == list(costs.values())
    for number in (0, 7, 20):
        submodel = space.submodel(space.even()[number])
        submodel.check(layout)
        assert wanted.cost(layout, submodel.widths, submodel.layers) == list(costs.values())[number]


def test_combinations_that_do_not_fit_together_are_left_out():
    """Granite's Mamba width, 8 heads x 16 channels in the parent, must be a multiple of hidden."""
    layout = layout_of(tiny_granitemoehybrid().config.to_dict())
    spec = candidates(layout, {"hidden": (48, 32), "mamba_heads": (6, 4), "mamba_head_dim": (8,)})
    space = Combinations(layout, spec)
    kept = [tuple(space.submodel(pick).widths.values()) for pick in space.even()]
    wanted = {
        (hidden, heads, channels)
        for hidden, heads, channels in itertools.product((64, 48, 32), (8, 6, 4), (16, 8))
        if heads * channels % hidden == 0
    }
    assert set(kept) == wanted and len(kept) == len(wanted) < 18


def test_a_budget_out_of_reach_names_the_range_and_the_nearest(layout):
    spec = candidates(layout, {"hidden": (48,)})
    smallest = budget(layout, 1.0).cost(layout, {"hidden": 48})
    with pytest.raises(BudgetError) as caught:
        check_budget(layout, spec, budget(layout, 0.5))
    for words in (f"({smallest:,})", "(hidden 48)", "no candidates come within 5%", "add candidates"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    check_budget(layout, spec, budget(layout, float(smallest) * 1.04))
    with pytest.raises(BudgetError):
        check_budget(layout, spec, budget(layout, float(smallest) * 1.04), tolerance=0.01)


def test_a_gap_between_candidates_is_refused_and_layers_of_their_own_fill_it(layout):
    """Two layers of experts: both wide, both narrow, or, where each chooses, one of each."""
    spec = candidates(layout, {"experts": (2,)})
    full, small = (budget(layout, 1.0).cost(layout, {"experts": n}) for n in (8, 2))
    between = budget(layout, (full + small) / 2)
    with pytest.raises(BudgetError, match=r"nearest costs"):
        check_budget(layout, spec, between, tolerance=0.01)
    check_budget(layout, spec, between, tolerance=0.01, per_layer=["experts"])
    assert reachable(layout, spec, between, per_layer=["experts"]) == (small, full)


def test_too_many_combinations_to_count_are_approached(layout):
    spec = {name: tuple(reversed(axis.legal())) for name, axis in layout.width_axes.items()}
    assert np.prod([len(widths) for widths in spec.values()]) > 100_000
    check_budget(layout, spec, budget(layout, 0.333), tolerance=0.005)


def test_only_axes_of_one_layer_choose_per_layer(layout):
    spec = candidates(layout, {"hidden": (32,), "experts": (4,)})
    with pytest.raises(WidthError, match=r"hidden is one axis for the whole model; layers can choose experts"):
        Combinations(layout, spec, ["hidden"])
    with pytest.raises(UnknownNameError, match="no candidates for 'expert'"):
        Combinations(layout, spec, ["expert"])
    assert Combinations(layout, spec, ["experts"]).keys == ["hidden", ("experts", 1), ("experts", 4)]


def test_active_parameters_do_not_see_experts(layout):
    spec = candidates(layout, {"hidden": (32,), "experts": (4,), "expert_ffn": (16,)})
    assert unseen_axes(layout, spec, budget(layout, 0.5, "active_params")) == ["experts"]
    assert unseen_axes(layout, spec, budget(layout, 0.5, "params")) == []
