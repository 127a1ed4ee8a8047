"""Writing safetensors as a stream: sizes are known beforehand, so headers go first and each tensor to its place, in any order.

The library's own writer wants every tensor of a file in memory at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """Write ``model.safetensors``, or numbered shards and their index, into an existing folder.

    Args:
        folder: where to.
        tensors: in this order; a tensor larger than a shard gets one of its own.
        max_shard_bytes: largest sum of tensor bytes in one file.
        advance: told how many bytes were written since it was last called.

    Returns:
        Bytes of all tensors.
    """
    files = WeightFiles(tensors, max_shard_bytes)
    files.begin(folder)
    for tensor in tensors:
        files.write(folder, tensor, advance)
    files.finish(folder)
    return files.nbytes


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file: its name, its first bytes and its length."""

    name: str
    header: bytes
    size: int

    def is_begun(self, folder: Path) -> bool:
        """Whether the file is there with this header and this length, whatever its tensors hold."""
        path = folder / self.name
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        with path.open("rb") as file:
            return file.read(len(self.header)) == self.header


class WeightFiles:
    """The weight files of a folder, laid out before the first byte is written, when somebody first asks.

    Attributes:
        nbytes: bytes of all tensors.
    """

    def __init__(self, tensors: Sequence[Planned], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._shards = split_shards(tensors, max_shard_bytes)

    @property
    def files(self) -> list[PlannedFile]:
        """The safetensors files, in order."""
        return self._laid_out[0]

    @cached_property
    def index(self) -> str | None:
        """Content of the index file; None where one file holds everything."""
        if len(self._shards) == 1:
            return None
        weight_map = {tensor: file for tensor, (file, _) in sorted(self._laid_out[1].items())}
        return json.dumps({"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}, indent=2) + "\n"

    @cached_property
    def _laid_out(self) -> tuple[list[PlannedFile], dict[str, tuple[str, int]]]:
        """The files; and by tensor, the name of its file and its place in it."""
        files: list[PlannedFile] = []
        places: dict[str, tuple[str, int]] = {}
        count = len(self._shards)
        for number, shard in enumerate(self._shards, start=1):
            name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            # Wide numbers first, as the format asks: after an odd count of 2-byte numbers a 4-byte tensor would lie unaligned.
            ordered = sorted(shard, key=lambda tensor: -tensor.itemsize)
            header = header_bytes(ordered)
            offset = len(header)
            for tensor in ordered:
                places[tensor.name] = (name, offset)
                offset += tensor.nbytes
            files.append(PlannedFile(name, header, offset))
        return files, places

    def are_begun(self, folder: Path) -> bool:
        """Whether ``begin`` was called on this folder, by us or by an earlier process with the same plan."""
        return all(file.is_begun(folder) for file in self.files)

    def begin(self, folder: Path) -> None:
        """Write all headers, and give each file its length."""
        for file in self.files:
            with (folder / file.name).open("wb") as opened:
                opened.write(file.header)
                opened.truncate(file.size)

    def finish(self, folder: Path) -> None:
        """Write the index, at last."""
        if self.index is not None:
            (folder / INDEX).write_text(self.index, encoding="utf-8")

    def write(self, folder: Path, tensor: Planned, advance: Advance = lambda written: None) -> None:
        """Write one tensor to its place; several threads may write different tensors."""
        name, start = self._laid_out[1][tensor.name]
        with (folder / name).open("r+b", buffering=0) as file:
            offset = told = start
            for block in tensor.blocks():
                write_at(file.fileno(), block, offset)
                offset += len(block)
                if offset - told > ADVANCE_BYTES:
                    advance(offset - told)
                    told = offset
        assert offset - start == tensor.nbytes, f"{tensor.name}: {offset - start} bytes for a shape of {tensor.nbytes}"
        advance(offset - told)


def write_at(file: int, block: memoryview | bytes, offset: int) -> None:
    """Write all of ``block`` at ``offset``: the system may take less at a time."""
    while written := os.pwrite(file, block, offset) if len(block) else 0:
        block, offset = block[written:], offset + written


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
