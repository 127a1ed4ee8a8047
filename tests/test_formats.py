"""docs/formats.md against the files of a real run: every file and field is described, and nothing else is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open
from search_runs import LENIENT, search_content, search_parent, write_recipe

from star_elastic.train import train_family
from star_elastic.train.state import RunFolder

PAGE = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")


def table(heading: str, number: int = 0) -> dict[str, str]:
    """One of a section's tables: first cell, without quotes -> the rest of its row."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"\|[-|]+\|\n((?:\|.*\n)+)", section)
    rows = (line.strip("|\n").split(" | ", 1) for line in blocks[number].splitlines())
    return {first.strip().strip("`"): rest for first, rest in rows}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The output, and the run's folder as it was before its end, which removes it."""
    folder = tmp_path_factory.mktemp("run")
    content = search_content(search_parent(folder / "parent"), folder) | {"ema": 0.9, "checkpoint_every": 4}
    path = write_recipe(content, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "remove", lambda self: None)
        train_family(path, LENIENT, progress=False)
    return folder / "out"


def names(file: Path) -> set[str]:
    with safe_open(file, "pt") as content:
        return set(content.keys())


def test_the_files_of_a_run(run):
    folder = Path(f"{run}.run")
    files = {file.name for file in folder.iterdir()}
    assert table("A training run").keys() == {
        *(files - {"checkpoints"}),
        "tensorboard/",
        "checkpoints/step-NNNNNNNN/",
    }
    checkpoint = folder / "checkpoints" / "step-00000008"
    told = table("A training run", 1)
    assert told.keys() - {"shards/"} == {file.name for file in checkpoint.iterdir()}
    state = json.loads((checkpoint / "state.json").read_text())
    assert re.findall(r"`(\w+)`", told["state.json"]) == list(state)
    assert json.loads((checkpoint / "sums.json").read_text()).keys() == told.keys() - {"shards/", "sums.json"}
    weights = names(checkpoint / "model.safetensors")
    assert names(checkpoint / "random.safetensors") == {"cpu", "sampler", "noise"}
    assert {name.rpartition(".")[2] for name in names(checkpoint / "optimizer.safetensors")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert names(checkpoint / "average.safetensors") < weights
    assert {name.split(".")[0] for name in names(checkpoint / "router.safetensors")} == {"weights", "moments"}


def test_the_router(run):
    with safe_open(run / "router.safetensors", "pt") as file:
        (name,), settings = file.metadata(), json.loads(file.metadata()["router"])
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert name == "router"
    told = table("A learned router", 1)
    assert told.keys() == settings.keys()
    fields = re.findall(r"`(\w+)`", told["budgets"])
    assert settings["budgets"][0].keys() == set(fields) - {"params", "active_params", "memory", "latency"}
    budgets, hidden = len(settings["budgets"]), settings["hidden"]
    wanted = {f"axes.{axis}.first": (hidden, budgets) for axis in settings["candidates"]}
    wanted |= {f"axes.{axis}.second": (len(widths), hidden) for axis, widths in settings["candidates"].items()}
    assert shapes == wanted
    assert {name.replace("AXIS", "hidden") for name in table("A learned router")} <= shapes.keys()


def test_the_output(run):
    report = json.loads((run / "training.json").read_text())
    last = PAGE.split("`training.json`: ")[1]
    assert [*re.findall(r"`(\w+)`", last)[:5]] == ["steps", "tokens", "seconds", "tokens_per_second", "notes"]
    assert report.keys() == {"steps", "tokens", "seconds", "tokens_per_second", "notes", "submodels"}
    assert {"metrics.jsonl", "router.safetensors", "elastic.json", "README.md"} <= {file.name for file in run.iterdir()}
