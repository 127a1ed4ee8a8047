"""Runs that learn widths: search and settle, exact resume across both, budgets met or told, and what a step costs."""

from __future__ import annotations

import errno
import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from search_runs import LENIENT, search_content, search_parent, write_recipe
from test_train_loop import Killed, assert_same_weights, die, dying, metrics, timeless, train, weights
from tiny import tiny_folder
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from star_elastic.budget import BudgetError
from star_elastic.cli import main
from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError, RecipeError, ReservedNameError, UnknownNameError, WidthError
from star_elastic.router import Router
from star_elastic.router_freeze import BudgetMissed
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import ElasticConfig
from star_elastic.train import checkpoint_files, load_recipe, models
from star_elastic.train.prepare import prepare
from star_elastic.train.search import Search
from star_elastic.train.state import RunFolder
from star_elastic.train.trainer import Trainer, TrainingStopped


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return search_parent(tmp_path_factory.mktemp("model") / "parent")


@pytest.fixture
def content(parent, tmp_path):
    return search_content(parent, tmp_path)


@pytest.fixture
def recipe(content, tmp_path):
    return write_recipe(content, tmp_path)


# What a run leaves


def test_budgets_are_met_and_the_folder_is_an_ordinary_one(content, tmp_path, capsys):
    content["stages"][0] |= {"steps": 40, "budgets_per_step": 3}
    report = train(write_recipe(content, tmp_path), "optimizer.lr=3e-3")
    out = tmp_path / "out"
    elastic = ElasticConfig.load(out)
    counts = {}
    for name in ("full", "mid", "small"):
        slice_checkpoint(out, tmp_path / name, elastic.get(name))
        sliced = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        counts[name] = sum(parameter.numel() for parameter in sliced.parameters())
        assert counts[name] == report.submodels[name].params == report.submodels[name].choice.cost
        assert not (tmp_path / name / "router.safetensors").exists()
    assert abs(counts["mid"] / counts["full"] / 0.75 - 1) <= 0.05
    assert abs(counts["small"] / counts["full"] / 0.5 - 1) <= 0.05

    AutoModelForCausalLM.from_pretrained(out)
    learned = elastic.provenance["training"]["budgets"]
    assert learned["small"]["cost"] == counts["small"] and learned["small"]["target"] == counts["full"] / 2
    told = json.loads((out / "training.json").read_text())["submodels"]
    assert told["small"]["choice"]["cut"] == {
        axis: elastic.get("small").widths[axis] for axis in ("hidden", "expert_ffn")
    }
    router = Router.load(out, ElasticModel.from_pretrained(out).layout)
    chosen = {axis: router.candidates[axis][int(row.argmax())] for axis, row in router.probabilities("small").items()}
    assert chosen == told["small"]["choice"]["cut"]

    capsys.readouterr()
    report.print()
    shown = " ".join(capsys.readouterr().out.split())
    assert "learned widths" in shown and f"{learned['small']['error']:+.1%}" in shown
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["submodels"]["small"]["params"] == counts["small"]
    assert main(["generate", str(out), "--submodel", "small", "--prompt", "Par", "--max-new-tokens", "3"]) == 0


def test_lines_of_metrics_tell_what_the_router_wants(recipe, tmp_path):
    train(recipe, *LENIENT)
    lines = metrics(tmp_path / "out")
    assert [line["phase"] for line in lines] == ["search"] * 5 + ["settle"] * 5
    assert [line["stage"] for line in lines] == [0] * 5 + [1] * 5
    for line in lines[:5]:
        assert len(line["kd"]) == 2 and line["kd_loss"] == pytest.approx(sum(line["kd"].values()) / 2)
        assert line["budget_error"].keys() == line["widths"].keys() == line["kd"].keys()
        for name, axes in line["width_probabilities"].items():
            assert {axis: len(row) for axis, row in axes.items()} == {"hidden": 3, "expert_ffn": 2}
            for axis, row in axes.items():
                assert sum(row) == pytest.approx(1)
                assert (
                    line["widths"][name][axis]
                    == {"hidden": (64, 48, 32), "expert_ffn": (32, 16)}[axis][row.index(max(row))]
                )
    assert (lines[0]["tau"], lines[4]["tau"], lines[4]["scale"]) == (1.0, 0.05, 10.0)
    assert all("tau" not in line and len(line["kd"]) == 1 for line in lines[5:])
    assert lines[5]["lr"] == 1e-3 > lines[4]["lr"] == pytest.approx(1e-4)  # each stage warms up and falls by itself
    assert all(line["memory_bytes"] > 1e6 for line in lines)


