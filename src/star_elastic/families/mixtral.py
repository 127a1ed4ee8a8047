"""Mixtral: attention and gated experts in every layer. On disk each expert has matrices w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from star_elastic.families import parts
from star_elastic.families.base import Config, Family, Table
from star_elastic.layout import Layout, Router

# What transformers assumes for a field that config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}

FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "experts": "num_local_experts",
    "expert_ffn": "intermediate_size",
}

ON_DISK = "block_sparse_moe"


def layout(config: Config) -> Layout:
    """The table of a Mixtral.

    Raises:
        CheckpointError: a field of the config is impossible.
    """
    config = parts.completed(config, DEFAULTS)
    make = parts.AxisMaker(config, FIELDS)
    own = [make.axis("hidden", scope="model"), make.heads(), make.experts(), make.axis("expert_ffn")]
    axes = parts.named(own, config["num_hidden_layers"])
    table = Table(axes, parts.common_constants(config))
    gate, up, down = (f"{ON_DISK}.experts.{{}}.{name}.weight" for name in ("w1", "w3", "w2"))
    rows = [
        *parts.norm_rows(table),
        *parts.attention_rows(table, "self_attn"),
        table.row("mlp.gate.weight", "experts, hidden", on_disk=f"{ON_DISK}.gate.weight"),
        *parts.gated_expert_rows(table, "mlp.experts", (gate, up), down),
    ]
    marks = {
        "router": Router("mlp.gate", "softmax_topk_fp32"),
        "taps": (
            *parts.norm_taps("self_attn", "mlp"),
            *parts.attention_taps("self_attn"),
            *parts.expert_taps("mlp.experts"),
        ),
        "states": (parts.kv_state(table),),
    }
    layers = [parts.layer("attention+moe", number, rows, **marks) for number in range(config["num_hidden_layers"])]
    return parts.decoder("mixtral", table, layers, config, top_k=config["num_experts_per_tok"])


def config_edits(config: Config, widths: Mapping[str, int], layers: Sequence[int] | None) -> dict[str, Any]:
    """Config fields of a nested Mixtral."""
    full = parts.completed(config, DEFAULTS)
    return parts.width_edits(FIELDS, full, widths, len(parts.kept(layers, full["num_hidden_layers"])))


FAMILY = Family("mixtral", layout, config_edits)
