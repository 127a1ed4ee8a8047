"""The demo's parent: a small NemotronH hybrid, trained from scratch by plain next-token prediction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from star_elastic.checkpoint import target_folder
from star_elastic.demo.settings import Settings
from star_elastic.demo.task import ROWS, TEXT
from star_elastic.progress import progress_bar
from star_elastic.train.data import open_documents, pad_token, training_loader
from star_elastic.train.documents import load_tokenizer
from star_elastic.train.precision import fast_dtype
from star_elastic.train.recipe import DataRecipe, SourceRecipe
from star_elastic.train.schedule import learning_rate
from star_elastic.train.teacher import autocast

KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def mixture(data: Path, reasoning: str = ROWS, text: str = TEXT) -> DataRecipe:
    """70% chains and 30% text, each document in rows of its own, so that no chain is cut in two."""
    return DataRecipe(
        sources=(
            SourceRecipe(path=str(data / reasoning), kind="reasoning"),
            SourceRecipe(path=str(data / text), kind="text"),
        ),
        packing="apart",
    )


def parent_config(settings: Settings, vocabulary: int) -> Any:
    """Config of the parent. ``time_step_min`` is tiny because transformers clamps by it in prefill but not in decoding."""
    from transformers import NemotronHConfig

    return NemotronHConfig(
        vocab_size=math.ceil(vocabulary / 8) * 8,
        hidden_size=settings.hidden,
        layers_block_type=[KINDS[letter] for letter in settings.pattern],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=16,
        chunk_size=32,
        time_step_min=1e-6,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=settings.expert_ffn,
        moe_shared_expert_intermediate_size=settings.shared_ffn,
        routed_scaling_factor=2.5,
        initializer_range=0.05,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def train_parent(out: Path, data: Path, settings: Settings, *, progress: bool) -> None:
    """Train the parent and write it, with its tokenizer, as an ordinary transformers folder."""
    tokenizer = load_tokenizer(data / "tokenizer")
    model = random_model(parent_config(settings, len(tokenizer)), settings.seed)
    pretrain(model, data, tokenizer, settings, progress=progress)
    with target_folder(out, data) as folder:
        model.eval().save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def random_model(config: Any, seed: int) -> Any:
    """A model as training begins."""
    from transformers import NemotronHForCausalLM

    torch.manual_seed(seed)
    model = NemotronHForCausalLM(config).train()
    with torch.no_grad():
        # Next to the layers' outputs the usual embeddings are faint, and looking a label up is learned half as fast.
        model.get_input_embeddings().weight.mul_(10)
    return model


def pretrain(model: Any, data: Path, tokenizer: Any, settings: Settings, *, progress: bool) -> int:
    """Next-token prediction on the demo's mixture for ``parent_steps`` steps; returns the number of real tokens."""
    recipe, steps, peak = mixture(data), settings.parent_steps, settings.peak_lr
    loader = training_loader(
        open_documents(recipe, tokenizer),
        recipe,
        length=settings.length,
        batch_size=settings.batch_size,
        seed=settings.seed,
        pad=pad_token(tokenizer),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    tokens = 0
    with progress_bar("training the parent", steps, "steps", shown=progress) as advance:
        for step, batch in zip(range(steps), loader, strict=False):
            rate = learning_rate(step, steps, peak=peak, floor=peak / 20, warmup=steps // 20)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            next_token_loss(model, batch["input_ids"], batch["attention_mask"]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens += int(batch["attention_mask"].sum())
            advance(1)
    return tokens


def next_token_loss(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over real targets, products in bf16 where the hardware has them. ids, mask: (B, T)."""
    with autocast(ids.device, fast_dtype(ids.device)):
        logits = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=False).logits
    targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
