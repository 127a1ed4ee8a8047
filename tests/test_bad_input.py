"""Bad input through the command line: one line on stderr that names the fault, exit code 2, nothing written."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import tiny_folder

from star_elastic.checkpoint import check_target
from star_elastic.cli import main
from star_elastic.errors import TargetError

CUT = ["--width", "hidden=48"]


def rewrite(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def drop_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def truncate(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda content: content[:-100])


def flip_header(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda content: content[:200] + bytes([content[200] ^ 64]) + content[201:])


def flip_length(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda content: bytes([content[0] ^ 128]) + content[1:])


def lose_a_shard(folder: Path) -> None:
    drop_weights(folder)
    tiny_folder(folder, sharded=True)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def other_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 36}))


def other_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))


def bad_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def bad_elastic(folder: Path) -> None:
    (folder / "elastic.json").write_text('{"format_version": 99}')


def config_with(text: str) -> Callable[[Path], object]:
    """Put a further field, given as JSON text, into config.json."""

    def spoil(folder: Path) -> None:
        rewrite(folder / "config.json", lambda content: content.rstrip()[:-1] + f', "extra": {text}}}'.encode())

    return spoil


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing folder": (shutil.rmtree, "does not exist"),
    "no weights": (drop_weights, "holds no weights"),
    "truncated": (truncate, "is not a whole safetensors file"),
    "bit-flipped header": (flip_header, "model"),
    "bit-flipped length": (flip_length, "is not a whole safetensors file"),
    "missing shard": (lose_a_shard, "names a missing shard: model-00002-of-"),
    "shape against config": (other_shapes, "has shape [64, 32]; config.json says [64, 36]"),
    "unknown family": (other_family, "model_type 'lama' is not a family"),
    "config is no JSON": (bad_config, "cannot be read as JSON"),
    "config of thousands of digits": (config_with("7" * 5000), "cannot be read as JSON"),
    "config nested deeply": (config_with("[" * 200 + "]" * 200), "it is nested too deeply"),
    "config with half a character": (config_with(r'"\ud800"'), "holds half of a surrogate pair"),
    "elastic.json of the future": (bad_elastic, "format_version 99"),
}

WORDS = {
    "unknown submodel": (["--to", "smal"], "no submodel 'smal'"),
    "unknown axis": (["--width", "hiden=48"], "no axis 'hiden': did you mean 'hidden'"),
    "illegal width": (["--width", "hidden=50"], "hidden width 50 is illegal"),
    "query heads": (["--width", "heads=3"], "heads width 3 is illegal"),
    "unknown preset": (["--to", "12b", "--preset", "nemotron"], "no preset 'nemotron'"),
    "other preset": (["--to", "12b", "--preset", "nemotron-3-nano-30b-a3b"], "does not have the shapes of preset"),
}


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "parent")


def check_refused(words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and message in said.err
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("verb", ["slice", "sort"])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_source(
    verb: str, fault: str, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = BROKEN[fault]
    spoil(parent)
    save_file({"hidden": np.ones(64, np.float32)}, tmp_path / "scores.safetensors")
    rest = CUT if verb == "slice" else ["--scores", str(tmp_path / "scores.safetensors")]
    check_refused([verb, str(parent), str(tmp_path / "out"), *rest], message, tmp_path, capsys)


@pytest.mark.parametrize("fault", WORDS)
def test_an_impossible_size(fault: str, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WORDS[fault]
    check_refused(["slice", str(parent), str(tmp_path / "out"), *words], message, tmp_path, capsys)


def test_targets(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = {
        "full": "exists and is not empty",
        "parent/inside": "lies inside the source",
        "parent": "is the source itself",
    }
    for out, message in cases.items():
        check_refused(["slice", str(parent), str(tmp_path / out), *CUT], message, tmp_path, capsys)


def test_a_full_disk(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from star_elastic.checkpoint import writer

    original = writer.write_at
    with Path("/dev/full").open("wb") as full:
        monkeypatch.setattr(writer, "write_at", lambda file, *rest: original(full.fileno(), *rest))
        check_refused(["slice", str(parent), str(tmp_path / "out"), *CUT], "No space left on device", tmp_path, capsys)


def test_a_dry_run_checks_the_disk_too(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    words = ["slice", str(parent), str(tmp_path / "out"), *CUT, "--dry-run"]
    check_refused(words, "not enough space for ", tmp_path, capsys)


def test_links_in_a_circle(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for source, out in ((parent, tmp_path / "circle"), (tmp_path / "circle", tmp_path / "out")):
        check_refused(["slice", str(source), str(out), *CUT], "is no path that can be followed", tmp_path, capsys)
    with pytest.raises(TargetError, match="null byte"):
        check_target(tmp_path / "a\0b")


def test_a_folder_that_may_not_be_read(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is renamed into it could not be synced: the folder would be there in spite of an error.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.R_OK)
    check_refused(["slice", str(parent), str(tmp_path / "out"), *CUT], "is not readable", tmp_path, capsys)


def test_a_source_that_is_neither_folder_nor_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("gpt2", "a/b/c", "https://huggingface.co/org/name", "org/name@"):
        message = "is no name of the hub: want org/name or org/name@revision"
        check_refused(["slice", source, str(tmp_path / "out"), *CUT], message, tmp_path, capsys)


def test_scores_that_are_not_there(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sort", str(parent), str(tmp_path / "out"), "--scores", str(tmp_path / "nowhere")]
    check_refused(words, "nowhere does not exist", tmp_path, capsys)
