"""Tiny random models of every family. Norm weights, biases and the selection bias are random: ones and zeros hide faults.

``tiny_model`` and ``tiny_folder`` make a NemotronH; ``FAMILIES`` has a builder for each family, such as ``tiny_llama``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def tiny_config(pattern: str = "ME*ME", **edits: Any) -> NemotronHConfig:
    """A hybrid of every layer kind but dense MLP (give ``pattern="ME*-E"`` for one)."""
    fields: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "layers_block_type": [KINDS[letter] for letter in pattern],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "intermediate_size": 48,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 1e-6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    }
    return NemotronHConfig(**{**fields, **edits})


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Random norm weights 1 +- 0.3, matrices large enough that every layer matters, random biases and selection bias."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise(parameter))
            elif parameter.ndim >= 2 and "conv1d" not in name:
                parameter.copy_(noise(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.3 * noise(parameter))
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.2 * noise(buffer))


def tiny_model(seed: int = 0, pattern: str = "ME*ME", **edits: Any) -> NemotronHForCausalLM:
    """A tiny random model in eval mode, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NemotronHForCausalLM(tiny_config(pattern, **edits))
    randomise(model, seed)
    return model.eval()


def tiny_folder(path: Path, sharded: bool = False, seed: int = 0, pattern: str = "ME*ME", **edits: Any) -> Path:
    """Save a tiny random model with transformers' own writer; ``sharded`` makes several files with an index."""
    tiny_model(seed, pattern, **edits).save_pretrained(path, max_shard_size="40KB" if sharded else "1GB")
    return path


# Heads are wider than hidden / heads, so that a guessed head_dim shows.
TRANSFORMER: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def build(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A random model of a config in eval mode, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    return model.eval()


def tiny_llama(seed: int = 0, **edits: Any) -> PreTrainedModel:
    """Attention and a gated MLP, with a tied head."""
    return build(LlamaConfig(**{**TRANSFORMER, "tie_word_embeddings": True, **edits}), seed)


def tiny_qwen3(seed: int = 0, **edits: Any) -> PreTrainedModel:
    """A Llama with QK-norm."""
    return build(Qwen3Config(**{**TRANSFORMER, **edits}), seed)


def tiny_qwen3_moe(seed: int = 0, **edits: Any) -> PreTrainedModel:
    """Eight gated experts behind a softmax router that does not renormalise; layer 1 is dense."""
    fields = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
    return build(Qwen3MoeConfig(**{**TRANSFORMER, **fields, **edits}), seed)


def tiny_mixtral(seed: int = 0, **edits: Any) -> PreTrainedModel:
    """Eight gated experts in every layer."""
    return build(MixtralConfig(**{**TRANSFORMER, "intermediate_size": 32, "num_local_experts": 8, **edits}), seed)


def tiny_granitemoehybrid(seed: int = 0, **edits: Any) -> PreTrainedModel:
    """Mamba-2 or attention, then eight gated experts beside a shared MLP; every multiplier is other than 1; tied head."""
    fields = {
        "intermediate_size": 32,
        "shared_intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    }
    return build(GraniteMoeHybridConfig(**{**TRANSFORMER, **fields, **edits}), seed)


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "nemotron_h": tiny_model,
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "mixtral": tiny_mixtral,
    "granitemoehybrid": tiny_granitemoehybrid,
}
"""Family -> builder ``(seed, **edits)`` of a tiny model."""


def tokens(batch: int = 2, length: int = 24, vocab: int = 128, seed: int = 0) -> torch.Tensor:
    """Random token ids, (B, T)."""
    return torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
