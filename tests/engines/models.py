"""Parents that engines' tests slice: trained ones of the demo, and tiny random ones with a tokenizer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tiny import FAMILIES, tiny_model
from transformers import AutoTokenizer

from star_elastic import Submodel, slice_checkpoint
from star_elastic.demo.task import make_chain
from star_elastic.demo.tokenizer import write_tokenizer

# Sizes that engines' kernels know: heads of 32 channels, states of 16.
HYBRID = {"hidden_size": 128, "head_dim": 32, "mamba_head_dim": 32, "ssm_state_size": 16, "intermediate_size": 96}
VOCAB = 288  # llama.cpp wants merges, so the tokenizer is the demo's
PARENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense nemotron_h": ("nemotron_h", {"pattern": "M*-M-", **HYBRID}),
    "nemotron_h": ("nemotron_h", {"pattern": "ME*ME", **HYBRID}),
    "llama": ("llama", {"head_dim": 32}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    # llama.cpp always renormalises the gates of a Qwen3-MoE, as all published ones do.
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, "mlp_only_layers": [], "norm_topk_prob": True}),
    "mixtral": ("mixtral", {"head_dim": 32}),
}
CUTS = {
    "dense nemotron_h": Submodel(widths={"hidden": 96, "ffn": 64, "mamba_heads": 6}),
    "nemotron_h": Submodel(widths={"hidden": 96, "expert_ffn": 16, "experts": 6, "mamba_heads": 6}),
    "llama": Submodel(widths={"hidden": 48, "ffn": 32}, layers=(0, 1, 3)),
    "qwen3": Submodel(widths={"hidden": 48, "ffn": 32, "heads": 4}),
    "qwen3_moe": Submodel(widths={"hidden": 48, "expert_ffn": 16, "heads": 4, "experts": 6}),
    "mixtral": Submodel(widths={"hidden": 48, "expert_ffn": 16, "experts": 6}),
}
PROMPTS = [[1, 3, 50, 60, 70], [1, 60, 61, 62, 63, 64, 65, 66]]


def tiny_slice(name: str, home: Path) -> Path:
    """A slice of a tiny random parent."""
    family, edits = PARENTS[name]
    builder = tiny_model if family == "nemotron_h" else FAMILIES[family]
    builder(vocab_size=VOCAB, **edits).save_pretrained(home / "parent")
    write_tokenizer(home / "parent")
    slice_checkpoint(home / "parent", home / "slice", CUTS[name])
    return home / "slice"


def task_prompts(folder: Path) -> list[list[int]]:
    """Questions of the demo's task, of different lengths: a model that was trained on it is sure of most of its answer."""
    tokenizer, rng = AutoTokenizer.from_pretrained(folder, local_files_only=True), random.Random(0)
    prompts = []
    for operands in (3, 4, 5, 6):
        asked = [{"role": "user", "content": make_chain(rng, operands).question}]
        prompts.append(tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"])
    return prompts
