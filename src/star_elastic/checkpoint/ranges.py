"""Which bytes of a file a cut reads, so that a file that lies elsewhere need not be fetched whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from star_elastic.checkpoint.take import Index, Rows, kept_positions

ByteRange = tuple[int, int]
"""First byte, and the one after the last."""


def rows_read(shape: Sequence[int], index: Sequence[Index], itemsize: int, gap: int = 0) -> list[ByteRange]:
    """Byte ranges, relative to the tensor's first byte, of the rows that ``array[np.ix_(*index)]`` touches.

    A row is what lies behind the leading dimensions: the last dimension alone where that is cut, more where it is whole.

    Args:
        shape: shape of the whole tensor.
        index: positions per dimension, in any order; None keeps a dimension whole.
        itemsize: bytes per number.
        gap: bytes that are rather read too many than asked for apart.
    """
    cut = [kept_positions(kept, size) for kept, size in zip(index, shape, strict=True)]
    total = math.prod(shape) * itemsize
    if total == 0 or any(kept is not None and len(kept) == 0 for kept in cut):
        return []
    # Of the last dimension the whole row is read, unless it is the only one.
    lead = next((d + 1 for d in reversed(range(max(1, len(cut) - 1))) if d < len(cut) and cut[d] is not None), 0)
    if lead == 0:
        return [(0, total)]
    rows = Rows(shape[:lead], cut[:lead])
    numbers = rows.source(0, rows.count)
    row_bytes = total // rows.source_count
    if isinstance(numbers, slice):
        return [(numbers.start * row_bytes, numbers.stop * row_bytes)]
    numbers = np.unique(numbers)
    ends = np.flatnonzero((np.diff(numbers) - 1) * row_bytes > gap)
    first, last = numbers[np.append(0, ends + 1)], numbers[np.append(ends, len(numbers) - 1)]
    return [(int(a) * row_bytes, (int(b) + 1) * row_bytes) for a, b in zip(first, last, strict=True)]


def merged(ranges: Iterable[ByteRange], gap: int = 0) -> list[ByteRange]:
    """The same bytes in ascending order, each once; ranges that lie at most ``gap`` apart become one.

    Example:
        >>> merged([(10, 20), (0, 5), (15, 30), (32, 40)], gap=2)
        [(0, 5), (10, 40)]
    """
    joined: list[ByteRange] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def length(ranges: Iterable[ByteRange]) -> int:
    """Bytes in ranges that do not overlap."""
    return sum(stop - start for start, stop in ranges)
