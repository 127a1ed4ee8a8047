"""Importance against a slow computation written out here: plain loops over samples, tokens and experts, in fp64."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bytes_tokenizer import write_tokenizer
from safetensors.torch import load_file
from tiny import tiny_folder, tiny_model, tokens

from star_elastic.cli import main
from star_elastic.errors import CheckpointError, DataError, TargetError
from star_elastic.families import layout_of
from star_elastic.score import Scores, score_model, score_parent
from star_elastic.score.experts import FusedExperts

Rows = list[list[int]]
EXPERTS = "model.layers.{}.mixer.experts"


def score(model: Any, batches: list[dict[str, torch.Tensor]]) -> Scores:
    return score_model(model, layout_of(model.config.to_dict()), batches)


def slow_scores(model: Any, rows: Rows) -> dict[str, torch.Tensor]:
    """One unpadded row at a time through transformers' own modules; every number is read out of a hook and added in a loop."""
    heard: dict[str, list[torch.Tensor]] = defaultdict(list)
    hooks = []

    def hear_input(module: Any, name: str) -> None:
        hooks.append(module.register_forward_hook(lambda m, i, o: heard[name].append(i[0][0])))

    for number, layer in enumerate(model.model.layers):
        hooks.append(layer.norm.register_forward_hook(lambda m, i, o, n=number: heard[f"norm {n}"].append(o[0])))
        if layer.block_type == "mlp":
            hear_input(layer.mixer.down_proj, f"layers.{number}.ffn")
        if layer.block_type == "moe":
            hear_input(layer.mixer.shared_experts.down_proj, f"layers.{number}.shared_ffn")
            hooks.append(layer.mixer.experts.register_forward_hook(lambda m, i, o, n=number: routed(heard, n, m, i)))
    squares: dict[str, torch.Tensor] = {}
    for row in rows:
        heard.clear()
        model(torch.tensor([row]))
        for name, pieces in heard.items():
            mean = torch.cat(pieces).double().abs().mean(0)
            squares[name] = squares.get(name, torch.zeros_like(mean)) + mean**2
    for hook in hooks:
        hook.remove()
    norms = [squares.pop(name).sqrt() for name in sorted(squares) if name.startswith("norm")]
    return {"hidden": torch.stack(norms).sum(0), **{name: total.sqrt() for name, total in squares.items()}}


def routed(heard: dict[str, list[torch.Tensor]], layer: int, experts: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    hidden, choice, _ = inputs
    for token in range(hidden.shape[0]):
        for expert in choice[token].tolist():
            inner = torch.relu(experts.up_proj[expert].double() @ hidden[token].double()) ** 2
            heard[f"layers.{layer}.expert_ffn"].append(inner[None])


def padded(rows: Rows, side: str, batch_size: int = 2, junk: int = 5) -> list[dict[str, torch.Tensor]]:
    """Batches of rows filled up with a real token id on either side: only the mask says what is padding."""
    batches = []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        longest = max(map(len, part))
        fill = [[junk] * (longest - len(row)) for row in part]
        gap = [[0] * len(f) for f in fill]
        real = [[1] * len(row) for row in part]
        ids, mask = (joined(fill, part), joined(gap, real)) if side == "left" else (joined(part, fill), joined(real, gap))
        batches.append({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)})
    return batches


def joined(first: Rows, second: Rows) -> Rows:
    return [a + b for a, b in zip(first, second, strict=True)]


def random_rows(lengths: tuple[int, ...] = (24, 7, 19, 30, 11)) -> Rows:
    return [tokens(1, length, seed=length)[0].tolist() for length in lengths]


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.allclose(found[key].double(), tensor.double(), rtol=rtol, atol=0), key


@pytest.mark.parametrize("pattern", ["ME*ME", "M*E-"])
@pytest.mark.parametrize("edits", [{}, {"moe_latent_size": 24}, {"n_group": 2, "topk_group": 1}])
def test_equals_the_slow_computation(pattern: str, edits: dict[str, Any]) -> None:
    model = tiny_model(3, pattern, **edits)
    rows = random_rows()
    found = score(model, padded(rows, "right"))
    assert_close(found.tensors, slow_scores(model, rows))
    assert (found.samples, found.tokens) == (5, sum(map(len, rows)))
    assert all(tensor.dtype == torch.float32 for tensor in found.tensors.values())


def test_keys_name_axis_and_layer() -> None:
    found = score(tiny_model(0, "M*E-"), [{"input_ids": tokens()}])
    assert {key: len(tensor) for key, tensor in found.tensors.items()} == {
        "hidden": 64,
        "layers.2.expert_ffn": 32,
        "layers.2.shared_ffn": 48,
        "layers.3.ffn": 48,
    }


def test_left_and_right_padding_and_batch_size_give_the_same_scores() -> None:
    model = tiny_model(1)
    rows = random_rows()
    right = score(model, padded(rows, "right"))
    left = score(model, padded(rows, "left"))
    alone = score(model, padded(rows, "right", batch_size=1))
    assert_close(left.tensors, right.tensors, rtol=1e-5)
    assert_close(alone.tensors, right.tensors, rtol=1e-5)
    assert left.idle_experts == right.idle_experts == alone.idle_experts
    assert left.tokens == right.tokens == alone.tokens


def test_an_all_padding_row_is_no_sample() -> None:
    model = tiny_model(1)
    rows = random_rows((12, 20))
    batches = padded(rows, "right")
    empty = {name: torch.cat([tensor, torch.zeros_like(tensor[:1])]) for name, tensor in batches[0].items()}
    found = score(model, [empty])
    assert found.samples == 2
    assert_close(found.tensors, score(model, batches).tensors, rtol=1e-5)


