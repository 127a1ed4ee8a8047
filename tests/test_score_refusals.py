"""Settings and targets that scoring refuses before it loads a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from scoring import calibration_file, scored_parent

from star_elastic.checkpoint import check_target
from star_elastic.cli import main
from star_elastic.errors import ElasticError, TargetError
from star_elastic.score import score_parent

SMALL = ["--samples", "2", "--seq-len", "16"]


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return scored_parent(tmp_path / "parent")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return calibration_file(tmp_path / "calibration.jsonl")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load_model", "score_layerwise", "calibration_batches"):
        monkeypatch.setattr(f"star_elastic.score.run.{name}", lambda *a, **k: pytest.fail("work began"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: want a whole number, 1 or more"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"samples": 0}, "samples is 0"),
        ({"samples": True}, "samples is True"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"depth_samples": 0}, "depth_samples is 0"),
        ({"save_every": 0}, "save_every is 0"),
        ({"seed": -1}, "seed is -1: want a whole number, 0 or more"),
        ({"packing": "side"}, "packing is 'side': want cross or apart"),
        ({"layerwise": "tape"}, "layerwise is 'tape': want memory or disk"),
        ({"layerwise": "memory", "resume": True}, "memory saves nothing that --resume could continue"),
        ({"layerwise": "memory", "depth_samples": 3}, "--depth-samples 3 is for depth=removal or kl, and here depth=cosine"),
        ({"methods": {"depth": "none"}, "depth_samples": 16}, "--depth-samples 16 is for depth=removal or kl"),
        (
            {"methods": {"mamba_heads": "random"}, "kept": {"mamba_head_dim": 4}},
            "is for mamba_heads ranked by channels, and here mamba_heads=random",
        ),
        ({"widths": ["hidden=110%"]}, "cuts nothing that can be cut"),
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_a_setting_that_cannot_be_run_is_told(
    parent: Path, data: Path, tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ElasticError) as caught:
        score_parent(parent, tmp_path / "scores", data, **setting)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("unloaded")
def test_a_target_that_cannot_be_made_is_told(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", str(parent), str(data / "deep" / "scores"), "--data", str(data)]) == 2
    assert f"cannot be made: {data} is a file" in capsys.readouterr().err


def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and real(path, mode))  # as root, all may
    with pytest.raises(TargetError, match="locked is not writable"):
        check_target(tmp_path / "locked" / "new" / "scores")
    assert check_target(tmp_path / "new" / "scores") == tmp_path / "new" / "scores"


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_file_in_the_place_of_the_run_is_told(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    (tmp_path / "scores.run").write_text("mine")
    assert main(["score", str(parent), str(tmp_path / "scores"), "--data", str(data), *SMALL, *more]) == 2
    assert "scores.run is a file" in capsys.readouterr().err
    assert (tmp_path / "scores.run").read_text() == "mine"


def test_the_whole_width_may_be_asked_for_either_way(parent: Path, data: Path, tmp_path: Path) -> None:
    kept = []
    for number, width in enumerate(("hidden=64", "hidden=100%")):
        out = tmp_path / str(number)
        words = ["--method", "depth=none", "--width", width]
        assert main(["score", str(parent), str(out), "--data", str(data), *SMALL, *words]) == 0
        kept.append(json.loads((out / "scores.json").read_text())["kept"]["hidden"])
    assert kept[0] == kept[1] and kept[0]["64"] == 1


def test_without_a_terminal_only_the_error_is_told(
    parent: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "scores")

    monkeypatch.setattr("star_elastic.score.files.save_file", broken)  # after all bars
    capfd.readouterr()
    assert main(["score", str(parent), str(tmp_path / "scores"), "--data", str(data), *SMALL]) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
