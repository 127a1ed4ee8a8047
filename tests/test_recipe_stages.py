"""Recipes with budgets, a router and stages: what is refused, with its line, and what is left out means."""

from __future__ import annotations

import pytest
from test_recipe import refused, write

from star_elastic.train.recipe import load_recipe

STAGED = """\
parent: ./sorted
output: ./family
data: {sources: [{path: a.txt}]}
budgets:
  full: {params: 1.0}
  small: {params: 0.5}
router:
  axes: {hidden: [1, 0.5]}
stages:
  - {phase: search, steps: 100}
  - {phase: settle, steps: 100}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("phase: settle, steps: 100", "phase: settle", "11: a stage needs exactly one of 'steps' and 'tokens'"),
        ("phase: settle", "phase: rest", "11: stages.1.phase = 'rest': should be 'search' or 'settle'"),
        ("phase: settle,", "phase: settle, step: 3,", "11: unknown key 'stages.1.step'; did you mean 'steps'?"),
        ("phase: settle, steps: 100", "phase: settle, steps: 60", "11: stages.1: warmup_steps 60 must be below its 60"),
        ("settle, steps: 100", "settle, steps: 100, lr: 1e-6", "11: stages.1: min_lr 1e-05 must not be above lr"),
        ("phase: search", "phase: settle", "10: the first stage of a recipe with budgets must be a search stage"),
        (
            "- {phase: settle, steps: 100}",
            "- {phase: settle, steps: 100}\n  - {phase: search, steps: 100}",
            "12: stages.2 is a search stage after a settle stage",
        ),
        (
            "settle, steps: 100",
            "settle, steps: 100, probabilities: {ful: 1, small: 1}",
            "11: stages.1: probabilities name 'ful': did you mean 'full'?",
        ),
        (
            "settle, steps: 100",
            "settle, steps: 100, probabilities: {full: 1}",
            "11: stages.1: probabilities lack small",
        ),
        ("settle, steps: 100", "settle, steps: 100, probabilities: {full: 0}", "11: probabilities of a stage should"),
        (
            "settle, steps: 100",
            "settle, steps: 100, budgets_per_step: 3",
            "11: stages.1: budgets_per_step 3 is above the 2",
        ),
        ("settle, steps: 100", "settle, steps: 100, accumulate: 9", "11: stages.1: accumulate 9 is above batch_size 8"),
        ("{params: 0.5}", "{parms: 0.5}", "6: unknown key 'budgets.small.parms'; did you mean 'params'?"),
        ("{params: 0.5}", "{params: half}", "6: budgets.small.params = 'half': want a fraction of the full model"),
        ("{params: 0.5}", "{params: -1}", "6: budgets.small.params = -1: want a fraction"),
        ("{params: 0.5}", "{params: 0.5, memory: 0.5}", "6: a budget needs exactly one of params, active_params"),
        ("{params: 0.5}", "{latency: 0.5}", "6: a latency budget needs 'table'"),
        ("{params: 0.5}", "{params: 0.5, context: 99}", "6: 'context' belongs to a memory budget"),
        ("{params: 0.5}", "{params: 0.5, probability: 1}", "4: give 'probability' for all or for none"),
        ("axes: {hidden: [1, 0.5]}", "axis: {hidden: [1]}", "8: unknown key 'router.axis'; did you mean 'axes'?"),
        ("axes: {hidden: [1, 0.5]}", "axes: {hidden: [0]}", "8: router.axes.hidden.0 = 0: should be greater than 0"),
        ("axes: {hidden: [1, 0.5]}", "tau: [0.1, 1.0]", "8: router.tau should not rise"),
        ("axes: {hidden: [1, 0.5]}", "axes: {hidden: null}\n  per_layer: [ffn]", "9: router.per_layer names 'ffn'"),
        ("stages:", "steps: 5\nstages:", "9: with 'stages', each stage says its own length: remove 'steps'"),
        ("data:", "submodels: {full: {}}\ndata:", "3: give either 'budgets' (widths are learned) or 'submodels'"),
        ("data:", "precision: fp32\nmaster_weights: bf16\ndata:", "4: master_weights bf16 computes in bf16"),
        ("data:", "ema: true\ndata:", "3: ema = True: should be a number"),
        ("data:", "ema: 1.5\ndata:", "3: ema = 1.5: should be less than 1"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path, old, new, message):
    assert old in STAGED
    assert refused(tmp_path, STAGED.replace(old, new, 1)).startswith(f"recipe.yaml:{message}")


FIXED = (
    STAGED.replace("budgets:", "submodels:")
    .replace("{params: 1.0}", "{}")
    .replace("{params: 0.5}", "{widths: {hidden: 48}}")
)


def test_what_learns_widths_needs_budgets(tmp_path):
    assert refused(tmp_path, FIXED).startswith("recipe.yaml:7: a router needs 'budgets' to learn widths for")
    without = FIXED.replace("router:\n  axes: {hidden: [1, 0.5]}\n", "")
    assert refused(tmp_path, without).startswith("recipe.yaml:8: a search stage needs 'budgets'")
    settled = load_recipe(write(tmp_path, without.replace("search", "settle")))
    assert [stage.phase for stage in settled.schedule] == ["settle", "settle"]


def test_without_stages_budgets_have_the_published_shape(tmp_path):
    recipe = load_recipe(write(tmp_path, STAGED[: STAGED.index("stages:")] + "steps: 1600\n"))
    assert [(stage.phase, stage.steps) for stage in recipe.schedule] == [("search", 1000), ("settle", 600)]
    told = refused(tmp_path, STAGED[: STAGED.index("stages:")] + "steps: 100\n")
    assert told == "recipe.yaml: optimizer.warmup_steps 60 must be below the settle stage's 38 steps"


def test_stages_take_what_they_do_not_say_from_the_recipe(tmp_path):
    text = STAGED.replace(
        "settle, steps: 100", "settle, tokens: 1M, batch_size: 4, sequence_length: 1000, lr: 5e-4, warmup_steps: 0"
    )
    search, settle = load_recipe(write(tmp_path, text)).schedule
    assert (search.sequence_length, search.batch_size, search.lr, search.min_lr) == (8192, 8, 1e-4, 1e-5)
    assert (settle.steps, settle.batch_size, settle.lr, settle.warmup_steps, settle.budgets_per_step) == (
        250,
        4,
        5e-4,
        0,
        1,
    )
    assert load_recipe(write(tmp_path, text)).total_steps == 350


def test_off_is_no_average(tmp_path):
    assert load_recipe(write(tmp_path, "ema: off\n" + STAGED)).ema is None
    assert load_recipe(write(tmp_path, "ema: 0.999\n" + STAGED)).ema == 0.999