def test_a_budget_of_probability_0_is_left_out_of_a_stage(content, tmp_path):
    content["stages"][1]["probabilities"] = {"full": 1, "mid": 0, "small": 0}
    train(write_recipe(content, tmp_path), *LENIENT)
    assert {line["submodel"] for line in metrics(tmp_path / "out")[5:]} == {"full"}


def test_a_later_stage_reads_what_was_not_read(recipe, tmp_path, monkeypatch):
    seen = []
    step = Trainer._step
    monkeypatch.setattr(Trainer, "_step", lambda self, batch: (seen.append(batch["input_ids"]), step(self, batch)))
    train(recipe, *LENIENT, "data.packing=cross", "stages.1.steps=3")
    assert [tuple(ids.shape) for ids in seen] == [(2, 16)] * 5 + [(2, 24)] * 3
    # the mixture is smaller than an epoch: rows of the second stage hold no token of the first
    first, second = (
        {tuple(row[at : at + 8].tolist()) for ids in part for row in ids for at in range(0, ids.shape[1] - 8, 8)}
        for part in (seen[:5], seen[5:])
    )
    assert not first & second


# What steps cost


def test_settle_steps_cost_what_the_nested_size_costs(recipe, tmp_path):
    """FLOPs of forward and backward, counted by torch, against the exported slice's own; the masked lens costs the full size."""
    train(recipe, *LENIENT, "stages.1.steps=2")
    elastic = ElasticModel.from_pretrained(tmp_path / "out").train()
    small = ElasticConfig.load(tmp_path / "out").get("small").model_copy(update={"layers": None})
    small = small.model_copy(update={"widths": {**small.widths, "hidden": 32, "expert_ffn": 16}})
    elastic.add("s", small)
    slice_checkpoint(tmp_path / "out", tmp_path / "slice", small)
    exported = ElasticModel.from_pretrained(tmp_path / "slice").train()
    ids = torch.arange(3, 51).view(2, 24)

    def flops(model, name):
        with FlopCounterMode(display=False) as counter:
            (model.features(ids, submodel=name) @ model.head_weight(submodel=name).T).sum().backward()
        return counter.get_total_flops()

    assert flops(elastic, "s") == flops(exported, None)
    assert flops(elastic, "s") < 0.55 * flops(elastic, "full")


# Freezing


def test_the_router_rests_once_widths_are_settled(recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(8, die))
        with pytest.raises(Killed):
            train(recipe, *LENIENT, "checkpoint_every=5")
    before = load_file(tmp_path / "out.run/checkpoints/step-00000005/router.safetensors")
    train(recipe, *LENIENT, "checkpoint_every=5", resume=True)
    after = load_file(tmp_path / "out/router.safetensors")
    assert after and all(torch.equal(before[f"weights.{name}"], tensor) for name, tensor in after.items())
    assert any("exp_avg" in name for name in before)


def test_a_search_that_misses_goes_on_and_then_ends_with_a_reason(recipe, tmp_path):
    """A router that hardly moves ends where it began: far off."""
    hopeless = ("router.weight=1e-9", "router.lr_factor=1e-6", "router.max_extension=0.6", "seed=1")
    reason = r"search ended off its budgets after step 8: budget '\w+' would get hidden \d+"
    with pytest.raises(TrainingStopped, match=reason) as told:
        train(recipe, *hopeless)
    message = str(told.value)
    assert "\n" not in message
    assert all(part in message for part in ("% of its", "the tolerance is 5%", "router.max_extension"))
    assert not (tmp_path / "out").exists()
    lines = metrics(tmp_path / "out.run")
    assert [line["phase"] for line in lines] == ["search"] * 8 and lines[5]["tau"] == 1.0  # heated again
    with pytest.raises(TrainingStopped, match="after step 8"):
        train(recipe, *hopeless, resume=True)
    with pytest.raises(TrainingStopped, match="after step 10"):
        train(recipe, *hopeless, "router.max_extension=1", resume=True)


def test_an_extended_search_is_followed_by_settling(recipe, tmp_path, monkeypatch):
    freeze, asked = Search.freeze, []

    def late(self):
        asked.append(1)
        if len(asked) < 3:
            raise BudgetMissed("not yet")
        return freeze(self)

    monkeypatch.setattr(Search, "freeze", late)
    report = train(recipe, *LENIENT, "router.max_extension=0.6")
    assert [line["phase"] for line in metrics(tmp_path / "out")] == ["search"] * 7 + ["settle"] * 5
    assert report.steps == 12 and len(asked) == 3


