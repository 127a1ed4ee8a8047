"""One tensor of the folder to be written: which tensor it comes from, and which members of each axis it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from star_elastic.checkpoint.ranges import ByteRange, rows_read
from star_elastic.checkpoint.reader import TensorInfo
from star_elastic.checkpoint.take import Index, take_blocks
from star_elastic.layout import Dim, Members


@dataclass(frozen=True)
class TensorCut:
    """A planned tensor. Positions are computed when it is written: lists for every expert of a large model would fill memory.

    Attributes:
        info: the tensor to read.
        name: the name to write it under.
        dims: what indexes each of its dimensions.
        members: members to take of each axis, in order; an axis left out is taken whole.
        by_member: further ``members`` for single members of the first dimension (an order of its own for each expert).
    """

    info: TensorInfo
    name: str
    dims: tuple[Dim, ...]
    members: Members
    by_member: Mapping[int, Members] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """safetensors dtype name: the source's, always."""
        return self.info.dtype

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return self.info.itemsize

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape after the cut."""
        widths = {axis: len(kept) for axis, kept in self.members.items()}
        return tuple(dim.width(widths) for dim in self.dims)

    @cached_property
    def nbytes(self) -> int:
        """Bytes after the cut."""
        size = self.itemsize
        for length in self.shape:
            size *= length
        return size

    def index(self) -> tuple[Index, ...]:
        """Positions to take along each dimension."""
        return tuple(positions(dim, self.members) for dim in self.dims)

    def ranges(self, gap: int = 0) -> list[ByteRange]:
        """Byte ranges of the source's file that the cut reads; see ``ranges.rows_read``."""
        if self.by_member:
            return [(self.info.offset, self.info.offset + self.info.nbytes)]
        rows = rows_read(self.info.shape, self.index(), self.itemsize, gap)
        return [(self.info.offset + start, self.info.offset + stop) for start, stop in rows]

    def blocks(self) -> Iterator[memoryview]:
        """The bytes of the cut tensor, as ``take.take_blocks`` yields them."""
        array = self.info.array()
        if not self.by_member:
            yield from take_blocks(array, self.index())
            return
        first, *rest = self.dims
        for member in first.index(self.members) or range(first.size):
            members = {**self.members, **self.by_member.get(member, {})}
            yield from take_blocks(array[member], [positions(dim, members) for dim in rest])


def positions(dim: Dim, members: Members) -> np.ndarray | None:
    """``dim.index``, remembered: the many experts of a layer are cut alike."""
    return _positions(dim, tuple((axis, _fixed(members[axis])) for axis in sorted(dim.axes & members.keys())))


def _fixed(members: Sequence[int]) -> Sequence[int]:
    return members if isinstance(members, range) else tuple(members)


@lru_cache(maxsize=32)
def _positions(dim: Dim, members: tuple[tuple[str, Sequence[int]], ...]) -> np.ndarray | None:
    index = dim.index(dict(members))
    return None if index is None else np.array(index, np.int64)
