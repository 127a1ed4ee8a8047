"""Metrics: one dict per step, in the file, in TensorBoard, in Weights & Biases, and in the live table."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console
from tiny import tiny_folder

from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.errors import ElasticError, TargetError
from star_elastic.progress import progress_bar
from star_elastic.train import train_family
from star_elastic.train.live import LiveTable, widths_text
from star_elastic.train.metrics import Metrics, TrackerError, check_trackers
from star_elastic.train.ranks import Ranks
from star_elastic.train.recipe import Recipe
from star_elastic.train.state import RunFolder


def line(step, kd, **more):
    return {
        "step": step,
        "stage": 0,
        "phase": "search",
        "submodel": ", ".join(kd),
        "kd_loss": sum(kd.values()) / len(kd),
        "kd": kd,
        "grad_norm": 0.8125,
        "lr": 3e-4,
        "memory_bytes": 3 << 30,
        "tau": 0.5,
        "scale": 3.25,
        "budget_error": dict.fromkeys(kd, 0.125),
        "widths": {name: {"hidden": 48} for name in kd},
        "width_probabilities": {name: {"hidden": [0.25, 0.75]} for name in kd},
        "tokens": 32 * step,
        "tokens_per_second": 1234.0,
        **more,
    }


@pytest.fixture
def run(tmp_path):
    recipe = Recipe(parent="p", output=tmp_path / "out", steps=100, data={"sources": [{"path": "a.txt"}]})
    folder = RunFolder(recipe)
    folder.path.mkdir()
    return folder


class Writer:
    """Stands for torch's SummaryWriter."""

    made: ClassVar[list[object]] = []

    def __init__(self, log_dir, purge_step):
        self.folder, self.purge_step, self.told, self.closed = log_dir, purge_step, {}, False
        self.made.append(self)

    def add_scalar(self, name, value, step):
        self.told[name, step] = value

    def flush(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def tensorboard(monkeypatch):
    monkeypatch.setattr(Writer, "made", [])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    return Writer.made


@pytest.fixture
def wandb(monkeypatch):
    """Stands for the package: remembers its calls."""
    calls = []

    class Run:
        id = "abc123"

        def log(self, numbers, step):
            calls.append((step, numbers))

        def finish(self):
            calls.append("finished")

    def init(**options):
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return calls


FLAT = {
    "stage": 0,
    "kd_loss": 0.5,
    "kd/small": 0.5,
    "grad_norm": 0.8125,
    "lr": 3e-4,
    "memory_bytes": 3 << 30,
    "tau": 0.5,
    "scale": 3.25,
    "budget_error/small": 0.125,
    "widths/small/hidden": 48,
    "width_probabilities/small/hidden": 0.75,
    "tokens": 64,
    "tokens_per_second": 1234.0,
}


def test_the_file_gets_every_line_as_it_is(run):
    lines = [line(1, {"small": 0.5}), line(2, {"full": 0.25})]
    metrics = Metrics(run)
    for one in lines:
        metrics.log(one)
    metrics.close()
    assert [json.loads(text) for text in run.metrics.read_text().splitlines()] == lines
    assert not (run.path / "tensorboard").exists()


def test_tensorboard_gets_every_number_once(run, tensorboard):
    metrics = Metrics(run, ["tensorboard"])
    metrics.log(line(2, {"small": 0.5}))
    assert tensorboard[0].told == {(name, 2): value for name, value in FLAT.items()}
    assert tensorboard[0].folder == str(run.path / "tensorboard")
    metrics.close()
    assert tensorboard[0].closed


def test_a_resumed_run_goes_on_along_the_same_axis(run, tensorboard, wandb):
    for first in (1, 8):
        metrics = Metrics(run, ["tensorboard", "wandb"])
        metrics.log(line(first, {"small": 0.5}))
        metrics.close()
    assert [writer.purge_step for writer in tensorboard] == [1, 8]
    starts = [call for call in wandb if isinstance(call, dict)]
    assert [start["id"] for start in starts] == [None, "abc123"] and {start["resume"] for start in starts} == {"allow"}
    assert [call[0] for call in wandb if isinstance(call, tuple)] == [1, 8] and wandb.count("finished") == 2


def test_wandb_gets_every_number_and_the_settings(run, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    Metrics(run, ["wandb"], {"steps": 100}).log(line(2, {"small": 0.5}))
    start, told = wandb
    assert start["project"] == "mine" and start["config"] == {"steps": 100} and start["name"] == "out"
    assert told == (2, FLAT)


def test_only_the_main_process_writes(run, tensorboard, wandb):
    other = RunFolder(run.recipe, Ranks(rank=1, size=2))
    metrics = Metrics(other, ["tensorboard", "wandb"])
    metrics.log(line(1, {"small": 0.5}))
    metrics.keep_events(run.recipe.output)
    assert not tensorboard and not wandb and not run.metrics.exists()


def test_event_files_outlive_the_run_and_are_not_overwritten(run, tensorboard):
    metrics = Metrics(run, ["tensorboard"])
    metrics.log(line(1, {"small": 0.5}))
    (run.path / "tensorboard").mkdir()
    (run.path / "tensorboard/events").write_text("numbers")
    metrics.keep_events(run.recipe.output)
    run.remove()
    kept = run.path.with_name("out.tensorboard")
    assert (kept / "events").read_text() == "numbers" and tensorboard[0].closed
    with pytest.raises(TargetError, match=r"out\.tensorboard holds the events of an earlier run"):
        check_trackers(["tensorboard"], run.recipe.output)


@pytest.mark.parametrize(
    ("name", "module", "install"),
    [("tensorboard", "torch.utils.tensorboard", r"star-elastic\[track\]"), ("wandb", "wandb", "pip install wandb")],
)
def test_a_package_that_is_not_there_is_one_line(run, monkeypatch, name, module, install):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(TrackerError, match=f"track: {name} is not installed here; .*{install}") as caught:
        check_trackers([name], run.recipe.output)
    assert isinstance(caught.value, ElasticError) and "\n" not in str(caught.value)


def test_real_event_files_hold_the_numbers(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((1, 2, 3), (3, 4)):  # the second run was resumed after step 2
        metrics = Metrics(run, ["tensorboard"])
        for step in steps:
            metrics.log(line(step, {"small": step / 8 + (len(steps) == 2)}))
        metrics.close()
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(FLAT)
    assert [(e.step, e.value) for e in events.Scalars("kd/small")] == [(1, 0.125), (2, 0.25), (3, 1.375), (4, 1.5)]


# The live table


def shown(table):
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_table_shows_the_numbers_of_the_lines():
    table = LiveTable(("full", "small"))
    assert "full" in shown(table) and "small" in shown(table)
    table.add(line(1, {"small": 0.5}))
    table.add(line(2, {"small": 0.25, "full": 0.0625}, budget_error={"small": -0.03, "full": 0.0}))
    text = shown(table)
    small = next(row for row in text.splitlines() if "small" in row)
    full = next(row for row in text.splitlines() if "full" in row)
    assert "0.3750" in small and "-3.0%" in small and "hidden 48 (0.75)" in small  # (0.5 + 0.25) / 2
    assert "0.0625" in full and "+0.0%" in full
    for number in (
        "step 2",
        "search",
        "tau 0.5",
        "scale 3.25",
        "lr 3.00e-04",
        "norm 0.812",
        "1,234 tokens/s",
        "3.00 GiB",
    ):
        assert number in text, number


def test_only_the_last_twenty_losses_count():
    table = LiveTable(("small",))
    for step in range(1, 31):
        table.add(line(step, {"small": float(step)}))
    assert "20.5000" in shown(table) and " 30 " in shown(table)  # mean of 11 to 30; 30 steps


def test_what_the_router_said_ends_with_its_stage():
    table = LiveTable(("small",))
    table.add(line(1, {"small": 0.5}))
    settled = {
        k: v for k, v in line(2, {"small": 0.5}, phase="settle").items() if k not in ("tau", "widths", "budget_error")
    }
    table.add(settled)
    assert "hidden" not in shown(table) and "tau" not in shown(table) and "settle" in shown(table)


def test_layers_with_widths_of_their_own_are_a_range():
    widths, chances = {"hidden": 48, "ffn.0": 16, "ffn.3": 32}, {"hidden": [0.1, 0.9], "ffn.0": [0.6], "ffn.3": [0.8]}
    assert widths_text(widths, chances) == "hidden 48 (0.90), ffn 16-32 (0.70)"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_stands_above_the_bar_in_a_terminal_only(terminal):
    console = Console(force_terminal=terminal, width=160, file=io.StringIO(), color_system=None)
    table = LiveTable(("small",))
    with progress_bar("training", 10, "tokens", above=table, console=console) as advance:
        table.add(line(1, {"small": 0.5}))
        advance(10)
    text = console.file.getvalue()
    assert "training" in text and "100%" in text and ("0.5000" in text) == terminal
    assert not terminal or text.rindex("0.5000") < text.rindex("training")


def test_a_run_tells_its_trackers_what_its_file_says(tmp_path, monkeypatch):
    class Filing(Writer):
        def __init__(self, log_dir, purge_step):
            super().__init__(log_dir, purge_step)
            Path(log_dir).mkdir()

    monkeypatch.setattr(Writer, "made", [])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Filing))
    parent = tiny_folder(tmp_path / "parent", pattern="M*", vocab_size=288)
    write_tokenizer(parent)
    (tmp_path / "text.txt").write_text("Some text to read, line after line.\n" * 20)
    content = {
        "parent": parent,
        "output": tmp_path / "out",
        "submodels": {"full": {}},
        "data": {"sources": [{"path": str(tmp_path / "text.txt")}]},
        "sequence_length": 16,
        "steps": 3,
        "optimizer": {"warmup_steps": 1},
        "device": "cpu",
        "track": ["tensorboard"],
    }
    train_family(Recipe.model_validate(content), progress=False)
    lines = [json.loads(text) for text in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    (writer,) = Writer.made
    told = {step: value for (name, step), value in writer.told.items() if name == "kd/full"}
    assert told == {line["step"]: line["kd"]["full"] for line in lines} and len(told) == 3
    assert writer.closed and (tmp_path / "out.tensorboard").is_dir()
    assert not (tmp_path / "out/tensorboard").exists() and not (tmp_path / "out.run").exists()
