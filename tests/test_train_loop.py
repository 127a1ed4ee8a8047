"""The training run: what it learns, where its gradients go, exact resume, and everything it refuses."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from rich.console import Console
from safetensors.torch import load_file
from tiny import tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.elastic import ElasticModel
from star_elastic.errors import (
    CheckpointError,
    DataError,
    ElasticError,
    RecipeError,
    ReservedNameError,
    TargetError,
    UnknownNameError,
    WidthError,
)
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import ElasticConfig, Submodel
from star_elastic.train import checkpoint_files, learner, load_recipe, models, teacher, train_family, trainer
from star_elastic.train.curriculum import BudgetSampler
from star_elastic.train.data import open_documents, training_loader
from star_elastic.train.documents import load_tokenizer
from star_elastic.train.interrupt import StopRequest
from star_elastic.train.report import Choice, Losses, SubmodelReport, TrainReport
from star_elastic.train.schedule import learning_rate
from star_elastic.train.state import RunFolder, random_states, restore_random_states
from star_elastic.train.trainer import TrainingStopped

SMALL = {"hidden": 48, "expert_ffn": 16}


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("model") / "parent", pattern="ME*", vocab_size=288)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def recipe(parent, tmp_path):
    return written(parent, tmp_path)


def written(parent, tmp_path):
    """A recipe file over a parent of three layers, chains of sums and some text; `output` is tmp_path/out."""
    with (tmp_path / "sums.jsonl").open("w") as file:
        for i in range(60):
            answer = {"role": "assistant", "reasoning_content": f"{i} and {i}", "content": str(2 * i)}
            file.write(json.dumps({"messages": [{"role": "user", "content": f"{i}+{i}="}, answer]}) + "\n")
    (tmp_path / "text.txt").write_text("Some text to read, line after line.\n" * 40)
    content = {
        "parent": str(parent),
        "output": str(tmp_path / "out"),
        "submodels": {"full": {}, "small": {"widths": SMALL}},
        "data": {
            "sources": [
                {"path": str(tmp_path / "sums.jsonl"), "kind": "reasoning"},
                {"path": str(tmp_path / "text.txt")},
            ],
            "shuffle_tokens": 256,
        },
        "sequence_length": 16,
        "batch_size": 2,
        "steps": 10,
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "precision": "fp32",
        "kl_chunk_tokens": 7,
        "checkpoint_every": 5,
        "device": "cpu",
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def train(path, *overrides, **options):
    return train_family(path, overrides, progress=False, **options)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(lines):
    return [
        {key: value for key, value in line.items() if key not in ("tokens_per_second", "memory_bytes")}
        for line in lines
    ]


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same_weights(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


# What a run leaves


def test_the_output_is_an_ordinary_folder_with_submodels_and_numbers(recipe, parent, tmp_path):
    before = torch.get_rng_state()
    report = train(recipe)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's randomness is not touched
    out = tmp_path / "out"
    assert report.output == out and not (tmp_path / "out.run").exists()

    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (parent, out))
    assert {key: after[key] for key in before} == before and after["hybrid_override_pattern"] == "ME*"
    card = (out / "README.md").read_text()
    assert f"{report.submodels['small'].params:,}" in card and "--to NAME" in card
    assert (
        AutoTokenizer.from_pretrained(out)("a")["input_ids"] == AutoTokenizer.from_pretrained(parent)("a")["input_ids"]
    )
    config = ElasticConfig.load(out)
    assert config.get("small").widths["hidden"] == 48 and list(config.submodels) == ["full", "small"]
    assert config.provenance["training"]["recipe"]["steps"] == 10
    training = config.provenance["training"]
    assert training["parent"] == "parent"
    assert [source["path"] for source in training["recipe"]["data"]["sources"]] == ["sums.jsonl", "text.txt"]
    for file in out.glob("*.[jm]*"):  # nothing in it says where it was made
        assert str(tmp_path) not in file.read_text() and str(parent) not in file.read_text(), file

    told = json.loads((out / "training.json").read_text())
    assert told["steps"] == report.steps == 10 and told["tokens"] == report.tokens == 10 * 2 * 16
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, 11))
    for name, entry in report.submodels.items():
        losses = [line["kd_loss"] for line in lines if line["submodel"] == name]
        assert entry.steps == len(losses) == told["submodels"][name]["steps"]
        assert entry.kd_mean == pytest.approx(sum(losses) / len(losses))
        assert entry.kd_first == losses[0]
        assert told["submodels"][name]["kd_recent"] == entry.kd_recent
    assert report.submodels["full"].params == sum(p.numel() for p in model.parameters())


def test_the_table_and_the_file_say_the_same(recipe, tmp_path, capsys):
    train_family(recipe)
    shown = capsys.readouterr().out
    told = json.loads((tmp_path / "out/training.json").read_text())
    for name, entry in told["submodels"].items():
        assert name in shown and f"{entry['kd_mean']:.4f}" in shown and f"{entry['params']:,}" in shown
    assert told["notes"] and all(note in shown for note in told["notes"])
    assert "not sorted along expert_ffn, hidden" in shown


def test_a_bf16_parent_stays_bf16_and_trains_under_autocast(recipe, tmp_path):
    from transformers import NemotronHForCausalLM

    parent = tmp_path / "bf16"
    model = NemotronHForCausalLM.from_pretrained(load_recipe(recipe).parent, dtype=torch.bfloat16)
    model.save_pretrained(parent)
    write_tokenizer(parent)
    report = train(recipe, f"parent={parent}", "precision=bf16", "steps=4", "submodels={small: {widths: {hidden: 48}}}")
    assert report.submodels["small"].kd_mean > 0.01
    stored, trained = weights(parent), weights(tmp_path / "out")
    assert {n: (t.dtype, t.shape) for n, t in stored.items()} == {n: (t.dtype, t.shape) for n, t in trained.items()}
    assert torch.bfloat16 in {t.dtype for t in trained.values()}


# What it learns


def test_one_submodel_alone_trains_as_its_exported_slice_would(recipe, parent, tmp_path):
    """The reference is transformers' own class of the small size, with torch's kl_div and AdamW, on the same batches."""
    steps = 4
    train(recipe, f"steps={steps}", f"submodels={{small: {{widths: {json.dumps(SMALL)}}}}}")
    trained = slice_of(tmp_path / "out", tmp_path / "trained")

    settings = load_recipe(recipe)
    tokenizer = load_tokenizer(parent)
    loader = training_loader(
        open_documents(settings.data, tokenizer),
        settings.data,
        length=16,
        batch_size=2,
        seed=0,
        pad=tokenizer.pad_token_id,
    )
    teacher = AutoModelForCausalLM.from_pretrained(parent).eval()
    child = AutoModelForCausalLM.from_pretrained(slice_of(parent, tmp_path / "child")).train()
    optimizer = torch.optim.AdamW(child.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step, batch in zip(range(steps), loader, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak=1e-3, floor=1e-5, warmup=2)
        ids = batch["input_ids"]
        with torch.no_grad():
            wanted = F.log_softmax(teacher(ids, use_cache=False).logits, -1)
        got = F.log_softmax(child(ids, use_cache=False).logits, -1)
        loss = F.kl_div(got, wanted, log_target=True, reduction="none").sum(-1).mean()
        assert loss.item() == pytest.approx(metrics(tmp_path / "out")[step]["kd_loss"], rel=1e-4)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(child.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    child.save_pretrained(tmp_path / "reference")
    reference = weights(tmp_path / "reference")
    start = weights(tmp_path / "child")
    assert trained.name and reference.keys() == weights(trained).keys()
    for name, tensor in weights(trained).items():
        torch.testing.assert_close(tensor, reference[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    moved = max((reference[name] - start[name]).abs().max() for name in start)
    assert moved > 1e-3  # far more than the tolerance


def slice_of(folder, out):
    slice_checkpoint(folder, out, Submodel(widths=SMALL))
    return out


def test_what_the_submodel_does_not_use_stays_bit_for_bit(recipe, parent, tmp_path):
    train(recipe, "steps=4", f"submodels={{small: {{widths: {json.dumps(SMALL)}}}}}")
    before, after = weights(parent), weights(tmp_path / "out")
    embedding = next(name for name in before if "embed" in name)
    assert torch.equal(before[embedding][:, 48:], after[embedding][:, 48:])
    assert not torch.equal(before[embedding][:, :48], after[embedding][:, :48])
    down = next(name for name in before if "experts.0.down_proj" in name)
    assert torch.equal(before[down][48:], after[down][48:]) and torch.equal(before[down][:, 16:], after[down][:, 16:])
    assert not torch.equal(before[down][:48, :16], after[down][:48, :16])


def test_the_small_model_gets_closer_to_its_teacher(recipe, tmp_path):
    report = train(recipe, "steps=60", "optimizer.lr=3e-3", f"submodels={{small: {{widths: {json.dumps(SMALL)}}}}}")
    small = report.submodels["small"]
    assert small.kd_recent < 0.7 * small.kd_first


def test_a_full_model_that_starts_as_its_own_teacher_has_nothing_to_learn(recipe, tmp_path):
    train(recipe, "steps=3", "submodels={full: {}}")
    assert all(line["kd_loss"] < 1e-6 for line in metrics(tmp_path / "out"))


def test_submodels_are_drawn_by_the_recipes_probabilities_and_rates_follow_the_schedule(recipe, tmp_path):
    train(recipe, "submodels.full.probability=1", "submodels.small.probability=3", "seed=4")
    sampler = BudgetSampler({"full": 0.25, "small": 0.75}, seed=4)
    lines = metrics(tmp_path / "out")
    assert [line["submodel"] for line in lines] == [name for _ in range(10) for name in sampler.draw_several(1)]
    expected = [learning_rate(s, 10, peak=1e-3, floor=1e-5, warmup=2) for s in range(10)]
    assert [line["lr"] for line in lines] == pytest.approx(expected)


def test_activation_checkpointing_changes_no_number(recipe, tmp_path):
    train(recipe, "steps=3")
    train(recipe, "steps=3", "activation_checkpointing=true", f"output={tmp_path / 'other'}")
    assert_same_weights(weights(tmp_path / "out"), weights(tmp_path / "other"))


def test_submodels_come_from_elastic_json_by_default_and_by_name(recipe, parent, tmp_path):
    elastic = tmp_path / "elastic"
    ElasticModel.from_pretrained(
        parent, submodels={"a": Submodel(widths=SMALL), "b": Submodel(widths={"hidden": 56})}
    ).save_pretrained(elastic)
    write_tokenizer(elastic)
    train(recipe, f"parent={elastic}", "submodels=null", "steps=3")
    assert list(ElasticConfig.load(tmp_path / "out").submodels) == ["a", "b"]
    report = train(recipe, f"parent={elastic}", "submodels={b: {}, full: {}}", "steps=3", f"output={tmp_path / 'o2'}")
    assert list(report.submodels) == ["b", "full"]
    assert ElasticConfig.load(tmp_path / "o2").get("b").widths["hidden"] == 56
    with pytest.raises(UnknownNameError, match=r"no submodel 'c'.*give widths"):
        train(recipe, f"parent={elastic}", "submodels={c: {}}", f"output={tmp_path / 'o3'}")


# Stopping and resuming


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


def dying(step, act):
    """RunFolder.log that acts when it is told of ``step``."""
    original = RunFolder.log

    def log(self, line):
        original(self, line)
        if line["step"] == step:
            act()

    return log


def die():
    raise Killed


@pytest.mark.parametrize("packing", ["cross", "apart"])
@pytest.mark.parametrize("died_at", [5, 7])
def test_ten_steps_equal_five_and_five_bit_for_bit(recipe, tmp_path, monkeypatch, packing, died_at):
    overrides = (f"data.packing={packing}", "optimizer.weight_decay=0.01")
    whole = train(recipe, *overrides, f"output={tmp_path / 'whole'}")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(died_at + 1, die))
        with pytest.raises(Killed):
            train(recipe, *overrides)
    assert not (tmp_path / "out").exists() and len(metrics(tmp_path / "out.run")) == died_at + 1
    torch.manual_seed(1234)  # another process would begin with other randomness
    resumed = train(recipe, *overrides, resume=True)
    assert_same_weights(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    assert timeless(metrics(tmp_path / "out")) == timeless(metrics(tmp_path / "whole"))
    assert resumed.submodels == whole.submodels and resumed.tokens == whole.tokens


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_says_how_to_go_on_and_loses_nothing(recipe, tmp_path, monkeypatch, number):
    train(recipe, f"output={tmp_path / 'whole'}")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(3, lambda: os.kill(os.getpid(), number)))
        with pytest.raises(TrainingStopped, match=rf"stopped by {number.name} after step 3 of 10.*--resume") as caught:
            train(recipe)
    assert isinstance(caught.value, ElasticError) and "\n" not in str(caught.value)
    assert [folder.name for folder in (tmp_path / "out.run/checkpoints").iterdir()] == ["step-00000003"]
    train(recipe, resume=True)
    assert_same_weights(weights(tmp_path / "out"), weights(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_command_line_survives_being_killed(recipe, tmp_path, number):
    train(recipe, "steps=40", "checkpoint_every=1", f"output={tmp_path / 'whole'}")
    command = [sys.executable, "-m", "star_elastic", "train", str(recipe), "steps=40", "checkpoint_every=1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out.run/checkpoints/step-00000003").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    errors = process.communicate()[1]
    if number == signal.SIGINT:
        assert process.returncode == 2 and errors.splitlines()[-1].startswith("error: stopped by SIGINT after step")
    assert subprocess.run([*command, "--resume"], capture_output=True).returncode == 0
    assert_same_weights(weights(tmp_path / "out"), weights(tmp_path / "whole"))
    assert timeless(metrics(tmp_path / "out")) == timeless(metrics(tmp_path / "whole"))
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out"]


def test_a_run_killed_before_its_first_checkpoint_begins_anew(recipe, tmp_path, monkeypatch):
    train(recipe, f"output={tmp_path / 'whole'}")
    for resume in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "log", dying(2, die))
            with pytest.raises(Killed):
                train(recipe, resume=resume)
    train(recipe)
    assert timeless(metrics(tmp_path / "out")) == timeless(metrics(tmp_path / "whole"))


def test_checkpoints_are_whole_the_last_few_stay_and_hold_no_pickle(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "log", dying(9, die))
    with pytest.raises(Killed):
        train(recipe, "checkpoint_every=2", "keep_checkpoints=3")
    checkpoints = sorted((tmp_path / "out.run/checkpoints").iterdir())
    assert [folder.name for folder in checkpoints] == [f"step-0000000{n}" for n in (4, 6, 8)]
    names = {"model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "sums.json"}
    assert all({file.name for file in folder.iterdir()} == names for folder in checkpoints)


def test_a_full_disk_at_a_checkpoint_keeps_the_last_good_one(recipe, tmp_path, monkeypatch):
    saves = []

    def save_file(tensors, path):
        saves.append(path)
        if len(saves) > 3:  # the first checkpoint has three files
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        original(tensors, path)

    original = checkpoint_files.save_file
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "save_file", save_file)
        with pytest.raises(
            CheckpointError, match="No space left on device.*step-00000003 stays: make room, and continue with --resume"
        ):
            train(recipe, "checkpoint_every=3")
    assert [folder.name for folder in (tmp_path / "out.run/checkpoints").iterdir()] == ["step-00000003"]
    train(recipe, "checkpoint_every=3", resume=True)
    assert len(metrics(tmp_path / "out")) == 10


def test_a_result_that_could_not_be_written_is_written_by_resume(recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "finish", lambda self: die())
        with pytest.raises(Killed):
            train(recipe)
    before = metrics(tmp_path / "out.run")
    report = train(recipe, resume=True)
    assert report.steps == 10 and metrics(tmp_path / "out") == before


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_checkpoint(recipe, tmp_path, monkeypatch):
    calls = []

    def broken(*args):
        calls.append(1)
        return original(*args) * (float("nan") if len(calls) == 8 else 1.0)

    original = teacher.chunked_kl
    monkeypatch.setattr(teacher, "chunked_kl", broken)
    told = r"loss is nan at step 8, submodel '(full|small)', rows 14 to 15 of stage 0; .*step-00000005"
    with pytest.raises(TrainingStopped, match=told) as caught:
        train(recipe)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    saved = load_file(tmp_path / "out.run/checkpoints/step-00000005/model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


def test_an_infinite_gradient_stops_too(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "clip_gradients", lambda *args: torch.tensor(float("inf")))
    with pytest.raises(
        TrainingStopped, match="gradient norm is inf at step 1.*no checkpoint yet; nothing was learned yet: look for"
    ):
        train(recipe)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_run_that_fails_before_its_first_checkpoint_leaves_no_folder(recipe, tmp_path, monkeypatch, error):
    def fail():
        raise error

    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(2, fail))
        with pytest.raises(type(error)):
            train(recipe, f"output={tmp_path / 'deep/er/out'}")
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/mine").write_text("keep")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(6, fail))
        with pytest.raises((RuntimeError, TrainingStopped)) as caught:
            train(recipe, f"output={tmp_path / 'deep/er/out'}")
    if isinstance(error, KeyboardInterrupt):  # a second Ctrl-C, say
        said = "interrupted; the last checkpoint is .*step-00000005: continue with the same command and --resume"
        assert re.search(said, str(caught.value))
    assert (tmp_path / "deep/er/out.run/checkpoints/step-00000005").is_dir()
    train(recipe, f"output={tmp_path / 'deep/er/out'}", resume=True)


def test_an_interrupt_while_a_run_is_resumed_says_that_its_checkpoint_is_kept(recipe, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(6, die))
        with pytest.raises(Killed):
            train(recipe)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "restore", interrupted)
        with pytest.raises(TrainingStopped, match="step-00000005: continue with the same command and --resume"):
            train(recipe, resume=True)
    train(recipe, resume=True)


def test_notes_are_told_before_the_first_step(recipe, monkeypatch, capsys):
    said = []
    monkeypatch.setattr(trainer.Trainer, "train", lambda *args: said.append(capsys.readouterr().out) or die())
    with pytest.raises(Killed):
        train_family(recipe)
    assert "note: the parent is not sorted along expert_ffn, hidden" in said[0]


def test_a_folder_that_was_there_before_the_run_is_not_removed(recipe, tmp_path, monkeypatch):
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run/mine").write_text("keep")
    monkeypatch.setattr(teacher, "chunked_kl", lambda *args: torch.tensor(float("nan"), requires_grad=True))
    with pytest.raises(TrainingStopped, match="no checkpoint yet"):
        train(recipe)
    assert (tmp_path / "out.run/mine").read_text() == "keep"


def test_a_run_folder_that_cannot_be_made_is_one_line(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match=r"file/out cannot be made: .*file is a file"):
        train(recipe, f"output={tmp_path / 'file/out'}")


def test_a_damaged_checkpoint_is_told(recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(7, die))
        with pytest.raises(Killed):
            train(recipe)
    (tmp_path / "out.run/checkpoints/step-00000005/model.safetensors").write_bytes(b"xx")
    with pytest.raises(CheckpointError, match=r"step-00000005 cannot be read .*remove it"):
        train(recipe, resume=True)


def cut(file):
    file.write_bytes(file.read_bytes()[:-50])


def flip(file):
    content = bytearray(file.read_bytes())
    content[-9] ^= 0x40  # inside the last tensor: still a file that loads
    file.write_bytes(content)


@pytest.fixture(scope="module")
def stopped(parent, tmp_path_factory):
    """A run that died after its checkpoint of step 5, to copy."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(7, die))
        with pytest.raises(Killed):
            train(written(parent, folder))
    return folder


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", flip),
        ("optimizer.safetensors", flip),
        ("random.safetensors", cut),
        ("optimizer.safetensors", Path.unlink),
        ("random.safetensors", Path.unlink),
        ("state.json", lambda file: file.write_text("{}")),
        ("sums.json", Path.unlink),
        ("sums.json", cut),
    ],
)
def test_every_damage_to_a_checkpoint_is_one_line(stopped, tmp_path, name, damage):
    shutil.copytree(stopped / "out.run", tmp_path / "out.run")
    damage(tmp_path / "out.run/checkpoints/step-00000005" / name)
    with pytest.raises(CheckpointError, match=rf"step-00000005 cannot be read \(.*{name}.*remove it") as caught:
        train(stopped / "recipe.yaml", f"output={tmp_path / 'out'}", resume=True)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_other_damage_to_a_run_is_one_line_and_a_copy_of_a_checkpoint_is_left_alone(stopped, tmp_path):
    def resume():
        train(stopped / "recipe.yaml", f"output={tmp_path / 'out'}", resume=True)

    run = tmp_path / "out.run"
    shutil.copytree(stopped / "out.run", run)
    (run / "checkpoints/step-00000005.mine").mkdir()
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines + "garbage\n")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl has lines that no run wrote \(.*\); remove them"):
        resume()
    (run / "metrics.jsonl").write_text(lines)
    told = (run / "recipe.json").read_text()
    (run / "recipe.json").unlink()
    with pytest.raises(CheckpointError, match=r"recipe.json does not exist"):
        resume()
    (run / "recipe.json").write_text(told)
    resume()
    assert timeless(metrics(tmp_path / "out"))[-1]["step"] == 10