def test_layers_may_choose_for_themselves(tmp_path, tmp_path_factory):
    """Costs are those of the exported slices, whose layers differ."""
    parent = tmp_path_factory.mktemp("deep") / "parent"
    tiny_folder(parent, pattern="E*E", vocab_size=288)
    write_tokenizer(parent)
    content = search_content(parent, tmp_path)
    content["budgets"] = {"full": {"params": 1.0}, "small": {"params": 0.87}}
    content["router"] = {"axes": {"expert_ffn": [1, 0.5]}, "per_layer": ["expert_ffn"], "tolerance": 0.02}
    content["stages"] = [
        {"phase": "search", "steps": 30, "budgets_per_step": 2, "lr": 3e-3},
        {"phase": "settle", "steps": 3},
    ]
    report = train(write_recipe(content, tmp_path))
    small = ElasticConfig.load(tmp_path / "out").get("small")
    assert sorted(small.layer_widths["expert_ffn"].values()) == [16, 32]
    slice_checkpoint(tmp_path / "out", tmp_path / "small", small)
    count = sum(tensor.numel() for name, tensor in weights(tmp_path / "small").items() if "correction_bias" not in name)
    entry = report.submodels["small"]
    assert count == entry.params == entry.choice.cost
    assert entry.choice.cut == {f"expert_ffn.{layer}": small.layer_widths["expert_ffn"][layer] for layer in (0, 2)}


@pytest.mark.parametrize("options", [("router.mode=straight_through",), ("router.loss=expected",)])
def test_the_published_ways_run_too(recipe, tmp_path, options):
    train(recipe, *LENIENT, *options, "stages.1.steps=2")
    assert len(metrics(tmp_path / "out")) == 7


# Stopping and resuming


@pytest.mark.parametrize("saved_at", [3, 5, 7], ids=["in the search", "at the border", "while settling"])
def test_ten_steps_equal_a_part_and_the_rest_bit_for_bit(recipe, tmp_path, monkeypatch, saved_at):
    options = (*LENIENT, "ema=0.9", "accumulate=2", "stages.1.batch_size=4")
    whole = train(recipe, *options, f"output={tmp_path / 'whole'}")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(saved_at + 1, die))
        with pytest.raises(Killed):
            train(recipe, *options, f"checkpoint_every={saved_at}")
    torch.manual_seed(1234)
    resumed = train(recipe, *options, resume=True)
    assert_same_weights(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    assert timeless(metrics(tmp_path / "out")) == timeless(metrics(tmp_path / "whole"))
    assert resumed.submodels == whole.submodels and resumed.tokens == whole.tokens
    routers = [load_file(tmp_path / name / "router.safetensors") for name in ("out", "whole")]
    assert_same_weights(*routers)


def test_a_full_disk_keeps_the_last_checkpoint_with_its_router(recipe, tmp_path, monkeypatch):
    original, saves = checkpoint_files.save_file, []

    def save_file(tensors, path):
        saves.append(path)
        if len(saves) > 5 and path.stem == "router":  # of the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        original(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "save_file", save_file)
        with pytest.raises(CheckpointError, match="No space left on device"):
            train(recipe, *LENIENT, "checkpoint_every=2")
    (kept,) = (tmp_path / "out.run/checkpoints").iterdir()
    assert kept.name == "step-00000002" and (kept / "router.safetensors").exists()
    train(recipe, *LENIENT, "checkpoint_every=2", resume=True)


@pytest.mark.slow
def test_a_run_killed_at_a_random_step_goes_on_as_if_it_had_not_been(recipe, tmp_path):
    options = [*LENIENT, "checkpoint_every=2", "stages.0.steps=12", "stages.1.steps=12"]
    train(recipe, *options, f"output={tmp_path / 'whole'}")
    command = [sys.executable, "-m", "star_elastic", "train", str(recipe), *options]
    chosen = random.Random(time.time()).sample(range(2, 22), 2)
    for turn, step in enumerate(sorted(chosen)):
        process = subprocess.Popen([*command, *(["--resume"] if turn else [])], stderr=subprocess.DEVNULL)
        while process.poll() is None and len(lines_of(tmp_path / "out.run")) < step:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, "--resume"], check=True, capture_output=True)
    assert timeless(metrics(tmp_path / "out")) == timeless(metrics(tmp_path / "whole")), f"killed at {chosen}"
    assert_same_weights(weights(tmp_path / "out"), weights(tmp_path / "whole"))


def lines_of(folder):
    file = folder / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


# Options


def test_an_average_of_the_weights_is_what_is_written(recipe, tmp_path, monkeypatch):
    seen = []
    original = models.Average.update

    def update(self, model):
        original(self, model)
        seen.append(model.get_parameter("lm_head.weight").detach().clone())

    monkeypatch.setattr(models.Average, "update", update)
    train(recipe, *LENIENT, "ema=0.75")
    average = weights(load_recipe(recipe).parent)["lm_head.weight"]
    for tensor in seen:
        average = 0.75 * average + 0.25 * tensor
    written = weights(tmp_path / "out")["lm_head.weight"]
    torch.testing.assert_close(written, average, rtol=0, atol=1e-6)
    assert not torch.allclose(written, seen[-1], rtol=0, atol=1e-6)
    assert load_recipe(recipe, ["ema=off"]).ema is None


