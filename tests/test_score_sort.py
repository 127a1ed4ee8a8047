"""Scores go into a sorted parent, and from there into slices; scores of another model do not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scoring import calibration_file, scored_parent
from tiny import tiny_folder, tokens

from star_elastic.checkpoint import Checkpoint, weights_sample_sha256
from star_elastic.cli import main
from star_elastic.errors import CheckpointError
from star_elastic.families import layout_of
from star_elastic.loading import load_model
from star_elastic.score import score_parent
from star_elastic.sort import sort_parent
from star_elastic.submodel import ElasticConfig, read_config


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return scored_parent(tmp_path / "parent")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return calibration_file(tmp_path / "calibration.jsonl")


@pytest.mark.parametrize("per_expert", [False, True])
def test_every_axis_is_sorted_and_the_function_stays(parent: Path, data: Path, tmp_path: Path, per_expert: bool) -> None:
    report = score_parent(parent, tmp_path / "scores", data, samples=6, seq_len=32, per_expert=per_expert)
    elastic = sort_parent(parent, tmp_path / "sorted", tmp_path / "scores")
    assert set(elastic.sorted_axes) == set(layout_of(read_config(parent)).width_axes)
    assert elastic.depth_order == report.depth_order == ElasticConfig.load(tmp_path / "sorted").depth_order
    scores = (tmp_path / "scores" / "scores.safetensors").read_bytes()
    assert elastic.provenance["scores_sha256"] == hashlib.sha256(scores).hexdigest()
    model, sorted_model = (load_model(folder, device=torch.device("cpu")) for folder in (parent, tmp_path / "sorted"))
    ids = tokens(vocab=125)
    with torch.no_grad():
        wanted, found = model(ids).logits, sorted_model(ids).logits
    assert (wanted - found).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_second_scoring_finds_every_axis_in_order(parent: Path, data: Path, tmp_path: Path) -> None:
    score_parent(parent, tmp_path / "scores", data, samples=6, seq_len=32)
    sort_parent(parent, tmp_path / "sorted", tmp_path / "scores")
    score_parent(tmp_path / "sorted", tmp_path / "again", data, samples=6, seq_len=32)
    again = load_file(tmp_path / "again" / "scores.safetensors")
    layout = layout_of(read_config(parent))
    for key, scores in again.items():
        axis = layout.axes.get(key.rsplit(".", 1)[-1])
        if axis is not None and axis.name != "depth":
            rising = scores.view(axis.groups, -1).diff(dim=1)
            assert (rising <= 1e-4 * scores.abs().max()).all(), key


def test_a_depth_of_three_is_the_three_layers_that_mattered_most(parent: Path, data: Path, tmp_path: Path) -> None:
    order = score_parent(parent, tmp_path / "scores", data, samples=6, seq_len=32).depth_order
    sort_parent(parent, tmp_path / "sorted", tmp_path / "scores")
    assert main(["slice", str(tmp_path / "sorted"), str(tmp_path / "cut"), "--width", "depth=3"]) == 0
    kinds = read_config(parent)["layers_block_type"]
    assert order is not None
    assert read_config(tmp_path / "cut")["layers_block_type"] == [kinds[layer] for layer in sorted(order[:3])]


def test_scores_of_another_model_with_equal_shapes_are_refused(parent: Path, data: Path, tmp_path: Path) -> None:
    score_parent(parent, tmp_path / "scores", data, samples=2, seq_len=16)
    other = tiny_folder(tmp_path / "other", seed=1, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with pytest.raises(CheckpointError, match=r"is of another model: its parent .* has other weights") as caught:
        sort_parent(other, tmp_path / "sorted", tmp_path / "scores")
    assert "\n" not in str(caught.value) and not (tmp_path / "sorted").exists()
    sort_parent(parent, tmp_path / "sorted", tmp_path / "scores")


def test_the_weights_hash_sees_every_tensor_and_no_file_borders(tmp_path: Path) -> None:
    whole = weights_sample_sha256(Checkpoint.open(tiny_folder(tmp_path / "whole", vocab_size=512)))
    shards = tiny_folder(tmp_path / "shards", sharded=True, vocab_size=512)
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert weights_sample_sha256(Checkpoint.open(shards)) == whole
    seen = {whole}
    tensors = Checkpoint.open(tmp_path / "whole").tensors
    for info in tensors.values():
        content = bytearray(info.path.read_bytes())
        content[info.offset + info.nbytes - 1] ^= 1
        info.path.write_bytes(content)
        seen.add(weights_sample_sha256(Checkpoint.open(tmp_path / "whole")))
    assert len(seen) == 1 + len(tensors)
