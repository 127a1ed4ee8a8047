"""Qwen3: a Llama whose queries and keys pass an RMS norm over each head's channels; some layers may see only a sliding window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from star_elastic.errors import CheckpointError
from star_elastic.families import parts
from star_elastic.families.base import LLAMA_CPP, SGLANG, VLLM, Config, Family, Table, Unfit, fits, kinds_of_layers
from star_elastic.layout import Layout, Tap

# What transformers assumes for a field that config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

FIELDS = {"hidden": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size"}


def layout(config: Config) -> Layout:
    """The table of a Qwen3.

    Raises:
        CheckpointError: a field of the config is impossible.
    """
    config = parts.completed(config, DEFAULTS)
    make = parts.AxisMaker(config, FIELDS)
    own = [make.axis("hidden", scope="model"), make.heads(), make.axis("ffn")]
    axes = parts.named(own, config["num_hidden_layers"])
    table = Table(axes, parts.common_constants(config))
    rows = [
        *parts.norm_rows(table),
        *parts.attention_rows(table, "self_attn", biases=config["attention_bias"], qk_norm=True),
        *parts.gated_mlp_rows(table, "mlp", "ffn"),
    ]
    taps = (
        *parts.norm_taps("self_attn", "mlp"),
        *parts.attention_taps("self_attn"),
        Tap("ffn", "mlp.down_proj", "input"),
    )
    marks = {"taps": taps, "states": (parts.kv_state(table),)}
    layers = [parts.layer("attention+mlp", number, rows, **marks) for number in range(config["num_hidden_layers"])]
    return parts.decoder("qwen3", table, layers, config)


def config_edits(config: Config, widths: Mapping[str, int], layers: Sequence[int] | None) -> dict[str, Any]:
    """Config fields of a nested Qwen3; the kinds of layer that stay are spelled out, since rules by number no longer hold."""
    full = parts.completed(config, DEFAULTS)
    stay = parts.kept(layers, full["num_hidden_layers"])
    kinds = attention_kinds(full)
    return {
        **parts.width_edits(FIELDS, full, widths, len(stay)),
        "layer_types": [kinds[number] for number in stay],
    }


def attention_kinds(config: Config) -> list[str]:
    """Whether each layer attends to everything or to a window: listed, or by transformers' rule for a list that is missing.

    Raises:
        CheckpointError: the list, or the number that the rule needs, is something else.
    """
    if config.get("layer_types") is not None:
        return kinds_of_layers(config, "layer_types", ("full_attention", "sliding_attention"))
    slides = config.get("use_sliding_window", False) and config.get("sliding_window", 4096) is not None
    first = config.get("max_window_layers", 28) if slides else config["num_hidden_layers"]
    if not isinstance(first, int):
        raise CheckpointError(f"config.json: max_window_layers must be a whole number, not {first!r}")
    return ["sliding_attention" if n >= first else "full_attention" for n in range(config["num_hidden_layers"])]


def llama_cpp(config: Config) -> Unfit | None:
    """llama.cpp's Qwen3 lets every layer see everything."""
    if "sliding_attention" in attention_kinds(parts.completed(config, DEFAULTS)):
        return Unfit("llama.cpp has no Qwen3 with layers that see only a sliding window")
    return None


FAMILY = Family("qwen3", layout, config_edits, engines={VLLM: fits, SGLANG: fits, LLAMA_CPP: llama_cpp})
