"""Tiny parents of every family, and nested models of them cut by hand-written indices: a reference that knows no table.

Names of tensors are told apart by their endings, which never mean two things. NemotronH has its own reference in ``hand_cut``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import hand_cut
import torch
from hand_cut import first_of_each, take
from tiny import FAMILIES, build
from transformers import PreTrainedModel

Index = dict[str, tuple[str, list[torch.Tensor | None]]]
"""Child name -> (parent name, index per dimension)."""

Cut = tuple[dict[str, int], tuple[int, ...] | None]

FIELDS = {
    "llama": {"hidden": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size"},
    "qwen3": {"hidden": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size"},
    "qwen3_moe": {
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "experts": "num_experts",
        "expert_ffn": "moe_intermediate_size",
    },
    "mixtral": {
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "experts": "num_local_experts",
        "expert_ffn": "intermediate_size",
    },
    "granitemoehybrid": {
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "experts": "num_local_experts",
        "expert_ffn": "intermediate_size",
        "shared_ffn": "shared_intermediate_size",
        "mamba_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
    },
}

# Granite's Mamba width (8 heads x 16) must stay a multiple of hidden, so its hidden alone goes to 32.
WIDTHS = {
    "hidden": 48,
    "heads": 4,
    "ffn": 20,
    "experts": 5,
    "expert_ffn": 20,
    "shared_ffn": 28,
    "mamba_heads": 4,
    "mamba_head_dim": 8,
}
TOGETHER = {**WIDTHS, "mamba_heads": 6, "mamba_head_dim": 8}
LAYERS = (0, 1, 3)


@dataclass(frozen=True)
class Case:
    """A family in one of its variants: edits of its tiny model, and how the config of a depth cut differs."""

    family: str
    edits: dict[str, Any] = field(default_factory=dict)
    depth: dict[str, Any] = field(default_factory=dict)

    def parent(self, seed: int = 0) -> PreTrainedModel:
        """The tiny parent."""
        return FAMILIES[self.family](seed, **self.edits)

    def cuts(self) -> dict[str, Cut]:
        """Every axis alone, depth, all axes, all axes and depth."""
        if self.family == "nemotron_h":
            name = next(name for name, edits in hand_cut.MODELS.items() if edits == self.edits)
            return {cut: hand_cut.cut_of(name, cut) for model, cut in hand_cut.cases() if model == name}
        axes = self.axes()
        alone: dict[str, Cut] = {axis: ({axis: WIDTHS[axis]}, None) for axis in axes}
        if "mamba_heads" in axes:
            alone["hidden"] = ({"hidden": 32}, None)
        together = {axis: TOGETHER[axis] for axis in axes}
        return {**alone, "depth": ({}, LAYERS), "all": (together, None), "all and depth": (together, LAYERS)}

    def axes(self) -> list[str]:
        """Axes of the tiny parent."""
        dense = self.family == "granitemoehybrid" and self.edits.get("num_local_experts") == 0
        return [axis for axis in FIELDS[self.family] if not (dense and axis in ("experts", "expert_ffn"))]

    def groups(self, parent: PreTrainedModel) -> dict[str, int]:
        """Groups of the grouped axes."""
        groups = {"heads": parent.config.num_key_value_heads}
        return {**groups, "mamba_heads": parent.config.mamba_n_groups} if "mamba_heads" in self.axes() else groups

    def index(self, parent: PreTrainedModel, cut: Cut) -> Index:
        """Where each tensor of the nested model lies in the parent."""
        if self.family == "nemotron_h":
            return hand_cut.hand_index(parent, *cut)
        widths, layers = cut
        groups = self.groups(parent)
        sizes = {axis: getattr(parent.config, name) for axis, name in FIELDS[self.family].items()}
        members = {axis: first_of_each(groups.get(axis, 1), sizes[axis], width) for axis, width in widths.items()}
        by_ending = HandIndex(parent.config, FIELDS[self.family], members)
        kept = range(parent.config.num_hidden_layers) if layers is None else layers
        new_number = {old: new for new, old in enumerate(kept)}
        index: Index = {}
        for name in parent.state_dict():
            head, _, rest = name.partition("layers.")
            number, _, tail = rest.partition(".")
            if not tail:
                index[name] = (name, by_ending.of(name))
            elif int(number) in new_number:
                index[f"{head}layers.{new_number[int(number)]}.{tail}"] = (name, by_ending.of(tail))
        return index

    def child(self, parent: PreTrainedModel, cut: Cut) -> PreTrainedModel:
        """A freshly built model of the nested config, holding hand-cut copies of the parent's tensors."""
        widths, layers = cut
        if self.family == "nemotron_h":
            return hand_cut.hand_child(parent, self.edits, widths, layers)
        config = copy.deepcopy(parent.config)
        changed = {FIELDS[self.family][axis]: width for axis, width in widths.items()}
        changed |= {} if layers is None else {"num_hidden_layers": len(layers), **self.depth}
        if "mamba_n_heads" in FIELDS[self.family].values():
            size = {axis: getattr(config, name) for axis, name in FIELDS[self.family].items()} | widths
            changed["mamba_expand"] = size["mamba_heads"] * size["mamba_head_dim"] // size["hidden"]
        for name, value in changed.items():
            setattr(config, name, value)
        child = build(config, seed=1).to(parent.dtype)
        source = parent.state_dict()
        state = {name: take(source[old], where) for name, (old, where) in self.index(parent, cut).items()}
        child.load_state_dict(state, strict=True)
        child.generation_config = parent.generation_config
        return child


