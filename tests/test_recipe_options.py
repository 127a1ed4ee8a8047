"""Recipe keys that are off unless asked for: what they mean, and mistakes in them by line."""

from __future__ import annotations

import pytest
from test_recipe import refused

from star_elastic.train.recipe import Recipe

BASE = """\
parent: ./sorted
output: ./family
steps: 100
data: {sources: [{path: a.txt}]}
"""


def test_they_are_off_by_default():
    recipe = Recipe(parent="p", output="o", steps=100, data={"sources": [{"path": "a.txt"}]})
    assert recipe.track == () and recipe.balance_experts is None and recipe.teacher_cache is None
    assert (
        Recipe.model_validate(recipe.model_dump(exclude_unset=True) | {"balance_experts": {}}).balance_experts.step
        == 1e-3
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("track: [tensorbord]", "track.0 = 'tensorbord': should be 'tensorboard' or 'wandb'"),
        ("balance_experts: {step: 0}", "balance_experts.step = 0: should be greater than 0"),
        ("balance_experts: {stp: 1}", "unknown key 'balance_experts.stp'; did you mean 'step'?"),
        ("teacher_cache: ''", "teacher_cache = '': should not be empty"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path, line, message):
    assert refused(tmp_path, BASE + line + "\n").startswith(f"recipe.yaml:5: {message}")
