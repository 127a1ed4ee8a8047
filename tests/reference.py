"""Rearranging a NemotronH by hand: the independent reference that slices and sorted folders are compared with.

It knows each tensor by name and reshapes it to (groups, heads, channels, ...) before indexing; it shares nothing with the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

Kept = Mapping[str, Sequence[int]]
State = dict[str, torch.Tensor]


def rearranged(
    model: NemotronHForCausalLM, kept: Kept | Callable[[int], Kept], layers: Sequence[int] | None = None
) -> State:
    """State of a model with the given members of each axis, in the given order.

    Args:
        model: the parent.
        kept: axis -> members; or, where layers differ, a function from layer number to that (``hidden`` from layer 0).
        layers: decoder layers that stay, renumbered.
    """
    config, state = model.config, model.state_dict()
    of_layer = kept if callable(kept) else lambda layer: kept
    hidden = list(of_layer(0).get("hidden", range(config.hidden_size)))
    out = {
        "model.embeddings.weight": state["model.embeddings.weight"][:, hidden],
        "model.norm_f.weight": state["model.norm_f.weight"][hidden],
        "lm_head.weight": state["lm_head.weight"][:, hidden],
    }
    for number, layer in enumerate(range(len(config.layers_block_type)) if layers is None else layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        members = {axis: list(positions) for axis, positions in of_layer(layer).items()}
        cut = {"norm.weight": own["norm.weight"][hidden]}
        for block in (_mamba, _attention, _moe, _mlp):
            cut |= block(own, config, members, hidden)
        assert cut.keys() == own.keys(), "the reference forgot a tensor"
        out |= {f"model.layers.{number}.{name}": tensor for name, tensor in cut.items()}
    return {name: tensor.clone() for name, tensor in out.items()}


def child_of(config: NemotronHConfig, state: State, **edits: object) -> NemotronHForCausalLM:
    """A model built from scratch with edited config fields and the given state."""
    fields = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "num_hidden_layers")}
    child = NemotronHForCausalLM(NemotronHConfig(**{**fields, **edits}))
    child.load_state_dict(state, strict=True)
    return child.eval()


def _mamba(own: State, config: NemotronHConfig, kept: Kept, hidden: list[int]) -> State:
    if "mixer.in_proj.weight" not in own:
        return {}
    heads, channels = config.mamba_num_heads, config.mamba_head_dim
    mh, mp = list(kept.get("mamba_heads", range(heads))), list(kept.get("mamba_head_dim", range(channels)))
    inner, bc = heads * channels, config.n_groups * config.ssm_state_size

    def lanes(tensor: torch.Tensor) -> torch.Tensor:
        """(heads * channels, ...) -> kept heads, and in each the kept channels."""
        return tensor.reshape(heads, channels, *tensor.shape[1:])[mh][:, mp].flatten(0, 1)

    def projected(tensor: torch.Tensor) -> torch.Tensor:
        z, x, b, c, dt = tensor.split([inner, inner, bc, bc, heads])
        return torch.cat([lanes(z), lanes(x), b, c, dt[mh]])

    def convolved(tensor: torch.Tensor) -> torch.Tensor:
        x, b, c = tensor.split([inner, bc, bc])
        return torch.cat([lanes(x), b, c])

    out = {
        "mixer.in_proj.weight": projected(own["mixer.in_proj.weight"])[:, hidden],
        "mixer.conv1d.weight": convolved(own["mixer.conv1d.weight"]),
        "mixer.norm.weight": lanes(own["mixer.norm.weight"]),
        "mixer.out_proj.weight": lanes(own["mixer.out_proj.weight"].T).T[hidden],
        **{f"mixer.{name}": own[f"mixer.{name}"][mh] for name in ("A_log", "D", "dt_bias")},
    }
    if "mixer.conv1d.bias" in own:
        out["mixer.conv1d.bias"] = convolved(own["mixer.conv1d.bias"])
    if "mixer.in_proj.bias" in own:
        out["mixer.in_proj.bias"] = projected(own["mixer.in_proj.bias"])
        out["mixer.out_proj.bias"] = own["mixer.out_proj.bias"][hidden]
    return out


def _attention(own: State, config: NemotronHConfig, kept: Kept, hidden: list[int]) -> State:
    if "mixer.q_proj.weight" not in own:
        return {}
    count, size = config.num_attention_heads, config.head_dim
    heads = list(kept.get("heads", range(count)))
    q, o = own["mixer.q_proj.weight"], own["mixer.o_proj.weight"]
    return {
        "mixer.q_proj.weight": q.reshape(count, size, -1)[heads].flatten(0, 1)[:, hidden],
        "mixer.k_proj.weight": own["mixer.k_proj.weight"][:, hidden],
        "mixer.v_proj.weight": own["mixer.v_proj.weight"][:, hidden],
        "mixer.o_proj.weight": o.reshape(-1, count, size)[:, heads].flatten(1, 2)[hidden],
    }


def _moe(own: State, config: NemotronHConfig, kept: Kept, hidden: list[int]) -> State:
    if "mixer.gate.weight" not in own:
        return {}
    experts = list(kept.get("experts", range(config.n_routed_experts)))
    width = list(kept.get("expert_ffn", range(config.moe_intermediate_size)))
    shared = list(kept.get("shared_ffn", range(config.moe_shared_expert_intermediate_size)))
    latent = "mixer.fc1_latent_proj.weight" in own
    inside = list(range(config.moe_latent_size)) if latent else hidden
    out = {
        "mixer.gate.weight": own["mixer.gate.weight"][experts][:, hidden],
        "mixer.gate.e_score_correction_bias": own["mixer.gate.e_score_correction_bias"][experts],
        "mixer.experts.up_proj": own["mixer.experts.up_proj"][experts][:, width][:, :, inside],
        "mixer.experts.down_proj": own["mixer.experts.down_proj"][experts][:, inside][:, :, width],
        **_two_matrices(own, "mixer.shared_experts", shared, hidden),
    }
    if latent:
        out["mixer.fc1_latent_proj.weight"] = own["mixer.fc1_latent_proj.weight"][:, hidden]
        out["mixer.fc2_latent_proj.weight"] = own["mixer.fc2_latent_proj.weight"][hidden]
    return out


def _mlp(own: State, config: NemotronHConfig, kept: Kept, hidden: list[int]) -> State:
    if "mixer.up_proj.weight" not in own:
        return {}
    return _two_matrices(own, "mixer", list(kept.get("ffn", range(config.intermediate_size))), hidden)


def _two_matrices(own: State, prefix: str, width: list[int], hidden: list[int]) -> State:
    out = {
        f"{prefix}.up_proj.weight": own[f"{prefix}.up_proj.weight"][width][:, hidden],
        f"{prefix}.down_proj.weight": own[f"{prefix}.down_proj.weight"][hidden][:, width],
    }
    if f"{prefix}.up_proj.bias" in own:
        out[f"{prefix}.up_proj.bias"] = own[f"{prefix}.up_proj.bias"][width]
        out[f"{prefix}.down_proj.bias"] = own[f"{prefix}.down_proj.bias"][hidden]
    return out
