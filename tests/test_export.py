"""GGUF export: the converter is found, run in a process of its own, and its file appears whole or not at all.

The converters here are small scripts; ``tests/engines`` runs llama.cpp's own.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from quantized import quantized_folder
from safetensors.torch import load_file
from tiny import tiny_folder

from star_elastic import Submodel, slice_checkpoint
from star_elastic.cli import main
from star_elastic.errors import CheckpointError, TargetError
from star_elastic.export import export_gguf
from star_elastic.llama_cpp import SCRIPT, ConverterError, find_converter
from star_elastic.units import format_bytes
from star_elastic.verify import verify_folder

SRC = Path(__file__).parents[1] / "src"
WRITES = """
import sys
arguments = sys.argv[1:]
out = arguments[arguments.index("--outfile") + 1]
open(out, "w").write(" ".join([arguments[0], arguments[arguments.index("--outtype") + 1]]))
"""
FAILS = WRITES + "print('INFO: loading'); print('KeyError: no such architecture', file=sys.stderr); sys.exit(1)"
SILENT = "print('nothing to do')"
HANGS = WRITES + "import time; time.sleep(60)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("export") / "model")


@pytest.fixture(autouse=True)
def no_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has is not found."""
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def converter(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / SCRIPT).write_text(f"#!{sys.executable}\n{text}")
    (folder / SCRIPT).chmod(0o755)
    return folder


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_file_is_what_the_converter_wrote(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "out"
    home.mkdir()
    written = export_gguf(model, home / "m.gguf", kind="q8_0", converter=converter(tmp_path / "llama", WRITES))
    assert written.read_text() == f"{model} q8_0" and left(home) == {"m.gguf"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FAILS, "refuses the folder: KeyError: no such architecture"),
        ("import no_such_package", "No module named 'no_such_package'; install llama.cpp's requirements"),
        (SILENT, "wrote no file: nothing to do"),
    ],
)
def test_a_failure_leaves_nothing_and_says_why(
    text: str, said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "out"
    home.mkdir()
    script = converter(tmp_path / "llama", text) / SCRIPT
    assert main(["export", str(model), "--gguf", str(home / "m.gguf"), "--converter", str(script)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and said in error
    assert left(home) == set()


def test_an_interrupt_ends_the_converter_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "out"
    home.mkdir()
    script = converter(tmp_path / "llama", HANGS) / SCRIPT
    command = [sys.executable, "-m", "star_elastic", "export", str(model), "--gguf", str(home / "m.gguf")]
    process = subprocess.Popen(
        [*command, "--converter", str(script)], env={"PYTHONPATH": str(SRC)}, stderr=subprocess.PIPE, text=True
    )
    while not list(home.glob(".*/m.gguf")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.communicate()[1] and process.returncode == 2
    assert left(home) == set()


def test_another_python_runs_it(model: Path, tmp_path: Path) -> None:
    llama = converter(tmp_path / "llama", "import sys; sys.exit('no')")
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; open(sys.argv[4], chr(119))' \"$@\"\n")
    other.chmod(0o755)
    assert export_gguf(model, tmp_path / "m.gguf", converter=llama, python=other).exists()
    with pytest.raises(ConverterError, match="--python nowhere is no program"):
        export_gguf(model, tmp_path / "n.gguf", converter=llama, python="nowhere")


def test_where_the_converter_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConverterError, match="is not on PATH: git clone https://github.com/ggml-org/llama.cpp"):
        find_converter()
    on_path = converter(tmp_path / "bin", WRITES)
    assert find_converter() == on_path / SCRIPT
    in_variable = converter(tmp_path / "variable", WRITES)
    monkeypatch.setenv("LLAMA_CPP", str(in_variable))
    assert find_converter() == in_variable / SCRIPT
    given = converter(tmp_path / "given", WRITES)
    assert find_converter(given) == find_converter(given / SCRIPT) == given / SCRIPT
    with pytest.raises(ConverterError, match="--converter is nowhere, where there is no convert_hf_to_gguf.py"):
        find_converter("nowhere")
    monkeypatch.setenv("LLAMA_CPP", "nowhere")
    with pytest.raises(ConverterError, match="LLAMA_CPP is nowhere"):
        find_converter()


def test_what_is_refused_before_the_converter_runs(model: Path, tmp_path: Path) -> None:
    llama = converter(tmp_path / "llama", FAILS)
    with pytest.raises(ConverterError, match="unknown type 'Q8' of a GGUF file: did you mean 'Q8_0'"):
        export_gguf(model, tmp_path / "m.gguf", kind="Q8", converter=llama)
    with pytest.raises(CheckpointError, match="does not exist"):
        export_gguf(tmp_path / "nowhere", tmp_path / "m.gguf", converter=llama)
    (tmp_path / "there.gguf").touch()
    with pytest.raises(TargetError, match="exists: choose another name"):
        export_gguf(model, tmp_path / "there.gguf", converter=llama)
    with pytest.raises(TargetError, match="there is no folder"):
        export_gguf(model, tmp_path / "no" / "m.gguf", converter=llama)
    code = shutil.copytree(model, tmp_path / "code")
    (code / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.T", None]}}))
    with pytest.raises(CheckpointError, match="would run code that comes with the model"):
        export_gguf(code, tmp_path / "m.gguf", converter=llama)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
@pytest.mark.parametrize("where", ["section", "sidecar"])
def test_quantized_folders_are_refused(
    form: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantized_folder(tmp_path / "model", form, section=where == "section", sidecar=where == "sidecar")
    llama = converter(tmp_path / "llama", WRITES)
    capsys.readouterr()
    assert main(["export", str(folder), "--gguf", str(tmp_path / "m.gguf"), "--converter", str(llama)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and f"model is quantized ({form.upper()} by ModelOpt)" in error
    assert not list(tmp_path.glob("*.gguf"))


def test_models_that_llama_cpp_does_not_run_are_refused(tmp_path: Path) -> None:
    llama, out = converter(tmp_path / "llama", WRITES), tmp_path / "m.gguf"
    both = tiny_folder(tmp_path / "both", pattern="ME*-")
    with pytest.raises(ConverterError, match="both cannot become a GGUF file: llama.cpp has no architecture with exp"):
        export_gguf(both, out, converter=llama, python=sys.executable)
    dense = tiny_folder(tmp_path / "dense", pattern="M*-")
    with pytest.raises(ConverterError, match="without experts.*: give a --python that has transformers 4"):
        export_gguf(dense, out, converter=llama)
    assert export_gguf(dense, out, converter=llama, python=sys.executable).exists()


def test_families_without_a_table_are_the_converters_business(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    assert export_gguf(folder, tmp_path / "m.gguf", converter=converter(tmp_path / "llama", WRITES)).exists()


def test_the_disk_is_looked_at_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = 200_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(0, 0, free))
    tensors = [t for file in model.glob("*.safetensors") for t in load_file(file).values()]
    bf16 = sum(t.numel() * (2 if t.ndim > 1 else 4) for t in tensors)
    assert bf16 > free
    llama = converter(tmp_path / "llama", FAILS)
    words = ["export", str(model), "--gguf", str(tmp_path / "m.gguf"), "--converter", str(llama)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"m.gguf: needs {format_bytes(bf16)}, {format_bytes(free)} are free" in said and len(said.splitlines()) == 1
    free = bf16
    assert main(words) == 2 and "KeyError: no such architecture" in capsys.readouterr().err


def test_a_slice_without_experts_does_not_speak_of_them(tmp_path: Path) -> None:
    """llama.cpp takes a top-k, which transformers always writes, as a sign of experts."""
    parent = tiny_folder(tmp_path / "parent", pattern="M*-")
    told = {"num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group", "topk_group"}
    assert told <= json.loads((parent / "config.json").read_text()).keys()
    slice_checkpoint(parent, tmp_path / "out", Submodel(widths={"hidden": 48}))
    assert not told & json.loads((tmp_path / "out" / "config.json").read_text()).keys()
    report = verify_folder(tmp_path / "out", against=parent, forward=True)
    assert report.ok, report.faults