CASES: dict[str, Case] = {
    **{f"nemotron_h {name}": Case("nemotron_h", edits) for name, edits in hand_cut.MODELS.items()},
    "llama": Case("llama"),
    "llama biases": Case("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen3": Case("qwen3", {}, {"layer_types": ["full_attention"] * 3}),
    "qwen3 window": Case(
        "qwen3",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        },
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3_moe": Case("qwen3_moe", {}, {"mlp_only_layers": [1]}),
    "qwen3_moe steps": Case(  # experts in layers 1 and 3
        "qwen3_moe",
        {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [], "attention_bias": True},
        {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
    ),
    "mixtral": Case("mixtral", {"sliding_window": 7}),
    "granitemoehybrid": Case(
        "granitemoehybrid", {}, {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
    ),
    "granitemoehybrid dense": Case(
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "position_embedding_type": "rope",
            "tie_word_embeddings": False,
            "mamba_n_groups": 1,
        },
        {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ),
}


def every_cut() -> list[tuple[str, str]]:
    """Every case with every cut."""
    return [(name, cut) for name, case in CASES.items() for cut in case.cuts()]


class HandIndex:
    """Index of each dimension of each tensor, written out by the ending of its name; ``members`` are those to take, in order."""

    def __init__(self, config: Any, fields: dict[str, str], members: Mapping[str, torch.Tensor]) -> None:
        size = {axis: getattr(config, name) for axis, name in fields.items()}
        take = {axis: members.get(axis, torch.arange(count)) for axis, count in size.items()}
        # gate lies above up
        twice = {axis: torch.cat([positions, size[axis] + positions]) for axis, positions in take.items()}
        self.hidden, self.ffn, self.experts = take["hidden"], take.get("ffn"), take.get("experts")
        self.expert_ffn, self.expert_gate_up = take.get("expert_ffn"), twice.get("expert_ffn")
        self.shared_ffn, self.shared_gate_up = take.get("shared_ffn"), twice.get("shared_ffn")
        self.query = lanes(take["heads"], config.head_dim, torch.arange(config.head_dim))
        if "mamba_heads" in fields:
            self.mamba_heads = take["mamba_heads"]
            self.inner = lanes(self.mamba_heads, config.mamba_d_head, take["mamba_head_dim"])
            inner, bc = config.mamba_n_heads * config.mamba_d_head, 2 * config.mamba_n_groups * config.mamba_d_state
            self.conv = torch.cat([self.inner, torch.arange(inner, inner + bc)])
            self.in_rows = torch.cat([self.inner, inner + self.conv, 2 * inner + bc + self.mamba_heads])

    def of(self, name: str) -> list[torch.Tensor | None]:
        """Index per dimension of a tensor; None keeps the dimension."""
        found = [rule for ending, rule in self.rules().items() if f".{name}".endswith(f".{ending}")]
        assert len(found) == 1, f"{len(found)} rules for {name}"
        return found[0]()

    def rules(self) -> dict[str, Callable[[], list[torch.Tensor | None]]]:
        """Ending of a name -> its index."""
        return {
            "embed_tokens.weight": lambda: [None, self.hidden],
            "lm_head.weight": lambda: [None, self.hidden],
            "model.norm.weight": lambda: [self.hidden],
            "input_layernorm.weight": lambda: [self.hidden],
            "post_attention_layernorm.weight": lambda: [self.hidden],
            "q_proj.weight": lambda: [self.query, self.hidden],
            "q_proj.bias": lambda: [self.query],
            "k_proj.weight": lambda: [None, self.hidden],
            "k_proj.bias": lambda: [None],
            "v_proj.weight": lambda: [None, self.hidden],
            "v_proj.bias": lambda: [None],
            "o_proj.weight": lambda: [self.hidden, self.query],
            "o_proj.bias": lambda: [self.hidden],
            "q_norm.weight": lambda: [None],
            "k_norm.weight": lambda: [None],
            "mlp.gate_proj.weight": lambda: [self.ffn, self.hidden],
            "mlp.gate_proj.bias": lambda: [self.ffn],
            "mlp.up_proj.weight": lambda: [self.ffn, self.hidden],
            "mlp.up_proj.bias": lambda: [self.ffn],
            "mlp.down_proj.weight": lambda: [self.hidden, self.ffn],
            "mlp.down_proj.bias": lambda: [self.hidden],
            "mlp.gate.weight": lambda: [self.experts, self.hidden],
            "router.weight": lambda: [self.experts, self.hidden],
            "experts.gate_up_proj": lambda: [self.experts, self.expert_gate_up, self.hidden],
            "experts.down_proj": lambda: [self.experts, self.hidden, self.expert_ffn],
            "input_linear.weight": lambda: [self.shared_gate_up, self.hidden],
            "output_linear.weight": lambda: [self.hidden, self.shared_ffn],
            "in_proj.weight": lambda: [self.in_rows, self.hidden],
            "in_proj.bias": lambda: [self.in_rows],
            "conv1d.weight": lambda: [self.conv, None, None],
            "conv1d.bias": lambda: [self.conv],
            "A_log": lambda: [self.mamba_heads],
            "D": lambda: [self.mamba_heads],
            "dt_bias": lambda: [self.mamba_heads],
            "mamba.norm.weight": lambda: [self.inner],
            "out_proj.weight": lambda: [self.hidden, self.inner],
            "out_proj.bias": lambda: [self.hidden],
        }


# A part of a name that only layers with this axis have.
SIGNS = {
    "heads": ".q_proj.weight",
    "ffn": ".mlp.up_proj.weight",
    "experts": ".experts.down_proj",
    "expert_ffn": ".experts.down_proj",
    "shared_ffn": ".shared_mlp.output_linear.weight",
    "mamba_heads": ".A_log",
    "mamba_head_dim": ".A_log",
}


def layers_with(model: PreTrainedModel, axis: str) -> list[int]:
    """Numbers of the layers that have an axis of their own."""
    return [int(name.split(".")[2]) for name in model.state_dict() if name.endswith(SIGNS[axis])]


def lanes(heads: torch.Tensor, width: int, channels: torch.Tensor) -> torch.Tensor:
    """Positions of the given channels of the given heads, each ``width`` wide."""
    return (heads[:, None] * width + channels).flatten()
