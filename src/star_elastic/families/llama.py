"""Llama, and models of its architecture such as SmolLM2: attention and a gated MLP in every layer, often with a tied head.

transformers refuses a Llama config whose hidden size is no multiple of its query heads, even though ``head_dim`` says how large a
head is. The two axes are therefore coupled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from star_elastic.axes import Coupling
from star_elastic.families import parts
from star_elastic.families.base import Config, Family, Table
from star_elastic.layout import Layout, Tap

# What transformers assumes for a field that config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

FIELDS = {"hidden": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size"}

HEADS_DIVIDE_HIDDEN = Coupling(("hidden",), ("heads",), "transformers wants hidden to be a multiple of the query heads")


def layout(config: Config) -> Layout:
    """The table of a Llama.

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
        *parts.attention_rows(table, "self_attn", biases=config["attention_bias"]),
        *parts.gated_mlp_rows(table, "mlp", "ffn", biases=config["mlp_bias"]),
    ]
    taps = (
        *parts.norm_taps("self_attn", "mlp"),
        *parts.attention_taps("self_attn"),
        Tap("ffn", "mlp.down_proj", "input"),
    )
    marks = {"taps": taps, "states": (parts.kv_state(table),)}
    layers = [parts.layer("attention+mlp", number, rows, **marks) for number in range(config["num_hidden_layers"])]
    return parts.decoder("llama", table, layers, config, couplings=(HEADS_DIVIDE_HIDDEN,))


def config_edits(config: Config, widths: Mapping[str, int], layers: Sequence[int] | None) -> dict[str, Any]:
    """Config fields of a nested Llama."""
    full = parts.completed(config, DEFAULTS)
    return parts.width_edits(FIELDS, full, widths, len(parts.kept(layers, full["num_hidden_layers"])))


FAMILY = Family("llama", layout, config_edits)