def test_stop_requests_are_caught_once_and_only_in_the_main_thread():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGINT) is not before
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is before  # a second Ctrl-C acts at once
    worker = threading.Thread(target=lambda: StopRequest().__enter__())
    worker.start()
    worker.join()
    assert signal.getsignal(signal.SIGINT) is before


def test_random_states_come_back():
    torch.manual_seed(5)
    states = {name: state.clone() for name, state in random_states().items()}
    drawn = torch.rand(4)
    torch.manual_seed(6)
    restore_random_states(states)
    assert torch.equal(torch.rand(4), drawn)


# What is refused, before any weight is loaded


@pytest.fixture
def no_loading(monkeypatch):
    def load(*args, **options):
        raise AssertionError("weights were loaded before the checks were done")

    monkeypatch.setattr(models, "load_model", load)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ("submodels.small.widths.hidden=50", WidthError, "submodel 'small': .*50"),
        ("submodels.small.widths={hiden: 48}", UnknownNameError, "submodel 'small': .*did you mean 'hidden'"),
        ("submodels.small.layers=[0, 9]", WidthError, "submodel 'small': .*9"),
        ("submodels.other={}", UnknownNameError, "no submodel 'other'"),
        ("submodels=null", RecipeError, "no submodels"),
        ("preset=nothing", UnknownNameError, "no preset 'nothing'"),
        ("sequence_length=257", RecipeError, "sequence_length = 257: the parent's max_position_embeddings is 256"),
        ("parent=/nowhere", CheckpointError, "/nowhere does not exist"),
        ("device=tpu9", ElasticError, "device 'tpu9' cannot be used here"),
        ("device=meta", ElasticError, "device 'meta' holds no numbers"),
        (
            "submodels.full.widths={hidden: 48}",
            ReservedNameError,
            "submodel 'full': 'full' always means the whole model",
        ),
        ("submodels.full.layers=[1, 2]", ReservedNameError, "submodel 'full': 'full' always means the whole model"),
        ("data.sources.0.path=/nowhere.txt", DataError, "data /nowhere.txt does not exist"),
        ("data.sources.0.field=thought", DataError, r"sums\.jsonl:1: no field 'thought'"),
    ],
)
def test_mistakes_are_found_before_weights_are_loaded(recipe, tmp_path, no_loading, change, kind, message):
    with pytest.raises(kind, match=message) as caught:
        train(recipe, change)
    assert isinstance(caught.value, ElasticError) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.run").exists()


