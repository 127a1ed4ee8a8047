"""Granite 4 hybrids: each layer has a mixer (Mamba-2 or attention), then routed experts and one shared MLP side by side.

Its multipliers of embeddings, residuals, attention scores and logits do not depend on any width. The width of the Mamba mixer is
written in the config as a whole multiple of hidden (``mamba_expand``), so hidden, Mamba heads and their channels are coupled. In
memory and on disk gate and up are one tensor; only its name differs. A model with no experts has the shared MLP alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from star_elastic.axes import Coupling
from star_elastic.families import parts
from star_elastic.families.base import (
    LLAMA_CPP,
    VLLM,
    Config,
    Family,
    Table,
    Unfit,
    divides,
    fits,
    kinds_of_layers,
    positive,
)
from star_elastic.layout import Layout, Router, Row, Tap, Unit

MAMBA, ATTENTION = "linear_attention", "full_attention"
LEGACY_KINDS = {"mamba": MAMBA, "attention": ATTENTION}

# What transformers assumes for a field that config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "attention_bias": False,
    "logits_scaling": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "layer_types": None,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "tie_word_embeddings": False,
}

FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "mamba_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "experts": "num_local_experts",
    "expert_ffn": "intermediate_size",
    "shared_ffn": "shared_intermediate_size",
}

EXPAND = Coupling(
    ("mamba_heads", "mamba_head_dim"),
    ("hidden",),
    "the config writes the width of the Mamba mixer as a whole multiple of hidden (mamba_expand)",
)


def normalise(config: Config) -> dict[str, Any]:
    """The config with defaults, each layer's kind spelled out, and every size checked.

    Raises:
        CheckpointError: a field is impossible.
    """
    renamed = {"layer_types" if name == "layers_block_type" else name: value for name, value in config.items()}
    dense = {"num_local_experts": 1, "num_experts_per_tok": 1} if renamed.get("num_local_experts") == 0 else {}
    full = {**parts.completed({**renamed, **dense}, DEFAULTS), "dense": bool(dense)}
    if full["mamba_d_head"] == "auto":
        full["mamba_d_head"] = full["mamba_expand"] * full["hidden_size"] // full["mamba_n_heads"]
    positive(full, "mamba_d_head")
    divides(full, "mamba_n_groups", "mamba_n_heads")
    kinds = full["layer_types"] or [MAMBA] * full["num_hidden_layers"]
    if isinstance(kinds, list):
        kinds = [LEGACY_KINDS.get(str(kind), kind) for kind in kinds]
    full["layer_types"] = kinds_of_layers({**full, "layer_types": kinds}, "layer_types", (MAMBA, ATTENTION))
    return full


def mlp_rows(table: Table, config: Config) -> list[Row]:
    """Routed experts, their router, and the shared MLP."""
    shared = [
        table.row("shared_mlp.input_linear.weight", "shared_ffn + shared_ffn, hidden", formats=parts.QUANTIZED),
        table.row("shared_mlp.output_linear.weight", "hidden!, shared_ffn!", formats=parts.QUANTIZED),
    ]
    if config["dense"]:
        return shared
    moe = "block_sparse_moe"
    return [
        table.row(f"{moe}.router.weight", "experts, hidden", on_disk=f"{moe}.router.layer.weight"),
        *parts.gated_expert_rows(table, f"{moe}.experts", f"{moe}.input_linear.weight", f"{moe}.output_linear.weight"),
        *shared,
    ]


def layer_unit(table: Table, config: Config, number: int) -> Unit:
    """One decoder layer."""
    taps = [Tap("shared_ffn", "shared_mlp.output_linear", "input")]
    router = None
    if not config["dense"]:
        taps += parts.expert_taps("block_sparse_moe.experts")
        router = Router("block_sparse_moe.router", "topk_softmax")
    if config["layer_types"][number] == MAMBA:
        name, kind, states = (
            "mamba",
            "mamba",
            parts.mamba_states(table, 4),
        )  # the scan hands back fp32, whatever the dtype
        taps += parts.mamba_taps("mamba")
        biases = {"bias": config["mamba_proj_bias"], "conv_bias": config["mamba_conv_bias"]}
        mixer = parts.mamba_rows(table, "mamba", config["mamba_n_groups"], **biases)
    else:
        name, kind, states = "self_attn", "attention", [parts.kv_state(table)]
        taps += parts.attention_taps("self_attn")
        mixer = parts.attention_rows(table, "self_attn", biases=config["attention_bias"])
    taps += parts.norm_taps(name, "block_sparse_moe", "shared_mlp")
    rows = [*parts.norm_rows(table), *mixer, *mlp_rows(table, config)]
    kind = f"{kind}+{'mlp' if config['dense'] else 'moe'}"
    return parts.layer(kind, number, rows, router=router, taps=tuple(taps), states=tuple(states))


def layout(config: Config) -> Layout:
    """The table of a Granite hybrid.

    Raises:
        CheckpointError: a field of the config is impossible.
    """
    config = normalise(config)
    make, kinds = parts.AxisMaker(config, FIELDS), set(config["layer_types"])
    own = [make.axis("hidden", scope="model")]
    if ATTENTION in kinds:
        own.append(make.heads())
    if MAMBA in kinds:
        own += [make.grouped("mamba_heads", config["mamba_n_groups"], "SSM groups"), make.axis("mamba_head_dim")]
    if not config["dense"]:
        own += [make.experts(), make.axis("expert_ffn")]
    own.append(make.axis("shared_ffn"))
    constants = {
        **parts.common_constants(config),
        "groups": config["mamba_n_groups"],
        "state": config["mamba_d_state"],
        "kernel": config["mamba_d_conv"],
    }
    table = Table(parts.named(own, config["num_hidden_layers"]), constants)
    layers = [layer_unit(table, config, number) for number in range(config["num_hidden_layers"])]
    return parts.decoder(
        "granitemoehybrid",
        table,
        layers,
        config,
        top_k=None if config["dense"] else config["num_experts_per_tok"],
        # transformers sizes its default cache by the attention layers and fails where there are none.
        required_kinds=frozenset({unit.kind for unit in layers if unit.kind.startswith("attention")}),
        couplings=(EXPAND,) if MAMBA in kinds else (),
        logits_divisor=config["logits_scaling"],
    )


def config_edits(config: Config, widths: Mapping[str, int], layers: Sequence[int] | None) -> dict[str, Any]:
    """Config fields of a nested Granite hybrid."""
    full = normalise(config)
    stay = parts.kept(layers, full["num_hidden_layers"])
    sizes = {**{name: full[field] for name, field in FIELDS.items()}, **widths}
    return {
        **parts.width_edits(FIELDS, full, widths, len(stay)),
        "layer_types": [full["layer_types"][number] for number in stay],
        "mamba_d_head": sizes["mamba_head_dim"],
        "mamba_expand": sizes["mamba_heads"] * sizes["mamba_head_dim"] // sizes["hidden"],
    }


def llama_cpp(config: Config) -> Unfit | None:
    """llama.cpp's converter knows the layers by older names, which transformers 5 replaces as it reads config.json."""
    why = "llama.cpp's converter does not understand the names that transformers 5 gives to the layers of a Granite hybrid"
    return Unfit(why, elsewhere=not {MAMBA, ATTENTION} & set(config.get("layer_types") or ()))


FAMILY = Family("granitemoehybrid", layout, config_edits, engines={VLLM: fits, LLAMA_CPP: llama_cpp})
