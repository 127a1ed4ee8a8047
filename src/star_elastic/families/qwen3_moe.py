"""Qwen3-MoE: Qwen3's attention, then gated experts behind a softmax router, or a dense gated MLP in some layers.

Which layers are dense follows from their numbers (``mlp_only_layers``, ``decoder_sparse_step``), which a depth cut changes: a
nested model lists them all. transformers keeps the number of experts as ``num_local_experts``, published configs as
``num_experts``; config.json carries both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from star_elastic.errors import CheckpointError
from star_elastic.families import parts
from star_elastic.families.base import LLAMA_CPP, SGLANG, VLLM, Config, Family, Table, Unfit, fits
from star_elastic.layout import Layout, Router, Tap, Unit

# What transformers assumes for a field that config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "attention_bias": False,
    "moe_intermediate_size": 768,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "tie_word_embeddings": False,
}

FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "experts": "num_local_experts",
    "expert_ffn": "moe_intermediate_size",
    "ffn": "intermediate_size",
}


def normalise(config: Config) -> dict[str, Any]:
    """The config with defaults and one name for the number of experts."""
    full = parts.completed({"num_local_experts": config.get("num_experts", 128), **config}, DEFAULTS)
    full["mlp_only_layers"] = dense_layers(full)
    return full


def dense_layers(config: Config) -> list[int]:
    """Numbers of the layers with a dense MLP.

    Raises:
        CheckpointError: they are not given as a list.
    """
    listed, step = config["mlp_only_layers"] or [], config["decoder_sparse_step"]
    if not isinstance(listed, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of layer numbers, not {listed!r}")
    return [n for n in range(config["num_hidden_layers"]) if n in listed or (n + 1) % step]


def layer_unit(table: Table, config: Config, number: int) -> Unit:
    """One decoder layer."""
    rows = [
        *parts.norm_rows(table),
        *parts.attention_rows(table, "self_attn", biases=config["attention_bias"], qk_norm=True),
    ]
    taps = [*parts.norm_taps("self_attn", "mlp"), *parts.attention_taps("self_attn")]
    states = (parts.kv_state(table),)
    if number in config["mlp_only_layers"]:
        rows += parts.gated_mlp_rows(table, "mlp", "ffn")
        taps.append(Tap("ffn", "mlp.down_proj", "input"))
        return parts.layer("attention+mlp", number, rows, taps=tuple(taps), states=states)
    gate, up, down = (f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down"))
    rows.append(table.row("mlp.gate.weight", "experts, hidden"))
    rows += parts.gated_expert_rows(table, "mlp.experts", (gate, up), down)
    taps += parts.expert_taps("mlp.experts")
    router = Router("mlp.gate", "softmax_topk")
    return parts.layer("attention+moe", number, rows, router=router, taps=tuple(taps), states=states)


def layout(config: Config) -> Layout:
    """The table of a Qwen3-MoE.

    Raises:
        CheckpointError: a field of the config is impossible.
    """
    config = normalise(config)
    make = parts.AxisMaker(config, FIELDS)
    own = [make.axis("hidden", scope="model"), make.heads()]
    dense, num_layers = len(config["mlp_only_layers"]), config["num_hidden_layers"]
    if dense < num_layers:
        own += [make.experts(), make.axis("expert_ffn")]
    if dense:
        own.append(make.axis("ffn"))
    table = Table(parts.named(own, num_layers), parts.common_constants(config))
    layers = [layer_unit(table, config, number) for number in range(num_layers)]
    top_k = config["num_experts_per_tok"] if dense < num_layers else None
    return parts.decoder("qwen3_moe", table, layers, config, top_k=top_k)


def config_edits(config: Config, widths: Mapping[str, int], layers: Sequence[int] | None) -> dict[str, Any]:
    """Config fields of a nested Qwen3-MoE."""
    full = normalise(config)
    stay = parts.kept(layers, full["num_hidden_layers"])
    return {
        **parts.width_edits(FIELDS, full, widths, len(stay)),
        "mlp_only_layers": [number for number, old in enumerate(stay) if old in full["mlp_only_layers"]],
        "decoder_sparse_step": 1,
    }


def json_fields(config: Config) -> dict[str, Any]:
    """The published name of the number of experts beside transformers' own."""
    experts = normalise(config)["num_local_experts"]
    return {"num_experts": experts, "num_local_experts": experts}


def llama_cpp(config: Config) -> Unfit | None:
    """llama.cpp's Qwen3-MoE has experts in every layer, and always renormalises their gates."""
    if normalise(config)["mlp_only_layers"]:
        return Unfit("llama.cpp has no Qwen3-MoE with dense MLP layers")
    if not config.get("norm_topk_prob", False):
        return Unfit("llama.cpp renormalises the gates of every Qwen3-MoE, and this one has norm_topk_prob false")
    return None


FAMILY = Family("qwen3_moe", layout, config_edits, json_fields, engines={VLLM: fits, SGLANG: fits, LLAMA_CPP: llama_cpp})
