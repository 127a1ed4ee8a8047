"""The `train` verb in several processes: the numbers of one process, the same files, one voice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import Processes, run
from safetensors.torch import load_file
from search_runs import LENIENT, search_content, search_parent, write_recipe

from star_elastic.cli import main
from star_elastic.train import train_family, trainer

STILL = ("tokens_per_second", "memory_bytes")  # what differs between equal runs


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return search_parent(tmp_path_factory.mktemp("model") / "parent")


@pytest.fixture
def recipe(parent, tmp_path):
    """Five search and five settle steps of four rows, which differ in length; every second step was clipped."""
    content = search_content(parent, tmp_path)
    optimizer = {**content["optimizer"], "eps": 1e-4, "clip": 0.05}
    return write_recipe({**content, "batch_size": 4, "optimizer": optimizer, "checkpoint_every": 3}, tmp_path)


def command(recipe: Path, *words: str) -> int:
    return main(["train", str(recipe), *LENIENT, *words])


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in STILL} for line in lines]


def assert_close(found, wanted, where=""):
    """Nested numbers and tensors within 1e-5; everything else equal."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_close(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_close(one, other, f"{where}.{number}")
    elif isinstance(wanted, float | torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=lambda text: f"{where}: {text}")
    else:
        assert found == wanted, where


def assert_same_result(found: Path, wanted: Path) -> None:
    assert {file.name for file in found.iterdir()} == {file.name for file in wanted.iterdir()}
    assert_close(metrics(found), metrics(wanted))
    for name in ("model", "router"):
        assert_close(*(load_file(folder / f"{name}.safetensors") for folder in (found, wanted)), name)
    submodels = [json.loads((folder / "elastic.json").read_text())["submodels"] for folder in (found, wanted)]
    assert submodels[0] == submodels[1]


@pytest.fixture
def alone(recipe, tmp_path):
    """The result of one process."""
    train_family(recipe, [*LENIENT, f"output={tmp_path / 'alone'}"], progress=False)
    return tmp_path / "alone"


def test_two_processes_equal_one_over_ten_steps(recipe, alone, tmp_path):
    ended = run(tmp_path / "log", 2, command, recipe, "accumulate=2")
    assert_same_result(tmp_path / "out", alone)
    assert "wrote" in ended[0].out and "steps" in ended[0].out
    assert not ended[1].out and not ended[1].err  # one voice
    lines = metrics(tmp_path / "out")
    assert [line["phase"] for line in lines] == ["search"] * 5 + ["settle"] * 5
    assert all(line["grad_norm"] > 0.05 for line in lines)  # every step was clipped
    assert not (tmp_path / "out.run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("shard=off",), ("shard=hybrid", "shard_group=1"), ("activation_checkpointing=true", "ema=0.5")]
)
def test_ways_to_share_give_the_same_numbers(recipe, parent, tmp_path, options):
    own = [word for word in options if not word.startswith("shard")]
    train_family(recipe, [*LENIENT, *own, f"output={tmp_path / 'alone'}"], progress=False)
    run(tmp_path / "log", 2, command, recipe, *options)
    assert_same_result(tmp_path / "out", tmp_path / "alone")


@pytest.mark.slow
def test_two_copies_of_two_shares_give_the_numbers_of_one_process(recipe, alone, tmp_path):
    """Hybrid sharding, 2 x 2: gradients are shared out within a copy after each part, and between copies with the last."""
    ended = run(tmp_path / "log", 4, command, recipe, "shard=hybrid", "shard_group=2")
    assert_same_result(tmp_path / "out", alone)
    assert not any(process.out or process.err for process in ended[1:])


@pytest.mark.slow
def test_two_copies_of_two_shares_in_parts(recipe, tmp_path):
    options = ("batch_size=8", "ema=0.5")
    train_family(recipe, [*LENIENT, *options, f"output={tmp_path / 'alone'}"], progress=False)
    run(tmp_path / "log", 4, command, recipe, *options, "accumulate=2", "shard=hybrid", "shard_group=2")
    assert_same_result(tmp_path / "out", tmp_path / "alone")


# Stopping and going on


def stopping(recipe: Path, step: int, by: int, *words: str) -> int:
    """The verb, in which one process gets a SIGTERM during a step."""
    take = trainer.Trainer._step

    def hooked(self, batch):
        take(self, batch)
        if self.step == step and self.ranks.rank == by:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.Trainer._step = hooked
    return command(recipe, *words)


