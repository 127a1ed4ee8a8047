"""The masked lens beside the central test of test_families.py: routing options, norms, soft masks and their gradients."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from hand_cut import MODELS, batch, cut_of, hand_child, parent_of
from tiny import tiny_granitemoehybrid, tiny_llama, tiny_mixtral, tiny_model, tiny_qwen3, tiny_qwen3_moe

from star_elastic.elastic import ElasticModel
from star_elastic.errors import UnknownNameError, WidthError
from star_elastic.families import layout_of
from star_elastic.masks import hard_masks, prefix_mask
from star_elastic.submodel import Submodel


def relative(one: torch.Tensor, two: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return ((one - two).abs().max() / two.abs().max()).item()


@pytest.mark.parametrize("gates", [{"norm_topk_prob": False}, {"n_routed_experts": 12, "n_group": 3, "topk_group": 2}])
def test_expert_masks_under_other_routing_options(gates):
    edits = dict(num_experts_per_tok=3, **gates)
    parent = tiny_model(**edits)
    child = hand_child(parent, edits, {"experts": 6})
    elastic = ElasticModel(parent)
    with torch.no_grad(), elastic.masked(hard_masks(elastic.layout, Submodel(widths={"experts": 6}))):
        assert relative(elastic(batch()).logits, child(batch()).logits) < 1e-5


def test_masked_decoding_with_a_cache_equals_the_child():
    parent = parent_of("dense")
    widths, _ = cut_of("dense", "all")
    child = hand_child(parent, MODELS["dense"], widths)
    elastic = ElasticModel(parent)
    with elastic.masked(hard_masks(elastic.layout, Submodel(widths=widths))):
        seen = elastic.generate(batch(12), max_new_tokens=6, do_sample=False)
    assert torch.equal(seen, child.generate(batch(12), max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize(
    ("heads", "channels"),
    [([1, 1, 1, 0] * 2, [1] * 5 + [0] * 3), ([1, 0.5, 1, 0, 1, 0.25, 0.25, 0], [1, 1, 1, 1, 0.5, 0.5, 0, 0])],
    ids=["hard", "soft"],
)
def test_gated_norm_divides_by_the_sum_of_squared_masks_of_its_group(heads, channels):
    """Against the norm written out per group; inputs are small enough for eps to matter, groups keep different shares."""
    elastic = ElasticModel(tiny_model())
    mixer = elastic.model.model.layers[0].mixer
    heads, channels = torch.tensor(heads, dtype=torch.float), torch.tensor(channels, dtype=torch.float)
    mask = torch.outer(heads, channels).flatten()
    hidden, gate = torch.randn(2, 3, 64) * mask * 0.02, torch.randn(2, 3, 64)
    seen = []
    mixer.in_proj.register_forward_hook(lambda *_: seen.append(mixer.norm(hidden, gate)))
    with elastic.masked({"mamba_heads": heads, "mamba_head_dim": channels}):
        elastic(batch())
    product = hidden * torch.nn.functional.silu(gate)
    for group in (slice(0, 32), slice(32, 64)):
        kept = mask[group].square().sum()
        scale = torch.sqrt(product[..., group].square().sum(-1, keepdim=True) / kept + mixer.norm.variance_epsilon)
        wanted = mixer.norm.weight[group] * product[..., group] / scale
        torch.testing.assert_close(seen[0][..., group], wanted, rtol=1e-5, atol=1e-7)


# Every expert is routed to, so that no top-k swap makes the loss jump.
SOFT = {
    "nemotron_h": functools.partial(tiny_model, pattern="ME*-E", num_experts_per_tok=8),
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "qwen3_moe": functools.partial(tiny_qwen3_moe, num_experts_per_tok=8),
    "qwen3_moe normed": functools.partial(tiny_qwen3_moe, num_experts_per_tok=8, norm_topk_prob=True),
    "mixtral": functools.partial(tiny_mixtral, num_experts_per_tok=8),
    "granitemoehybrid": functools.partial(tiny_granitemoehybrid, num_experts_per_tok=8),
}


@pytest.mark.parametrize(
    ("family", "axis"), [(name, axis) for name, build in SOFT.items() for axis in layout_of(build().config.to_dict()).axes]
)
def test_gradient_of_a_soft_mask_equals_finite_differences(family, axis):
    """In fp32, so a central difference of 2e-2 is used."""
    elastic = ElasticModel(SOFT[family]())
    generator = torch.Generator().manual_seed(1)
    masks = {name: 0.4 + 0.5 * torch.rand(one.size, generator=generator) for name, one in elastic.layout.axes.items()}
    direction = torch.randn(masks[axis].shape, generator=generator)
    direction /= direction.norm()

    def loss(mask):
        with elastic.masked(masks | {axis: mask}):
            return elastic(batch(), labels=batch(), use_cache=False).loss

    mask = masks[axis].clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(mask), mask)
    with torch.no_grad():
        step = 1e-2
        measured = (loss(masks[axis] + step * direction) - loss(masks[axis] - step * direction)) / (2 * step)
    assert abs(measured) > 1e-4
    assert (slope @ direction - measured).abs() < 1e-2 * measured.abs() + 1e-4


@pytest.mark.parametrize("axis", ["ffn", "expert_ffn", "shared_ffn", "heads"])
def test_a_mask_enters_its_path_once(axis):
    """A layer's answer is linear in the masks of these axes: half the mask of one member is half of what it adds."""
    elastic = ElasticModel(tiny_model(pattern="ME*-E"))
    layer = {"heads": 2, "ffn": 3}.get(axis, 1)
    stream = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))  # unseeded, one channel in 64 stays silent
    size = elastic.layout.axes[axis].size

    def answer(value):
        mask = torch.ones(size)
        mask[1] = value
        seen = {}
        block = elastic.model.model.layers[layer]
        before = block.register_forward_pre_hook(lambda module, args: (stream, *args[1:]))
        after = block.register_forward_hook(lambda module, args, output: seen.update(out=output - stream))
        with elastic.masked({axis: mask}), torch.no_grad():
            elastic(batch(6)[:1])
        before.remove()
        after.remove()
        return seen["out"]

    none, half, whole = answer(0.0), answer(0.5), answer(1.0)
    assert (whole - none).abs().max() > 1e-3
    torch.testing.assert_close(half, (none + whole) / 2, rtol=1e-4, atol=1e-5)


