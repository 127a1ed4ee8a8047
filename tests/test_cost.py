"""Counts and bytes against real tensors: a closed formula and its copy in a test would agree on the same mistake."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, tiny_config
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.cache_utils import DynamicCache

from star_elastic import cost
from star_elastic.families import layout_of
from star_elastic.presets import NEMOTRON_3_NANO
from star_elastic.submodel import read_json


def random_config(seed: int) -> NemotronHConfig:
    """A random small hybrid: any mix of layers, groups, experts, biases, latent experts."""
    pick = random.Random(seed).choice
    groups, kv, per_group = pick([1, 2, 4]), pick([1, 2]), pick([1, 2, 3])
    pattern = "".join(pick("ME*-") for _ in range(pick([2, 4, 7])))
    return tiny_config(
        pattern,
        hidden_size=pick([32, 48, 64]),
        num_attention_heads=kv * pick([1, 2, 3]),
        num_key_value_heads=kv,
        head_dim=pick([8, 16]),
        mamba_num_heads=groups * per_group,
        n_groups=groups,
        mamba_head_dim=pick([4, 8]),
        ssm_state_size=pick([4, 16]),
        n_routed_experts=pick([4, 8, 12]),
        num_experts_per_tok=pick([1, 2, 3]),
        moe_intermediate_size=pick([12, 32]),
        moe_shared_expert_intermediate_size=pick([20, 48]),
        moe_latent_size=pick([None, 16]),
        intermediate_size=pick([24, 40]),
        use_bias=pick([True, False]),
        mlp_bias=pick([True, False]),
        use_conv_bias=pick([True, False]),
        vocab_size=pick([64, 100]),
    )


@pytest.mark.parametrize("seed", range(30))
def test_counts_equal_real_tensors(seed: int) -> None:
    """Case 1: total is the sum of all parameters; active leaves out the tensors of the experts that top-k does not use."""
    config = random_config(seed)
    with torch.device("meta"):
        model = NemotronHForCausalLM(config)
    layout = layout_of(config.to_dict())
    total = sum(p.numel() for p in model.parameters())
    unused = sum(
        p[: config.n_routed_experts - config.num_experts_per_tok].numel()
        for name, p in model.named_parameters()
        if ".experts." in name
    )
    assert cost.params(layout, {}) == total
    assert cost.active_params(layout, {}) == total - unused
    assert (
        cost.active_params(layout, {}, embedding=False) == total - unused - model.get_input_embeddings().weight.numel()
    )


def test_the_published_model_counts_exactly() -> None:
    layout = NEMOTRON_3_NANO.layout
    assert cost.params(layout, {}) == 31_577_937_344
    assert cost.active_params(layout, {}) == 3_580_073_408
    assert cost.active_params(layout, {}, embedding=False) == 3_227_751_872


# Sizes as published, with the number of parameters that their publishers' files hold.
PUBLISHED = {
    "SmolLM2-135M": (134_515_008, "llama", (49152, 576, 30, 9, 3, 1536), {"tie_word_embeddings": True}),
    "Llama-3.1-8B": (8_030_261_248, "llama", (128256, 4096, 32, 32, 8, 14336), {}),
    "Qwen3-0.6B": (596_049_920, "qwen3", (151936, 1024, 28, 16, 8, 3072), {"tie_word_embeddings": True}),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        "qwen3_moe",
        (151936, 2048, 48, 32, 4, 6144),
        {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "Mixtral-8x7B": (46_702_792_704, "mixtral", (32000, 4096, 32, 32, 8, 14336), {}),
}
SIZE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_of_other_families_count_exactly(name: str) -> None:
    total, family, sizes, rest = PUBLISHED[name]
    config = {"model_type": family, **dict(zip(SIZE_FIELDS, sizes, strict=True)), **rest}
    assert cost.params(layout_of(config), {}) == total


@pytest.mark.parametrize("size", ["23b", "12b"])
def test_the_published_sizes_count_as_transformers_builds_them(size: str) -> None:
    from star_elastic.families import family_of

    config, widths = NEMOTRON_3_NANO.config, NEMOTRON_3_NANO.sizes[size]
    with torch.device("meta"):
        child = NemotronHForCausalLM(NemotronHConfig.from_dict(family_of(config).child_config(config, widths, None)))
    assert cost.params(NEMOTRON_3_NANO.layout, widths) == sum(p.numel() for p in child.parameters())


def test_counts_follow_kept_layers() -> None:
    config = tiny_config("ME*-E")
    kept = tiny_config("M*-")
    with torch.device("meta"):
        child = NemotronHForCausalLM(kept)
    assert cost.params(layout_of(config.to_dict()), {}, [0, 2, 3]) == sum(p.numel() for p in child.parameters())


def test_counts_are_differentiable_in_the_widths_and_in_depth_gates() -> None:
    """The gradient is the exact difference quotient, since the count is linear in each single axis."""
    layout = layout_of(tiny_config("ME*-E").to_dict())
    for name, axis in layout.width_axes.items():
        width = torch.tensor(float(axis.size), dtype=torch.float64, requires_grad=True)
        total = cost.params(layout, {name: width})
        assert total.item() == cost.params(layout, {})
        total.backward()
        assert width.grad is not None
        assert width.grad.item() == pytest.approx(cost.params(layout, {}) - cost.params(layout, {name: axis.size - 1}))
    gate = torch.tensor(0.5, requires_grad=True)
    without = cost.params(layout, {}, [0, 1, 2, 3])
    assert cost.params(layout, {}, {0: 1, 1: 1, 2: 1, 3: 1, 4: gate}).item() == (without + cost.params(layout, {})) / 2


def test_memory_counts_every_expert_resident() -> None:
    """Case 2: 8 -> 4 experts at equal top-k frees those experts, their router rows and selection biases, nothing else."""
    layout = layout_of(tiny_config("ME*ME").to_dict())
    freed = cost.memory_bytes(layout, {}) - cost.memory_bytes(layout, {"experts": 4})
    per_layer = 4 * (2 * 32 * 64) * 2 + 4 * 64 * 4 + 4 * 4  # expert matrices bf16, router rows fp32, biases fp32
    assert freed == 2 * per_layer
    assert cost.active_params(layout, {}) - cost.active_params(layout, {"experts": 4}) == 2 * 4 * 64  # router rows only


@pytest.mark.parametrize(("dtype", "name"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_weight_bytes_are_those_of_the_file(dtype: str, name: str, tmp_path: Path) -> None:
    """Case 2, second half: the estimate is within 1% of the file that transformers writes."""
    from tiny import tiny_model

    model = tiny_model(pattern="ME*-E", hidden_size=128, vocab_size=1024).to(getattr(torch, dtype))
    for layer in (1, 4):  # what from_pretrained keeps in fp32
        model.model.layers[layer].mixer.gate.float()
    model.save_pretrained(tmp_path)
    estimate = cost.weight_bytes(layout_of(read_json(tmp_path / "config.json")), {}, dtype=name)
    assert estimate == pytest.approx((tmp_path / "model.safetensors").stat().st_size, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_bytes_are_those_of_a_real_cache(family: str, dtype: torch.dtype) -> None:
    model = FAMILIES[family]().to(dtype)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(1, 11, dtype=torch.long), cache=cache, use_cache=True)
    layout = layout_of(model.config.to_dict())
    tensors = [state for layer in cache.layers for state in _states(layer)]
    kv = sum(t.numel() * t.element_size() for t in tensors if t.dim() == 4 and t.shape[2] == 11)
    total = sum(t.numel() * t.element_size() for t in tensors)
    assert 11 * cost.kv_bytes_per_token(layout, {}, itemsize=dtype.itemsize) == kv
    assert cost.state_bytes_per_sequence(layout, {}, itemsize=dtype.itemsize) == total - kv


def _states(layer: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in vars(layer).values():
        values = value.values() if isinstance(value, dict) else [value]
        found += [v for v in values if isinstance(v, torch.Tensor)]
    return found


def test_quantized_bytes_of_a_matrix_by_hand() -> None:
    """One MLP layer: 64 x 48 up and down. NVFP4 takes half a byte a number, a byte per 16, and two fp32 scales a matrix."""
    with_mlp, without = layout_of(tiny_config("*-").to_dict()), layout_of(tiny_config("*").to_dict())
    layer = {
        f: cost.weight_bytes(with_mlp, {}, dtype=f) - cost.weight_bytes(without, {}, dtype=f) for f in cost.FORMATS
    }
    norm, matrices = 64, 2 * 64 * 48
    assert layer["bf16"] == 2 * (norm + matrices)
    assert layer["fp8"] == 2 * norm + matrices + 2 * 8
    assert layer["nvfp4"] == 2 * norm + matrices / 2 + matrices / 16 + 2 * 8
