"""Slices whose layers differ, on the command line; and what is said of widths per layer that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bytes_tokenizer import write_tokenizer
from tiny import tiny_folder

from star_elastic.cli import main
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError, ElasticError, UnknownNameError, WidthError
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import ElasticConfig, Submodel

SMALL = Submodel(widths={"hidden": 32}, layer_widths={"expert_ffn": {1: 20, 4: 24}, "mamba_heads": {0: 2, 3: 8}})


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp("models") / "elastic", bos_token_id=1, eos_token_id=2, pad_token_id=0)
    write_tokenizer(folder)
    ElasticConfig(family="nemotron_h", submodels={"small": SMALL}).save(folder)
    return folder


@pytest.fixture(scope="module")
def sliced(elastic: Path) -> Path:
    slice_checkpoint(elastic, elastic.with_name("small"), SMALL)
    return elastic.with_name("small")


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_slice_says_plainly_how_to_load_it(elastic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("slice", elastic, tmp_path / "out", "--to", "small") == 0
    said = capsys.readouterr().out
    assert "expert_ffn 32 -> 20 in layer 1; 24 in layer 4" in said
    assert "not with transformers alone" in said
    card = (tmp_path / "out" / "README.md").read_text()
    assert "ElasticModel.from_pretrained" in card
    assert "AutoModelForCausalLM" not in card
    assert "| expert_ffn | 20..24 | 32 |" in card
    own = json.loads((tmp_path / "out" / "elastic.json").read_text())
    assert own["own_widths"]["mamba_heads"] == {"0": 2, "3": 8}
    assert own["provenance"] == {"parent": "elastic", "submodel": "small"}


def test_inspect_shows_both_folders(elastic: Path, sliced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", elastic) == 0
    assert "small: expert_ffn 20 in layer 1; 24 in layer 4" in capsys.readouterr().out
    assert run("inspect", sliced) == 0
    assert "expert_ffn: 20 in layer 1; 24 in layer 4" in capsys.readouterr().out
    shown = {}
    for name, folder in (("small", elastic), ("full", sliced)):
        assert run("inspect", folder, "--json") == 0
        shown[name] = json.loads(capsys.readouterr().out)["submodels"][name]
    numbers = ("params", "active_params", "bytes", "kv_bytes_per_token", "state_bytes_per_sequence")
    assert [shown["small"][number] for number in numbers] == [shown["full"][number] for number in numbers]
    assert shown["small"]["layer_widths"]["mamba_heads"] == {"0": 2, "3": 8}


def test_generate_writes_the_same_from_both_folders(
    elastic: Path, sliced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prompt", "ab+cd=", "--max-new-tokens", 8)
    assert run("generate", elastic, *options, "--submodel", "small") == 0
    wanted = capsys.readouterr().out
    assert run("generate", sliced, *options) == 0
    assert capsys.readouterr().out == wanted


@pytest.mark.parametrize("verb", ["slice", "sort"])
def test_such_a_slice_is_not_rearranged(
    verb: str, sliced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--width", "hidden=16") if verb == "slice" else ("--scores", tmp_path)
    assert run(verb, sliced, tmp_path / "out", *options) == 2
    said = capsys.readouterr().err.strip()
    assert "layers differ in mamba_heads, expert_ffn" in said
    assert len(said.splitlines()) == 1
    with pytest.raises(CheckpointError, match="layers differ in"):
        slice_checkpoint(sliced, tmp_path / "out", Submodel())


def test_such_a_slice_takes_no_nested_models_and_no_unknown_options(sliced: Path) -> None:
    model = ElasticModel.from_pretrained(sliced)
    for cut in (Submodel(widths={"hidden": 16}), Submodel(layers=(0, 1, 2))):
        with pytest.raises(WidthError, match="cut the checkpoint that it was cut from"):
            model.add("smaller", cut)
    with pytest.raises(ElasticError, match="loads without 'device_map'"):
        ElasticModel.from_pretrained(sliced, device_map="auto")


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden": {0: 32}}, WidthError, "hidden is one axis for the whole model: give one width, not one for layer 0"),
    ({"depth": {0: 3}}, WidthError, "depth is one axis for the whole model"),
    ({"ffm": {0: 32}}, UnknownNameError, "this model has no axis 'ffm'"),
    ({"expert_ffn": {0: 16}}, WidthError, "layer 0 has no expert_ffn; layers that have: 1, 4"),
    ({"expert_ffn": {9: 16}}, WidthError, "layer 9 has no expert_ffn"),
    ({"expert_ffn": {1: 18}}, WidthError, "layer 1: expert_ffn width 18 is illegal: .*nearest legal: 16 and 20"),
    ({"mamba_heads": {0: 3}}, WidthError, "layer 0: mamba_heads width 3 is illegal: .*nearest legal: 2 and 4"),
]


@pytest.mark.parametrize(("own", "error", "message"), MISTAKES)
def test_impossible_widths_are_refused_in_one_line(
    own: dict[str, Any], error: type[Exception], message: str, elastic: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        slice_checkpoint(elastic, elastic.with_name("never"), Submodel(layer_widths=own))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"expert_ffn": {"1": 18, "4": 24}}, "own_widths: layer 1: expert_ffn width 18 is illegal"),
        ({"expert_ffn": {"one": 20}}, "own_widths.expert_ffn.one"),
        ({"expert_ffn": {"01": 20}}, "own_widths.expert_ffn.01"),
        ({"expert_ffn": {"1": 16, "4": 24}}, "shape"),
    ],
)
def test_damaged_own_widths_are_refused(own: dict[str, Any], message: str, sliced: Path, tmp_path: Path) -> None:
    for file in sliced.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((sliced / "elastic.json").read_text())
    content["own_widths"].update(own)
    (tmp_path / "elastic.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message) as caught:
        ElasticModel.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_its_elastic_json_nothing_loads_the_slice(sliced: Path, tmp_path: Path) -> None:
    for file in sliced.iterdir():
        if file.name != "elastic.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="has shape"):
        ElasticModel.from_pretrained(tmp_path)