@pytest.mark.parametrize("batches", [[], [{"input_ids": tokens(), "attention_mask": torch.zeros(2, 24, dtype=torch.int64)}]])
def test_no_real_token_is_refused(batches: list[dict[str, torch.Tensor]]) -> None:
    with pytest.raises(DataError, match=r"no real token, so model\.layers\.0 to model\.layers\.4 cannot be scored"):
        score(tiny_model(), batches)


def test_dropout_of_a_model_in_training_mode_does_not_blur_the_scores() -> None:
    model = tiny_model(2, attention_dropout=0.5)
    wanted = score(model, [{"input_ids": tokens()}]).tensors
    found = score(model.train(), [{"input_ids": tokens()}]).tensors
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_model_is_left_as_it_was() -> None:
    model = tiny_model(2).train()
    before = model(tokens()).logits
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for name, m in model.named_modules()}
    score(model, [{"input_ids": tokens()}])
    assert model.training
    assert hooks == {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for name, m in model.named_modules()
    }
    assert torch.equal(model(tokens()).logits, before)


def test_model_is_left_as_it_was_after_an_error() -> None:
    model = tiny_model(2)
    with torch.no_grad():
        model.model.layers[2].norm.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError):
        score(model, [{"input_ids": tokens()}])
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


def test_experts_that_no_token_reached_are_told() -> None:
    model = tiny_model(4)
    gate = model.model.layers[1].mixer.gate
    gate.e_score_correction_bias[:] = torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0])
    found = score(model, [{"input_ids": tokens()}])
    assert found.idle_experts[1] == [2, 3, 4, 5, 6, 7]
    assert (found.tensors["layers.1.expert_ffn"] > 0).any()


def test_expert_reached_by_padding_only_counts_as_idle() -> None:
    model = tiny_model(4)
    ids = tokens(1, 12)
    seen: list[torch.Tensor] = []
    gate = model.model.layers[1].mixer.gate
    with torch.no_grad():
        gate.register_forward_hook(lambda m, i, o: seen.append(o[2]))
        model(ids)
    mask = torch.ones_like(ids)
    mask[0, 1:] = 0  # causal: the first token's route does not depend on what follows
    found = score(model, [{"input_ids": ids, "attention_mask": mask}])
    assert found.idle_experts[1] == sorted(set(range(8)) - set(seen[0][0].tolist()))


@pytest.mark.parametrize(
    ("parameter", "place"),
    [
        ("model.layers.1.norm.weight", r"model\.layers\.1\.norm"),
        ("model.layers.1.mixer.experts.up_proj", r"model\.layers\.1\.mixer\.experts"),
        ("model.layers.4.mixer.shared_experts.up_proj.weight", r"model\.layers\.4\.mixer\.shared_experts\.down_proj"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_names_the_first_bad_module(parameter: str, place: str, value: float) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(parameter).fill_(value)
    with pytest.raises(CheckpointError, match=f"activations of {place} hold NaN or infinity"):
        score(model, [{"input_ids": tokens()}])


def test_nan_on_padding_does_no_harm() -> None:
    model = tiny_model(1, "E*")
    rows = random_rows((9, 14))
    wanted = score(model, padded(rows, "right")).tensors
    with torch.no_grad():
        model.model.embeddings.weight[127] = float("nan")
    # Padding follows the row, so causal attention never looks at it.
    rows = [[min(token, 126) for token in row] for row in rows]
    clean = score(tiny_model(1, "E*"), padded(rows, "right")).tensors
    assert_close(score(model, padded(rows, "right", junk=127)).tensors, clean, rtol=1e-6)
    assert wanted.keys() == clean.keys()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_out_experts_equal_the_fused_ones(implementation: str, dtype: torch.dtype) -> None:
    model = tiny_model(5).to(dtype)
    model.set_experts_implementation(implementation)
    unit = next(unit for unit in layout_of(model.config.to_dict()).units if unit.layer == 1)
    [tap] = [tap for tap in unit.taps if tap.side == "experts"]
    module = model.get_submodule(EXPERTS.format(1))
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    choice = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:2] for i in range(20)])
    weight = torch.rand(20, 2, generator=torch.Generator().manual_seed(1))
    found = FusedExperts.of(unit, tap, module).run(hidden, choice, weight, lambda *heard: None)
    wanted = module(hidden, choice, weight)
    assert found.dtype == wanted.dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_choice_outside_the_experts_means_no_expert() -> None:
    model = tiny_model(5)
    model.set_experts_implementation("eager")
    unit = next(unit for unit in layout_of(model.config.to_dict()).units if unit.layer == 1)
    [tap] = [tap for tap in unit.taps if tap.side == "experts"]
    experts = FusedExperts.of(unit, tap, model.get_submodule(EXPERTS.format(1)))
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([[0.7, 0.3], [0.7, 0.0], [0.0, 0.0]])
    heard: list[tuple[int, list[int]]] = []
    output = experts.run(
        hidden, torch.tensor([[1, 4], [4, 8], [8, 8]]), weight, lambda e, token, inner: heard.append((e, token.tolist()))
    )
    assert heard == [(1, [0]), (4, [0, 1])]
    alone = experts.run(hidden[1:2], torch.tensor([[4]]), weight[1:2, :1], lambda *heard: None)
    assert torch.allclose(output[1], alone[0]) and not output[2].any()


# From folder to folder


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
    assert set(stored) == {"hidden", *(f"layers.{n}.{axis}" for n in (1, 4) for axis in ("expert_ffn", "shared_ffn"))}
    assert all(tensor.dtype == torch.float32 and (tensor >= 0).all() for tensor in stored.values())
    summary = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert summary["tokens"] == report.tokens and summary["samples"] == 4 and summary["seq_len"] == 32
    assert {"data_sha256", "parent_fingerprint", "star_elastic", "method"} <= summary.keys()
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
