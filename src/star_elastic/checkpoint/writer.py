"""Writing safetensors as a stream: sizes are known beforehand, so the header goes first and tensors follow block by block.

The library's own writer wants every tensor of a file in memory at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from star_elastic.checkpoint.reader import INDEX, SINGLE

MAX_SHARD_BYTES = 5 * 10**9

ADVANCE_BYTES = 16 * 2**20  # drawing costs more than writing a block

Advance = Callable[[int], object]
"""Called with the number of bytes just written."""


class Planned(Protocol):
    """A tensor to be written: its description, and its bytes when asked for."""

    @property
    def name(self) -> str:
        """Name to write it under."""
        ...

    @property
    def dtype(self) -> str:
        """safetensors dtype name."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        ...

    def blocks(self) -> Iterator[memoryview]:
        """Its bytes, in order; each block is written before the next is asked for."""
        ...


def write_weights(
    folder: Path,
    tensors: Sequence[Planned],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    advance: Advance = lambda written: None,
) -> int:
    """Write ``model.safetensors``, or numbered shards and at last their index, into an existing folder.

    Args:
        folder: where to.
        tensors: in this order; a tensor larger than a shard gets one of its own.
        max_shard_bytes: largest sum of tensor bytes in one file.
        advance: told how many bytes were written since it was last called.

    Returns:
        Bytes of all tensors.
    """
    shards = split_shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0], advance)
    else:
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_file(folder / name, shard, advance)
            weight_map |= {tensor.name: name for tensor in shard}
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return sum(tensor.nbytes for tensor in tensors)


def split_shards(tensors: Iterable[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    """Cut a sequence of tensors into files, in order; always at least one file."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def write_file(path: Path, tensors: Sequence[Planned], advance: Advance) -> None:
    """Write one safetensors file: header length, header, bytes."""
    # Wide numbers first, as the format asks: after an odd count of 2-byte numbers a 4-byte tensor would lie unaligned.
    ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    with path.open("wb") as file:
        file.write(header_bytes(ordered))
        for tensor in ordered:
            written = told = 0
            for block in tensor.blocks():
                file.write(block)
                written += len(block)
                if written - told > ADVANCE_BYTES:
                    advance(written - told)
                    told = written
            assert written == tensor.nbytes, f"{tensor.name}: {written} bytes for a shape of {tensor.nbytes}"
            advance(written - told)


def header_bytes(tensors: Sequence[Planned]) -> bytes:
    """The start of a safetensors file that holds ``tensors`` in this order, padded to whole 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
