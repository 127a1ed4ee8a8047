"""Batches of tokens: the weighted mixture for training, and a fixed set of samples for calibration and evaluation."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from star_elastic.errors import DataError
from star_elastic.train.documents import Documents
from star_elastic.train.packing import Cursor, Packing, RowStream, TokenDocuments, next_row
from star_elastic.train.recipe import DataRecipe, SourceRecipe
from star_elastic.train.sources import open_source

Batch = dict[str, Tensor]  # input_ids [B, T] int64, attention_mask [B, T] int64


def open_documents(recipe: DataRecipe, tokenizer: Any) -> list[Documents]:
    """Open every source of a mixture, and tokenize one document of each to see that it can be.

    Raises:
        DataError: a source that cannot be read, is empty, or needs a chat template that the tokenizer lacks.
    """
    documents = [Documents(open_source(source), tokenizer) for source in recipe.sources]
    for source in documents:
        source[0]
    return documents


class Mixture(IterableDataset[list[int]]):
    """Endless rows from several sources, in shares of *tokens*.

    The next row comes from the source that is furthest behind its share. So the shares hold at every moment, not only on average,
    also where rows differ in length; and there is no random state to keep.
    """

    def __init__(self, streams: Sequence[RowStream], weights: Sequence[float]) -> None:
        self._streams, self._weights = list(streams), list(weights)
        self._drawn = [0] * len(self._streams)  # tokens so far, per source

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            source = _furthest_behind(self._drawn, self._weights)
            row = next(self._streams[source])
            self._drawn[source] += len(row)
            yield row

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state of all streams."""
        return {"drawn": list(self._drawn), "streams": [stream.state() for stream in self._streams]}

    def behind(self) -> dict[str, Any]:
        """State of a mixture, of rows of another length perhaps, that goes on with documents that this one has not read."""
        return {"drawn": [0] * len(self._streams), "streams": [stream.behind() for stream in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly behind the last row before ``state_dict``."""
        self._drawn = list(state["drawn"])
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.restore(saved)


def training_loader(
    documents: Sequence[TokenDocuments],
    recipe: DataRecipe,
    *,
    length: int,
    batch_size: int,
    seed: int,
    pad: int,
    after: StatefulDataLoader | None = None,
) -> StatefulDataLoader:
    """An endless loader of batches whose ``state_dict`` is JSON-ready and resumes exactly.

    Args:
        documents: One per source of the recipe.
        recipe: Weights, packing, shuffling.
        length: Tokens of a full row.
        batch_size: Rows per batch.
        seed: Decides the order.
        pad: Token on the right of short rows (packing ``apart``).
        after: Loader of the stage before, of rows of another length perhaps: what it has not read comes first.
    """
    streams = [
        RowStream(source, length, recipe.packing, -(-recipe.shuffle_tokens // length), f"{seed}/source {number}")
        for number, source in enumerate(documents)
    ]
    mixture = Mixture(streams, recipe.weights())
    if after is not None:
        assert isinstance(after.dataset, Mixture)
        mixture.load_state_dict(after.dataset.behind())
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.13 announces to remove.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            mixture,
            batch_size=batch_size,
            collate_fn=_Pad(pad),
            generator=torch.Generator(),  # it draws a seed from its generator; torch's global one is not its to move
        )


@dataclass(frozen=True)
class Calibration:
    """A fixed set of samples.

    Attributes:
        batches: Each with ``input_ids`` and ``attention_mask``, [B, T]; padding on the right, T at most the asked length.
        samples: Rows in all batches; fewer than asked for where the data ends before.
        tokens: Real tokens in all batches.
        sha256: Of the token rows in order, so that two runs can prove that they used the same data.
    """

    batches: list[Batch]
    samples: int
    tokens: int
    sha256: str

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def calibration_batches(
    data: str | Path | DataRecipe,
    tokenizer: Any,
    *,
    samples: int,
    seq_len: int,
    batch_size: int = 1,
    packing: Packing = "cross",
    seed: int = 0,
) -> Calibration:
    """A deterministic set of rows for importance scores or held-out loss.

    Args:
        data: A file, glob, folder or hub name, or a mixture (its own packing then holds, and its weights).
        tokenizer: A transformers tokenizer.
        samples: Rows wanted. No document is read twice to reach them.
        seq_len: Tokens of a full row.
        batch_size: Rows per batch.
        packing: ``cross`` (documents follow each other in a row) or ``apart`` (padded rows).
        seed: Decides the order of the documents.

    Raises:
        DataError: unreadable or empty data.

    Example:
        >>> held_out = calibration_batches("text.jsonl", tokenizer, samples=64, seq_len=512, batch_size=8)
        >>> [batch["input_ids"].shape for batch in held_out][0]
        torch.Size([8, 512])
    """
    recipe = data if isinstance(data, DataRecipe) else DataRecipe(sources=(source_of(data),), packing=packing)
    documents = open_documents(recipe, tokenizer)
    rows = list(_rows_once(documents, recipe, samples, seq_len, seed))
    if not rows:
        raise DataError(f"{_names(recipe)} gives no tokens")
    return _calibration(rows, tokenizer, batch_size)


def held_out_batches(
    data: str | Path | DataRecipe,
    tokenizer: Any,
    *,
    tokens: int,
    seq_len: int,
    skip: int = 0,
    batch_size: int = 1,
    packing: Packing = "cross",
    seed: int = 0,
) -> Calibration:
    """Rows to measure loss on: those that follow the first ``skip`` rows which ``calibration_batches`` gives of the same data.

    Args:
        data, tokenizer, seq_len, batch_size, packing, seed: As for ``calibration_batches``.
        tokens: Real tokens wanted; the last row is cut to reach them exactly. Fewer where the data ends before.
        skip: Rows that were used for something else.

    Raises:
        DataError: unreadable data, or none behind the skipped rows that holds two tokens in a row.
    """
    recipe = data if isinstance(data, DataRecipe) else DataRecipe(sources=(source_of(data),), packing=packing)
    documents = open_documents(recipe, tokenizer)
    rows: list[list[int]] = []
    for row in islice(_rows_once(documents, recipe, sys.maxsize, seq_len, seed), skip, None):
        rows.append(row[:tokens])
        tokens -= len(row)
        if tokens <= 0:
            break
    if not any(len(row) > 1 for row in rows):
        used = f" behind the {skip} samples that are used already" if skip else ""
        raise DataError(f"{_names(recipe)} holds nothing to measure loss on{used}")
    return _calibration(rows, tokenizer, batch_size)


def _calibration(rows: list[list[int]], tokenizer: Any, batch_size: int) -> Calibration:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(torch.tensor([len(row), *row], dtype=torch.int64).numpy().tobytes())
    pad = _Pad(pad_token(tokenizer))
    batches = [pad(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]
    return Calibration(batches, len(rows), sum(map(len, rows)), digest.hexdigest())


def _names(recipe: DataRecipe) -> str:
    return ", ".join(source.name for source in recipe.sources)


def source_of(data: str | Path) -> SourceRecipe:
    """What a user means by one word of data: something on disk if it is there or looks like a path, else a hub name.

    A hub name is ``owner/name``, or a bare name without an ending.

    Raises:
        DataError: no word at all.
    """
    text = str(data)
    if not text.strip():
        raise DataError("the name of the data is empty: give a file, a glob, a folder or a hub name")
    on_disk = Path(text).exists() or any(sign in text for sign in "*?[") or text.startswith((".", "/", "~"))
    if on_disk or Path(text).suffix or text.count("/") > 1:
        return SourceRecipe(path=str(Path(text)))
    return SourceRecipe(hub=text)


def pad_token(tokenizer: Any) -> int:
    """The padding token; where a tokenizer has none, end-of-sequence does: padding is masked anyway."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def _rows_once(
    documents: Sequence[TokenDocuments], recipe: DataRecipe, most: int, length: int, seed: int
) -> Iterator[list[int]]:
    """At most ``most`` rows in the mixture's shares; a source that ends leaves its share to the others."""
    cursors = [Cursor(source, f"{seed}/source {number}") for number, source in enumerate(documents)]
    weights, drawn = list(recipe.weights()), [0] * len(cursors)
    while cursors and most:
        source = _furthest_behind(drawn, weights)
        row = next_row(cursors[source], length, recipe.packing, same_epoch=True) if _fresh(cursors[source]) else []
        if not row:
            del cursors[source], weights[source], drawn[source]
            continue
        drawn[source] += len(row)
        most -= 1
        yield row


def _fresh(cursor: Cursor) -> bool:
    return cursor.position.epoch == 0


def _furthest_behind(drawn: Sequence[int], weights: Sequence[float]) -> int:
    due = sum(drawn) / sum(weights)
    return max(range(len(drawn)), key=lambda source: weights[source] * due - drawn[source])


class _Pad:
    """Rows to a batch, padded on the right to the longest row. A class, so that worker processes can receive it."""

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, rows: Sequence[Sequence[int]]) -> Batch:
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), self._pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask}
