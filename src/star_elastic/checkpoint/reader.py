"""Opening a model folder: every header is checked before the first tensor is read.

The ``safetensors`` library parses and validates the headers. It would copy a tensor to hand it to numpy, and importing torch for
its lazy views takes seconds, so the bytes themselves are mapped here: the library guarantees that tensors lie without gaps, in
the order of ``offset_keys``, after a header whose length is the file's first eight bytes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from star_elastic.errors import CheckpointError
from star_elastic.submodel import read_config, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    8: ("F64", "I64", "U64", "C64"),
    4: ("F32", "I32", "U32"),
    2: ("F16", "BF16", "I16", "U16"),
    1: ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"),
}
ITEMSIZES = {name: size for size, names in _DTYPES.items() for name in names}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: file, byte offset, safetensors dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize

    def array(self) -> np.ndarray:
        """The tensor as a read-only memory map of raw items: moving needs no meaning.

        Raw, because files of other writers may hold numbers at odd offsets, and numpy copies an unaligned array of any other
        dtype as a whole before it takes from it.
        """
        dtype = np.dtype(f"V{self.itemsize}")
        if self.nbytes == 0:
            return np.empty(self.shape, dtype)
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_SEQUENTIAL)  # reads further ahead on a cold disk
        # Not np.memmap, whose every view costs as much as copying some kilobytes.
        return np.frombuffer(mapped, dtype, math.prod(self.shape), self.offset).reshape(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """An opened model folder: its config, and where each tensor lies, in file order.

    Example:
        >>> checkpoint = Checkpoint.open("parent")  # doctest: +SKIP
        >>> checkpoint.tensors["lm_head.weight"].shape  # doctest: +SKIP
        (131072, 2688)
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read config.json and the headers of ``model.safetensors``, or of the shards that its index names.

        Raises:
            CheckpointError: anything is missing, damaged or contradictory; the message names the file.
        """
        folder = Path(folder)
        config = read_config(folder)
        single, index = folder / SINGLE, folder / INDEX
        if single.exists() and index.exists():
            raise CheckpointError(f"{folder} holds both {SINGLE} and {INDEX}: remove the one that is stale")
        if index.exists():
            tensors = _read_shards(index)
        elif single.exists():
            tensors = {info.name: info for info in read_header(single)}
        else:
            raise CheckpointError(_no_weights(folder))
        return cls(folder, config, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())


def read_header(path: Path) -> Iterator[TensorInfo]:
    """Tensors of one safetensors file, in file order.

    Raises:
        CheckpointError: the file is truncated, its header is damaged, or a dtype is not known here.
    """
    try:
        with path.open("rb") as file:
            offset = 8 + int.from_bytes(file.read(8), "little")
        with safe_open(path, framework="numpy") as opened:
            found = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            described = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in found]
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is not a whole safetensors file: {reason}") from None
    for name, dtype, shape in described:
        if dtype not in ITEMSIZES:
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype}; known: {', '.join(ITEMSIZES)}")
        info = TensorInfo(name, dtype, shape, path, offset)
        offset += info.nbytes
        yield info


def _read_shards(index: Path) -> dict[str, TensorInfo]:
    """Tensors of all shards; index and headers must name the same tensors in the same files."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for name, shard in weight_map.items():
        # A name such as ../other/model.safetensors would read outside the folder.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} puts tensor {name!r} into {shard!r}, which is no file name")
    tensors: dict[str, TensorInfo] = {}
    for shard in dict.fromkeys(weight_map.values()):
        path = index.with_name(shard)
        if not path.exists():
            raise CheckpointError(f"{index} names a missing shard: {shard}")
        for info in read_header(path):
            if weight_map.get(info.name) != shard:
                said = weight_map.get(info.name, "nowhere")
                raise CheckpointError(f"{path} holds tensor {info.name!r}, which {INDEX} puts into {said}")
            tensors[info.name] = info
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{index} puts tensor {name!r} into {shard}, which does not hold it")
    return tensors


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when loaded: "
            "convert them to safetensors first, with transformers' save_pretrained"
        )
    return f"{folder} holds no weights: neither {SINGLE} nor {INDEX}"
