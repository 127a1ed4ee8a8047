"""The budget's loss over choices against choices counted by hand."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_config, tiny_granitemoehybrid

from star_elastic.budget import Budget
from star_elastic.combinations import Combinations
from star_elastic.families import layout_of
from star_elastic.router import Router
from star_elastic.train.budget_loss import ChoiceLoss


def test_the_loss_of_choices_is_the_mean_error_of_what_would_be_drawn():
    layout = layout_of(tiny_config().to_dict())
    budget = Budget.resolve(layout, "small", "params", 0.5)
    space = Combinations(layout, {"hidden": (64, 48, 32), "expert_ffn": (32, 16)})
    loss = ChoiceLoss(space, budget, 0.05)
    probabilities = {"hidden": torch.tensor([0.3, 0.0, 0.7]), "expert_ffn": torch.tensor([0.25, 0.75])}
    draws = {}
    for i, hidden in enumerate((64, 48, 32)):
        for j, ffn in enumerate((32, 16)):
            chance = float(probabilities["hidden"][i] * probabilities["expert_ffn"][j])
            draws[hidden, ffn] = chance, abs(budget.error(layout, {"hidden": hidden, "expert_ffn": ffn}))
    wanted = sum(chance * error for chance, error in draws.values() if error > 0.05)
    assert loss(probabilities).item() == pytest.approx(wanted, rel=1e-5)
    assert loss.inside(probabilities) == pytest.approx(sum(c for c, error in draws.values() if error <= 0.05), rel=1e-5)
    router = Router(layout, space.candidates, [budget])
    expected = router.budget_loss(budget, probabilities)
    assert expected < 0.6 * wanted  # the published loss sees the mean of a choice above and one below


def test_widths_that_do_not_fit_together_are_no_way_to_meet_a_budget():
    """granitemoehybrid writes the Mamba mixer's width as a multiple of hidden: 48 does not divide 128."""
    layout = layout_of(tiny_granitemoehybrid().config.to_dict())
    space = Combinations(layout, {"hidden": (64, 48, 32)})
    budget = Budget.resolve(layout, "small", "params", Budget("", "params", 1, 1).cost(layout, {"hidden": 48}))
    loss = ChoiceLoss(space, budget, 0.05)
    assert (
        loss({"hidden": torch.tensor([0.0, 1.0, 0.0])}).item()
        == 1
        > loss({"hidden": torch.tensor([0.0, 0.0, 1.0])}).item()
        > 0
    )
    assert loss.inside({"hidden": torch.tensor([0.0, 1.0, 0.0])}) == 0