def test_a_parent_without_weights_tokenizer_or_room_for_it(recipe, parent, tmp_path, no_loading):
    import shutil

    bare = shutil.copytree(parent, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="bare"):
        train(recipe, f"parent={bare}")
    plain = tiny_folder(tmp_path / "plain", pattern="ME*", vocab_size=288)
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        train(recipe, f"parent={plain}")
    narrow = tiny_folder(tmp_path / "narrow", pattern="ME*", vocab_size=128)
    write_tokenizer(narrow)
    with pytest.raises(RecipeError, match="has 283 tokens, the model's vocab_size is 128"):
        train(recipe, f"parent={narrow}")


def test_nothing_is_overwritten_and_runs_are_not_mixed(recipe, parent, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("keep")
    with pytest.raises(TargetError, match="not empty"):
        train(recipe)
    with pytest.raises(TargetError, match="inside the source"):
        train(recipe, f"output={parent / 'inside'}")
    with pytest.raises(RecipeError, match="nothing to resume"):
        train(recipe, f"output={tmp_path / 'new'}", resume=True)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", dying(7, die))
        with pytest.raises(Killed):
            train(recipe, f"output={tmp_path / 'half'}")
    with pytest.raises(TargetError, match=r"half\.run holds an unfinished run: continue it with --resume"):
        train(recipe, f"output={tmp_path / 'half'}")
    changes = {
        "steps=12": r"steps was 10, now 12",
        "optimizer.lr=0.002": r"optimizer\.lr was 0\.001, now 0\.002",
        "data.sources.1.kind=reasoning": r"data\.sources\.1\.kind was 'text', now 'reasoning'",
    }
    for change, message in changes.items():
        with pytest.raises(RecipeError, match=message):
            train(recipe, f"output={tmp_path / 'half'}", change, resume=True)
    report = train(recipe, f"output={tmp_path / 'half'}", "checkpoint_every=3", "log_every=2", resume=True)
    assert report.steps == 10


def test_two_processes_cannot_train_in_one_folder(recipe, tmp_path):
    (tmp_path / "out.run").mkdir()
    other = os.open(tmp_path / "out.run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(TargetError, match="another process is training"):
        train(recipe)
    os.close(other)


# The report


def test_losses_are_summarised():
    losses = Losses()
    for value in range(30):
        losses.add(float(value))
    report = SubmodelReport.of(7, 0.5, losses)
    assert (report.kd_first, report.kd_mean, report.steps) == (0.0, 14.5, 30)
    assert report.kd_recent == sum(range(10, 30)) / 20
    assert SubmodelReport.of(7, 0.5, Losses()).kd_mean is None


def test_the_table_of_learned_widths_fits_a_terminal_and_widths_are_whole():
    cut = {"hidden": 1920, "expert_ffn": 960, "shared_ffn": 1856, "mamba_heads": 48, "experts": 96}
    choice = Choice("active_params", 2.1e9, 2.0991e9, -4e-4, 0.983, True, cut, "2.099B of 2.100B")
    entry = SubmodelReport.of(12_400_000_000, 1.0, Losses(), choice)
    console = Console(width=80, file=io.StringIO())
    TrainReport(Path("out"), 1, 1, 1.0, {"small-model": entry}).print(console)
    lines = console.file.getvalue().splitlines()
    row = next(line for line in lines if "active_params" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "small-model", "active_params", "2.100B", "2.099B", "-0.0%", "0.983",
    ]  # fmt: skip
    assert "small-model: hidden 1920, expert_ffn 960, shared_ffn 1856, mamba_heads 48, experts 96" in lines
