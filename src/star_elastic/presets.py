"""Published models whose nested sizes are known: a config, and the widths of each size.

Source of the widths: the training scripts that accompany Star Elastic (arXiv 2605.07182); they agree with the published
parameter counts and file sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from star_elastic.errors import UnknownNameError, nearest
from star_elastic.families import layout_of
from star_elastic.layout import Layout


@dataclass(frozen=True)
class Preset:
    """A published parent.

    Attributes:
        name: for ``--preset``.
        config: its config.json.
        sizes: per nested size the widths that differ from the parent's.
        hub: names on the hub of the checkpoints that were trained for these sizes, by the format of their matrices; a mixed
            one stands under its narrowest.
    """

    name: str
    config: dict[str, Any]
    sizes: dict[str, dict[str, int]]
    hub: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def layout(self) -> Layout:
        """The parent's table."""
        return layout_of(self.config)

    def hub_name(self, formats: Collection[str] = ()) -> str | None:
        """The checkpoint on the hub whose matrices are stored in ``formats``; none given are bf16. None where none is known."""
        return self.hub.get(next((form for form in ("nvfp4", "fp8") if form in formats), "bf16"))


NEMOTRON_3_NANO = Preset(
    name="nemotron-3-nano-30b-a3b",
    config={
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "vocab_size": 131072,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_hidden_layers": 52,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": False,
        "intermediate_size": 1856,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "expand": 2,
        "chunk_size": 128,
        "use_bias": False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    sizes={"30b": {}, "23b": {"hidden": 2016}, "12b": {"hidden": 1920, "expert_ffn": 960}},
    hub={form: f"nvidia/NVIDIA-Nemotron-Labs-3-Elastic-30B-A3B-{form.upper()}" for form in ("bf16", "fp8", "nvfp4")},
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in (NEMOTRON_3_NANO,)}


def get_preset(name: str) -> Preset:
    """Look a preset up by name.

    Raises:
        UnknownNameError: no such preset; names the nearest.
    """
    if name not in PRESETS:
        raise UnknownNameError(f"no preset {name!r}: {nearest(name, PRESETS)}")
    return PRESETS[name]


def recognise(layout: Layout) -> Preset | None:
    """The preset whose parent has exactly this architecture, if there is one."""
    for preset in PRESETS.values():
        if preset.layout.fingerprint == layout.fingerprint:
            return preset
    return None