@pytest.mark.parametrize(("before", "after", "step"), [(2, 1, 4), (1, 2, 7)])
def test_a_run_that_was_stopped_goes_on_in_another_number_of_processes(recipe, tmp_path, before, after, step):
    train_family(recipe, [*LENIENT, "ema=0.5", f"output={tmp_path / 'alone'}"], progress=False)
    ended = Processes(tmp_path / "log", before, stopping, recipe, step, before - 1, "ema=0.5").wait()
    assert [process.code for process in ended] == [2] * before
    told = ended[0].err.splitlines()[-1]
    assert told.startswith(f"error: stopped by SIGTERM after step {step} of 10, saved in ") and told.endswith(
        "--resume"
    )
    assert all(not process.err for process in ended[1:])
    checkpoint = tmp_path / f"out.run/checkpoints/step-{step:08d}"
    files = sorted(str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())
    assert len([name for name in files if name.startswith("shards/")]) == (before if before > 1 else 0)
    assert all(
        name.endswith(".safetensors") or name in ("state.json", "sums.json") for name in files
    )  # so there is no pickle

    run(tmp_path / "log", after, command, recipe, "ema=0.5", "--resume")
    assert_same_result(tmp_path / "out", tmp_path / "alone")


def unable(recipe: Path, name: str, by: int, *words: str) -> int:
    """The verb, in which one process cannot do something."""

    def fail(*_, **__):
        raise OSError(28, "No space left on device", "somewhere")

    if int(os.environ["RANK"]) == by:
        module, _, attribute = name.rpartition(".")
        vars(sys.modules[f"star_elastic.train.{module}"])[attribute] = fail
    return command(recipe, *words)


@pytest.mark.parametrize("name", ["state.write_files", "trainer.write_family"])
def test_a_full_disk_is_told_once_and_keeps_the_last_checkpoint(recipe, tmp_path, name):
    ended = Processes(tmp_path / "log", 2, unable, recipe, name, 0).wait()
    assert [process.code for process in ended] == [2, 2]
    assert ended[0].err.splitlines()[-1].startswith("error: cannot write ") and not ended[1].err
    assert "No space left" in ended[0].err
    if name == "trainer.write_family":  # everything but the result is there: resuming writes it
        run(tmp_path / "log", 2, command, recipe, "--resume")
        assert len(metrics(tmp_path / "out")) == 10
    else:
        assert not (tmp_path / "out.run").exists()


# Mistakes


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("batch_size=6", "batch_size 6 cannot be shared equally by 4 processes: give a multiple, such as 4"),
        ("device=cuda:1", "device cuda:1 is one device, but 4 processes train: give cuda, or auto"),
        ("shard_group=3", "shard: hybrid puts 3 processes in a group, which do not divide 4 processes"),
        ("stepz=1", "stepz"),
        ("data.sources.0.path=nowhere.txt", "nowhere.txt"),
    ],
)
def test_a_mistake_is_one_line_from_one_process(recipe, tmp_path, word, message):
    words = (word, "shard=hybrid") if word.startswith("shard") else (word,)
    ended = Processes(tmp_path / "log", 4, command, recipe, *words).wait()
    assert [process.code for process in ended] == [2] * 4
    assert message in ended[0].err and ended[0].err.count("\n") == 1
    assert not any(process.err + process.out for process in ended[1:])
    assert not (tmp_path / "out.run").exists()


def test_a_mistake_that_another_process_finds_is_told_by_the_main_one(recipe, tmp_path):
    ended = Processes(tmp_path / "log", 2, unable, recipe, "prepare.open_documents", 1).wait()
    assert "No space left" in ended[0].err.splitlines()[-1] and ended[0].code == 2


# As a user starts it


@pytest.mark.slow
def test_torchrun_trains_and_a_signal_to_it_saves(recipe, alone, tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "star_elastic", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*words, str(recipe), *LENIENT, "checkpoint_every=1"], env=environment)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out.run/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    process.wait(120)
    assert not (tmp_path / "out").exists()
    done = subprocess.run([*words, str(recipe), *LENIENT, "--resume"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same_result(tmp_path / "out", alone)
    assert done.stdout.count("wrote") == 1
