"""Two numbers about a model: loss on held-out text, and how often it answers a question with a known answer exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from star_elastic.elastic import ElasticModel
from star_elastic.train.distill import chunked_cross_entropy, chunked_kl

Conversation = Sequence[Mapping[str, str]]


@torch.inference_mode()
def held_out_loss(
    model: ElasticModel,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    submodel: str | None = None,
    chunk_tokens: int = 1024,
) -> float:
    """Mean next-token cross-entropy in nats over all real tokens of all batches.

    Args:
        model: an elastic model; its mode is left as it is, so put it in evaluation mode first.
        batches: each with ``input_ids`` and ``attention_mask``, (B, T); a prediction counts when its target is real.
        submodel: which nested model; None for the whole.
        chunk_tokens: tokens whose logits exist at one time.
    """
    total, count = 0.0, 0
    for batch in batches:
        ids, mask = (batch[name].to(model.model.device) for name in ("input_ids", "attention_mask"))
        hidden = model.features(ids, mask, submodel=submodel)  # (B, T, D)
        loss = chunked_cross_entropy(hidden, model.head_weight(submodel), ids, mask, chunk_tokens)
        targets = int(mask[:, 1:].sum())
        total, count = total + loss.item() * targets, count + targets
    return total / max(count, 1)


@torch.no_grad()
def held_out_kd(
    model: ElasticModel,
    teacher: ElasticModel,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    submodel: str | None = None,
    chunk_tokens: int = 1024,
) -> float:
    """Mean KL(teacher || model) in nats per real token of all batches: how far a nested model is from the parent.

    Args:
        model: an elastic model; its mode is left as it is, so put it in evaluation mode first.
        teacher: the whole parent, of the same vocabulary.
        batches: each with ``input_ids`` and ``attention_mask``, (B, T).
        submodel: which nested model; None for the whole.
        chunk_tokens: tokens whose logits exist at one time.
    """
    total, count = 0.0, 0
    for batch in batches:
        ids, mask = (batch[name].to(model.model.device) for name in ("input_ids", "attention_mask"))
        learnt, taught = model.features(ids, mask, submodel=submodel), teacher.features(ids, mask)  # (B, T, D)
        loss = chunked_kl(learnt, model.head_weight(submodel), taught, teacher.head_weight(), mask, chunk_tokens)
        tokens = int(mask.sum())
        total, count = total + loss.item() * tokens, count + tokens
    return total / max(count, 1)


@torch.inference_mode()
def exact_match(
    model: Any,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    *,
    max_new_tokens: int,
    end_of_thought: str = "</think>",
) -> float:
    """Share of questions whose greedy answer equals the expected one.

    Args:
        model: a transformers causal LM.
        tokenizer: its tokenizer, with a chat template.
        conversations: messages; the last one is the assistant's, and its content is the expected answer.
        max_new_tokens: limit for thought and answer together.
        end_of_thought: what stands between thought and answer; a continuation without it is wrong.

    Prompts of equal length run as one batch, so that nothing is padded.
    """
    groups: dict[int, list[tuple[list[int], str]]] = defaultdict(list)
    for *question, answer in conversations:
        text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        groups[len(prompt)].append((prompt, answer["content"]))
    right = 0
    for group in groups.values():
        prompts = torch.tensor([prompt for prompt, _ in group], device=model.device)  # (B, T)
        written = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        for tokens, (_, wanted) in zip(written[:, prompts.shape[1] :], group, strict=True):
            right += _answer(tokenizer, tokens.tolist(), end_of_thought) == wanted
    return right / max(len(conversations), 1)


def _answer(tokenizer: Any, tokens: list[int], end_of_thought: str) -> str | None:
    """The text between the end of the thought and the end of the sequence; None if the thought did not end."""
    ended = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
    _, found, answer = tokenizer.decode(tokens[:ended]).partition(end_of_thought)
    return answer.strip() if found else None
