"""Schedules of the router against their ends, by hand, and past them."""

from __future__ import annotations

import pytest

from star_elastic.train.anneal import Anneal


def test_reaches_its_ends_and_stays_there():
    """Case 6: total 10, ask step 10 and 25."""
    anneal = Anneal(10)
    assert (anneal.tau(0), anneal.scale(0)) == (1.0, 1.0)
    for step in (9, 10, 25):
        assert (anneal.tau(step), anneal.scale(step)) == (0.05, 10.0)


def test_tau_falls_by_one_factor_and_scale_rises_by_one_step():
    anneal = Anneal(5, tau_start=1.0, tau_end=1 / 16, scale_start=2, scale_end=10)
    assert [anneal.tau(step) for step in range(5)] == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16])
    assert [anneal.scale(step) for step in range(5)] == pytest.approx([2, 4, 6, 8, 10])


@pytest.mark.parametrize("total", [1, 2, 3, 10, 777])
@pytest.mark.parametrize("tau", [1.0, 0.7, 0.5, 0.1, 0.05])
def test_steps_to_a_temperature_is_the_first_step_that_has_it(total, tau):
    anneal = Anneal(total)
    first = anneal.steps_to(tau)
    assert first is not None
    assert first == next(step for step in range(total) if anneal.tau(step) <= tau + 1e-12)


def test_a_temperature_that_is_never_reached():
    assert Anneal(10).steps_to(0.01) is None
    assert Anneal(10).steps_to(2.0) == 0


def test_one_step_is_the_last():
    assert (Anneal(1).tau(0), Anneal(1).scale(0)) == (0.05, 10.0)


@pytest.mark.parametrize("mistake", [{"total": 0}, {"total": 5, "tau_end": 0}, {"total": 5, "tau_end": 2}])
def test_impossible_schedules_are_refused(mistake):
    with pytest.raises(ValueError, match="schedule"):
        Anneal(**mistake)
