"""Interrupted scoring goes on to the same bits; a run of other settings does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scoring import calibration_file, scored_parent
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHModel

from star_elastic.errors import CheckpointError, TargetError
from star_elastic.score import score_parent
from star_elastic.score.state import ScoringStopped

USUAL: dict[str, Any] = {"samples": 4, "seq_len": 32, "save_every": 1}


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return scored_parent(tmp_path / "parent")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return calibration_file(tmp_path / "calibration.jsonl")


def stopping(after: int) -> Any:
    """A forward of the model's body that is interrupted after so many calls."""
    calls = 0
    forward = NemotronHModel.forward

    def run(self: Any, *inputs: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return forward(self, *inputs, **named)

    return run


def interrupt(parent: Path, out: Path, data: Path, patch: pytest.MonkeyPatch, after: int, **more: Any) -> None:
    with patch.context() as patched, pytest.raises((KeyboardInterrupt, ScoringStopped)):
        patched.setattr(NemotronHModel, "forward", stopping(after))
        score_parent(parent, out, data, **USUAL, **more)


@pytest.mark.parametrize("after", [2, 17])
def test_other_methods_go_on_to_the_same_bits(
    parent: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    weighted = dict.fromkeys(("hidden", "heads", "shared_ffn", "expert_ffn"), "weighted")
    more = {"methods": {"depth": "kl", "experts": "reap_sum", **weighted}}
    wanted = load_file(score_parent(parent, tmp_path / "whole", data, **USUAL, **more).out / "scores.safetensors")
    interrupt(parent, tmp_path / "cut", data, monkeypatch, after, **more)
    score_parent(parent, tmp_path / "cut", data, **USUAL, **more, resume=True)
    found = load_file(tmp_path / "cut" / "scores.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("after", [0, 1, 3, 4, 10, 11, 29, 50])
def test_an_interrupted_run_goes_on_to_the_same_bits(
    parent: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    wanted = load_file(score_parent(parent, whole, data, **USUAL).out / "scores.safetensors")
    interrupt(parent, cut, data, monkeypatch, after)
    assert not cut.exists() and (tmp_path / "cut.run").exists() == (after > 0)
    if after:
        with pytest.raises(TargetError, match=r"cut\.run holds an unfinished run: --resume continues it"):
            score_parent(parent, cut, data, **USUAL)
    calls: list[int] = []
    forward = NemotronHModel.forward
    monkeypatch.setattr(NemotronHModel, "forward", lambda self, *i, **n: calls.append(1) or forward(self, *i, **n))
    score_parent(parent, cut, data, **USUAL, resume=True)
    found = load_file(cut / "scores.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert (cut / "scores.json").read_text() == (whole / "scores.json").read_text()
    assert not (tmp_path / "cut.run").exists()
    # The whole run: 4 batches, then in each round two runs and one a candidate for each batch. None is done twice but those of
    # the batch that was interrupted.
    in_all = 4 + 4 * sum(2 + candidates for candidates in (4, 3, 2, 1, 1))
    assert in_all - after <= len(calls) <= in_all - after + 6


def test_states_are_saved_every_so_many_batches(
    parent: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, ScoringStopped)):
        patched.setattr(NemotronHModel, "forward", stopping(3))
        score_parent(parent, tmp_path / "cut", data, **USUAL | {"save_every": 2})
    assert int(load_file(tmp_path / "cut.run" / "state.safetensors")["batches"]) == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"batch_size": 2}, "batch_size"),
        ({"methods": {"experts": "random"}}, "methods"),
        ({"seq_len": 31}, "data_sha256"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_a_run_of_other_settings_is_not_continued(
    parent: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], name: str
) -> None:
    interrupt(parent, tmp_path / "cut", data, monkeypatch, 2)
    with pytest.raises(CheckpointError, match=f"is of another run: its {name} was") as caught:
        score_parent(parent, tmp_path / "cut", data, **USUAL | change, resume=True)
    assert "\n" not in str(caught.value)


def test_a_damaged_state_is_told(parent: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.run").mkdir()
    (tmp_path / "cut.run" / "state.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"state\.safetensors cannot be read"):
        score_parent(parent, tmp_path / "cut", data, **USUAL, resume=True)
