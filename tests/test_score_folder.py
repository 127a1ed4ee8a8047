"""Scoring from folder to folder: files, messages, refusals, interruption and resumption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bytes_tokenizer import write_tokenizer
from safetensors.torch import load_file, save_file
from scoring import assert_close, calibration_file, scored_parent

from star_elastic.cli import main
from star_elastic.errors import TargetError
from star_elastic.score import score_parent
from star_elastic.score.run import row_length


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return scored_parent(tmp_path / "parent")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return calibration_file(tmp_path / "calibration.jsonl")


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
    assert {"data_sha256", "parent_fingerprint", "weights_sample_sha256", "star_elastic", "methods", "meaning"} <= summary.keys()
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


def test_documents_apart_are_padded_and_score_as_they_are(parent: Path, data: Path, tmp_path: Path) -> None:
    apart = score_parent(parent, tmp_path / "apart", data, samples=9, seq_len=200, packing="apart", batch_size=4)
    alone = score_parent(parent, tmp_path / "alone", data, samples=9, seq_len=200, packing="apart", batch_size=1)
    cross = score_parent(parent, tmp_path / "cross", data, samples=9, seq_len=200)
    assert apart.samples == 9 and cross.samples < 9 and apart.tokens == cross.tokens
    first, second = (load_file(run.out / "scores.safetensors") for run in (apart, alone))
    assert_close(first, second, rtol=1e-4)


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
    for words, message in (
        (["--seq-len", "257"], "longer than the model's 256 positions"),
        (["--method", "experts=reep"], "did you mean 'reap'"),
        (["--kept", "mamba_head_dim=5"], "nearest legal: 4 and 8"),
        (["--width", "experts=1"], "a token uses its top-2"),
        (["--packing", "side"], "'side' is not one of 'cross', 'apart'"),
    ):
        assert message in refused(["score", str(parent), out, "--data", str(data), *words], capsys)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 no")
    assert "broken.parquet cannot be read" in refused(["score", str(parent), out, "--data", str(broken)], capsys)
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


def test_nan_in_activations_names_the_layer(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(parent / "model.safetensors")
    tensors["backbone.layers.2.mixer.v_proj.weight"][0, 0] = float("nan")
    save_file(tensors, parent / "model.safetensors", metadata={"format": "pt"})
    words = ["score", str(parent), str(tmp_path / "scores"), "--data", str(data), "--samples", "2", "--seq-len", "16"]
    assert "model.layers.2.mixer.v_proj.weight holds NaN" in refused(words, capsys)
    assert not (tmp_path / "scores").exists()


@pytest.mark.parametrize(
    ("positions", "wanted", "length"), [(256, None, 256), (9000, None, 8192), (None, None, 8192), (None, 9, 9)]
)
def test_rows_are_as_long_as_the_model_allows(positions: int | None, wanted: int | None, length: int) -> None:
    assert row_length({} if positions is None else {"max_position_embeddings": positions}, wanted) == length


def test_interrupt_leaves_nothing(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Iterator[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr("star_elastic.score.files.save_file", interrupted)
    words = ["score", str(parent), str(tmp_path / "scores"), "--data", str(data), "--samples", "2", "--seq-len", "16"]
    assert main(words) == 2
    assert "error: interrupted" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.jsonl", "parent"]
