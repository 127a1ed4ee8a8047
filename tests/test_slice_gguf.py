"""``slice --gguf``: a GGUF file beside each slice, and every reason against it before the first tensor is cut."""

from __future__ import annotations

import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from quantized import quantized_folder
from safetensors.torch import load_file
from test_export import SCRIPT, WRITES, converter
from tiny import tiny_folder

from star_elastic import Submodel, slice_checkpoint
from star_elastic.cli import main
from star_elastic.slice_gguf import file_beside
from star_elastic.submodel import ElasticConfig
from star_elastic.units import format_bytes

SIZES = {"mid": {"hidden": 48}, "small": {"hidden": 32}}
HELPS = "import sys\nif '--help' in sys.argv: sys.exit()\n"
GOOD = HELPS + WRITES
REFUSES = HELPS + "sys.exit('KeyError: no such architecture')"
NEEDS = "import no_such_package"


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family of two sizes, in the current folder; no converter is found but those that a test makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    folder = tiny_folder(tmp_path / "parent", pattern="ME*")
    ElasticConfig(family="nemotron_h", submodels={n: Submodel(widths=w) for n, w in SIZES.items()}).save(folder)
    return folder


def there(folder: Path) -> set[str]:
    """Names in a folder, hidden ones too, but for what the fixtures made."""
    return {path.name for path in folder.iterdir()} - {"parent", "llama", "dry"}


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    """The one line with which a command is refused; nothing is written."""
    before = there(folder)
    capsys.readouterr()
    assert main(["slice", *words]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and there(folder) == before
    return error


def test_one_size(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama = converter(tmp_path / "llama", GOOD)
    words = ["parent", "out", "--to", "small", "--gguf", "--type", "q8_0", "--converter", str(llama)]
    assert main(["slice", *words, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "dry run: out and out.gguf were not written"
    assert there(tmp_path) == set()
    assert main(["slice", *words]) == 0
    assert there(tmp_path) == {"out", "out.gguf"}
    assert Path("out.gguf").read_text() == f"{tmp_path / 'out'} q8_0"
    lines = capsys.readouterr().out.splitlines()
    assert f"wrote out.gguf: {format_bytes(Path('out.gguf').stat().st_size)}" in lines
    assert "run in llama.cpp: llama-cli -m out.gguf -p Hello" in lines
    assert "run in Ollama, then: echo FROM ./out.gguf > Modelfile && ollama create out -f Modelfile" in lines


def test_several_sizes(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(converter(tmp_path / "llama", GOOD)))
    assert main(["slice", "parent", "sizes", "--to", "small", "--to", "mid", "--gguf"]) == 0
    assert there(tmp_path / "sizes") == {"mid", "mid.gguf", "small", "small.gguf"}
    for name in SIZES:
        assert Path(f"sizes/{name}.gguf").read_text() == f"{tmp_path / 'sizes' / name} bf16"


def test_without_a_converter_nothing_is_cut(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, tmp_path, "parent", "out", "--to", "small", "--gguf")
    assert "is not on PATH: git clone https://github.com/ggml-org/llama.cpp, then set LLAMA_CPP" in error


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_converter_that_does_not_run_is_found_out_first(
    dry_run: bool, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = converter(tmp_path / "llama", NEEDS)
    words = ["parent", "out", "--to", "small", "--gguf", "--converter", str(llama), *(["--dry-run"] if dry_run else [])]
    error = refused(capsys, tmp_path, *words)
    assert f"{llama / SCRIPT} does not run: ModuleNotFoundError: No module named 'no_such_package'; install" in error


def test_a_folder_that_the_converter_refuses_stays(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = converter(tmp_path / "llama", REFUSES)
    capsys.readouterr()
    assert main(["slice", "parent", "out", "--to", "small", "--gguf", "--converter", str(llama)]) == 2
    error = capsys.readouterr().err
    assert "refuses the folder: KeyError: no such architecture; the slice out itself is finished" in error
    assert there(tmp_path) == {"out"}
    slice_checkpoint("parent", "wanted", Submodel(widths=SIZES["small"]))
    assert Path("out/model.safetensors").read_bytes() == Path("wanted/model.safetensors").read_bytes()


def test_what_cannot_be_a_gguf_file_is_not_cut(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = ["--width", "hidden=32", "--gguf", "--converter", str(converter(tmp_path / "llama", GOOD))]
    tiny_folder(tmp_path / "both", pattern="ME*-")
    assert "out cannot become a GGUF file: llama.cpp has no" in refused(capsys, tmp_path, "both", "out", *end)
    quantized_folder(tmp_path / "nvfp4", "nvfp4")
    assert "out is quantized (NVFP4 by ModelOpt)" in refused(capsys, tmp_path, "nvfp4", "out", *end)
    own = Submodel(layer_widths={"expert_ffn": {1: 16}})
    ElasticConfig(family="nemotron_h", submodels={"own": own}).save(tiny_folder(tmp_path / "per", pattern="ME*ME"))
    error = refused(capsys, tmp_path, "per", "out", "--to", "own", *end[2:])
    assert "out is a slice whose layers differ in expert_ffn: no GGUF file can say that" in error


def test_what_stays_of_a_model_is_what_llama_cpp_is_asked_about(parent: Path, tmp_path: Path) -> None:
    tiny_folder(tmp_path / "both", pattern="ME*-")
    llama = converter(tmp_path / "llama", GOOD)
    assert main(["slice", "both", "out", "--layers", "0,1,2", "--gguf", "--converter", str(llama)]) == 0
    assert Path("out.gguf").exists()


def test_files_that_are_there_stay(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = ["--gguf", "--converter", str(converter(tmp_path / "llama", GOOD))]
    Path("out.gguf").write_text("mine")
    assert "target out.gguf exists" in refused(capsys, tmp_path, "parent", "out", "--to", "small", *end)
    names = {"a": Submodel(widths={"hidden": 32}), "a.gguf": Submodel(widths={"hidden": 48})}
    ElasticConfig(family="nemotron_h", submodels=names).save(parent)
    error = refused(capsys, tmp_path, "parent", "sizes", "--to", "a", "--to", "a.gguf", *end)
    assert "target sizes/a.gguf exists" in error and Path("out.gguf").read_text() == "mine"


def test_room_for_both_is_wanted_beforehand(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slice_checkpoint(parent, tmp_path / "dry", Submodel(widths=SIZES["small"]))
    tensors = load_file(tmp_path / "dry" / "model.safetensors").values()
    both = sum(t.nbytes + t.numel() * (2 if t.ndim > 1 else 4) for t in tensors)
    free = both - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(0, 0, free))
    words = ["parent", "out", "--to", "small", "--gguf", "--converter", str(converter(tmp_path / "llama", GOOD))]
    error = refused(capsys, tmp_path, *words)
    assert f"needs {format_bytes(both)}, {format_bytes(free)} are free" in error
    assert f"{tmp_path / 'out'} and {tmp_path / 'out.gguf'}: " in error
    free = both
    assert main(["slice", *words]) == 0


@pytest.mark.parametrize("words", [["--type", "F16"], ["--converter", "x"], ["--python", sys.executable]])
def test_options_that_go_with_it(
    words: list[str], parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, tmp_path, "parent", "out", "--to", "small", *words)
    assert f"{words[0]} {words[1]} means nothing without --gguf" in error


def test_names_beside() -> None:
    assert [str(file_beside(Path(name))) for name in ("a", "x/a.b", "/a")] == ["a.gguf", "x/a.b.gguf", "/a.gguf"]
    assert file_beside(Path()) == Path.cwd().with_name(f"{Path.cwd().name}.gguf")
