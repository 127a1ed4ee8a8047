"""elastic.json and what is told of it; folders that no weights need to be read of to be refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from tiny import tiny_folder, tiny_model
from transformers import AutoModelForCausalLM

from star_elastic.cli import main
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError, ReservedNameError, nearest
from star_elastic.submodel import ElasticConfig, Submodel, open_elastic, read_json

GOOD: dict[str, Any] = {"format_version": 1, "family": "nemotron_h", "submodels": {"small": {"widths": {"hidden": 32}}}}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "parent")


def folder_with(parent: Path, tmp_path: Path, elastic: str | None = None, **config: Any) -> Path:
    """A copy of the parent (weights by link) with another elastic.json or other config fields."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(parent / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**read_json(parent / "config.json"), **config}))
    if elastic is not None:
        (folder / "elastic.json").write_text(elastic)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 3}, "format_version 3; this version of star-elastic reads 1 and 2"),
        ({"format_version": True}, "format_version True"),
        ({"format_version": 1.0}, "format_version 1.0"),
        ({"family": "llama"}, "is for family 'llama', config.json for 'nemotron_h'"),
        ({"submodel": {}}, "unknown field 'submodel': did you mean 'submodels'?"),
        ({"submodels": {"a": {"width": {}}}}, "unknown field 'submodels.a.width': did you mean 'widths'?"),
        (
            {"submodels": {"a": {"widths": {"hidden": "32"}}}},
            "submodels.a.widths.hidden: Input should be a valid integer",
        ),
        ({"submodels": {"a": {"widths": {"hidden": 33}}}}, "submodel 'a': hidden width 33 is illegal"),
        ({"submodels": {"a": {"widths": {"hiden": 32}}}}, "did you mean 'hidden'?"),
        ({"submodels": {"full": {"widths": {"hidden": 32}}}}, "'full' always means the whole model"),
        ({"submodels": {" ": {"widths": {}}}}, "a submodel needs a name"),
        ({"sorted_axes": ["foo"]}, "sorted_axes names 'foo'"),
        ({"sorted_axes": ["hidden", "hidden"]}, "sorted_axes names 'hidden' twice"),
        ({"depth_order": [0, 0, 9]}, "depth_order must hold each layer from 0 to 4 once, not [0, 0, 9]"),
    ],
)
def test_a_wrong_elastic_json_is_refused_in_one_line(
    change: dict[str, Any], message: str, parent: Path, tmp_path: Path
) -> None:
    folder = folder_with(parent, tmp_path, json.dumps({**GOOD, **change}))
    with pytest.raises(CheckpointError) as caught:
        open_elastic(folder)
    assert message in str(caught.value) and "elastic.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"submodels": {"a": {"widths": {"hidden": 32, "hidden": 48}}}}', "gives 'hidden' twice"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "must hold a JSON object, not list"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_what_is_no_clear_json_is_refused(text: str, message: str, parent: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_elastic(folder_with(parent, tmp_path, text))


def test_full_cannot_get_another_meaning_in_memory_either(parent: Path) -> None:
    elastic = ElasticModel(tiny_model())
    with pytest.raises(ReservedNameError, match="'full' always means the whole model"):
        elastic.add("full", Submodel(widths={"hidden": 32}))
    elastic.add("full", Submodel(widths={"hidden": 64}))
    with pytest.raises(ReservedNameError):
        open_elastic(parent, submodels={"full": Submodel(widths={"hidden": 32})})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized (fp8)"),
        ({"quantization_config": "odd"}, "quantization_config must be an object, not 'odd'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is larger than n_routed_experts 8"),
        ({"topk_group": 2}, "topk_group 2 is larger than n_group 1"),
        ({"chunk_size": 0}, "chunk_size must be a positive whole number, not 0"),
        ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon must be a number, not 'x'"),
        ({"layers_block_type": [{"a": 1}]}, "layer 0 is {'a': 1}"),
    ],
)
@pytest.mark.parametrize("verb", ["slice", "generate"])
def test_a_folder_that_cannot_run_is_refused_before_work(
    config: dict[str, Any], message: str, verb: str, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = folder_with(parent, tmp_path, **config), tmp_path / "out"
    words = {"slice": [str(out), "--width", "hidden=32"], "generate": ["--prompt", "hi"]}[verb]
    assert main([verb, str(folder), *words]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1 and not out.exists()


def test_what_only_transformers_refuses_is_one_line_too(parent: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be loaded by transformers: KeyError") as caught:
        ElasticModel.from_pretrained(folder_with(parent, tmp_path, mlp_hidden_act="foo"))
    assert "\n" not in str(caught.value)


def test_a_saved_elastic_model_carries_the_pattern_for_other_readers(tmp_path: Path) -> None:
    elastic = ElasticModel(tiny_model(pattern="ME*-E"))
    elastic.save_pretrained(tmp_path / "saved")
    config = read_json(tmp_path / "saved" / "config.json")
    assert config["hybrid_override_pattern"] == "ME*-E" and config["num_hidden_layers"] == 5
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())


def test_slicing_an_unsorted_parent_says_so_and_a_sorted_one_does_not(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "out"), "--width", "hidden=32", "--width", "heads=4", "--dry-run"]
    assert main(["slice", str(parent), *words]) == 0
    assert "note: not sorted along hidden, heads" in capsys.readouterr().out
    sorted_one = json.dumps({**GOOD, "sorted_axes": ["hidden", "heads"]})
    assert main(["slice", str(folder_with(parent, tmp_path, sorted_one)), *words]) == 0
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("word", ["hidden=" + "9" * 5000, "hidden=٣٢"])
def test_numbers_that_are_none_are_refused(
    word: str, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slice", str(parent), str(tmp_path / "out"), "--width", word]) == 2
    assert "want AXIS=N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--prompt", "a\udcff"], "is not UTF-8 text"), (["--prompt", "a", "--seed", str(2**70)], "--seed")],
)
def test_prompts_and_seeds_that_are_none_are_refused(
    words: list[str], message: str, parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(parent), *words]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_scores_without_a_tensor_are_refused(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({}, tmp_path / "scores.safetensors")
    scores = str(tmp_path / "scores.safetensors")
    assert main(["sort", str(parent), str(tmp_path / "out"), "--scores", scores]) == 2
    assert "holds no scores" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_long_lists_of_names_are_capped() -> None:
    assert nearest("layer.1", [f"layers.{n}" for n in range(100)]).endswith("... (100 in all)")


def test_sigterm_in_mid_write_cleans_up_and_is_one_line(parent: Path, tmp_path: Path) -> None:
    """A real process, stopped while it waits inside a write."""
    code = f"""
import sys, time
from star_elastic.checkpoint import writer
import star_elastic.cli as cli
def waiting(*a):
    print("writing", flush=True); time.sleep(60)
writer.WeightFiles.write = waiting
sys.argv = ["star-elastic", "slice", {str(parent)!r}, {str(tmp_path / "out")!r}, "--width", "hidden=32"]
sys.exit(cli.main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "writing" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2 and told.startswith("error: interrupted") and told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == []


def test_elastic_json_survives_a_round_trip(tmp_path: Path) -> None:
    config = ElasticConfig(
        family="nemotron_h",
        submodels={"small": Submodel(widths={"hidden": 32}, layers=(0, 2))},
        sorted_axes=("hidden",),
        depth_order=(2, 0, 1, 3, 4),
        provenance={"parent": "p"},
    )
    config.save(tmp_path)
    assert ElasticConfig.load(tmp_path) == config
