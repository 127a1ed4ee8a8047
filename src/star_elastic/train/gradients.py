"""The gradients of one step: several nested models on the same rows, the rows in parts, one answer of the teacher per part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from star_elastic.elastic import ElasticModel
from star_elastic.train.data import Batch
from star_elastic.train.ranks import ALONE, Ranks
from star_elastic.train.sharding import Sharded
from star_elastic.train.teacher import Teaches, autocast

View = Callable[[], AbstractContextManager[Any]]
"""Opens a block inside which the student computes as one nested model."""


def distil(
    student: ElasticModel,
    teacher: Teaches,
    batch: Batch,
    views: Mapping[str, View],
    *,
    parts: int = 1,
    dtype: torch.dtype | None = None,
    sharded: Sharded | None = None,
) -> dict[str, Tensor]:
    """Add to the gradients those of the distillation loss, its mean over nested models and real tokens.

    Where several processes train, each runs its share of the rows, and all end with the gradients of all rows.

    Args:
        student: What learns.
        teacher: Whom it learns from.
        batch: Rows [B, T].
        views: The nested models, by name.
        parts: Parts in which the rows are run; the gradient is that of all rows together.
        dtype: Of matrix products under autocast; None without it.
        sharded: The student as the processes share it; None for one process.

    Returns:
        The loss of each nested model: scalars without gradient, nats per token.
    """
    device = student.model.device
    tokens = int(batch["attention_mask"].sum())
    losses = {name: torch.zeros((), device=device) for name in views}
    sharded = sharded or Sharded(student, ALONE)
    ranks = sharded.ranks
    pieces = list(split(own_rows(batch, ranks), parts))
    for number, part in enumerate(pieces):
        # The processes' gradients are averaged: times their number, that is the sum.
        share = ranks.size * int(part["attention_mask"].sum()) / max(tokens, 1)
        with autocast(device, dtype):
            answer = teacher.answer(part)
        for name, view in views.items():
            with autocast(device, dtype), view():
                loss = teacher.distance(answer, student, part) * share
            # Of the last part, every pass: the very last one may skip layers that another has run.
            sharded.begin_backward(is_last=number + 1 == len(pieces))
            (loss / len(views)).backward()
            losses[name] += loss.detach()
    sharded.average_gradients()
    ranks.average(losses.values())
    return losses


def own_rows(batch: Batch, ranks: Ranks) -> Batch:
    """This process's rows of a batch that all processes hold: equally many for each."""
    return {name: rows.chunk(ranks.size)[ranks.rank] for name, rows in batch.items()}


def split(batch: Batch, parts: int) -> Iterator[Batch]:
    """A batch in at most ``parts`` runs of rows, none of them empty."""
    chunked = {name: rows.chunk(parts) for name, rows in batch.items()}
    for pieces in zip(*chunked.values(), strict=True):
        yield dict(zip(chunked, pieces, strict=True))
