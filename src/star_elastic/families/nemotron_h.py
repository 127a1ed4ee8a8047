"""NemotronH: a stack of layers with one mixer each: Mamba-2 (M), attention (*), mixture of experts (E) or dense MLP (-).

Names differ between memory and disk: transformers keeps ``model.layers.N.mixer.experts.up_proj`` as one (E, F, D) tensor,
checkpoints hold ``backbone.layers.N.mixer.experts.E.up_proj.weight``, one tensor per expert. There is no gate matrix: experts
and MLPs are down(relu(up x)^2). With ``moe_latent_size`` the routed experts work in a smaller space, between two projections.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from star_elastic.axes import Axis, Rule
from star_elastic.errors import CheckpointError
from star_elastic.families import parts
from star_elastic.families.base import (
    ITEMSIZE,
    LLAMA_CPP,
    SGLANG,
    VLLM,
    Config,
    Family,
    Table,
    Unfit,
    at_most,
    divides,
    fits,
    positive,
)
from star_elastic.families.parts import QUANTIZED, SPARED
from star_elastic.layout import Layout, Norm, Router, Row, State, Tap, Unit

MAMBA, ATTENTION, MOE, MLP = "linear_attention", "full_attention", "moe", "mlp"
PATTERN = {"M": MAMBA, "*": ATTENTION, "E": MOE, "-": MLP}
LEGACY_KINDS = {"mamba": MAMBA, "attention": ATTENTION, "hybrid": ATTENTION}

# What transformers assumes for a field that config.json leaves out (it writes only what differs from its defaults).
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "layers_block_type": None,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "mlp_bias": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "use_conv_bias": True,
    "mamba_ssm_cache_dtype": "float32",
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
}

# Older spellings of the same fields.
ALIASES = {
    "num_local_experts": "n_routed_experts",
    "layer_types": "layers_block_type",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}

EXPERT_COUNTS = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group")

# Axis -> config field.
FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "mamba_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "experts": "n_routed_experts",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "ffn": "intermediate_size",
}


def normalise(config: Config) -> dict[str, Any]:
    """Fill in defaults and older spellings, check every size, and give each layer's kind in ``layers_block_type``."""
    renamed = {ALIASES.get(name, name): value for name, value in config.items()}
    full = {**DEFAULTS, **renamed}
    full["num_key_value_heads"] = full["num_key_value_heads"] or full["num_attention_heads"]
    full["layers_block_type"] = layer_kinds(full)
    sizes = [name for name, value in DEFAULTS.items() if isinstance(value, int) and not isinstance(value, bool)]
    positive(full, *sizes, *(["moe_latent_size"] if full["moe_latent_size"] is not None else []))
    divides(full, "num_key_value_heads", "num_attention_heads")
    divides(full, "n_groups", "mamba_num_heads")
    divides(full, "n_group", "n_routed_experts")
    at_most(full, "topk_group", "n_group")
    if not isinstance(full["layer_norm_epsilon"], float):
        raise CheckpointError(f"config.json: layer_norm_epsilon must be a number, not {full['layer_norm_epsilon']!r}")
    at_most(full, "num_experts_per_tok", "n_routed_experts")
    return full


def layer_kinds(config: Config) -> list[str]:
    """Kind of each layer, from ``layers_block_type`` or else from ``hybrid_override_pattern``."""
    named, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if named is None:
        if not isinstance(pattern, str):
            raise CheckpointError(
                "config.json: neither layers_block_type nor hybrid_override_pattern says what the layers are"
            )
        named = [PATTERN.get(letter, letter) for letter in pattern]
    if not isinstance(named, list) or not named:
        raise CheckpointError(f"config.json: layers_block_type must be a non-empty list, not {named!r}")
    kinds = [LEGACY_KINDS.get(str(kind), kind) for kind in named]
    for number, kind in enumerate(kinds):
        if kind not in list(PATTERN.values()):
            raise CheckpointError(f"config.json: layer {number} is {kind!r}; known: {', '.join(PATTERN.values())}")
    return kinds


