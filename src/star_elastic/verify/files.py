"""Weight files: whole, and exactly those that the index names. Unlike ``Checkpoint.open`` this goes on after a fault."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from star_elastic.checkpoint.reader import INDEX, SINGLE, TensorInfo, read_header
from star_elastic.errors import CheckpointError
from star_elastic.submodel import read_json
from star_elastic.verify.report import Fault

STRAY = ("*.bin", "*.pt", "*.pth", "*.ckpt", ".*.partial", ".*.resume", "*.run")
"""Other weights and unfinished work, which readers of the folder might take for its own."""


def check_files(folder: Path) -> tuple[dict[str, TensorInfo], list[Fault], str]:
    """Tensors of all readable weight files that belong to the folder, what is wrong with them, and what was looked at.

    Args:
        folder: a model folder.
    """
    index, single = folder / INDEX, folder / SINGLE
    faults = [Fault(path.name, "no such file", "one") for pattern in STRAY for path in sorted(folder.glob(pattern))]
    present = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    weight_map: dict[str, Any] | None = None
    if index.exists():
        try:
            content = read_json(index)
            weight_map = _weight_map(content)
        except CheckpointError as error:
            faults.append(Fault(INDEX, "an index", _reason(error, index)))
    elif not single.exists():
        faults.append(Fault(SINGLE, "weights in it, or an index", "neither"))
    named = set(map(str, weight_map.values())) if weight_map is not None else {SINGLE}
    if index.exists() and single.exists() and SINGLE not in named:
        faults.append(Fault(INDEX, f"an index or {SINGLE}", "both: one is stale"))
    faults += [Fault(name, f"a file that {INDEX} names", "nothing") for name in sorted(named - {SINGLE} - set(present))]
    if weight_map is not None or not index.exists():
        told = f"no file but those in {INDEX}" if weight_map is not None else f"no other weights than {SINGLE}"
        faults += [Fault(name, told, "a stray file") for name in present if name not in named and name != SINGLE]
    tensors, damaged = _headers([path for name, path in present.items() if name in named or weight_map is None])
    faults += damaged
    if weight_map is not None:
        faults += _index_faults(weight_map, tensors, {fault.what for fault in damaged} | (named - set(present)))
        faults += _size_faults(content, tensors) if not faults else []
    return tensors, faults, f"{len(present)} weight files, {len(tensors)} tensors"


def _weight_map(content: dict[str, Any]) -> dict[str, Any]:
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("no weight_map in it")
    return weight_map


def _headers(paths: Iterable[Path]) -> tuple[dict[str, TensorInfo], list[Fault]]:
    tensors: dict[str, TensorInfo] = {}
    faults = []
    for path in paths:
        try:
            found = {info.name: info for info in read_header(path)}
        except CheckpointError as error:
            faults.append(Fault(path.name, "a whole safetensors file", _reason(error, path)))
            continue
        faults += [
            Fault(path.name, f"{name} in one file", f"it also in {tensors[name].path.name}")
            for name in found.keys() & tensors.keys()
        ]
        tensors.update(found)
    return tensors, faults


def _index_faults(weight_map: dict[str, Any], tensors: dict[str, TensorInfo], unread: set[str]) -> list[Fault]:
    """Differences between index and headers; files that could not be read are not counted again."""
    faults = []
    for name, shard in weight_map.items():
        found = tensors[name].path.name if name in tensors else "it nowhere"
        if found != shard and shard not in unread:
            faults.append(Fault(f"{INDEX}: {name}", f"the file that holds it, {shard!r}", found))
    faults += [
        Fault(f"{INDEX}: {name}", f"{info.path.name!r}", "no entry")
        for name, info in tensors.items()
        if name not in weight_map
    ]
    return faults


def _size_faults(content: dict[str, Any], tensors: dict[str, TensorInfo]) -> list[Fault]:
    metadata = content.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(info.nbytes for info in tensors.values())
    return [Fault(f"{INDEX}: total_size", f"{size:,} bytes", f"{said!r}")] if said not in (None, size) else []


def _reason(error: CheckpointError, path: Path) -> str:
    return str(error).replace(str(path), "it")
