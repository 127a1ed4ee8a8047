"""Recipes: what is refused, in one line with its place, and what the defaults mean."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from star_elastic.errors import RecipeError
from star_elastic.train.recipe import (
    BudgetRecipe,
    DataRecipe,
    OptimizerRecipe,
    Recipe,
    RouterRecipe,
    SourceRecipe,
    StageRecipe,
    SubmodelRecipe,
    load_recipe,
    override,
)

GOOD = """\
parent: ./sorted
output: ./family
steps: 100
submodels:
  full: {}
  small:
    widths: {hidden: 48}
data:
  packing: apart
  sources:
    - path: sums.jsonl
      kind: reasoning
    - path: books.txt
optimizer:
  lr: 1e-3
"""


def write(tmp_path, text=GOOD):
    path = tmp_path / "recipe.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def refused(tmp_path, text, overrides=()):
    """The message of the refusal without the folder; one line, always."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_values_and_published_defaults(tmp_path):
    recipe = load_recipe(write(tmp_path))
    assert (recipe.steps, recipe.data.packing, recipe.submodels["small"].widths) == (100, "apart", {"hidden": 48})
    assert recipe.optimizer.lr == 1e-3  # YAML 1.1 reads 1e-3 as a string
    assert recipe.optimizer.betas == (0.9, 0.98)
    assert (recipe.optimizer.min_lr, recipe.optimizer.weight_decay, recipe.optimizer.clip) == (1e-5, 0.0, 1.0)
    assert (recipe.optimizer.warmup_steps, recipe.sequence_length, recipe.precision) == (60, 8192, "auto")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  lr: 1e-3", "  lrr: 1", "recipe.yaml:15: unknown key 'optimizer.lrr'; did you mean 'lr'?"),
        ("kind: reasoning", "knd: text", "recipe.yaml:12: unknown key 'data.sources.0.knd'; did you mean 'kind'?"),
        ("widths:", "width:", "recipe.yaml:7: unknown key 'submodels.small.width'; did you mean 'widths'?"),
        ("steps: 100", "stepps: 1", "recipe.yaml:3: unknown key 'stepps'; did you mean 'steps'?"),
        ("  lr: 1e-3", "  lr: 0", "recipe.yaml:15: optimizer.lr = 0: should be greater than 0"),
        ("  lr: 1e-3", "  lr: .nan", "recipe.yaml:15: optimizer.lr = nan: should be a finite number"),
        ("hidden: 48", "hidden: x", "recipe.yaml:7: submodels.small.widths.hidden = 'x': should be a valid integer"),
        ("packing: apart", "packing: both", "recipe.yaml:9: data.packing = 'both': should be 'cross' or 'apart'"),
        ("kind: reasoning", "kind: code", "recipe.yaml:12: data.sources.0.kind = 'code': should be 'reasoning' or 'text'"),
        ("parent: ./sorted\n", "", "recipe.yaml: key 'parent' is missing"),
        ("    - path: books.txt", "    - kind: text", "recipe.yaml:13: a source needs exactly one of 'path' and 'hub'"),
        ("steps: 100", "steps: 100\ntokens: 5", "recipe.yaml: a recipe needs exactly one of 'steps' and 'tokens'"),
        ("steps: 100", "steps: 60", "recipe.yaml: optimizer.warmup_steps 60 must be below the run's 60 steps"),
        ("  lr: 1e-3", "  lr: 1e-6", "recipe.yaml:14: min_lr 1e-05 must not be above lr 1e-06"),
        ("full: {}", "full: {probability: 1}", "recipe.yaml:4: give 'probability' for all or for none; it is missing for small"),
        ("kind: reasoning", "weight: 1", "recipe.yaml:10: give 'weight' for all or for none; it is missing for books.txt"),
        ("steps: 100", "steps: 100\nsteps: 2", "recipe.yaml:4: key 'steps' is given twice, first in line 3"),
        ("data:", "data: [", "recipe.yaml:10: not valid YAML"),
        (GOOD, "- a\n- b\n", "recipe.yaml: a recipe is a mapping"),
        (GOOD, "", "recipe.yaml: a recipe is a mapping"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path, old, new, message):
    assert old in GOOD
    assert refused(tmp_path, GOOD.replace(old, new)).startswith(message)


def test_the_first_mistake_comes_first_and_the_others_are_counted(tmp_path):
    broken = GOOD.replace("  lr: 1e-3", "  lr: -1\n  clip: 0").replace("packing: apart", "packing: x")
    assert refused(tmp_path, broken).startswith("recipe.yaml:9: data.packing = 'x'")
    assert refused(tmp_path, broken).endswith("(and 2 more)")


