"""The dry run: what it says of the published run and of small ones, against counts by hand and real folders; what it refuses."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from test_cli import refused
from test_latency import table_for
from tiny import tiny_folder
from transformers import AutoModelForCausalLM

from star_elastic.cli import main
from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.errors import (
    CheckpointError,
    DataError,
    ElasticError,
    RecipeError,
    TargetError,
    UnknownNameError,
    WidthError,
)
from star_elastic.families import layout_of
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import Submodel, read_config
from star_elastic.train import load_recipe, metrics, train_family
from star_elastic.train.anneal import Anneal
from star_elastic.train.cache_run import cache_teacher
from star_elastic.train.check import check_run
from star_elastic.train.dry_run import DryRun, dry_run, planned_ranks
from star_elastic.train.ranks import Ranks
from star_elastic.train.state import RunFolder

NANO = Path(__file__).parent.parent / "recipes" / "nano-v3.yaml"
GIB = 2**30


@pytest.fixture(scope="module")
def published() -> DryRun:
    return dry_run(NANO, world_size=8, device_memory=80 * GIB)


def test_the_published_run_has_its_steps_and_tokens(published: DryRun) -> None:
    search, settle = published.stages
    assert (search.phase, search.sequence_length, search.batch_size) == ("search", 8192, 1536)
    assert (settle.phase, settle.sequence_length, settle.batch_size) == ("settle", 49152, 512)
    assert search.steps == -(-100_000_000_000 // (1536 * 8192)) and settle.steps == -(-60_000_000_000 // (512 * 49152))
    assert search.tokens >= 100e9 and settle.tokens >= 60e9
    assert (search.rows_per_pass, settle.rows_per_pass) == (1, 1)
    assert list(settle.probabilities.values()) == pytest.approx([0.5, 0.3, 0.2])
    assert list(search.probabilities.values()) == pytest.approx([1 / 3] * 3)


def test_the_published_budgets_are_met_by_the_published_widths(published: DryRun) -> None:
    full, middle, small = published.budgets.values()
    assert full.nearest == full.target == 31_577_937_344 and full.widths == "the whole model"
    assert middle.widths == "hidden 2016" and abs(middle.error) < 0.001
    assert abs(small.error) < 0.001 and small.least < small.target < small.most == full.target
    assert published.candidates["hidden"] == (2688, 2016, 1920, 1392)


def test_the_temperature_is_cold_at_the_end_of_the_search(published: DryRun) -> None:
    steps = published.stages[0].steps
    assert published.cold_step == steps - 1 and Anneal(steps).tau(steps - 1) == pytest.approx(0.05)
    early = dry_run(NANO, ["router.tau=[1.0, 0.0025]"])  # twice as far in the logarithm: half the way
    assert early.cold_step == pytest.approx((steps - 1) / 2, abs=1)
    warm = dry_run(NANO, ["router.tau=[1.0, 0.5]"])
    assert warm.cold_step is None and any("tau ends at 0.5" in warning for warning in warm.warnings)


def test_eight_devices_are_said_to_be_too_small_and_what_helps_does(published: DryRun) -> None:
    told = [warning for warning in published.warnings if "needs about" in warning]
    assert len(told) == 2 and all("master_weights: bf16, more devices than 8" in warning for warning in told)
    for changes, world in ((["master_weights=bf16"], 8), (["stages.0.accumulate=48", "stages.1.accumulate=16"], 32)):
        other = dry_run(NANO, changes, world_size=world, device_memory=80 * GIB)
        assert not [warning for warning in other.warnings if "needs about" in warning]
        assert all(stage.rows_per_pass == 1 for stage in other.stages)


def test_the_recipe_and_the_page_state_the_numbers_that_the_dry_run_prints(published: DryRun) -> None:
    page = " ".join((NANO.parent.parent / "docs/how-to/plan-a-run.md").read_text().split())
    text = " ".join(NANO.read_text().replace("#", " ").split())
    first, second = (round(stage.memory.total / GIB) for stage in published.stages)
    assert f"{first} GiB in stage 1 and {second} GiB in stage 2" in text
    assert f"{first} GiB in the first stage and {second} GiB" in page
    bf16 = dry_run(NANO, ["master_weights=bf16"], world_size=8)
    more = dry_run(NANO, ["stages.0.accumulate=48", "stages.1.accumulate=16"], world_size=32)
    for other in (bf16, more):
        one, two = (round(stage.memory.total / GIB) for stage in other.stages)
        assert f"({one} and {two} GiB" in text and f"{one} and {two} GiB" in page
    state = round(published.stages[0].memory.state / GIB)
    assert f"{state} GiB on each of 8 devices" in text and f"{state} GiB on each of 8 devices" in page


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp("dry") / "parent", vocab_size=288)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def content(parent: Path, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("Some text to read, line after line.\n" * 40)
    return {
        "parent": str(parent),
        "output": str(tmp_path / "out"),
        "budgets": {"full": {"params": 1.0}, "half": {"params": 0.5}},
        "data": {"sources": [{"path": str(tmp_path / "text.txt")}]},
        "sequence_length": 16,
        "batch_size": 4,
        "steps": 16,
        "optimizer": {"warmup_steps": 2},
        "device": "cpu",
        "precision": "fp32",
    }


def written(content: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def numbers(folder: Path) -> int:
    """Numbers in the parameters of a folder's files; the selection bias is a buffer."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if "e_score_correction_bias" not in name]  # noqa: SIM118
        return sum(file.get_tensor(name).numel() for name in names)


