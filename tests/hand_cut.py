"""Nested NemotronH models cut by hand-written indices: a reference that knows nothing of the table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny import tiny_config, tiny_model, tokens
from transformers import NemotronHForCausalLM

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
LETTERS = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}

MODELS = {
    "plain": {},
    "dense": {"pattern": "ME*-E"},
    "latent": {"moe_latent_size": 16},
    "biases": {"pattern": "ME*-E", "use_bias": True, "mlp_bias": True, "moe_latent_size": 16},
    "groups": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
}
"""Edits of the tiny model that bring out every kind of row."""

EVERY_AXIS = {
    "hidden": 40,
    "heads": 2,
    "mamba_heads": 6,
    "mamba_head_dim": 4,
    "experts": 6,
    "expert_ffn": 20,
    "shared_ffn": 28,
    "ffn": 32,
}
CUTS: dict[str, tuple[dict[str, int], tuple[int, ...] | None]] = {
    "hidden": ({"hidden": 48}, None),
    "heads": ({"heads": 4}, None),
    "mamba_heads": ({"mamba_heads": 4}, None),
    "mamba_head_dim": ({"mamba_head_dim": 4}, None),
    "experts": ({"experts": 4}, None),
    "expert_ffn": ({"expert_ffn": 16}, None),
    "shared_ffn": ({"shared_ffn": 32}, None),
    "ffn": ({"ffn": 20}, None),
    "depth": ({}, (0, 2, 4)),
    "all": (EVERY_AXIS, None),
    "all and depth": (EVERY_AXIS, (1, 2, 3)),
}


def cases() -> list[tuple[str, str]]:
    """Every model with every cut that it has an axis for."""
    return [
        (model, cut)
        for model, edits in MODELS.items()
        for cut in CUTS
        if cut != "ffn" or "-" in edits.get("pattern", "")
    ]


def cut_of(model_name: str, cut_name: str) -> tuple[dict[str, int], tuple[int, ...] | None]:
    """Widths and layers of a cut, without the axes that the model does not have."""
    widths, layers = CUTS[cut_name]
    has_ffn = "-" in MODELS[model_name].get("pattern", "")
    return {axis: width for axis, width in widths.items() if axis != "ffn" or has_ffn}, layers


def parent_of(model_name: str, seed: int = 0) -> NemotronHForCausalLM:
    """The tiny parent of this name."""
    return tiny_model(seed, **MODELS[model_name])


def batch(length: int = 24) -> torch.Tensor:
    """Token ids (2, T)."""
    return tokens(2, length)


def first_of_each(groups: int, size: int, kept: int) -> torch.Tensor:
    """The first kept/groups positions of every group."""
    return torch.arange(size).view(groups, -1)[:, : kept // groups].flatten()


class HandCut:
    """Index of each dimension of each parameter, written out by name."""

    def __init__(self, config, widths: dict[str, int]) -> None:
        size = {axis: getattr(config, field) for axis, field in FIELDS.items()}
        keep = {**size, **widths}
        self.hidden = torch.arange(keep["hidden"])
        self.expert = first_of_each(config.n_group, size["experts"], keep["experts"])
        self.expert_ffn = torch.arange(keep["expert_ffn"])
        self.shared_ffn = torch.arange(keep["shared_ffn"])
        self.ffn = torch.arange(keep["ffn"])
        heads = first_of_each(config.num_key_value_heads, size["heads"], keep["heads"])
        self.query = torch.cat([torch.arange(h * config.head_dim, (h + 1) * config.head_dim) for h in heads.tolist()])
        self.mamba_head = first_of_each(config.n_groups, size["mamba_heads"], keep["mamba_heads"])
        width = size["mamba_head_dim"]
        self.inner = torch.tensor(
            [h * width + p for h in self.mamba_head.tolist() for p in range(keep["mamba_head_dim"])]
        )
        inner, groups_state = size["mamba_heads"] * width, config.n_groups * config.ssm_state_size
        self.conv = torch.cat([self.inner, torch.arange(inner, inner + 2 * groups_state)])
        self.in_rows = torch.cat([self.inner, inner + self.conv, 2 * inner + 2 * groups_state + self.mamba_head])

    def of(self, name: str, moe: bool) -> list[torch.Tensor | None]:
        """Index per dimension of a decoder layer's tensor; None keeps the dimension."""
        mlp = self.shared_ffn if moe else self.ffn
        table: dict[str, Callable[[], list[torch.Tensor | None]]] = {
            "mixer.in_proj.weight": lambda: [self.in_rows, self.hidden],
            "mixer.in_proj.bias": lambda: [self.in_rows],
            "mixer.conv1d.weight": lambda: [self.conv, None, None],
            "mixer.conv1d.bias": lambda: [self.conv],
            "mixer.A_log": lambda: [self.mamba_head],
            "mixer.D": lambda: [self.mamba_head],
            "mixer.dt_bias": lambda: [self.mamba_head],
            "mixer.norm.weight": lambda: [self.inner],
            "mixer.out_proj.weight": lambda: [self.hidden, self.inner],
            "mixer.out_proj.bias": lambda: [self.hidden],
            "mixer.q_proj.weight": lambda: [self.query, self.hidden],
            "mixer.k_proj.weight": lambda: [None, self.hidden],
            "mixer.v_proj.weight": lambda: [None, self.hidden],
            "mixer.o_proj.weight": lambda: [self.hidden, self.query],
            "mixer.gate.weight": lambda: [self.expert, self.hidden],
            "mixer.gate.e_score_correction_bias": lambda: [self.expert],
            "mixer.fc1_latent_proj.weight": lambda: [None, self.hidden],
            "mixer.fc1_latent_proj.bias": lambda: [None],
            "mixer.fc2_latent_proj.weight": lambda: [self.hidden, None],
            "mixer.fc2_latent_proj.bias": lambda: [self.hidden],
            "norm.weight": lambda: [self.hidden],
        }
        if name in table:
            return table[name]()
        last = name.split(".")[-2:]
        return {
            ("up_proj", "weight"): [mlp, self.hidden],
            ("up_proj", "bias"): [mlp],
            ("down_proj", "weight"): [self.hidden, mlp],
            ("down_proj", "bias"): [self.hidden],
        }[(last[0], last[1])]


