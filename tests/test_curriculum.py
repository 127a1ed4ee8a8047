"""The budget sampler and the learning rate: independent, resumable, and defined past the planned end."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from star_elastic.train.curriculum import BudgetSampler
from star_elastic.train.schedule import learning_rate

SKEWED = {"30b": 0.5, "23b": 0.3, "12b": 0.2}


def test_draws_follow_the_probabilities():
    sampler = BudgetSampler(SKEWED, seed=1)
    counts = Counter(sampler.draw_several(1)[0] for _ in range(6000))
    for name, probability in SKEWED.items():
        # Four standard deviations of a binomial share.
        assert abs(counts[name] / 6000 - probability) < 4 * math.sqrt(probability * (1 - probability) / 6000)


def test_probabilities_are_normalised_and_zero_is_never_drawn():
    assert {BudgetSampler({"a": 0, "b": 6, "c": 0}, seed=s).draw_several(1)[0] for s in range(50)} == {"b"}


def test_the_same_seed_gives_the_same_draws_whatever_else_draws():
    one, two = BudgetSampler(SKEWED, seed=3), BudgetSampler(SKEWED, seed=3)
    first = [one.draw_several(1)[0] for _ in range(40)]
    second = [(torch.rand(5), two.draw_several(1)[0])[1] for _ in range(40)]
    assert first == second
    other = BudgetSampler(SKEWED, seed=4)
    assert first != [other.draw_several(1)[0] for _ in range(40)]


def test_a_restored_sampler_continues():
    sampler = BudgetSampler(SKEWED, seed=5)
    [sampler.draw_several(1)[0] for _ in range(7)]
    state = sampler.state()
    expected = [sampler.draw_several(1)[0] for _ in range(20)]
    fresh = BudgetSampler(SKEWED, seed=99)
    fresh.restore(state)
    assert [fresh.draw_several(1)[0] for _ in range(20)] == expected


def test_warm_up_is_linear_and_the_cosine_ends_at_the_floor():
    rates = [learning_rate(s, 10, peak=1e-4, floor=1e-5, warmup=4) for s in range(10)]
    assert rates[:4] == pytest.approx([2.5e-5, 5e-5, 7.5e-5, 1e-4])
    assert rates[4] == pytest.approx(1e-4)
    # Half a cosine over the five steps that remain: 0, 36, 72, 108, 144, 180 degrees would be six points.
    assert rates[4:] == pytest.approx([1e-5 + 4.5e-5 * (1 + math.cos(math.radians(36 * k))) for k in range(6)])
    assert rates[-1] == pytest.approx(1e-5)


@pytest.mark.parametrize("step", [10, 25, 10_000])
def test_past_the_planned_end_the_rate_stays_at_the_floor(step):
    assert learning_rate(step, 10, peak=1e-4, floor=1e-5, warmup=4) == pytest.approx(1e-5)
    assert learning_rate(step, 10, peak=1e-4, floor=1e-5, warmup=9) == pytest.approx(1e-5)


def test_a_run_of_one_step_uses_the_peak():
    assert learning_rate(0, 1, peak=1e-3, floor=0.0) == 1e-3