def test_a_missing_or_binary_file(tmp_path):
    with pytest.raises(RecipeError, match=r"nothing\.yaml does not exist"):
        load_recipe(tmp_path / "nothing.yaml")
    (tmp_path / "weights.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "weights.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)


def test_overrides_reach_sections_lists_and_absent_keys(tmp_path):
    recipe = load_recipe(
        write(tmp_path),
        ["optimizer.lr=3e-4", "data.sources.1.kind=reasoning", "submodels.mid.widths={hidden: 56}", "seed=7"],
    )
    assert recipe.optimizer.lr == 3e-4 and recipe.seed == 7
    assert recipe.data.sources[1].kind == "reasoning" and recipe.data.sources[1].path == "books.txt"
    assert recipe.submodels["mid"].widths == {"hidden": 56}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("x", "override 'x' must be key=value"),
        ("stps=1", "override 'stps=1': unknown key 'stps'; did you mean 'steps'?"),
        ("optimzer.lr=1", "override 'optimzer.lr=1': unknown key 'optimzer'; did you mean 'optimizer'?"),
        ("optimizer.lr=-1", "override 'optimizer.lr=-1': optimizer.lr = -1: should be greater than 0"),
        ("data.sources.7.kind=text", "override 'data.sources.7.kind=text': 7 is not an item of a list of 2"),
        ("steps.a=1", "override 'steps.a=1': 100 has no key 'a'"),
        ("seed=[", "override 'seed=[': '[' is not a YAML value"),
    ],
)
def test_wrong_overrides_name_themselves(tmp_path, change, message):
    assert refused(tmp_path, GOOD, [change]).startswith(message)


def test_override_of_a_recipe_made_in_python(tmp_path):
    recipe = load_recipe(write(tmp_path))
    changed = override(recipe, ["optimizer.clip=0.5", "output=/elsewhere"])
    assert changed.optimizer.clip == 0.5 and str(changed.output) == "/elsewhere"
    assert changed.optimizer.lr == recipe.optimizer.lr
    with pytest.raises(RecipeError, match="override 'batch_size=0': batch_size = 0: should be"):
        override(recipe, ["batch_size=0"])


def test_tokens_round_up_to_whole_steps(tmp_path):
    recipe = load_recipe(write(tmp_path, GOOD.replace("steps: 100", "tokens: 6401\nbatch_size: 2\nsequence_length: 32")))
    assert recipe.total_steps == 101
    assert override(recipe, ["tokens=6.4k"]).total_steps == 100
    with pytest.raises(RecipeError, match=r"tokens = '6 cows': cannot read '6 cows': want a positive number such as 12e9"):
        override(recipe, ["tokens=6 cows"])


def mixture(*kinds, weights=None):
    sources = [{"path": f"{i}.txt", "kind": kind} for i, kind in enumerate(kinds)]
    for source, weight in zip(sources, weights or [], strict=False):
        source["weight"] = weight
    return Recipe(parent="p", output="o", steps=100, data={"sources": sources}).data.weights()


def test_reasoning_gets_seven_tenths_shared_equally():
    assert mixture("reasoning", "text", "reasoning") == pytest.approx((0.35, 0.3, 0.35))
    assert mixture("text", "text") == pytest.approx((0.5, 0.5))
    assert mixture("reasoning") == (1.0,)
    assert mixture("reasoning", "text", weights=[1, 3]) == pytest.approx((0.25, 0.75))


def test_reading_a_recipe_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, star_elastic.train.recipe; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_shipped_recipes_and_the_one_in_the_docs_are_valid(tmp_path):
    root = Path(__file__).parent.parent
    shipped = sorted((root / "recipes").glob("*.yaml"))
    assert shipped
    for path in shipped:
        load_recipe(path)
    page = (root / "docs/how-to/train.md").read_text(encoding="utf-8")
    recipe = load_recipe(write(tmp_path, page.split("```yaml\n")[1].split("```")[0]))
    assert recipe.submodels["small"].probability == 0.2


def test_the_docs_explain_every_key():
    root = Path(__file__).parent.parent / "docs/how-to"
    train, data = ((root / name).read_text(encoding="utf-8") for name in ("train.md", "data.md"))
    keys = [*Recipe.model_fields, *(f"optimizer.{key}" for key in OptimizerRecipe.model_fields), *SubmodelRecipe.model_fields]
    keys += [*(f"router.{key}" for key in RouterRecipe.model_fields), *BudgetRecipe.model_fields, *StageRecipe.model_fields]
    assert [key for key in keys if f"`{key}`" not in train and key != "optimizer"] == []
    assert [key for key in (*DataRecipe.model_fields, *SourceRecipe.model_fields) if key not in data] == []
    lr = OptimizerRecipe()
    assert f"| `optimizer.lr` | {lr.lr:.0e} |".replace("e-0", "e-") in train
