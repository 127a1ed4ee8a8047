"""An independent held-out loss: transformers' own model of an exported folder, its logits, a loop over rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from bytes_tokenizer import write_tokenizer
from tiny import FAMILIES
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

TEXT = "".join(f"{number} and {number * 7 % 31} make a line of words; " for number in range(60))


def family_folder(path: Path, family: str) -> Path:
    """A tiny model of a family with a tokenizer of one token per byte."""
    FAMILIES[family](bos_token_id=1, eos_token_id=2, pad_token_id=0).save_pretrained(path)
    write_tokenizer(path)
    return path


def reference_loss(folder: Path, batches: Iterable[Mapping[str, torch.Tensor]]) -> float:
    """Mean over all predicted real tokens, in fp64; padding is on the right."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses: list[float] = []
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            row = ids[: int(mask.sum())]
            with torch.no_grad():
                chances = log_softmax(model(row[None]).logits[0].double(), dim=-1)
            losses += [-float(chances[place, token]) for place, token in enumerate(row[1:])]
    return sum(losses) / len(losses)