def read_axes(config: Config) -> dict[str, Axis]:
    """The axes of a model: only those that its kinds of layer have."""
    kinds = set(config["layers_block_type"])
    make = parts.AxisMaker(config, FIELDS)
    axes = [make.axis("hidden", scope="model")]
    if ATTENTION in kinds:
        axes.append(make.heads())
    if MAMBA in kinds:
        axes += [make.grouped("mamba_heads", config["n_groups"], "SSM groups"), make.axis("mamba_head_dim")]
    if MOE in kinds:
        axes += [expert_axis(config), make.axis("expert_ffn"), make.axis("shared_ffn")]
    if MLP in kinds:
        axes.append(make.axis("ffn"))
    return parts.named(axes, len(config["layers_block_type"]))


def expert_axis(config: Config) -> Axis:
    """Routed experts: cut inside each expert group; what stays must offer every token its top-k."""
    groups, open_groups, top_k = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
    per_group = max(2, math.ceil(top_k / open_groups))
    why = f"a token uses its top-{top_k}" + (f", of {open_groups} of {groups} expert groups" if groups > 1 else "")
    rules = (
        Rule(f"experts are cut equally inside each of {groups} expert groups", groups, groups),
        Rule(why, 1, per_group * groups),
    )
    return Axis("experts", config["n_routed_experts"], groups, rules if groups > 1 else rules[1:])


def mlp_rows(table: Table, config: Config, prefix: str, axis: str) -> list[Row]:
    """An MLP without gate; its channels are masked after the activation, which would square a mask on up's rows."""
    rows = [
        table.row(f"{prefix}.up_proj.weight", f"{axis}, hidden", formats=QUANTIZED),
        table.row(f"{prefix}.down_proj.weight", f"hidden!, {axis}!", formats=QUANTIZED),
    ]
    if config["mlp_bias"]:
        rows += [table.row(f"{prefix}.up_proj.bias", axis), table.row(f"{prefix}.down_proj.bias", "hidden!")]
    return rows


def moe_rows(table: Table, config: Config) -> list[Row]:
    """Routed experts, their router, one shared expert, and the latent projections where the model has them."""
    latent = config["moe_latent_size"] is not None
    inside, outside = ("latent", "latent") if latent else ("hidden", "hidden!")
    rows = [
        table.row("mixer.gate.weight", "experts, hidden", fp32=True),
        table.row("mixer.gate.e_score_correction_bias", "experts", buffer=True, fp32=True),
        table.row(
            "mixer.experts.up_proj",
            f"experts, expert_ffn, {inside}",
            on_disk="mixer.experts.{}.up_proj.weight",
            routed=True,
            formats=QUANTIZED,
        ),
        table.row(
            "mixer.experts.down_proj",
            f"experts, {outside}, expert_ffn!",
            on_disk="mixer.experts.{}.down_proj.weight",
            routed=True,
            formats=QUANTIZED,
        ),
        *mlp_rows(table, config, "mixer.shared_experts", "shared_ffn"),
    ]
    if latent:
        rows.append(table.row("mixer.fc1_latent_proj.weight", "latent, hidden", formats=QUANTIZED))
        rows.append(table.row("mixer.fc2_latent_proj.weight", "hidden!, latent", formats=QUANTIZED))
    if latent and config["mlp_bias"]:
        rows += [table.row("mixer.fc1_latent_proj.bias", "latent"), table.row("mixer.fc2_latent_proj.bias", "hidden!")]
    return rows


