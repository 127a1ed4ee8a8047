"""Gate and up matrices: one tensor in memory, two per expert on disk, or one on disk too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_cut import CASES
from hand_cut import batch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_qwen3_moe
from transformers import AutoModelForCausalLM

from star_elastic import cost
from star_elastic.errors import CheckpointError
from star_elastic.families import layout_of
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_folder
from star_elastic.submodel import Submodel

EXPERTS = {
    "qwen3_moe": ("model.layers.0.mlp.experts.{}.{}_proj.weight", ("gate", "up", "down")),
    "mixtral": ("model.layers.0.block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2")),
}


def rewrite(folder: Path, edit: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a folder."""
    tensors = {**load_file(folder / "model.safetensors"), **edit}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", EXPERTS)
def test_gate_is_the_upper_half_and_up_the_lower(family: str, tmp_path: Path) -> None:
    """What the table calls segment 0 and 1 is what transformers fuses, in this order."""
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path)
    pattern, (gate, up, down) = EXPERTS[family]
    layout, tensors = layout_of(model.config.to_dict()), load_file(tmp_path / "model.safetensors")
    experts = model.model.layers[0].mlp.experts
    halves = {gate: experts.gate_up_proj[3, :32], up: experts.gate_up_proj[3, 32:], down: experts.down_proj[3]}
    for word, part in halves.items():
        assert torch.equal(tensors[pattern.format(3, word)], part)
    found = {word: layout.find(pattern.format(3, word)) for word in halves}
    assert {word: (at.member, at.segment) for word, at in found.items() if at} == {gate: (3, 0), up: (3, 1), down: (3, None)}
    assert found[gate].renamed(layer=2, member=1) == pattern.format(1, gate).replace("layers.0", "layers.2")


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "granitemoehybrid"])
def test_a_folder_under_names_in_memory_slices_too(case: str, tmp_path: Path) -> None:
    """Tools that save a state dict as it is write fused tensors; transformers reads them, and so do we."""
    model = CASES[case].parent()
    cut = CASES[case].cuts()["all"]
    model.save_pretrained(tmp_path / "parent")
    tied = model.config.tie_word_embeddings
    state = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(state, tmp_path / "parent" / "model.safetensors", metadata={"format": "pt"})
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", Submodel(widths=cut[0]))
    child, (loaded, info) = (
        CASES[case].child(model, cut),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True),
    )
    assert not any(info.values()), info
    assert torch.equal(loaded(batch()).logits, child(batch()).logits)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoehybrid"])
def test_each_expert_may_have_an_order_of_its_own(family: str, tmp_path: Path) -> None:
    """Gate and up of an expert move together, whether stored apart or as one tensor; no other expert moves."""
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "parent")
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).tolist()
    sort_folder(tmp_path / "parent", tmp_path / "out", {"layers.2.experts.5.expert_ffn": order})
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    prefix = next(name.removesuffix("gate_up_proj") for name in model.state_dict() if "layers.2." in name and "gate_up" in name)
    old, new = (m.get_parameter(f"{prefix}gate_up_proj") for m in (model, after))
    assert torch.equal(new[5, :32], old[5, order]) and torch.equal(new[5, 32:], old[5, 32:][order])
    assert torch.equal(new[:5], old[:5]) and torch.equal(new[6:], old[6:])
    assert torch.equal(after.get_parameter(f"{prefix}down_proj")[5], model.get_parameter(f"{prefix}down_proj")[5][:, order])
    wanted = model(batch()).logits
    assert (after(batch()).logits - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_damaged_experts_are_named(tmp_path: Path) -> None:
    gate, up = (f"model.layers.2.mlp.experts.3.{name}_proj.weight" for name in ("gate", "up"))
    fused = "model.layers.2.mlp.experts.gate_up_proj"
    for edit, words in (
        ({up: None}, f"misses {up} that its config.json describes"),
        ({gate: torch.zeros(31, 64)}, f"{gate} has shape \\[31, 64\\]; config.json says \\[32, 64\\]"),
        ({fused: torch.zeros(8, 64, 64)}, "a second time as"),
    ):
        tiny_qwen3_moe().save_pretrained(tmp_path / "parent")
        rewrite(tmp_path / "parent", edit)
        with pytest.raises(CheckpointError, match=words):
            slice_checkpoint(tmp_path / "parent", tmp_path / "out", Submodel(widths={"hidden": 48}))
        assert not (tmp_path / "out").exists()


def test_quantized_scales_count_every_stored_matrix() -> None:
    """Eight experts of gate, up and down in three layers, q, k, v, o in four, one dense MLP: two fp32 scales each."""
    layout = layout_of(tiny_qwen3_moe().config.to_dict())
    rows = [row for _, row in layout.tensors()]
    matrices = 3 * 8 * 3 + 4 * 4 + 3
    assert sum(cost.scale_bytes(row, {}, "fp8") for row in rows) == 8 * matrices
