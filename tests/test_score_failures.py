"""Scoring that cannot go well: numbers that are none, hidden states that are gone, and what a failed run leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scoring import calibration_file, scored_parent

from star_elastic.cli import main
from star_elastic.errors import CheckpointError
from star_elastic.score import score_parent
from star_elastic.score.finite import NotFiniteError
from star_elastic.score.state import STATE_FILE, ScoringStopped
from star_elastic.streamed import StreamedModel

USUAL: dict[str, Any] = {"samples": 4, "seq_len": 32, "methods": {"depth": "cosine"}, "save_every": 1, "progress": False}
DISK: dict[str, Any] = {**USUAL, "layerwise": "disk"}


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return scored_parent(tmp_path / "parent")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return calibration_file(tmp_path / "calibration.jsonl")


def spoil(parent: Path, name: str, value: float = float("nan")) -> None:
    """Put a number into the last entry of one tensor."""
    tensors = load_file(parent / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, parent / "model.safetensors", metadata={"format": "pt"})


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("layerwise", [None, "memory", "disk"])
@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("backbone.layers.3.mixer.out_proj.weight", r"model\.layers\.3\.mixer\.out_proj\.weight"),
        ("backbone.layers.4.mixer.gate.e_score_correction_bias", r"model\.layers\.4\.mixer\.gate\.e_score_correction_bias"),
        ("backbone.norm_f.weight", r"model\.norm_f\.weight"),
        ("backbone.embeddings.weight", r"model\.embeddings\.weight"),
        ("lm_head.weight", r"lm_head\.weight"),
    ],
)
@pytest.mark.parametrize("hidden", ["activation", "weight_norm"])
def test_a_weight_that_is_no_number_is_named(
    parent: Path, data: Path, tmp_path: Path, stored: str, named: str, layerwise: Any, hidden: str
) -> None:
    spoil(parent, stored)
    methods = {"depth": "none", "hidden": hidden}
    with pytest.raises(NotFiniteError, match=f"{named} holds NaN or infinity"):
        score_parent(parent, tmp_path / "scores", data, **USUAL | {"methods": methods}, layerwise=layerwise)
    assert left(tmp_path) == ["calibration.jsonl", "parent"]


@pytest.mark.parametrize("layerwise", [None, "memory"])
@pytest.mark.parametrize(
    ("stored", "place"),
    [
        ("layers.0.mixer.out_proj.weight", r"model\.layers\.0"),
        ("layers.4.mixer.shared_experts.down_proj.weight", r"model\.layers\.4"),
        ("norm_f.weight", r"model\.norm_f"),
    ],
)
def test_an_output_that_overflows_names_the_module_that_gave_it(
    parent: Path, data: Path, tmp_path: Path, layerwise: Any, stored: str, place: str
) -> None:
    tensors = load_file(parent / "model.safetensors")
    tensors[f"backbone.{stored}"].fill_(3e38)
    save_file(tensors, parent / "model.safetensors", metadata={"format": "pt"})
    options = USUAL | {"methods": {"depth": "none"}, "layerwise": layerwise}
    with pytest.raises(NotFiniteError, match=f"activations of {place} hold NaN or infinity"):
        score_parent(parent, tmp_path / "scores", data, **options)
    assert left(tmp_path) == ["calibration.jsonl", "parent"]


def test_a_norm_that_overflows_names_the_key(parent: Path, data: Path, tmp_path: Path) -> None:
    tensors = load_file(parent / "model.safetensors")
    tensors["lm_head.weight"].fill_(3e38)
    save_file(tensors, parent / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotFiniteError, match="scores of hidden hold NaN or infinity"):
        score_parent(parent, tmp_path / "scores", data, **USUAL | {"methods": {"depth": "none", "hidden": "weight_norm"}})


def test_probed_losses_that_are_no_numbers_are_refused(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("star_elastic.score.probe.held_out_loss", lambda *a, **k: float("nan"))
    words = ["--samples", "1", "--seq-len", "32", "--method", "depth=cosine", "--probe-tokens", "32"]
    assert main(["score", str(parent), str(tmp_path / "scores"), "--data", str(data), *words]) == 2
    assert "--probe: held-out loss of the whole model is nan" in capsys.readouterr().err
    assert left(tmp_path) == ["calibration.jsonl", "parent"]


def stop_at(patch: pytest.MonkeyPatch, layer: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    holding = StreamedModel.holding

    def stop(self: StreamedModel, unit: Any) -> Any:
        if unit.layer == layer:
            raise error
        return holding(self, unit)

    patch.setattr(StreamedModel, "holding", stop)


@pytest.mark.parametrize("fault", ["gone", "short", "long"])
@pytest.mark.parametrize("after", [1, 2])
def test_hidden_states_that_are_not_whole_are_refused(
    parent: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, after: int
) -> None:
    with monkeypatch.context() as patched, pytest.raises(ScoringStopped):
        stop_at(patched, after)
        score_parent(parent, tmp_path / "cut", data, **DISK)
    read, written = (tmp_path / "cut.run" / f"hidden-{(after + n) % 2}.bin" for n in range(2))
    whole = read.read_bytes()
    read.unlink()
    if fault != "gone":
        read.write_bytes(whole[:-4] if fault == "short" else whole + bytes(4))
    with pytest.raises(CheckpointError, match=rf"{read.name}, which the next layer reads, (is missing|has \d+ bytes, not)"):
        score_parent(parent, tmp_path / "cut", data, **DISK, resume=True)
    read.write_bytes(whole)
    written.unlink()  # only written anew: not missed
    found = load_file(score_parent(parent, tmp_path / "cut", data, **DISK, resume=True).out / "scores.safetensors")
    wanted = load_file(score_parent(parent, tmp_path / "whole", data, **DISK).out / "scores.safetensors")
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_hidden_states_reach_the_disk_before_the_state(
    parent: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    for module in ("hidden", "state"):
        monkeypatch.setattr(f"star_elastic.score.{module}.flush", lambda path: flushed.append(path.name))
    score_parent(parent, tmp_path / "scores", data, **DISK)
    state = f".{STATE_FILE}.partial"
    assert flushed == [name for layer in range(5) for name in (f"hidden-{(layer + 1) % 2}.bin", state)]


def test_an_interruption_says_how_to_go_on(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["score", str(parent), str(tmp_path / "cut"), "--data", str(data), "--seq-len", "32", "--layerwise", "disk"]
    with monkeypatch.context() as patched:
        stop_at(patched, 2)
        assert main(words) == 2
    error = capsys.readouterr().err
    assert "the same with --resume continues" in error and "nothing unfinished" not in error and error.count("\n") == 1
    assert main([*words, "--resume"]) == 0
    assert left(tmp_path) == ["calibration.jsonl", "cut", "parent"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_run_that_saved_nothing_leaves_nothing(
    parent: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    stop_at(monkeypatch, 0, error)
    with pytest.raises(error):
        score_parent(parent, tmp_path / "cut", data, **DISK)
    assert left(tmp_path) == ["calibration.jsonl", "parent"]


@pytest.mark.parametrize(("error", "stays"), [(OSError, True), (NotFiniteError, False)])
def test_only_what_can_go_on_stays(
    parent: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], stays: bool
) -> None:
    stop_at(monkeypatch, 3, error)
    with pytest.raises(error):
        score_parent(parent, tmp_path / "cut", data, **DISK)
    assert (tmp_path / "cut.run").exists() == stays
