"""Slices of every family load in a fresh process, offline, by transformers alone; no code of the source comes along or runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bytes_tokenizer import write_tokenizer
from family_cut import CASES
from tiny import FAMILIES, tokens

from star_elastic.checkpoint.companions import copy_companions
from star_elastic.cli import main
from star_elastic.errors import CheckpointError
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import Submodel
from star_elastic.verify import verify_folder

CASE_OF = {case.family: name for name, case in reversed(CASES.items())}
"""Family -> its first case."""

CODE = "raise SystemExit('code of the model ran')\n"

LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ids = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        torch.save(model.eval()(ids).logits, f"{folder}/logits.pt")
    told = {"class": type(model).__name__, "faults": [name for name, found in info.items() if found]}
    told["ids"] = AutoTokenizer.from_pretrained(folder)("elastic")["input_ids"]
    print(json.dumps(told))
assert not any(name.startswith("star_elastic") for name in sys.modules)
"""


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def with_code(folder: Path) -> None:
    """Say in a folder that config, model and tokenizer want its own code, and put that code there."""
    write_tokenizer(folder)
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_json(folder / "config.json", auto_map=names)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]})
    for name in ("configuration", "modeling", "tokenization"):
        (folder / f"{name}_own.py").write_text(CODE)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every family a parent with code of its own, and a slice of it."""
    home = tmp_path_factory.mktemp("load")
    for family, case in CASE_OF.items():
        CASES[case].parent().save_pretrained(home / family)
        with_code(home / family)
        widths, layers = CASES[case].cuts()["all and depth"]
        slice_checkpoint(home / family, home / f"{family}-out", Submodel(widths=widths, layers=layers))
    return home


@pytest.fixture(scope="module")
def loaded(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one fresh process says of all slices, each moved to where nothing but itself is."""
    away = tmp_path_factory.mktemp("away")
    folders = [shutil.copytree(home / f"{family}-out", away / family) for family in FAMILIES]
    torch.save(tokens(), away / "ids.pt")
    nobody = "http://127.0.0.1:9"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": nobody, "HF_HOME": str(away / "cache")}
    environment.pop("PYTHONPATH", None)
    words = [sys.executable, "-c", LOAD, str(away / "ids.pt"), *map(str, folders)]
    done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=away)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    logits = [torch.load(folder / "logits.pt") for folder in folders]
    return {family: {**one, "logits": out} for family, one, out in zip(FAMILIES, told, logits, strict=True)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slice_loads_offline_in_a_fresh_process(family: str, home: Path, loaded: dict[str, dict[str, Any]]) -> None:
    case = CASES[CASE_OF[family]]
    parent = case.parent()
    child = case.child(parent, case.cuts()["all and depth"])
    assert loaded[family]["class"] == type(child).__name__ and loaded[family]["faults"] == []
    assert loaded[family]["ids"] == [3 + ord(letter) - 33 for letter in "elastic"]
    with torch.no_grad():
        torch.testing.assert_close(loaded[family]["logits"], child(tokens()).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_points_to_code_that_stays_behind(family: str, home: Path) -> None:
    out = home / f"{family}-out"
    for name in ("config.json", "tokenizer_config.json"):
        before, after = (json.loads((folder / name).read_text()) for folder in (home / family, out))
        assert "auto_map" in before and "auto_map" not in after
    before.pop("auto_map")
    assert after == before
    assert list(out.rglob("*.py")) == [] and verify_folder(out).ok


def test_a_tokenizer_config_without_code_is_copied_byte_for_byte(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    content = b'{"tokenizer_class":\t"T",  "text": "na\xc3\xafve"}'
    (source / "tokenizer_config.json").write_bytes(content)
    assert copy_companions(source, target) == ["tokenizer_config.json"]
    assert (target / "tokenizer_config.json").read_bytes() == content
    (source / "tokenizer_config.json").write_bytes(content[:-1] + b', "auto_map": {"AutoTokenizer": [null, "a.T"]}}')
    copy_companions(source, target)
    assert (target / "tokenizer_config.json").read_text() == '{\n  "tokenizer_class": "T",\n  "text": "naïve"\n}\n'
    (source / "tokenizer_config.json").write_bytes(b'{"auto_map": ')
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json cannot be read as JSON"):
        copy_companions(source, target)


@pytest.mark.parametrize(
    ("auto_map", "missing"),
    [
        ({"AutoTokenizer": ["own.T", None]}, "own.py"),
        ({"AutoTokenizer": [None, "here.T"]}, ""),
        ({"AutoTokenizer": ["here.T", "own.U"], "AutoProcessor": "other.P"}, "other.py, own.py"),
        (["own.T", None], "own.py"),  # as older writers had it
        ({"AutoTokenizer": ["org/model--here.T", None]}, "org/model--here.py"),
        (None, ""),
    ],
)
def test_verify_names_code_that_is_missing(auto_map: Any, missing: str, home: Path, tmp_path: Path) -> None:
    out = shutil.copytree(home / "llama-out", tmp_path / "out")
    (out / "here.py").write_text(CODE)
    edit_json(out / "tokenizer_config.json", auto_map=auto_map)
    faults = [str(fault) for fault in verify_folder(out).faults]
    said = "tokenizer_config.json: auto_map: expected none, or code that is in the folder, found {}, which is not here"
    assert faults == ([said.format(missing)] if missing else [])


def test_verify_names_code_of_the_model(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shutil.copytree(home / "llama-out", tmp_path / "out")
    edit_json(out / "config.json", auto_map={"AutoConfig": "here.C", "AutoModel": "own.M"})
    (out / "here.py").write_text(CODE)
    (out / "tokenizer_config.json").write_text("[")
    assert main(["verify", str(out)]) == 1
    said = capsys.readouterr().out
    assert "FAILED   config: config.json: auto_map: expected none: native classes load it, found {'AutoConfig'" in said
    assert "'own.M'}, of which own.py is not here" in said
    assert "FAILED   config: tokenizer_config.json: expected a JSON object, found " in said
