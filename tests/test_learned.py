"""Sizes between trained ones: what the router of a really trained checkpoint answers, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from search_runs import search_content, search_parent, write_recipe
from tiny import tiny_folder
from transformers import AutoModelForCausalLM

from star_elastic import cost, learned
from star_elastic.budget import Budget
from star_elastic.cli import main
from star_elastic.families import layout_of
from star_elastic.ladder import Budget as Bound
from star_elastic.learned import LearnedBudgetError, choose_learned
from star_elastic.router import Router
from star_elastic.router_freeze import BudgetMissed
from star_elastic.submodel import ElasticConfig, Submodel, open_elastic
from star_elastic.train import train_family

SHARES = {"full": 1.0, "mid": 0.75, "small": 0.5}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An elastic checkpoint whose router has learned 40 steps, on all three budgets at each."""
    folder = tmp_path_factory.mktemp("learned")
    content = search_content(search_parent(folder / "parent"), folder)
    content["router"]["axes"] = {axis: [1, 0.875, 0.75, 0.625, 0.5] for axis in ("hidden", "expert_ffn", "shared_ffn")}
    content["stages"] = [
        {"phase": "search", "steps": 40, "budgets_per_step": 3},
        {"phase": "settle", "steps": 2},
    ]
    content["optimizer"]["lr"] = 3e-3
    train_family(write_recipe(content, folder), progress=False)
    return folder / "out"


@pytest.fixture
def full_params(trained):
    _, layout, _ = open_elastic(trained)
    return int(cost.params(layout, {}))


