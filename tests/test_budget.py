"""Budgets as people write them, and their costs against real tensors of models that were really cut."""

from __future__ import annotations

import math

import pytest
import torch
from hand_cut import cut_of, hand_child, parent_of
from tiny import tiny_folder, tiny_model
from transformers.cache_utils import DynamicCache

from star_elastic.budget import Budget, BudgetError, interpolate
from star_elastic.errors import UnknownNameError
from star_elastic.families import layout_of
from star_elastic.presets import NEMOTRON_3_NANO
from star_elastic.submodel import read_json

NANO = NEMOTRON_3_NANO.layout
FULL = 31_577_937_344


@pytest.fixture(scope="module")
def tiny():
    return layout_of(tiny_model().config.to_dict())


def one(value, kind="params", layout=NANO, **more):
    return Budget.resolve(layout, "small", kind, value, **more)


@pytest.mark.parametrize(
    ("value", "target", "fraction"),
    [
        (0.5, FULL / 2, 0.5),
        ("0.5", FULL / 2, 0.5),
        ("50%", FULL / 2, 0.5),
        ("12B", 12e9, 12e9 / FULL),
        (12_000_000_000, 12e9, 12e9 / FULL),
        ("12e9", 12e9, 12e9 / FULL),
        (1, FULL, 1.0),
        ("100%", FULL, 1.0),
        ("31_577_937_344", FULL, 1.0),
    ],
)
def test_fractions_and_absolute_numbers(value, target, fraction):
    budget = one(value)
    assert (budget.target, budget.fraction) == (target, fraction)
    assert budget.is_full == (fraction == 1)


@pytest.mark.parametrize("kind", ["params", "active_params", "memory"])
def test_the_full_model_is_full_however_it_is_written(kind):
    full = one(1.0, kind)
    assert full.is_full and one(full.target, kind).is_full
    assert full.error(NANO, {}) == 0


def test_bytes_and_where_they_are_counted(tiny):
    assert one("24GiB", "memory").target == 24 * 2**30
    long, short = (one(0.9, "memory", tiny, context=context, batch=2) for context in (4096, 16))
    kv = 1 * 2 * 2 * 8 * 2  # one attention layer, keys and values, 2 KV heads of 8, 2 bytes a number
    assert long.cost(tiny, {}) - short.cost(tiny, {}) == 2 * (4096 - 16) * kv


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "is not positive"),
        (-0.5, "is not positive"),
        ("-3B", "cannot read"),
        ("0%", "is not positive"),
        (math.nan, "is not positive"),
        (math.inf, "is not positive"),
        (True, "cannot read"),
        ("12GiB", "such as 12B"),
        ("many", "such as 12B"),
        (1.5, "above 1, so no fraction, and no number of parameters"),
        ("40B", "more than the full model's 31.578B"),
        ("120%", "more than the full model's"),
    ],
)
def test_values_that_are_refused_in_one_line(value, words):
    with pytest.raises(BudgetError, match=words) as caught:
        one(value)
    assert "\n" not in str(caught.value)


def test_unknown_kinds_and_formats_name_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'memory'"):
        one(0.5, "memori")
    with pytest.raises(UnknownNameError, match="did you mean 'bf16'"):
        one(0.5, "memory", dtype="bf61")


class Clock:
    """A latency table of 2 ms a layer and 1 us a hidden channel."""

    def cost(self, layout, widths, layers=None):
        kept = (
            layout.num_layers if layers is None else sum(layers.values()) if isinstance(layers, dict) else len(layers)
        )
        return 2e-3 * kept + 1e-6 * widths.get("hidden", 64)


def test_latency_is_counted_by_its_table(tiny):
    budget = one("5.05ms", "latency", tiny, table=Clock())
    assert budget.target == pytest.approx(5.05e-3)
    assert budget.fraction == pytest.approx(5.05e-3 / (10e-3 + 64e-6))
    assert budget.cost(tiny, {"hidden": 32}, (0, 1)) == pytest.approx(4.032e-3)
    assert budget.text(budget.target) == "5.05 ms"
    assert one("0.005 s", "latency", tiny, table=Clock()).target == pytest.approx(5e-3)
    assert one(0.5, "latency", tiny, table=Clock()).fraction == 0.5
    with pytest.raises(BudgetError, match="such as 35ms"):
        one("5 min", "latency", tiny, table=Clock())
    with pytest.raises(BudgetError, match="give the table"):
        one("5ms", "latency", tiny)


@pytest.mark.parametrize("cut", ["hidden", "mamba_heads", "experts", "expert_ffn", "depth", "all", "all and depth"])
def test_cost_is_the_number_of_parameters_of_the_cut_model(cut):
    """Fault 1: never a closed formula against its copy."""
    parent = parent_of("dense")
    layout = layout_of(parent.config.to_dict())
    widths, layers = cut_of("dense", cut)
    child = hand_child(parent, {"pattern": "ME*-E"}, widths, layers)
    budget = one(0.5, layout=layout)
    numel = sum(parameter.numel() for parameter in child.parameters())
    assert budget.cost(layout, widths, layers) == numel
    assert budget.error(layout, widths, layers) == pytest.approx(numel / budget.target - 1)
    gates = {layer: torch.tensor(1.0) for layer in (layers or range(5))}  # fault 6: depth enters the cost
    assert float(budget.cost(layout, widths, gates)) == numel


def test_memory_is_all_resident_weights_and_the_cache_that_a_model_really_has(tmp_path):
    """Fault 2: 8 -> 4 experts with the same top-k saves 4 experts, their router rows and their selection biases."""
    layout = layout_of(read_json(tiny_folder(tmp_path / "parent") / "config.json"))
    budget = one(0.9, "memory", layout, context=24, dtype="fp32")
    experts, expert_layers = 4, 2
    saved = experts * expert_layers * (2 * 64 * 32 + 64 + 1) * 4
    assert budget.cost(layout, {}) - budget.cost(layout, {"experts": 4}) == saved
    model = tiny_model()
    weights = sum(t.numel() * 4 for name, t in model.state_dict().items())
    cache = model(torch.zeros(1, 24, dtype=torch.long), use_cache=True).past_key_values
    assert isinstance(cache, DynamicCache)
    held = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    held += [t for layer in cache.layers for box in vars(layer).values() if isinstance(box, dict) for t in box.values()]
    assert budget.cost(layout, {}) == weights + sum(t.numel() * t.element_size() for t in held if torch.is_tensor(t))


def test_a_cost_between_budgets_is_a_mixture_of_its_neighbours():
    budgets = [Budget(name, "params", target, target / 100) for name, target in (("a", 100), ("c", 20), ("b", 60))]
    assert interpolate(budgets, 50) == pytest.approx({"c": 0.25, "b": 0.75})
    assert interpolate(budgets, 90) == pytest.approx({"b": 0.25, "a": 0.75})
    assert interpolate(budgets, 60) == {"b": 1.0}
    assert interpolate(budgets, 20) == {"c": 1.0}
    for outside in (19, 101):
        with pytest.raises(BudgetError, match="outside the trained budgets"):
            interpolate(budgets, outside)
    with pytest.raises(BudgetError, match="of one kind, not of memory, params"):
        interpolate([*budgets, Budget("d", "memory", 10, 0.5)], 50)