def norm_by_hand(norm: torch.nn.Module, stream: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """An RMS norm over ``kept`` channels, whatever the number of channels."""
    return norm.weight * stream / torch.sqrt(stream.square().sum(-1, keepdim=True) / kept + norm.variance_epsilon)


@pytest.mark.parametrize("model_name", ["plain", "biases"])
def test_a_soft_hidden_mask_multiplies_once_whatever_writes_to_the_stream(model_name):
    """Each layer adds mask * mixer(norm over k channels), and the head reads mask * embedding: no factor twice or missing."""
    elastic = ElasticModel(parent_of(model_name))
    model, mask = elastic.model, torch.linspace(0.2, 1.0, 64)
    kept = mask.square().sum()
    outputs = []
    for block in model.model.layers:
        block.register_forward_hook(lambda module, args, output: outputs.append((module, args[0], output)))
    with torch.no_grad():
        with elastic.masked({"hidden": mask}):
            elastic(batch())
        for block, stream, output in outputs:
            added = block.mixer(norm_by_hand(block.norm, stream, kept))
            added = added[0] if isinstance(added, tuple) else added
            torch.testing.assert_close(output - stream, mask * added, rtol=1e-4, atol=1e-4)
        with elastic.masked({"hidden": mask, "depth": torch.zeros(5)}):
            seen = elastic(batch()).logits
        stream = mask * model.model.embeddings(batch())
        wanted = norm_by_hand(model.model.norm_f, stream, kept) @ model.lm_head.weight.T
    torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-5)


