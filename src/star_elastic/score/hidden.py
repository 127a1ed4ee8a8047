"""The hidden states of all calibration batches between two layers: what layerwise scoring carries from one to the next."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from star_elastic.errors import CheckpointError


class HiddenStates(Protocol):
    """Hidden states by batch, (B, T, D) each."""

    def read(self, batch: int) -> Tensor:
        """What the layer at hand reads."""

    def write(self, batch: int, hidden: Tensor) -> None:
        """What the next layer will read."""

    def turn(self) -> None:
        """Go on to the next layer."""


class InMemory:
    """Hidden states in main memory."""

    def __init__(self) -> None:
        self._now: dict[int, Tensor] = {}
        self._next: dict[int, Tensor] = {}

    def read(self, batch: int) -> Tensor:
        """What the layer at hand reads; it is forgotten, since each batch is read once a layer."""
        return self._now.pop(batch)

    def write(self, batch: int, hidden: Tensor) -> None:
        """What the next layer will read."""
        self._next[batch] = hidden.cpu()

    def turn(self) -> None:
        """Go on to the next layer."""
        self._now, self._next = self._next, {}


class OnDisk:
    """Hidden states in two files that change roles after each layer, so that a layer that was interrupted can run again.

    Args:
        folder: where the files go.
        shapes: of each batch, (B, T).
        hidden: channels, D.
        dtype: of the hidden states.
        layer: the layer at hand.

    Raises:
        CheckpointError: the disk is too small for both files; or what the layer at hand would read is not there.
    """

    def __init__(self, folder: Path, shapes: Sequence[tuple[int, int]], hidden: int, dtype: torch.dtype, layer: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._shapes = [(*shape, hidden) for shape in shapes]
        self._starts = [sum(rows * length * hidden for rows, length in shapes[:number]) for number in range(len(shapes) + 1)]
        size = self._starts[-1]
        paths = [folder / f"hidden-{number}.bin" for number in range(2)]
        if layer:
            _check_whole(paths[layer % 2], size * dtype.itemsize)
        missing = sum(size * dtype.itemsize - (path.stat().st_size if path.exists() else 0) for path in paths)
        if missing > shutil.disk_usage(folder).free:
            raise CheckpointError(f"{folder}: hidden states need {missing / 2**30:.1f} GiB more than are free: fewer --samples")
        self._files = [torch.from_file(str(path), shared=True, size=size, dtype=dtype) for path in paths]
        self._paths, self._layer = paths, layer

    def read(self, batch: int) -> Tensor:
        """What the layer at hand reads."""
        return self._part(self._layer % 2, batch).clone()

    def write(self, batch: int, hidden: Tensor) -> None:
        """What the next layer will read."""
        self._part((self._layer + 1) % 2, batch).copy_(hidden)

    def turn(self) -> None:
        """Go on to the next layer; what was written is on the disk before any record says so."""
        self._layer += 1
        flush(self._paths[self._layer % 2])

    def _part(self, file: int, batch: int) -> Tensor:
        start, end = self._starts[batch : batch + 2]
        return self._files[file][start:end].view(self._shapes[batch])


def flush(path: Path) -> None:
    """Wait until a file, however it was written, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _check_whole(path: Path, size: int) -> None:
    """Raise CheckpointError unless a file is there in full: mapping it would fill it up with zeros."""
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        what = "is missing" if found is None else f"has {found} bytes, not {size}"
        raise CheckpointError(f"{path}, which the next layer reads, {what}: remove {path.parent} and score again")
