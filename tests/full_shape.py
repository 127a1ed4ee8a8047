"""Checkpoints in the full shapes of Nemotron 3 Nano that take no room: holes, with a few pieces of known bytes in each tensor.

Names and shapes are written down here by hand, not read from the package's tables. A piece's bytes follow from the tensor's name
and the position in it, and none is zero, so that a slice can be checked to hold all of them, and nothing else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from star_elastic.presets import NEMOTRON_3_NANO

ITEMSIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
PIECE_BYTES = 4096
CUT = {"23b": {2688: 2016}, "12b": {2688: 1920, 1856: 960}}
"""Length of a dimension in the parent -> in the slice: hidden is 2688, the expert width 1856, and nothing else is as long."""


@dataclass(frozen=True)
class Stored:
    """A tensor on disk; ``per`` neighbours along its last dimension are one item, as in packed weights and block scales."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    per: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]

    def cut(self, lengths: dict[int, int]) -> tuple[int, ...]:
        """Its shape in a slice."""
        if not self.shape:
            return ()
        plain = (*self.shape[:-1], self.shape[-1] * self.per)
        *rest, last = (lengths.get(length, length) for length in plain)
        return (*rest, last // self.per)

    def pieces(self) -> list[tuple[int, bytes]]:
        """Where it is not zero: at its beginning, in the middle and at the end."""
        starts = {0, self.nbytes // 3 // 8 * 8, max(0, self.nbytes - PIECE_BYTES)}
        return [(start, known_bytes(self.name, start, self.nbytes)) for start in sorted(starts)]


def known_bytes(name: str, start: int, nbytes: int) -> bytes:
    """Bytes of a piece, each a function of the tensor's name and the position."""
    positions = np.arange(start, min(start + PIECE_BYTES, nbytes), dtype=np.uint64)
    mixed = (positions + np.uint64(crc32(name.encode()))) * np.uint64(0x9E3779B97F4A7C15)
    return bytes((mixed >> np.uint64(40)).astype(np.uint8) | 1)


def all_tensors(pattern: str, experts: int, vocab: int, form: str) -> Iterator[Stored]:
    """The tensors of a Nemotron 3 Nano with these layers (M, * or E each), in ``bf16``, ``fp8`` or ``nvfp4``."""
    yield Stored("backbone.embeddings.weight", "BF16", (vocab, 2688))
    for number, kind in enumerate(pattern):
        stem = f"backbone.layers.{number}"
        yield Stored(f"{stem}.norm.weight", "BF16", (2688,))
        # Published quantized models keep attention and the Mamba layer before it in bf16.
        kept = pattern[number : number + 2] == "M*"
        yield from LAYERS[kind](f"{stem}.mixer", experts, "bf16" if kept else form)
    yield Stored("backbone.norm_f.weight", "BF16", (2688,))
    yield Stored("lm_head.weight", "BF16", (vocab, 2688))


def _mamba(stem: str, experts: int, form: str) -> Iterator[Stored]:
    for name in ("A_log", "D", "dt_bias"):
        yield Stored(f"{stem}.{name}", "BF16", (64,))
    yield Stored(f"{stem}.conv1d.bias", "BF16", (6144,))
    yield Stored(f"{stem}.conv1d.weight", "BF16", (6144, 1, 4))
    yield Stored(f"{stem}.norm.weight", "BF16", (4096,))
    yield from _matrix(f"{stem}.in_proj", (10304, 2688), form)
    yield from _matrix(f"{stem}.out_proj", (2688, 4096), form)


def _attention(stem: str, experts: int, form: str) -> Iterator[Stored]:
    for name, shape in {"q": (4096, 2688), "k": (256, 2688), "v": (256, 2688), "o": (2688, 4096)}.items():
        yield Stored(f"{stem}.{name}_proj.weight", "BF16", shape)
        if form != "bf16" and name in "kv":
            yield Stored(f"{stem}.{name}_proj.{name}_scale", "F32", ())


def _experts(stem: str, experts: int, form: str) -> Iterator[Stored]:
    yield Stored(f"{stem}.gate.weight", "BF16", (experts, 2688))
    yield Stored(f"{stem}.gate.e_score_correction_bias", "F32", (experts,))
    for name, width in (
        *((f"experts.{number}", 1856) for number in range(experts)),
        ("shared_experts", 3712),
    ):
        yield from _matrix(f"{stem}.{name}.up_proj", (width, 2688), form)
        yield from _matrix(f"{stem}.{name}.down_proj", (2688, width), form)


LAYERS = {"M": _mamba, "*": _attention, "E": _experts}


def _matrix(stem: str, shape: tuple[int, int], form: str) -> Iterator[Stored]:
    rows, columns = shape
    if form == "bf16":
        yield Stored(f"{stem}.weight", "BF16", shape)
        return
    if form == "fp8":
        yield Stored(f"{stem}.weight", "F8_E4M3", shape)
        yield Stored(f"{stem}.weight_scale", "F32", ())
    else:
        yield Stored(f"{stem}.weight", "U8", (rows, columns // 2), per=2)
        yield Stored(f"{stem}.weight_scale", "F8_E4M3", (rows, columns // 16), per=16)
        yield Stored(f"{stem}.weight_scale_2", "F32", ())
    yield Stored(f"{stem}.input_scale", "F32", ())


def sparse_folder(
    path: Path, tensors: list[Stored], form: str, shard_bytes: int, *, empty: bool = False, **edits: Any
) -> Path:
    """A sharded folder of these tensors; ``empty`` leaves out the known bytes."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**NEMOTRON_3_NANO.config, **edits}))
    if form != "bf16":
        said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": form.upper()}}
        (path / "hf_quant_config.json").write_text(json.dumps(said))
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if size > shard_bytes:
            shards.append([])
            size = tensor.nbytes
        shards[-1].append(tensor)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {tensor.name: name for tensor in shard}
        _write_sparse(path / name, shard, empty)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def _write_sparse(path: Path, tensors: list[Stored], empty: bool) -> None:
    header, end = {}, 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for tensor in [] if empty else tensors:
            for start, piece in tensor.pieces():
                file.seek(8 + len(text) + header[tensor.name]["data_offsets"][0] + start)
                file.write(piece)


def check_slice(folder: Path, tensors: list[Stored], lengths: dict[int, int]) -> None:
    """The folder holds the first so many of each dimension: names, dtypes, shapes, and every byte that is not zero."""
    wanted = {tensor.name: tensor for tensor in tensors}
    seen: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header.pop("__metadata__")
            expected = 0
            for name, said in header.items():
                tensor, shape = wanted[name], wanted[name].cut(lengths)
                assert (said["dtype"], tuple(said["shape"])) == (tensor.dtype, shape), name
                expected += _check_pieces(file.fileno(), 8 + length + said["data_offsets"][0], tensor, shape)
            assert _nonzero_bytes(file.fileno(), 8 + length) == expected, f"{path} holds bytes of nowhere"
        seen |= header.keys()
    assert seen == wanted.keys()


def _check_pieces(file: int, offset: int, tensor: Stored, shape: tuple[int, ...]) -> int:
    """Compare what is left of each piece; return how many bytes that is."""
    size, counted = ITEMSIZES[tensor.dtype], np.zeros(0, np.int64)
    for start, piece in tensor.pieces():
        numbers = np.arange(start // size, (start + len(piece)) // size)
        places = np.unravel_index(numbers, tensor.shape) if tensor.shape else ()
        kept = np.all([place < most for place, most in zip(places, shape, strict=True)], axis=0) if shape else [True]
        there = [place[kept] for place in places]
        target = np.ravel_multi_index(there, shape) if shape else np.zeros(1, np.int64)
        items = np.frombuffer(piece, f"V{size}")[kept]
        for first, last in _runs(target):
            read = os.pread(file, (last - first) * size, offset + int(target[first]) * size)
            assert read == items[first:last].tobytes(), f"{tensor.name}: other bytes at {target[first]}"
        counted = np.union1d(counted, target)
    return len(counted) * size


def _runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Where neighbours follow each other: index of the first, and the one after the last."""
    ends = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    return [(first, last) for first, last in pairwise(ends) if first < last]


def _nonzero_bytes(file: int, start: int) -> int:
    """Bytes from ``start`` on that are not zero; holes are skipped."""
    end, count = os.fstat(file).st_size, 0
    while start < end:
        try:
            first = os.lseek(file, start, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            break
        start = os.lseek(file, first, os.SEEK_HOLE)
        for at in range(first, start, 2**20):
            count += np.count_nonzero(np.frombuffer(os.pread(file, min(2**20, start - at), at), np.uint8))
    return count