def take(tensor: torch.Tensor, index: list[torch.Tensor | None]) -> torch.Tensor:
    """The kept positions of every dimension, copied."""
    for dim, kept in enumerate(index):
        if kept is not None:
            tensor = tensor[(slice(None),) * dim + (kept,)]
    return tensor.clone()


def hand_index(
    parent: NemotronHForCausalLM, widths: dict[str, int], layers: tuple[int, ...] | None = None
) -> dict[str, tuple[str, list[torch.Tensor | None]]]:
    """Child name -> (parent name, index per dimension)."""
    config = parent.config
    cut = HandCut(config, widths)
    layers = tuple(range(config.num_hidden_layers)) if layers is None else layers
    index: dict[str, tuple[str, list[torch.Tensor | None]]] = {
        "model.embeddings.weight": ("model.embeddings.weight", [None, cut.hidden]),
        "model.norm_f.weight": ("model.norm_f.weight", [cut.hidden]),
        "lm_head.weight": ("lm_head.weight", [None, cut.hidden]),
    }
    inside = None if config.moe_latent_size else cut.hidden
    for new, old in enumerate(layers):
        prefix = f"model.layers.{old}."
        for name in (full.removeprefix(prefix) for full in parent.state_dict() if full.startswith(prefix)):
            if name == "mixer.experts.up_proj":
                where = [cut.expert, cut.expert_ffn, inside]
            elif name == "mixer.experts.down_proj":
                where = [cut.expert, inside, cut.expert_ffn]
            else:
                where = cut.of(name, config.layers_block_type[old] == "moe")
            index[f"model.layers.{new}.{name}"] = (prefix + name, where)
    return index


def hand_child(
    parent: NemotronHForCausalLM, edits: dict, widths: dict[str, int], layers: tuple[int, ...] | None = None
) -> NemotronHForCausalLM:
    """A freshly built model of the nested config, holding hand-cut copies of the parent's tensors."""
    kinds = parent.config.layers_block_type
    pattern = "".join(LETTERS[kinds[number]] for number in (range(len(kinds)) if layers is None else layers))
    fields = {FIELDS[axis]: width for axis, width in widths.items()}
    child = NemotronHForCausalLM(tiny_config(**{**edits, **fields, "pattern": pattern})).to(parent.dtype)
    source = parent.state_dict()
    state = {name: take(source[old], index) for name, (old, index) in hand_index(parent, widths, layers).items()}
    child.load_state_dict(state, strict=True)
    child.generation_config = parent.generation_config
    return child.eval()
