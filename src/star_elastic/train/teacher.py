"""The teacher: what the frozen parent says about a batch, asked once, however many nested models learn from it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from star_elastic.elastic import ElasticModel
from star_elastic.train.data import Batch
from star_elastic.train.distill import chunked_kl


class Teaches(Protocol):
    """Whom a student learns from."""

    def answer(self, batch: Batch) -> Any:
        """What there is to learn about a batch."""

    def distance(self, answer: Any, student: ElasticModel, batch: Batch) -> Tensor:
        """How far the student, through the lens in force, is from an answer to the same batch; a scalar."""


class Teacher:
    """The parent, run in full on each batch.

    Args:
        model: The parent, without gradients.
        chunk_tokens: Tokens whose logits exist at one time in the loss.
    """

    def __init__(self, model: ElasticModel, chunk_tokens: int) -> None:
        self.model, self._chunk_tokens = model, chunk_tokens

    @torch.no_grad()
    def answer(self, batch: Batch) -> Tensor:
        """Last hidden states [B, T, D]: with the head they stand for the logits, which would take V/D times the memory."""
        return self.model.features(*inputs(batch, self.model.model.device))

    def distance(self, answer: Tensor, student: ElasticModel, batch: Batch) -> Tensor:
        """KL of the student, through the lens in force, from an answer to the same batch; a scalar, in nats per real token."""
        ids, padding = inputs(batch, student.model.device)
        return chunked_kl(
            student.features(ids, padding),
            student.head_weight(),
            answer,
            self.model.head_weight(),
            padding,
            self._chunk_tokens,
        )


def inputs(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Token ids [B, T] and the mask of real tokens, None where all are real."""
    padding = None if bool(batch["attention_mask"].all()) else batch["attention_mask"].to(device)
    return batch["input_ids"].to(device), padding


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Matrix products in ``dtype``; None leaves them as they are."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
