"""Widths per layer: hard mask == sliced lens == views == exported folder == tensors cut by hand, layer by layer."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from family_cut import CASES
from hand_cut import batch, take
from test_families import assert_same_state, relative
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from star_elastic import cost
from star_elastic.elastic import ElasticModel
from star_elastic.errors import WidthError
from star_elastic.families import layout_of
from star_elastic.layout import Layout
from star_elastic.masks import hard_masks
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import ElasticConfig, Submodel

TOGETHER = ("all", "all and depth")


@cache
def layout_for(case: str) -> Layout:
    config = CASES[case].parent().config
    return layout_of({**config.to_dict(), "dtype": "float32"})


def own_axes(case: str) -> list[str]:
    """Axes on which at least two layers can differ."""
    layout = layout_for(case)
    axes = [axis for axis in layout.width_axes.values() if axis.scope == "layer" and len(axis.legal()) > 1]
    return [axis.name for axis in axes if len(layout.layers_with(axis.name)) > 1]


def random_cut(case: str, cut: str, seed: int = 0) -> Submodel:
    """Random widths per layer of one axis; or of all axes, with hidden cut for all layers and perhaps fewer layers."""
    layout, rng = layout_for(case), random.Random(f"{case} {cut} {seed}")
    shared, layers = CASES[case].cuts()["all"] if cut in TOGETHER else ({}, None)
    if cut == "all and depth":  # of each kind enough stay to differ
        layers = tuple(range(1, layout.num_layers)) if "nemotron_h" in case else (0, 1, 3)
    axes = own_axes(case) if cut in TOGETHER else [cut]
    shared = {axis: width for axis, width in shared.items() if axis not in axes}
    for _ in range(10_000):
        own = {axis: {n: rng.choice(layout.axes[axis].legal()) for n in layout.layers_with(axis)} for axis in axes}
        submodel = Submodel(widths=shared, layers=layers, layer_widths=own)
        try:
            submodel.check(layout)
        except WidthError:
            continue  # widths that do not fit together
        if submodel.completed(layout).layer_widths:
            return submodel
    raise AssertionError(f"no widths per layer fit: {case} {cut}")


def hand_state(elastic: ElasticModel, case: str, submodel: Submodel) -> dict[str, torch.Tensor]:
    """The nested model's tensors, those of each layer cut by hand at that layer's widths."""
    index = hand_index(elastic, case, submodel)
    source = elastic.model.state_dict()
    return {name: take(source[old], where) for name, (old, where) in index.items()}


def hand_index(elastic: ElasticModel, case: str, submodel: Submodel):
    def cut_at(layer: int | None):
        own = {axis: by_layer[layer] for axis, by_layer in submodel.layer_widths.items() if layer in by_layer}
        return CASES[case].index(elastic.model, ({**submodel.widths, **own}, submodel.layers))

    kept = range(elastic.layout.num_layers) if submodel.layers is None else submodel.layers
    by_layer = {f".layers.{new}.": cut_at(old) for new, old in enumerate(kept)}
    return {
        name: next((cut[name] for part, cut in by_layer.items() if part in name), where)
        for name, where in cut_at(None).items()
    }


def with_cut(case: str, cut: str) -> tuple[ElasticModel, Submodel]:
    elastic, submodel = ElasticModel(CASES[case].parent()), random_cut(case, cut)
    elastic.add("small", submodel)
    return elastic, submodel


# Each axis alone in one variant of each family; all axes and depth in every variant.
FIRST = {case.family: name for name, case in reversed(CASES.items())}.values()
CUTS = [(case, cut) for case in FIRST for cut in (*own_axes(case), "all")] + [(case, "all and depth") for case in CASES]
ALL = [(case, "all and depth") for case in FIRST]


@pytest.mark.parametrize(("case", "cut"), CUTS)
def test_masks_lens_and_views_compute_the_model_cut_by_hand(case: str, cut: str) -> None:
    elastic, submodel = with_cut(case, cut)
    view, wanted = elastic.submodel("small"), hand_state(elastic, case, submodel)
    assert view.state_dict().keys() == wanted.keys()
    assert [name for name, tensor in view.state_dict().items() if not torch.equal(tensor, wanted[name])] == []
    with torch.no_grad():
        logits = view(batch()).logits
        assert torch.equal(elastic(batch(), submodel="small").logits, logits)
        with elastic.masked(hard_masks(elastic.layout, submodel)):
            assert relative(elastic(batch()).logits, logits) < 1e-5
        assert relative(elastic(batch()).logits, logits) > 1e-3, "the cut changes what the model computes"


@pytest.mark.parametrize(("case", "cut"), CUTS)
def test_the_folder_is_the_model_and_counts_are_its_tensors(case: str, cut: str, tmp_path: Path) -> None:
    elastic, submodel = with_cut(case, cut)
    elastic.model.save_pretrained(tmp_path / "parent")
    report = slice_checkpoint(tmp_path / "parent", tmp_path / "out", submodel)
    loaded = ElasticModel.from_pretrained(tmp_path / "out")
    assert_same_state(loaded.model, elastic.submodel("small"))
    assert torch.equal(loaded(batch()).logits, elastic(batch(), submodel="small").logits)
    assert torch.equal(loaded.submodel("full")(batch()).logits, loaded(batch()).logits)
    numel = {name: tensor.numel() for name, tensor in loaded.model.named_parameters()}
    config = loaded.model.config
    unused = sum(
        tensor[config.num_experts_per_tok :].numel()
        for name, tensor in loaded.model.named_parameters()
        if ".experts." in name
    )
    assert (report.params, report.active_params) == (sum(numel.values()), sum(numel.values()) - unused)
    assert cost.params(loaded.layout, {}) == report.params
    assert cost.active_params(loaded.layout, {}) == report.active_params
    buffers = sum(tensor.numel() for name, tensor in loaded.model.named_buffers() if name.endswith("correction_bias"))
    assert cost.weight_bytes(elastic.layout, submodel.keyed_widths, submodel.layers, "fp32") == 4 * (
        report.params + buffers
    )


@pytest.mark.parametrize(("case", "cut"), ALL)
def test_transformers_alone_refuses_the_folder(case: str, cut: str, tmp_path: Path) -> None:
    elastic, submodel = with_cut(case, cut)
    elastic.model.save_pretrained(tmp_path / "parent")
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", submodel)
    shown = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    finally:
        hf_logging.set_verbosity(shown)


@pytest.mark.parametrize(("case", "cut"), ALL)
def test_every_way_to_generate_gives_the_folders_tokens(case: str, cut: str, tmp_path: Path) -> None:
    elastic, submodel = with_cut(case, cut)
    ids, options = batch(12), {"max_new_tokens": 8, "do_sample": False}
    elastic.model.save_pretrained(tmp_path / "parent")
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", submodel)
    wanted = ElasticModel.from_pretrained(tmp_path / "out").generate(ids, **options)
    assert torch.equal(elastic.submodel("small").generate(ids, **options), wanted)
    assert torch.equal(elastic.generate(ids, submodel="small", **options), wanted)
    without_cache = elastic.submodel("small").generate(ids, use_cache=False, **options)
    assert torch.equal(without_cache, wanted), "caches hold what the layers' own widths say"


@pytest.mark.parametrize(("case", "cut"), ALL)
def test_gradients_are_the_folders_and_land_in_the_parents_kept_part(case: str, cut: str, tmp_path: Path) -> None:
    elastic, submodel = with_cut(case, cut)
    elastic.submodel("small").save_pretrained(tmp_path / "out")
    loaded, ids = ElasticModel.from_pretrained(tmp_path / "out"), batch()
    elastic(ids, labels=ids, submodel="small", use_cache=False).loss.backward()
    loaded(ids, labels=ids, use_cache=False).loss.backward()
    wanted, index = dict(loaded.model.named_parameters()), hand_index(elastic, case, submodel)
    of_parent = {old: (name, where) for name, (old, where) in index.items()}
    for old, parameter in elastic.model.named_parameters():
        if old not in of_parent:
            assert parameter.grad is None
            continue
        name, where = of_parent[old]
        inside = torch.zeros_like(parameter, dtype=torch.bool)
        kept = [torch.arange(n) if at is None else at for at, n in zip(where, parameter.shape, strict=True)]
        inside[torch.meshgrid(*kept, indexing="ij")] = True
        torch.testing.assert_close(take(parameter.grad, where), wanted[name].grad, rtol=1e-5, atol=2e-6)
        assert parameter.grad[~inside].abs().sum() == 0


@pytest.mark.parametrize("case", ["nemotron_h plain", "qwen3_moe", "granitemoehybrid"])
def test_bf16_views_equal_the_folder_bit_for_bit(case: str, tmp_path: Path) -> None:
    parent = CASES[case].parent().to(torch.bfloat16)
    elastic = ElasticModel(parent)
    axis = next(name for name in ("experts", "mamba_heads", "heads") if name in own_axes(case))
    options = elastic.layout.axes[axis].legal()
    own = {axis: {n: options[i % 2 - 2] for i, n in enumerate(elastic.layout.layers_with(axis))}}
    elastic.add("small", Submodel(layer_widths=own))
    parent.save_pretrained(tmp_path / "parent")
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", Submodel(layer_widths=own))
    loaded, parent = (ElasticModel.from_pretrained(tmp_path / name) for name in ("out", "parent"))
    parent.add("small", Submodel(layer_widths=own))
    assert loaded.model.dtype == torch.bfloat16
    assert torch.equal(loaded(batch()).logits, parent(batch(), submodel="small").logits)
    fp32 = ElasticModel.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    assert fp32.model.dtype == torch.float32
    assert relative(fp32(batch()).logits, loaded(batch()).logits.float()) < 0.2


def test_layers_that_agree_are_an_ordinary_slice(tmp_path: Path) -> None:
    case = "nemotron_h plain"
    elastic = ElasticModel(CASES[case].parent())
    own = dict.fromkeys(elastic.layout.layers_with("expert_ffn"), 20)
    per_layer, shared = Submodel(layer_widths={"expert_ffn": own}), Submodel(widths={"expert_ffn": 20})
    assert per_layer.completed(elastic.layout) == shared.completed(elastic.layout)
    full = Submodel(layer_widths={"expert_ffn": dict.fromkeys(own, 32)})
    assert full.is_full(elastic.layout)
    elastic.model.save_pretrained(tmp_path / "parent")
    slice_checkpoint(tmp_path / "parent", tmp_path / "out", per_layer)
    assert not (tmp_path / "out" / "elastic.json").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.moe_intermediate_size == 20


def test_a_cut_that_drops_the_layers_that_differ_is_an_ordinary_one() -> None:
    layout = layout_for("llama")
    cut = Submodel(layers=(0, 1), layer_widths={"ffn": {2: 20, 3: 24}}).completed(layout)
    assert cut == Submodel(layers=(0, 1)).completed(layout)


def test_the_lens_follows_the_parents_attention_implementation() -> None:
    elastic, _ = with_cut("qwen3", "ffn")
    wanted = elastic(batch(), submodel="small").logits
    elastic.model.set_attn_implementation("eager")
    seen = elastic(batch(), submodel="small", output_attentions=True)
    assert len(seen.attentions) == 4
    assert relative(seen.logits, wanted) < 1e-5


def test_costs_are_differentiable_in_each_layers_width() -> None:
    layout = layout_for("llama")
    widths = {("ffn", n): torch.tensor(20.0, requires_grad=True) for n in (0, 2)}
    cost.params(layout, {"hidden": 32, **widths}).backward()
    assert [width.grad.item() for width in widths.values()] == [3 * 32, 3 * 32]  # gate, up, down
    assert cost.memory_bytes(layout, widths, context=1) == cost.memory_bytes(
        layout, {("ffn", 0): 20, ("ffn", 2): 20}, context=1
    )


def test_states_are_counted_by_layer() -> None:
    """NemotronH conv state: (heads*8 + 2*2*8) x 4 numbers of 2 bytes; SSM: heads*8*8 numbers of 4 bytes."""
    layout = layout_for("nemotron_h plain")
    first, second, *_ = layout.layers_with("mamba_heads")
    kept = (first, second, *(unit.layer for unit in layout.units if unit.kind == "full_attention"))
    widths = {("mamba_heads", first): 2, ("mamba_heads", second): 6}
    wanted = sum((heads * 8 + 32) * 4 * 2 + heads * 8 * 8 * 4 for heads in (2, 6))
    assert cost.state_bytes_per_sequence(layout, widths, sorted(kept)) == wanted


def test_elastic_json_says_version_2_only_where_layers_differ(tmp_path: Path) -> None:
    small = Submodel(widths={"hidden": 32})
    ElasticConfig(family="llama", submodels={"small": small}).save(tmp_path)
    written = json.loads((tmp_path / "elastic.json").read_text())
    assert written["format_version"] == 1
    assert written["submodels"]["small"] == {"widths": {"hidden": 32}, "layers": None}
    assert "own_widths" not in written
    own = Submodel(layer_widths={"ffn": {0: 20, 3: 24}}, layers=(0, 3))
    ElasticConfig(family="llama", submodels={"small": small, "own": own}).save(tmp_path)
    assert json.loads((tmp_path / "elastic.json").read_text())["format_version"] == 2
    assert ElasticConfig.load(tmp_path).submodels == {"small": small, "own": own}
