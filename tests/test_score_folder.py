"""Scoring from folder to folder: files, messages, refusals, interruption and resumption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bytes_tokenizer import write_tokenizer
from safetensors.torch import load_file
from scoring import assert_close
from tiny import tiny_folder

from star_elastic.cli import main
from star_elastic.errors import TargetError
from star_elastic.score import score_parent


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A model folder with a tokenizer of one token per byte (below 125)."""
    folder = tiny_folder(tmp_path / "parent", bos_token_id=1, eos_token_id=2, pad_token_id=0)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.jsonl"
    lines = [{"text": f"line {number}: {'abcdefgh' * (number + 1)}"} for number in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_folder_to_folder(parent: Path, data: Path, tmp_path: Path) -> None:
    report = score_parent(parent, tmp_path / "scores", data, samples=4, seq_len=32, batch_size=2)
    stored = load_file(tmp_path / "scores" / "scores.safetensors")
    experts = {f"layers.{n}.{axis}" for n in (1, 4) for axis in ("experts", "expert_ffn", "shared_ffn")}
    mamba = {f"layers.{n}.{axis}" for n in (0, 3) for axis in ("mamba_heads", "mamba_head_dim")}
    assert set(stored) == {"hidden", "layers.2.heads", "depth", "depth_order", *experts, *mamba}
    assert stored.pop("depth_order").tolist() == list(report.depth_order or ())
    idle = {f"layers.{layer}.experts": experts for layer, experts in report.idle_experts.items()}
    for key, tensor in stored.items():
        assert tensor.dtype == torch.float32
        assert (tensor < 0).nonzero()[:, 0].tolist() == idle.get(key, [])
    summary = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert summary["tokens"] == report.tokens and summary["samples"] == 4 and summary["seq_len"] == 32
    assert {"data_sha256", "parent_fingerprint", "weights_sha256", "star_elastic", "methods", "meaning"} <= summary.keys()
    # The share that the best half keeps, from the stored scores.
    best = stored["hidden"].double().sort(descending=True).values
    assert summary["kept"]["hidden"]["32"] == pytest.approx(float(best[:32].sum() / best.sum()))
    assert 0.5 < summary["kept"]["hidden"]["32"] < summary["kept"]["hidden"]["48"] < 1
    assert sorted(path.name for path in (tmp_path / "scores").iterdir()) == ["scores.json", "scores.safetensors"]


def test_same_data_same_scores_other_data_other_hash(parent: Path, data: Path, tmp_path: Path) -> None:
    runs = [score_parent(parent, tmp_path / str(n), data, samples=4, seq_len=32, batch_size=1 + n) for n in range(2)]
    assert runs[0].facts["data_sha256"] == runs[1].facts["data_sha256"]
    first, second = (load_file(run.out / "scores.safetensors") for run in runs)
    assert_close(first, second, rtol=1e-5)
    again = score_parent(parent, tmp_path / "again", data, samples=4, seq_len=32, batch_size=1)
    for key, tensor in load_file(again.out / "scores.safetensors").items():
        assert torch.equal(tensor, first[key])
    data.write_text(data.read_text().replace("abc", "xyz"))
    other = score_parent(parent, tmp_path / "other", data, samples=4, seq_len=32)
    assert other.facts["data_sha256"] != runs[0].facts["data_sha256"]


def test_command_prints_what_the_file_holds(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["score", str(parent), str(tmp_path / "scores"), "--data", str(data), "--samples", "4", "--seq-len", "32"]
    assert main(words) == 0
    out = capsys.readouterr().out
    kept = json.loads((tmp_path / "scores" / "scores.json").read_text())["kept"]
    assert f"{kept['hidden']['32']:.1%}" in out and f"{kept['hidden']['48']:.1%}" in out
    experts = [kept[f"layers.{layer}.expert_ffn"]["16"] for layer in (1, 4)]
    assert f"{sum(experts) / 2:.1%}" in out and f"{min(experts):.1%}" in out
    if idle := json.loads((tmp_path / "scores" / "scores.json").read_text())["idle_experts"]:
        assert all(f"of layer {layer}" in out for layer in idle)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": "  "}\n'])
def test_empty_data_is_refused_and_nothing_written(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    data = tmp_path / "empty.jsonl"
    data.write_text(content)
    refused(["score", str(parent), str(tmp_path / "scores"), "--data", str(data)], capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.jsonl", "parent"]


def test_bad_input_is_refused_before_the_model_is_loaded(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("star_elastic.score.run.load_model", lambda *a, **k: pytest.fail("the model was loaded"))
    out = str(tmp_path / "scores")
    assert "does not exist" in refused(["score", str(tmp_path / "none"), out, "--data", str(data)], capsys)
    assert "none.txt" in refused(["score", str(parent), out, "--data", str(tmp_path / "none.txt")], capsys)
    assert "inside the source" in refused(["score", str(parent), str(parent / "s"), "--data", str(data)], capsys)
    assert "unknown dtype 'float23'" in refused(["score", str(parent), out, "--data", str(data), "--dtype", "float23"], capsys)
    assert "device 'cudda'" in refused(["score", str(parent), out, "--data", str(data), "--device", "cudda"], capsys)
    Path(out).mkdir()
    (Path(out) / "mine").touch()
    assert "not empty" in refused(["score", str(parent), out, "--data", str(data)], capsys)
    with pytest.raises(TargetError):
        score_parent(parent, out, data)


def test_folder_without_weights_or_with_a_broken_header(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["score", str(parent), str(tmp_path / "scores"), "--data", str(data)]
    weights = parent / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    assert "not a whole safetensors file" in refused(words, capsys)
    weights.unlink()
    assert "holds no weights" in refused(words, capsys)


def test_tokenizer_of_another_model_is_refused(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(parent, extra=40)
    data = tmp_path / "text.txt"
    data.write_text("abc <extra35> def")
    assert "vocabulary of 128" in refused(["score", str(parent), str(tmp_path / "s"), "--data", str(data)], capsys)
    assert not (tmp_path / "s").exists()


def test_interrupt_leaves_nothing(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Iterator[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr("star_elastic.score.run.save_file", interrupted)
    words = ["score", str(parent), str(tmp_path / "scores"), "--data", str(data), "--samples", "2", "--seq-len", "16"]
    assert main(words) == 2
    assert "error: interrupted" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.jsonl", "parent"]
