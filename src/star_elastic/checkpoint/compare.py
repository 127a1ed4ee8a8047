"""Stored tensors as they lie: their bytes, block by block, and whether two are equal."""

from __future__ import annotations

from collections.abc import Iterator

from star_elastic.checkpoint.reader import TensorInfo

BLOCK_BYTES = 2**22


def stored_blocks(info: TensorInfo) -> Iterator[bytes]:
    """The bytes of a stored tensor, in blocks of at most ``BLOCK_BYTES``."""
    with info.path.open("rb") as file:
        file.seek(info.offset)
        for start in range(0, info.nbytes, BLOCK_BYTES):
            yield file.read(min(BLOCK_BYTES, info.nbytes - start))


def same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two stored tensors have the same dtype, shape and numbers."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(stored_blocks(one), stored_blocks(other), strict=True))