def by_hand(folder, target, weights, low, high, tolerance=0.05):
    """The most probable of all combinations between two sizes and within the tolerance, from the weights in the file."""
    with safe_open(folder / "router.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["router"])
        tensors = {name: file.get_tensor(name).double() for name in file.keys()}  # noqa: SIM118
    names = [budget["name"] for budget in settings["budgets"]]
    mix = torch.tensor([weights.get(name, 0.0) for name in names], dtype=torch.float64)
    probable = {}
    for axis, widths in settings["candidates"].items():
        hidden = tensors[f"axes.{axis}.first"] @ mix
        logits = tensors[f"axes.{axis}.second"] @ torch.where(hidden > 0, hidden, 0.1 * hidden)
        probable[axis] = dict(zip(widths, logits.softmax(0).tolist(), strict=True))
    _, layout, _ = open_elastic(folder)
    best, most = None, 0.0
    for widths in itertools.product(*settings["candidates"].values()):
        one = dict(zip(probable, widths, strict=True))
        if not all(low[axis] <= width <= high[axis] for axis, width in one.items()):
            continue
        if abs(cost.params(layout, one) / target - 1) > tolerance:
            continue
        chance = math.prod(probable[axis][width] for axis, width in one.items())
        if chance > most:
            best, most = one, chance
    return best


@pytest.mark.parametrize("share", [0.52, 0.6, 0.66, 0.75, 0.85, 0.95])
def test_the_most_probable_widths_between_the_neighbours_are_taken(trained, full_params, share):
    target = int(share * full_params)
    below, above = ("small", "mid") if share < 0.75 else ("mid", "full")
    weight = (share - SHARES[below]) / (SHARES[above] - SHARES[below])
    _, layout, elastic = open_elastic(trained)
    low, high = (layout.complete(elastic.get(name).widths) for name in (below, above))
    if any(low[axis] > high[axis] for axis in low):
        low, high = ({axis: pick(low[axis], high[axis]) for axis in low} for pick in (min, max))
    wanted = by_hand(trained, target, {below: 1 - weight, above: weight}, low, high)
    assert wanted is not None
    found = choose_learned(trained, layout, elastic, Bound("params", target)).submodel
    assert {axis: found.widths[axis] for axis in wanted} == wanted
    assert all(low[axis] <= width <= high[axis] for axis, width in found.widths.items())


def test_a_trained_budget_gives_its_trained_size(trained, full_params):
    _, layout, elastic = open_elastic(trained)
    for name, share in SHARES.items():
        found = choose_learned(trained, layout, elastic, Bound("params", int(share * full_params)))
        assert found.submodel.completed(layout) == elastic.get(name).completed(layout)


def test_the_command_slices_it(trained, full_params, tmp_path, capsys):
    target = int(0.6 * full_params)
    assert main(["slice", str(trained), str(tmp_path / "out"), "--params", str(target), "--learned"]) == 0
    out = capsys.readouterr().out
    assert "router: 60% small and 40% mid: the most probable widths" in out and f"({target:,}) asked for" in out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert abs(sum(parameter.numel() for parameter in model.parameters()) / target - 1) <= 0.05
    assert not (tmp_path / "out" / "router.safetensors").exists()
    assert main(["slice", str(trained), str(tmp_path / "dry"), "--params", str(target), "--learned", "--dry-run"]) == 0
    assert not (tmp_path / "dry").exists()


def refused(trained, tmp_path, capsys, *words):
    assert main(["slice", str(trained), str(tmp_path / "none"), *words, "--learned"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "none").exists()
    return error


def test_what_is_refused(trained, full_params, tmp_path, capsys):
    plain = tmp_path / "plain"
    shutil.copytree(trained, plain)
    (plain / "router.safetensors").unlink()
    assert "plain holds no router.safetensors" in refused(plain, tmp_path, capsys, "--params", "100k")
    error = refused(trained, tmp_path, capsys, "--params", "10k")
    low, high = (Budget("", "params", 1.0, 1.0).text(share * full_params) for share in (0.5, 1.0))
    assert f"10.000k parameters (10,000) is outside the trained budgets, {low} to {high}" in error
    assert "is outside the trained budgets" in refused(trained, tmp_path, capsys, "--params", str(full_params + 1))
    error = refused(trained, tmp_path, capsys, "--active-params", "100k")
    assert "--active-params: the router knows no budget of active_params, only mid of params and small of params" in error
    assert "--learned means nothing with --to" in refused(trained, tmp_path, capsys, "--to", "small")
    assert "--learned means nothing with --width" in refused(trained, tmp_path, capsys, "--width", "hidden=48")
    assert "no size is given" in refused(trained, tmp_path, capsys)
    assert "of the hub only weights are fetched" in refused("org/name", tmp_path, capsys, "--params", "100k")


def test_a_router_of_another_model_or_a_damaged_one_is_told(trained, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    (other / "router.safetensors").write_bytes(b"\0" * 40)
    assert "is not a whole safetensors file" in refused(other, tmp_path, capsys, "--params", "100k")
    with safe_open(trained / "router.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["router"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    settings["fingerprint"] = "0" * 64
    save_file(tensors, other / "router.safetensors", metadata={"router": json.dumps(settings)})
    assert "is the router of another model" in refused(other, tmp_path, capsys, "--params", "100k")


# Routers that were not trained, for what one run does not show


def made(folder, trained, budgets, widths, *, axes=("hidden", "expert_ffn"), per_layer=()):
    """A router with weights of chance beside the trained model's config."""
    folder.mkdir()
    shutil.copy(trained / "config.json", folder)
    _, layout, _ = open_elastic(trained)
    shares = (1, 0.75, 0.5)
    candidates = {axis: tuple(int(layout.axes[axis].size * share) for share in shares) for axis in axes}
    Router(layout, candidates, budgets, per_layer=per_layer).save(folder)
    return layout, ElasticConfig(family="nemotron_h", submodels=widths)


def test_memory_budgets_are_compared_at_equal_load_only(trained, tmp_path):
    _, layout, _ = open_elastic(trained)
    half, whole = (Budget.resolve(layout, n, "memory", v, context=64, batch=2) for n, v in (("half", 0.5), ("full", 1.0)))
    layout, elastic = made(tmp_path / "m", trained, [half, whole], {"half": Submodel(widths={"hidden": 32, "expert_ffn": 16})})
    target = int(0.8 * whole.target)
    found = choose_learned(tmp_path / "m", layout, elastic, Bound("memory", target, "fp32", context=64, batch=2)).submodel
    assert abs(half.cost(layout, found.keyed_widths) / target - 1) <= 0.05
    with pytest.raises(LearnedBudgetError, match="only half of memory with --context 64 --batch 2"):
        choose_learned(tmp_path / "m", layout, elastic, Bound("memory", target))


def test_the_whole_model_counts_in_every_kind(trained, tmp_path):
    """A recipe may write ``full`` in parameters and the others in active ones."""
    _, layout, _ = open_elastic(trained)
    half, whole = Budget.resolve(layout, "half", "active_params", 0.5), Budget.resolve(layout, "full", "params", 1.0)
    layout, elastic = made(tmp_path / "m", trained, [half, whole], {"half": Submodel(widths={"hidden": 32, "expert_ffn": 16})})
    target = int(0.75 * cost.active_params(layout, {}))
    found = choose_learned(tmp_path / "m", layout, elastic, Bound("active_params", target)).submodel
    assert abs(cost.active_params(layout, found.keyed_widths) / target - 1) <= 0.05


def test_nothing_between_the_neighbours_is_an_error(trained, tmp_path):
    """Both neighbours have the same widths, far from the budget: what would be inside lies outside of them."""
    _, layout, _ = open_elastic(trained)
    budgets = [Budget.resolve(layout, name, "params", value) for name, value in (("half", 0.5), ("most", 0.9))]
    same = Submodel(widths={"hidden": 32, "expert_ffn": 16})
    layout, elastic = made(tmp_path / "m", trained, budgets, {"half": same, "most": same})
    with pytest.raises(BudgetMissed, match=r"no widths between those of half and most cost .* within 5%"):
        choose_learned(tmp_path / "m", layout, elastic, Bound("params", int(0.7 * cost.params(layout, {}))))


def test_layers_that_chose_for_themselves_stay_between(trained, tmp_path):

    parent = tiny_folder(tmp_path / "parent", pattern="EEE", vocab_size=64)
    config = json.loads((parent / "config.json").read_text())
    layout = layout_of(config)
    small = Submodel.of({"hidden": 32, ("expert_ffn", 0): 32, ("expert_ffn", 1): 16, ("expert_ffn", 2): 16}, None)
    large = Submodel.of({"hidden": 64, ("expert_ffn", 0): 32, ("expert_ffn", 1): 16, ("expert_ffn", 2): 32}, None)
    costs = [int(cost.params(layout, one.keyed_widths)) for one in (small, large)]
    budgets = [
        Budget.resolve(layout, name, "params", price) for name, price in zip(("small", "large"), costs, strict=True)
    ]
    (tmp_path / "m").mkdir()
    shutil.copy(parent / "config.json", tmp_path / "m")
    candidates = {"hidden": (64, 48, 32), "expert_ffn": (32, 24, 16)}
    Router(layout, candidates, budgets, per_layer=("expert_ffn",)).save(tmp_path / "m")
    elastic = ElasticConfig(family="nemotron_h", submodels={"small": small, "large": large})
    found = choose_learned(tmp_path / "m", layout, elastic, Bound("params", sum(costs) // 2)).submodel.keyed_widths
    assert found["expert_ffn", 0] == 32 and found["expert_ffn", 1] == 16
    assert 32 <= found["hidden"] <= 64


def test_the_trained_tolerance_is_used(trained):
    elastic = ElasticConfig.load(trained)
    assert learned.trained_tolerance(elastic) == 0.05
    recipe = {"training": {"recipe": {"router": {"tolerance": 0.2}}}}
    assert learned.trained_tolerance(elastic.model_copy(update={"provenance": recipe})) == 0.2
    assert learned.trained_tolerance(elastic.model_copy(update={"provenance": {"training": "?"}})) == learned.TOLERANCE