def test_frozen_parameters_stay_bit_for_bit(recipe, parent, tmp_path):
    train(recipe, *LENIENT, "freeze=['*embed*', lm_head.weight]", "optimizer.weight_decay=0.1")
    before, after = weights(parent), weights(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    frozen = {name for name in before if "embed" in name or name == "lm_head.weight"}
    assert len(frozen) == 2 and not changed & frozen and len(changed) > 5


def test_bf16_weights_train_in_bf16(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "log", dying(5, die))
    with pytest.raises(Killed):
        train(recipe, *LENIENT, "master_weights=bf16", "precision=bf16", "checkpoint_every=4")
    saved = tmp_path / "out.run/checkpoints/step-00000004"
    dtypes = {name: tensor.dtype for name, tensor in load_file(saved / "model.safetensors").items()}
    assert dtypes["lm_head.weight"] == torch.bfloat16
    assert load_file(saved / "optimizer.safetensors")["lm_head.weight.exp_avg"].dtype == torch.bfloat16
    assert {t.dtype for n, t in load_file(saved / "router.safetensors").items() if n.startswith("weights")} == {
        torch.float32
    }


def test_checkpointing_is_on_in_the_search_unless_told(recipe, tmp_path):
    loaded = load_recipe(recipe, ["activation_checkpointing=auto"])
    trainer = Trainer(prepare(loaded), RunFolder(loaded))
    assert trainer.student.checkpointing
    trainer.position.stage = 1
    trainer._enter_stage(loaded.schedule[0])
    assert not trainer.student.checkpointing
    train(recipe, *LENIENT, f"output={tmp_path / 'one'}")
    train(recipe, *LENIENT, "activation_checkpointing=auto", f"output={tmp_path / 'two'}")
    assert_same_weights(weights(tmp_path / "one"), weights(tmp_path / "two"))


def test_the_recipe_of_a_run_names_no_folder_of_the_machine(recipe, tmp_path):
    train(recipe, *LENIENT, "stages.1.steps=2")
    for file in (tmp_path / "out").glob("*.[jm]*"):
        assert str(tmp_path) not in file.read_text(), file


# What is refused


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ("budgets.small={params: 0.2}", BudgetError, r"'small': no candidates come within 5%.*they reach from .* to "),
        ("budgets.small={params: 900B}", BudgetError, "'small': .*more than the full model's"),
        ("budgets.full={params: 0.9}", ReservedNameError, "'full' always means the whole model"),
        ("router.axes={hiden: [1, 0.5]}", UnknownNameError, "did you mean 'hidden'"),
        ("router.axes={hidden: [50]}", WidthError, "50 is no legal width"),
        ("router.axes={depth: [1, 0.5]}", WidthError, "layers are not ranked"),
        ("stages.1.sequence_length=4096", RecipeError, "stages.1: sequence_length = 4096: .* 256"),
        ("freeze=['lm_heat.*']", RecipeError, "freeze: no parameter matches 'lm_heat.*'"),
        ("freeze=['*']", RecipeError, "nothing is left to train"),
        ("budgets.small={latency: 0.5, table: /nowhere.json}", CheckpointError, "/nowhere.json does not exist"),
    ],
)
def test_mistakes_are_found_before_weights_are_loaded(recipe, tmp_path, monkeypatch, change, kind, message):
    def load(*args, **options):
        raise AssertionError("weights were loaded before the checks were done")

    monkeypatch.setattr(models, "load_model", load)
    with pytest.raises(kind, match=message) as caught:
        train(recipe, change)
    assert "\n" not in str(caught.value) and not (tmp_path / "out.run").exists()


def test_experts_under_a_budget_of_active_parameters_are_warned_about(content, tmp_path):
    content["router"]["axes"]["experts"] = [1, 0.5]
    for kind, warned in (("active_params", True), ("params", False)):
        content["budgets"] = {"full": {kind: 1.0}, "small": {kind: 0.7}}
        del content["stages"][1:]
        notes = prepare(load_recipe(write_recipe(content, tmp_path))).notes
        assert any("does not see experts" in note for note in notes) == warned


@pytest.mark.parametrize("options", [(), ("router.loss=expected",)])
def test_a_loss_that_cannot_list_its_choices_says_which_it_takes(content, tmp_path, monkeypatch, options):
    monkeypatch.setattr("star_elastic.train.budget_loss.MOST_CHOICES", 2)
    notes = prepare(load_recipe(write_recipe(content, tmp_path), options)).notes
    assert any(note.startswith("router.loss is expected, not choices") for note in notes) == (not options)
