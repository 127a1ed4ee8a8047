"""Layer by layer from disk: the same numbers as the whole model, and one layer in memory at a time."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scoring import calibration_file, padded, random_rows, scored_parent
from tiny import FAMILIES
from transformers import AutoModelForCausalLM

from star_elastic.checkpoint import Checkpoint
from star_elastic.cli import main
from star_elastic.errors import CheckpointError
from star_elastic.families import layout_of
from star_elastic.loading import load_model
from star_elastic.score import ScoreOptions, score_model, score_parent
from star_elastic.score.hidden import OnDisk
from star_elastic.score.layerwise import score_layerwise
from star_elastic.score.state import RunState, ScoringStopped
from star_elastic.skeleton import saved_tensors
from star_elastic.streamed import StreamedModel
from star_elastic.submodel import read_config

CPU = torch.device("cpu")
USUAL: dict[str, Any] = {"samples": 4, "seq_len": 32, "methods": {"depth": "cosine"}}


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return scored_parent(tmp_path / "parent")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return calibration_file(tmp_path / "calibration.jsonl")


def saved(family: str, folder: Path, **edits: Any) -> Path:
    FAMILIES[family](3, **edits).save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
def test_units_hold_what_transformers_loads(family: str, dtype: torch.dtype | str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "parent")
    layout = layout_of(read_config(folder))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    streamed = StreamedModel(Checkpoint.open(folder), layout, device=CPU, dtype=dtype)
    wanted = dict(saved_tensors(whole))
    for unit in layout.units:
        with streamed.holding(unit):
            held = {name: tensor for name, tensor in saved_tensors(streamed.model) if not tensor.is_meta}
            assert set(held) == {unit.name(row) for row in unit.rows}
            for name, tensor in held.items():
                assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
    assert all(tensor.is_meta for _, tensor in saved_tensors(streamed.model))
    computed = {name: buffer for name, buffer in whole.named_buffers() if name not in wanted}
    for name, buffer in streamed.model.named_buffers():
        if name in computed:
            assert torch.equal(buffer, computed[name]), name


MIXED = {"depth": "cosine", "heads": "weight_norm", "hidden": "activation"}
WEIGHTED = dict.fromkeys(("hidden", "heads", "ffn", "shared_ffn", "expert_ffn"), "weighted") | {"experts": "reap_sum"}


@pytest.mark.parametrize("waiting", ["memory", "disk"])
@pytest.mark.parametrize("methods", [MIXED, WEIGHTED])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_scores_equal_the_whole_model_s(family: str, methods: dict[str, str], waiting: Any, tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "parent")
    layout = layout_of(read_config(folder))
    batches = padded(random_rows(), "left")
    methods = {axis: name for axis, name in methods.items() if axis in layout.axes} | {"depth": "cosine"}
    options = ScoreOptions(methods, per_expert="experts" in layout.axes)
    wanted = score_model(load_model(folder, device=CPU), layout, batches, options)
    state = RunState(tmp_path / "scores", {}, 1)
    found, _ = score_layerwise(Checkpoint.open(folder), layout, batches, options, device=CPU, waiting=waiting, state=state)
    assert found.tensors.keys() == wanted.tensors.keys()
    for key, tensor in wanted.tensors.items():
        assert torch.allclose(found.tensors[key], tensor, rtol=1e-5, atol=0), key
    assert found.depth_order == wanted.depth_order and found.idle_experts == wanted.idle_experts
    assert (found.samples, found.tokens) == (wanted.samples, wanted.tokens)


def test_a_norm_of_weights_outside_the_layers_counts(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "parent")
    layout = layout_of(read_config(folder))
    options = ScoreOptions({"depth": "none", "hidden": "weight_norm"})
    batches = padded(random_rows(), "left")
    wanted = score_model(load_model(folder, device=CPU), layout, batches, options).tensors["hidden"]
    found, _ = score_layerwise(Checkpoint.open(folder), layout, batches, options, device=CPU)
    assert torch.equal(found.tensors["hidden"], wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_folder_to_folder(parent: Path, data: Path, tmp_path: Path, dtype: str) -> None:
    whole = score_parent(parent, tmp_path / "whole", data, **USUAL, dtype=dtype)
    words = ["score", str(parent), str(tmp_path / "layers"), "--data", str(data), "--samples", "4", "--seq-len", "32"]
    assert main([*words, "--layerwise", "disk", "--dtype", dtype]) == 0
    first, second = (load_file(folder / "scores.safetensors") for folder in (whole.out, tmp_path / "layers"))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[key].float(), second[key].float(), rtol=1e-5) for key in first)
    facts = json.loads((tmp_path / "layers" / "scores.json").read_text())
    assert facts["methods"]["depth"] == "cosine" and "cosine" in facts["meaning"]["depth"] and facts["layerwise"] == "disk"
    assert not (tmp_path / "layers.run").exists()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_on_disk_a_run_goes_on_after_its_last_layer(
    parent: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    options = {**USUAL, "layerwise": "disk", "methods": {"depth": "cosine", "heads": "weight_norm", "hidden": "weighted"}}
    wanted = load_file(score_parent(parent, tmp_path / "whole", data, **options).out / "scores.safetensors")
    holding, held = StreamedModel.holding, []

    def stop(self: StreamedModel, unit: Any) -> Any:
        held.append(unit.layer)
        if unit.layer == after:
            raise KeyboardInterrupt
        return holding(self, unit)

    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, ScoringStopped)):
        patched.setattr(StreamedModel, "holding", stop)
        score_parent(parent, tmp_path / "cut", data, **options)
    held.clear()
    monkeypatch.setattr(StreamedModel, "holding", lambda self, unit: held.append(unit.layer) or holding(self, unit))
    found = load_file(score_parent(parent, tmp_path / "cut", data, **options, resume=True).out / "scores.safetensors")
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert [layer for layer in held if layer is not None] == list(range(after, 5))
    assert not (tmp_path / "cut.run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "depth=removal"], "reads the model once for every pair: depth=cosine"),
        (["--method", "depth=kl"], "reads the model once for every pair: depth=cosine"),
        (["--probe"], "--probe runs the whole model"),
    ],
)
def test_what_needs_the_whole_model_is_refused(
    parent: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["score", str(parent), str(tmp_path / "s"), "--data", str(data), "--layerwise", "memory", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_nan_names_the_layer(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "parent")
    layout = layout_of(read_config(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.v_proj\.weight holds NaN"):
        score_layerwise(Checkpoint.open(tmp_path / "nan"), layout, padded(random_rows(), "left"), ScoreOptions(), device=CPU)


def test_hidden_states_on_disk_change_files_after_each_layer(tmp_path: Path) -> None:
    states = OnDisk(tmp_path, [(2, 3), (1, 4)], 5, torch.bfloat16)
    first = [torch.randn(2, 3, 5).bfloat16(), torch.randn(1, 4, 5).bfloat16()]
    for number, hidden in enumerate(first):
        states.write(number, hidden)
    states.turn()
    states.write(0, torch.zeros(2, 3, 5))
    assert torch.equal(states.read(0), first[0]) and torch.equal(states.read(1), first[1])
    again = OnDisk(tmp_path, [(2, 3), (1, 4)], 5, torch.bfloat16, layer=1)
    assert torch.equal(again.read(1), first[1])


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="GiB more than are free"):
        OnDisk(tmp_path, [(2**20, 2**20)], 1024, torch.float32)
    assert not list(tmp_path.iterdir())


def test_one_layer_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read and is still alive, whoever holds it, beside the embedding of the first layer and the final norm."""
    folder = saved("nemotron_h", tmp_path / "parent")
    layout = layout_of(read_config(folder))
    alive: list[weakref.ref[torch.Tensor]] = []
    most: dict[str, int] = {}
    read, holding = StreamedModel._read, StreamedModel.holding

    def watched(self: StreamedModel, *place: Any) -> torch.Tensor:
        tensor = read(self, *place)
        alive.append(weakref.ref(tensor))
        return tensor

    @contextmanager
    def measured(self: StreamedModel, unit: Any) -> Iterator[None]:
        with holding(self, unit):
            most[unit.module] = sum(tensor.nbytes for ref in alive if (tensor := ref()) is not None)
            yield

    monkeypatch.setattr(StreamedModel, "_read", watched)
    monkeypatch.setattr(StreamedModel, "holding", measured)
    score_layerwise(Checkpoint.open(folder), layout, padded(random_rows(), "left"), ScoreOptions(), device=CPU)
    whole = load_model(folder, device=CPU)
    own = {unit.module: 0 for unit in layout.units}
    for name, tensor in saved_tensors(whole):
        found = layout.find(name)
        assert found is not None
        own[found.unit.module] += tensor.nbytes
    [embedding], [norm] = ([own[u.module] for u in layout.units if u.kind == kind] for kind in ("embedding", "final_norm"))
    for unit in layout.units:
        if unit.layer is not None:
            assert most[unit.module] == own[unit.module] + norm + (embedding if unit.layer == 0 else 0), unit.module