def test_soft_expert_mask_scales_the_gate_before_renormalisation():
    """Scores 0.5 each: with masks 1 and 1/3 the two gates are 3/4 and 1/4 of the scaling factor, by hand."""
    elastic = ElasticModel(tiny_model())
    gate = elastic.model.model.layers[1].mixer.gate
    seen = []
    with torch.no_grad():
        for layer in elastic.model.model.layers:
            if layer.block_type == "moe":
                layer.mixer.gate.weight.zero_()
                layer.mixer.gate.e_score_correction_bias.zero_()
    mask = torch.tensor([1.0, 1 / 3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    gate.register_forward_hook(lambda module, args, output: seen.append(output))
    with elastic.masked({"experts": mask}):
        elastic(batch())
    _, gates, experts = seen[0]
    order = experts.argsort(dim=-1)
    assert torch.equal(experts.gather(1, order), torch.tensor([[0, 1]]).expand(48, 2))
    torch.testing.assert_close(gates.gather(1, order), torch.tensor([[0.75, 0.25]]).expand(48, 2) * 2.5)


@pytest.mark.parametrize("axis", ["hidden", "heads", "mamba_heads", "mamba_head_dim", "expert_ffn", "shared_ffn"])
def test_soft_masks_go_to_both_limits(axis):
    elastic = ElasticModel(tiny_model())
    whole = elastic.layout.axes[axis]
    width = whole.legal()[(len(whole.legal()) - 1) // 2]
    hard = prefix_mask(whole, width)
    with torch.no_grad():
        for limit, step in ((hard, 1e-4), (torch.ones(whole.size), -1e-4)):
            with elastic.masked({axis: limit}):
                at_limit = elastic(batch()).logits
            with elastic.masked({axis: limit + step * (1 - hard)}):
                near = elastic(batch()).logits
            assert 0 < relative(near, at_limit) < 3e-2


def test_masks_per_layer_and_per_layer_gates():
    elastic = ElasticModel(tiny_model())
    own = prefix_mask(elastic.layout.axes["expert_ffn"], 16)
    shared = prefix_mask(elastic.layout.axes["expert_ffn"], 24)
    ids = batch()
    with torch.no_grad():
        wanted = elastic(ids).logits
        with elastic.masked({("expert_ffn", 1): torch.ones(32)}):
            assert torch.equal(elastic(ids).logits, wanted)
        with elastic.masked({("expert_ffn", 1): own, ("expert_ffn", 4): shared}):
            separate = elastic(ids).logits
        with elastic.masked({("expert_ffn", 1): own, "expert_ffn": shared}):
            assert torch.equal(elastic(ids).logits, separate)
        with elastic.masked({"expert_ffn": shared}):
            assert not torch.equal(elastic(ids).logits, separate)
        block = elastic.model.model.layers[3]
        outputs = []
        handle = block.register_forward_hook(lambda module, args, output: outputs.append((args[0], output)))
        elastic(ids)
        with elastic.masked({"depth": torch.tensor([1, 1, 1, 0.25, 1])}):
            elastic(ids)
        handle.remove()
        (before, plain), (same, gated) = outputs
        assert torch.equal(before, same)
        torch.testing.assert_close(gated - before, 0.25 * (plain - before))


@pytest.mark.parametrize(
    ("masks", "error", "words"),
    [
        ({"hiden": torch.ones(64)}, UnknownNameError, "did you mean 'hidden'"),
        ({"hidden": torch.ones(60)}, WidthError, "has 64 members"),
        ({("hidden", 1): torch.ones(64)}, WidthError, "one axis for the whole model"),
        ({("expert_ffn", 9): torch.ones(32)}, WidthError, "layers go from 0 to 4"),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks, error, words):
    elastic = ElasticModel(tiny_model())
    with pytest.raises(error, match=words), elastic.masked(masks):
        pass


def test_everything_is_put_back_after_an_exception():
    elastic = ElasticModel(tiny_model())
    wanted, gate = elastic(batch()).logits, elastic.model.model.layers[1].mixer.gate
    before = vars(gate)["forward"]
    handle = elastic.model.model.layers[1].mixer.shared_experts.register_forward_hook(lambda *_: 1 / 0)
    masks = hard_masks(elastic.layout, Submodel(widths={"hidden": 48, "mamba_heads": 4, "experts": 4}))
    with pytest.raises(ZeroDivisionError), elastic.masked(masks):
        elastic(batch())
    handle.remove()
    assert torch.equal(elastic(batch()).logits, wanted)
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in elastic.model.parameters())
    assert isinstance(elastic.model.model.layers[1].norm.variance_epsilon, float)
    assert vars(gate)["forward"] == before


def test_training_does_not_hand_masked_norms_to_a_fused_kernel(monkeypatch):
    """The fused Mamba kernel reads norm weight and eps itself; under a mask that reaches the norm it must not be asked."""
    elastic = ElasticModel(tiny_model().train())
    asked = []
    module = sys.modules[type(elastic.model).__module__]
    monkeypatch.setattr(module, "mamba2_split_conv1d_scan_combined", lambda *args, **kwargs: asked.append(1))
    elastic(batch(), use_cache=False)
    assert len(asked) == 2
    with elastic.masked({"mamba_heads": torch.tensor([1.0, 1, 1, 0.5] * 2)}):
        elastic(batch(), use_cache=False)
    assert len(asked) == 2
    with elastic.masked({"expert_ffn": torch.full((32,), 0.5)}):
        elastic(batch(), use_cache=False)
    assert len(asked) == 4
