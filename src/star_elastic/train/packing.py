"""From documents to rows of tokens, shuffled, endless, and resumable from a few numbers.

A row's place is (epoch, document, token): what comes after it can be computed again from there, so a checkpoint stores positions
and no tokens.

Why documents that must not see each other need rows of their own: attention could be confined to a document by a block mask,
but the selective scan of a Mamba layer carries its state along the whole row. Fused CUDA kernels can reset it at document
borders (``seq_idx``); the PyTorch scan of transformers cannot, so the only way that holds on every machine is one document per
row, padded on the right. Padding follows the document, so nothing reads it, and it carries no loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch

from star_elastic.errors import DataError

Packing = Literal["cross", "apart"]


class TokenDocuments(Protocol):
    """What rows are cut from: token lists by index (``Documents``)."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence[int]: ...


@dataclass(frozen=True)
class Position:
    """The next token to read: epochs done, documents of this epoch done, tokens of this document done."""

    epoch: int = 0
    index: int = 0
    offset: int = 0


class Cursor:
    """Reads documents in an order that each epoch shuffles anew."""

    def __init__(self, documents: TokenDocuments, seed: str, position: Position | None = None) -> None:
        self.documents = documents
        self.position = position or Position()
        self._seed = seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._loaded, self._tokens = (-1, -1), list[int]()

    def take(self, most: int) -> list[int]:
        """The next tokens of the current document, at most ``most``; then the cursor stands behind them."""
        at = self.position
        tokens = self._document(at)
        part = tokens[at.offset : at.offset + most]
        if at.offset + most < len(tokens):
            self.position = Position(at.epoch, at.index, at.offset + most)
        elif at.index + 1 < len(self.documents):
            self.position = Position(at.epoch, at.index + 1)
        else:
            self.position = Position(at.epoch + 1)
        return part

    def _document(self, at: Position) -> list[int]:
        if self._epoch != at.epoch:
            self._epoch = at.epoch
            self._order = permutation(len(self.documents), f"{self._seed}/epoch {at.epoch}")
        if self._loaded != (at.epoch, at.index):
            self._loaded = (at.epoch, at.index)
            self._tokens = list(self.documents[int(self._order[at.index])])
        return self._tokens


def next_row(cursor: Cursor, length: int, packing: Packing, *, same_epoch: bool = False) -> list[int]:
    """The next row, of at most ``length`` tokens.

    Args:
        cursor: Where to read.
        length: Tokens of a full row.
        packing: ``cross`` goes on into following documents until the row is full; ``apart`` stops at the end of the document.
        same_epoch: Stop at the end of the epoch, with a short row or, at last, an empty one.

    Raises:
        DataError: a whole epoch gave no token.
    """
    row: list[int] = []
    begin = cursor.position.epoch
    while len(row) < length and not (packing == "apart" and row):
        if same_epoch and cursor.position.epoch > begin:
            break
        if not row and cursor.position.epoch > begin + 1:
            raise DataError(f"{cursor.documents.name} gives no tokens")
        row += cursor.take(length - len(row))
    return row


class RowStream:
    """Endless rows of one source, shuffled in blocks.

    Args:
        documents: Token lists.
        length: Tokens of a full row.
        packing: See ``next_row``.
        block: Rows that are read ahead and shuffled among themselves, so that a long document does not fill a whole batch. A
            block ends with its epoch.
        seed: Any text; equal seeds give equal rows.
    """

    def __init__(self, documents: TokenDocuments, length: int, packing: Packing, block: int, seed: str) -> None:
        self._documents, self._length, self._packing = documents, length, packing
        self._block, self._seed = block, seed
        self._cursor = Cursor(documents, seed)
        self._begin = self._cursor.position  # of the block in hand
        self._rows: list[list[int]] = []
        self._emitted = 0

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self._emitted == len(self._rows):
            self._read_block(self._cursor.position)
        self._emitted += 1
        return self._rows[self._emitted - 1]

    def state(self) -> dict[str, Any]:
        """JSON-ready state: where the block in hand begins, and how many of its rows are out."""
        return {"begin": asdict(self._begin), "emitted": self._emitted, "documents": len(self._documents)}

    def behind(self) -> dict[str, Any]:
        """State of a stream, of rows of another length perhaps, that goes on behind the block in hand."""
        return {**self.state(), "begin": asdict(self._cursor.position), "emitted": 0}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly behind the last row before ``state`` was taken.

        Raises:
            DataError: the source has another number of documents now.
        """
        if state["documents"] != len(self._documents):
            raise DataError(
                f"{self._documents.name} has {len(self._documents)} documents, but the run began with {state['documents']}; "
                "put the old data back, or begin a new run"
            )
        self._cursor = Cursor(self._documents, self._seed, Position(**state["begin"]))
        self._begin, self._rows = self._cursor.position, []
        if state["emitted"]:
            self._read_block(self._cursor.position)
        self._emitted = state["emitted"]

    def _read_block(self, begin: Position) -> None:
        rows: list[list[int]] = []
        while len(rows) < self._block and not (rows and self._cursor.position.epoch > begin.epoch):
            rows.append(next_row(self._cursor, self._length, self._packing))
        order = permutation(len(rows), f"{self._seed}/block {begin}")
        self._begin, self._rows, self._emitted = begin, [rows[i] for i in order.tolist()], 0


def permutation(count: int, seed: str) -> torch.Tensor:
    """A random order of ``count`` things, int64, that depends on nothing but ``seed``."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") >> 1  # manual_seed takes 63 bits
    return torch.randperm(count, generator=torch.Generator().manual_seed(number))
