"""Tied tensors that a folder stores twice, as some published ones do: a head beside the embedding that config.json ties it to.

What is made of such a folder holds them once. Where the two differ, transformers unties them with a warning, other engines take
one or the other, and parameters would be counted wrongly: that is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from star_elastic.checkpoint import Checkpoint, Source, TensorInfo
from star_elastic.checkpoint.compare import same_bytes
from star_elastic.checkpoint.sample import pieces
from star_elastic.errors import CheckpointError
from star_elastic.layout import Layout


def store_once(
    checkpoint: Checkpoint, layout: Layout, fetch: Source | None = None
) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint without the second copies of tied tensors.

    Args:
        checkpoint: a model folder.
        layout: its table.
        fetch: gets bytes that lie on the hub; evenly spaced pieces of both copies are compared then, instead of all bytes.

    Returns:
        The checkpoint, and name of each copy that was left out -> name of the tensor that it is tied to.

    Raises:
        CheckpointError: the copies differ.
        RemoteError: they cannot be fetched.
    """
    copies = stored_twice(checkpoint.tensors, layout)
    for copy, home in copies.items():
        if not _same(checkpoint.tensors[copy], checkpoint.tensors[home], fetch):
            raise CheckpointError(
                f"{checkpoint.folder}: config.json ties {copy} to {home}, but the weights hold two different tensors: "
                f"set tie_word_embeddings to false to keep both, or remove {copy}"
            )
    kept = {name: info for name, info in checkpoint.tensors.items() if name not in copies}
    return replace(checkpoint, tensors=kept), copies


def stored_twice(tensors: Mapping[str, TensorInfo], layout: Layout) -> dict[str, str]:
    """Tied tensors that are stored although the one they are tied to is: name -> name of that one."""
    copies: dict[str, str] = {}
    for unit, row in layout.tensors():
        home = layout.find(row.alias) if row.alias is not None else None
        if home is None or unit.name(row) not in tensors:
            continue
        names = [home.unit.name(home.row), *home.unit.disk_names(home.row)]
        copies |= {unit.name(row): name for name in names if name in tensors}
    return copies


def _same(one: TensorInfo, other: TensorInfo, fetch: Source | None) -> bool:
    if fetch is None:
        return same_bytes(one, other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return _sample(one, fetch) == _sample(other, fetch)


def _sample(info: TensorInfo, fetch: Source) -> list[bytes]:
    """Pieces of a tensor on the hub. They are not released: what is read later must be hashed in order."""
    places = pieces(info)
    fetch.need(info.path, [(offset, offset + length) for offset, length in places], lambda _: None)
    with info.path.open("rb") as file:
        return [os.pread(file.fileno(), length, offset) for offset, length in places]