def test_the_nearest_cost_is_that_of_the_slice_with_those_widths(
    content: dict[str, Any], parent: Path, tmp_path: Path
) -> None:
    planned = dry_run(written(content, tmp_path))
    half = planned.budgets["half"]
    widths = {axis: int(width) for axis, width in (part.split() for part in half.widths.split(", "))}
    slice_checkpoint(parent, tmp_path / "slice", Submodel(widths=widths))
    assert numbers(tmp_path / "slice") == half.nearest
    assert half.target == numbers(parent) / 2 and abs(half.error) < 0.05
    assert [(stage.phase, stage.steps) for stage in planned.stages] == [("search", 10), ("settle", 6)]
    assert not any("not checked" in warning for warning in planned.warnings)
    assert any("not sorted along" in warning for warning in planned.warnings)


def test_submodels_of_given_widths_are_counted(content: dict[str, Any], parent: Path, tmp_path: Path) -> None:
    del content["budgets"]
    small = {"hidden": 48, "expert_ffn": 16}
    content["submodels"] = {"full": {}, "small": {"widths": small}}
    planned = dry_run(written(content, tmp_path))
    slice_checkpoint(parent, tmp_path / "slice", Submodel(widths=small))
    assert {name: one.params for name, one in planned.submodels.items()} == {
        "full": numbers(parent),
        "small": numbers(tmp_path / "slice"),
    }
    assert planned.cold_step is None and planned.budgets == {}


