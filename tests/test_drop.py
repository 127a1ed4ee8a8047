"""Tensors that the table does not know: refused by name, unless the user says to leave them out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized import quantized_folder
from safetensors.torch import load_file, save_file
from tiny import tiny_folder

from star_elastic.cli import main
from star_elastic.errors import CheckpointError
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import Submodel

CUT = Submodel(widths={"hidden": 48})
EXTRA = {
    "mtp.layers.0.eh_proj.weight": torch.randn(64, 128),
    "mtp.layers.0.norm.weight": torch.randn(64),
    "backbone.layers.1.mixer.lora_A": torch.randn(4, 64),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("drop") / "parent")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> Path:
    folder = tmp_path_factory.mktemp("drop_extra") / "parent"
    folder.mkdir()
    (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
    save_file({**load_file(plain / "model.safetensors"), **EXTRA}, folder / "model.safetensors", {"format": "pt"})
    return folder


def refused(parent: Path, tmp_path: Path, *drop: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        slice_checkpoint(parent, tmp_path / "out", CUT, drop=drop)
    assert list(tmp_path.iterdir()) == [] and "\n" not in str(caught.value)
    return str(caught.value)


def test_they_are_named_and_refused(parent: Path, tmp_path: Path) -> None:
    said = refused(parent, tmp_path)
    assert all(name in said for name in EXTRA) and "a nemotron_h of this config does not have" in said
    assert "leave them out with --drop" in said
    assert "mtp" not in refused(parent, tmp_path, "mtp.*") and "backbone.layers.1.mixer.lora_A" in refused(
        parent, tmp_path, "mtp.*"
    )


def test_left_out_the_rest_is_as_without_them(parent: Path, plain: Path, tmp_path: Path) -> None:
    report = slice_checkpoint(parent, tmp_path / "out", CUT, drop=["mtp.*", "*.lora_[AB]"])
    slice_checkpoint(plain, tmp_path / "plain", CUT)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "plain")]
    assert files[0] == files[1]
    assert sorted(report.dropped) == sorted(EXTRA)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Left out of the parent on request, 3 in all: " in card and all(f"`{name}`" in card for name in EXTRA)
    assert "Left out" not in (tmp_path / "plain" / "README.md").read_text()


def test_a_pattern_that_matches_nothing(parent: Path, plain: Path, tmp_path: Path) -> None:
    said = refused(parent, tmp_path, "mtp.*", "*.lora_A", "mpt.*")
    assert "--drop 'mpt.*' matches no tensor of" in said and "mtp.layers.0.norm.weight" in said
    assert "the table knows them all" in refused(plain, tmp_path, "mtp.*")


@pytest.mark.parametrize("pattern", ["*", "backbone.layers.1.*", "lm_head.weight"])
def test_a_pattern_that_matches_what_is_needed(parent: Path, tmp_path: Path, pattern: str) -> None:
    said = refused(parent, tmp_path, pattern)
    assert f"--drop {pattern!r} matches " in said and ", which a nemotron_h needs" in said


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_scales_of_quantized_matrices_are_needed(tmp_path: Path, form: str) -> None:
    folder = quantized_folder(tmp_path / "quantized", form)
    with pytest.raises(CheckpointError, match=r"--drop '\*_scale' matches .*_scale, which a nemotron_h needs"):
        slice_checkpoint(folder, tmp_path / "out", Submodel(widths={"hidden": 32}), drop=["*_scale"])


def test_on_the_command_line(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["slice", str(parent), str(tmp_path / "out"), "--width", "hidden=48"]
    assert main(words) == 2
    assert "mtp.layers.0.norm.weight" in capsys.readouterr().err
    assert main([*words, "--drop", "mtp.*", "--drop", "*.lora_A"]) == 0
    said = capsys.readouterr().out
    assert "left out: 3 tensors: " in said and all(name in said for name in EXTRA)