def layer_unit(table: Table, config: Config, number: int) -> Unit:
    """One decoder layer: pre-norm and mixer."""
    kinds = config["layers_block_type"]
    kind = kinds[number]
    norm = table.row("norm.weight", "hidden", norm=Norm())
    taps = [Tap("hidden", "norm", "output", readers=("mixer",))]
    states: list[State] = []
    router = None
    if kind == MAMBA:
        # Both formats spare attention and the Mamba layers that neighbour it, as the published checkpoints do.
        beside_attention = ATTENTION in kinds[max(0, number - 1) : number + 2]
        formats = SPARED if beside_attention else QUANTIZED
        biases = {"bias": config["use_bias"], "conv_bias": config["use_conv_bias"]}
        rows = parts.mamba_rows(table, "mixer", config["n_groups"], formats, **biases)
        taps += parts.mamba_taps("mixer")
        states = parts.mamba_states(table, ITEMSIZE.get(str(config["mamba_ssm_cache_dtype"]), 4))
    elif kind == ATTENTION:
        rows = parts.attention_rows(table, "mixer", SPARED)
        taps += parts.attention_taps("mixer")
        states = [parts.kv_state(table)]
    elif kind == MOE:
        rows = moe_rows(table, config)
        router = Router("mixer.gate", "sigmoid_bias")
        taps += [*parts.expert_taps("mixer.experts"), Tap("shared_ffn", "mixer.shared_experts.down_proj", "input")]
    else:
        rows = mlp_rows(table, config, "mixer", "ffn")
        taps += [Tap("ffn", "mixer.down_proj", "input")]
    return Unit(
        "model.layers.{}",
        "backbone.layers.{}",
        kind,
        (norm, *rows),
        number,
        router,
        taps=tuple(taps),
        states=tuple(states),
    )


def layout(config: Config) -> Layout:
    """The table of a NemotronH model.

    Raises:
        CheckpointError: a field of the config is missing or impossible.
    """
    config = normalise(config)
    axes = read_axes(config)
    constants = {
        **parts.common_constants(config),
        "groups": config["n_groups"],
        "state": config["ssm_state_size"],
        "kernel": config["conv_kernel"],
        "latent": config["moe_latent_size"] or 0,
    }
    table = Table(axes, constants)
    kinds = config["layers_block_type"]
    embedding = Unit("model.embeddings", "backbone.embeddings", "embedding", (table.row("weight", "vocab, hidden!"),))
    layers = [layer_unit(table, config, number) for number in range(len(kinds))]
    norm = Unit("model.norm_f", "backbone.norm_f", "final_norm", (table.row("weight", "hidden", norm=Norm()),))
    head = Unit("lm_head", "lm_head", "head", (table.row("weight", "vocab, hidden"),))
    return Layout(
        family="nemotron_h",
        axes=axes,
        units=(embedding, *layers, norm, head),
        top_k=config["num_experts_per_tok"] if MOE in kinds else None,
        # transformers sizes its default cache by the attention layers and fails where there are none.
        required_kinds=frozenset({ATTENTION} & set(kinds)),
    )


def config_edits(config: Config, widths: Mapping[str, int], layers: Sequence[int] | None) -> dict[str, Any]:
    """Config fields of a nested model. ``head_dim`` is always written: readers that guess it from ``hidden`` guess wrong."""
    full = normalise(config)
    kinds = full["layers_block_type"]
    return {
        **{FIELDS[name]: width for name, width in widths.items()},
        "head_dim": full["head_dim"],
        "layers_block_type": kinds if layers is None else [kinds[number] for number in layers],
    }


def json_fields(config: Config) -> dict[str, Any]:
    """The pattern string and layer count that other readers of config.json want beside ``layers_block_type``."""
    letters = {kind: letter for letter, kind in PATTERN.items()}
    kinds = config["layers_block_type"]
    return {"hybrid_override_pattern": "".join(letters[kind] for kind in kinds), "num_hidden_layers": len(kinds)}


def idle_fields(config: Config) -> Collection[str]:
    """transformers writes numbers of experts for models without any too, which llama.cpp then expects."""
    return () if MOE in config["layers_block_type"] else EXPERT_COUNTS


def llama_cpp(config: Config) -> Unfit | None:
    """llama.cpp has one architecture with experts and one with dense MLPs; what config.json gives as a top-k decides."""
    kinds = layer_kinds({ALIASES.get(name, name): value for name, value in config.items()})
    if MOE in kinds and MLP in kinds:
        return Unfit("llama.cpp has no architecture with experts and dense MLP layers in one model")
    if MOE not in kinds:
        why = "under transformers 5 llama.cpp's converter takes a model without experts for one with experts"
        return Unfit(why, elsewhere=True)
    return None


ENGINES = {VLLM: fits, SGLANG: fits, LLAMA_CPP: llama_cpp}

FAMILY = Family("nemotron_h", layout, config_edits, json_fields, idle_fields, ENGINES)