def test_nothing_is_written_and_no_weight_is_read(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forbidden)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", forbidden)
    monkeypatch.setattr(torch, "from_file", forbidden)
    recipe = written(content, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    dry_run(recipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (["budgets.half.params=0.01"], ValueError, "budget 'half': no candidates come within 5% of"),
        (["router.axes={hiden: [0.5]}"], UnknownNameError, "no axis 'hiden'"),
        (["router.axes={hidden: [33]}"], WidthError, "33 is no legal width"),
        (["sequence_length=512"], RecipeError, "max_position_embeddings is 256"),
        (["data.sources.0.path=nowhere.txt"], DataError, "nowhere.txt"),
        (["stepps=1"], RecipeError, "unknown key 'stepps'"),
        (["parent=preset:nano"], UnknownNameError, "no preset 'nano'"),
    ],
)
def test_mistakes_are_those_of_train(
    content: dict[str, Any], tmp_path: Path, changes: list[str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        dry_run(written(content, tmp_path), changes)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_output_that_exists_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(TargetError, match="exists and is not empty"):
        dry_run(written(content, tmp_path))


def test_a_config_alone_is_planned_and_what_was_not_checked_is_said(
    content: dict[str, Any], parent: Path, tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copyfile(parent / "config.json", tmp_path / "bare" / "config.json")
    content |= {"parent": str(tmp_path / "bare"), "device": "auto", "precision": "auto"}
    content["data"] = {"sources": [{"path": "nowhere.txt"}]}
    planned = dry_run(written(content, tmp_path), world_size=2)
    assert planned.warnings[0].startswith("only the configuration of ")
    assert "not checked: weights, tokenizer, data" in planned.warnings[0]
    assert "GPUs, weights and moments in fp32, matrix products in bf16, teacher in fp32" in planned.assumed
    alone = dry_run(written(content, tmp_path)).stages[0].memory
    assert 0.5 < planned.stages[0].memory.weights / alone.weights < 0.6
    whole = dry_run(written(content, tmp_path), ["shard='off'"], world_size=2).stages[0].memory
    assert whole.weights == alone.weights and whole.gathered == 0


def test_a_device_that_is_elsewhere_is_noted(content: dict[str, Any], tmp_path: Path) -> None:
    content["device"] = "cuda:7"
    planned = dry_run(written(content, tmp_path))
    assert any(warning.startswith("not checked: device 'cuda:7'") for warning in planned.warnings)


# What ``train`` refuses before its first step, by the same words


def forbidden(*_: Any, **__: Any) -> None:
    raise AssertionError("weights were loaded")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["freeze=['*.gate.wait']"], "freeze: no parameter matches '*.gate.wait'"),
        (["freeze=['*']"], "nothing is left to train"),
        (["device=tpu"], "tpu"),
        (["track=[wandb]"], "pip install wandb"),
        (["teacher_cache=nowhere", "router.max_extension=0"], "holds no cache.json"),
        (["data.sources.0.field=story", "data.sources.0.format=jsonl"], "not valid JSON"),
        (["data.sources.0.path=PLACE/holes.jsonl"], "holds int; it must be text"),
        (["data.sources.0.path=PLACE/other.jsonl"], "neither 'messages' nor 'text'"),
        (["budgets.half.params=0.01"], "no candidates come within 5%"),
        (["budgets=null", "submodels={small: null}"], "submodels"),
        (["preset=nemotron-3-nano-30b-a3b", "budgets=null"], "does not have the shapes of preset"),
        (["parent=PLACE/empty"], "config.json"),
    ],
)
def test_what_train_refuses_is_refused_in_the_same_words(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], said: str
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forbidden)
    monkeypatch.setitem(metrics.TRACKERS, "wandb", ("no_such_package", "pip install wandb"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "holes.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "other.jsonl").write_text('{"story": "x"}\n')
    recipe, changes = written(content, tmp_path), [change.replace("PLACE", str(tmp_path)) for change in changes]
    told = []
    for function in (dry_run, functools.partial(train_family, progress=False)):
        with pytest.raises(ElasticError) as caught:
            function(recipe, changes)
        told.append((type(caught.value), str(caught.value)))
    assert told[0] == told[1] and said in told[0][1] and "\n" not in told[0][1]
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.run").exists()


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize(
    ("changes", "world", "said"),
    [
        (["batch_size=6"], 4, "batch_size 6 cannot be shared equally by 4 processes: give a multiple, such as 4"),
        (["shard=hybrid", "shard_group=3"], 4, "hybrid puts 3 processes in a group, which do not divide 4 processes"),
        (["shard=hybrid", "shard_group=8"], 4, "hybrid puts 8 processes in a group"),
    ],
)
def test_what_that_many_processes_cannot_do_is_refused(
    content: dict[str, Any], parent: Path, tmp_path: Path, changes: list[str], world: int, said: str, has_weights: bool
) -> None:
    if not has_weights:
        (tmp_path / "bare").mkdir()
        shutil.copyfile(parent / "config.json", tmp_path / "bare" / "config.json")
        content["parent"] = str(tmp_path / "bare")
    recipe = written(content, tmp_path)
    with pytest.raises(RecipeError) as caught:
        dry_run(recipe, changes, world_size=world)
    assert said in str(caught.value)
    if has_weights:
        with pytest.raises(RecipeError) as trained:
            check_run(RunFolder(load_recipe(recipe, changes), Ranks(0, world, 0, world)), resume=False)
        assert str(trained.value) == str(caught.value)
    fits = [change.replace("=6", "=8").replace("group=3", "group=2").replace("group=8", "group=4") for change in changes]
    dry_run(recipe, fits, world_size=world)


def test_one_device_for_several_processes_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="device cuda:7 is one device, but 4 processes train"):
        dry_run(written(content, tmp_path), ["device=cuda:7"], world_size=4)


def test_a_group_of_hybrid_is_a_machine_of_at_most_eight() -> None:
    shared = {world: planned_ranks(world).local_size for world in (1, 6, 8, 12, 32, 7, 11)}
    assert shared == {1: 1, 6: 6, 8: 8, 12: 6, 32: 8, 7: 7, 11: 1}


def test_an_unfinished_run_needs_resume_and_resume_needs_one(content: dict[str, Any], tmp_path: Path) -> None:
    recipe = written(content, tmp_path)
    with pytest.raises(RecipeError, match="nothing to resume"):
        dry_run(recipe, resume=True)
    (tmp_path / "out.run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    with pytest.raises(TargetError, match="holds an unfinished run"):
        dry_run(recipe)


def test_a_budget_that_does_not_see_experts_is_warned_about(content: dict[str, Any], tmp_path: Path) -> None:
    content["budgets"] = {"half": {"active_params": 0.69}}
    content["router"] = {"axes": {"hidden": None, "experts": None}}
    planned = dry_run(written(content, tmp_path))
    assert any("does not see experts" in warning for warning in planned.warnings)


def test_latency_budgets_read_their_table(content: dict[str, Any], parent: Path, tmp_path: Path) -> None:
    layout = layout_of(read_config(parent))
    raw = table_for(layout)
    for unit in raw["units"]:
        if unit["ladder"] == {"hidden": [64]}:
            unit["ladder"]["hidden"] = [32, 64]
            unit["points"] = [{**unit["points"][0], "widths": {"hidden": width}} for width in (32, 64)]
    (tmp_path / "table.json").write_text(json.dumps(raw))
    content["budgets"] = {"fast": {"latency": 0.5, "table": str(tmp_path / "table.json")}}
    content["router"] = {"axes": {"hidden": [1, 0.5], "expert_ffn": [1, 0.5, 0.25]}}
    fast = dry_run(written(content, tmp_path)).budgets["fast"]
    # By hand: 43.5 s that depend on nothing, two expert layers, and the head. Whole: 43.5 + 2 x 420 + 7.
    assert (fast.most, fast.least) == (890.5, 43.5 + 2 * 100 + 3)
    assert fast.target == 890.5 / 2 and fast.nearest == 43.5 + 2 * 200 + 7  # hidden 64, expert_ffn 8
    assert fast.widths == "expert_ffn 8"


def test_the_command_prints_tables_or_json(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(written(content, tmp_path))
    assert main(["train", recipe, "--dry-run", "--world-size", "2", "batch_size=8"]) == 0
    said = capsys.readouterr().out
    assert "on 2 devices" in said and "1 search" in said and "memory of a device" in said and "half" in said
    assert main(["train", recipe, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 16 and told["tokens"] == 16 * 4 * 16 and told["cold_step"] == 9
    parts = told["stages"][0]["memory"]
    assert parts["total"] >= parts["weights"] + parts["gradients"] + parts["moments"] + parts["teacher"]
    assert abs(told["budgets"]["half"]["error"]) < 0.05


def test_its_options_need_it(content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(written(content, tmp_path))
    assert "belong to --dry-run" in refused(["train", recipe, "--world-size", "2"], capsys)
    assert "want a positive size such as" in refused(["train", recipe, "--dry-run", "--device-memory", "much"], capsys)
    assert not (tmp_path / "out").exists()


def test_a_cache_takes_the_place_of_the_teacher_and_is_checked(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content["router"] = {"max_extension": 0}
    recipe, answers = written(content, tmp_path), tmp_path / "answers"
    before = dry_run(recipe)
    cache_teacher(recipe, answers, 3, progress=False)
    cached = dry_run(recipe, [f"teacher_cache={answers}"])
    for one, other in zip(before.stages, cached.stages, strict=True):
        assert one.memory.teacher > other.memory.teacher == 0
        assert one.memory.total - other.memory.total == one.memory.teacher
    assert cached.cache_bytes == sum(file.stat().st_size for file in answers.rglob("*.safetensors"))
    assert before.cache_bytes is None and "teacher" in before.assumed
    capsys.readouterr()
    assert main(["train", str(recipe), "--dry-run", f"teacher_cache={answers}"]) == 0
    said = capsys.readouterr().out
    assert "the teacher's answers take" in said and max(map(len, said.splitlines())) < 200
    with pytest.raises(RecipeError, match="teacher_cache: .* belongs to seed 0, not 1"):
        dry_run(recipe, [f"teacher_cache={answers}", "seed=1"])
    with pytest.raises(CheckpointError, match="nowhere holds no cache.json"):
        dry_run(recipe, [f"teacher_cache={tmp_path / 'nowhere'}"])
