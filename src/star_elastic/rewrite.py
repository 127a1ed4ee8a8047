"""What slicing and sorting share: a folder's tensors checked against its table, and a new folder written from planned cuts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from star_elastic.checkpoint import (
    MAX_SHARD_BYTES,
    Checkpoint,
    TensorCut,
    copy_companions,
    target_folder,
    write_weights,
)
from star_elastic.errors import CheckpointError
from star_elastic.families import layout_of
from star_elastic.layout import Layout, Located
from star_elastic.per_layer import LayerWidths, own_table
from star_elastic.progress import progress_bar
from star_elastic.submodel import ElasticConfig

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
TRAINING = "training"  # what training leaves in the provenance of elastic.json
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def locate(layout: Layout, checkpoint: Checkpoint) -> dict[str, Located]:
    """What each tensor of a folder stands for, in file order.

    Raises:
        CheckpointError: the folder holds a tensor that the table does not know, or misses one, or holds one twice under two
            names; or a shape or dtype is not what config.json says. The message names the first few.
    """
    located = {}
    for name, info in checkpoint.tensors.items():
        found = layout.find(name)
        if found is None:
            unknown = [other for other in checkpoint.tensors if layout.find(other) is None]
            raise CheckpointError(
                f"{info.path} holds {_few(unknown)} that a {layout.family} of this config does not have"
            )
        expected = tuple(dim.size for dim in found.dims)
        if info.shape != expected:
            raise CheckpointError(
                f"{info.path}: {name} has shape {list(info.shape)}; config.json says {list(expected)}"
            )
        if info.dtype not in FLOATS:
            raise CheckpointError(f"{info.path}: {name} is {info.dtype}; only unquantized weights can be rearranged")
        located[name] = found
    _check_complete(layout, checkpoint, located)
    return located


def write_model(
    out: Path | str,
    checkpoint: Checkpoint,
    cuts: Sequence[TensorCut],
    config: dict[str, Any],
    card: str,
    *,
    elastic: ElasticConfig | None = None,
    label: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Write a model folder whole or not at all: weights, config.json, the small files of the source, and a model card.

    Raises:
        CheckpointError: the cuts are not what ``config`` describes, or the disk is full.
        TargetError: ``out`` must not be written.
    """
    check_against_config(cuts, config, elastic.own_widths if elastic else {})
    size = sum(cut.nbytes for cut in cuts)
    with target_folder(out, checkpoint.folder, size=size) as folder:
        copy_companions(checkpoint.folder, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card, encoding="utf-8")
        if elastic is not None:
            elastic.save(folder)
        with progress_bar(label, size, "bytes", shown=progress and sys.stderr.isatty()) as advance:
            write_weights(folder, cuts, max_shard_bytes, advance)


def check_against_config(
    cuts: Sequence[TensorCut], config: dict[str, Any], own_widths: LayerWidths | None = None
) -> None:
    """Compare planned tensors with the table of the config that will be written beside them: names and every shape.

    ``own_widths`` are those that go into elastic.json, where the layers of what is written differ in width.

    A field of the config that does not follow a width would otherwise load as garbage, or not at all.

    Raises:
        CheckpointError: any difference.
    """
    layout = layout_of(json.loads(json.dumps(config)))
    layout = own_table(layout, own_widths) if own_widths else layout
    for cut in cuts:
        found = layout.find(cut.name)
        expected = tuple(dim.size for dim in found.dims) if found else None
        if expected != cut.shape:
            raise CheckpointError(f"the cut gives {cut.name} shape {list(cut.shape)}; its config gives {expected}")
    missing = _missing(layout, {cut.name for cut in cuts})
    if missing:
        raise CheckpointError(f"the cut misses {_few(missing)} that its config describes")


def parent_name(checkpoint: Checkpoint, elastic: ElasticConfig | None = None) -> str:
    """A name for the parent: what elastic.json records, the hub name in config.json, or the folder's name."""
    recorded = elastic.provenance.get("parent") if elastic else None
    origin = str(checkpoint.config.get("_name_or_path", ""))
    hub = origin if HUB_NAME.fullmatch(origin) else None  # older writers left paths of their own machine there
    return str(recorded or hub or checkpoint.folder.resolve().name)


def _check_complete(layout: Layout, checkpoint: Checkpoint, located: dict[str, Located]) -> None:
    missing = _missing(layout, set(located))
    if missing:
        raise CheckpointError(f"{checkpoint.folder} misses {_few(missing)} that its config.json describes")
    for unit, row in layout.tensors():
        in_memory = unit.name(row)
        twice = [name for name in unit.disk_names(row) if name != in_memory and name in located]
        if twice and in_memory in located:
            raise CheckpointError(f"{checkpoint.folder} holds {in_memory} a second time as {_few(twice)}: keep one")


def _missing(layout: Layout, names: set[str]) -> list[str]:
    """On-disk names of tensors that ``names`` holds under neither scheme. A tied tensor may be left out."""
    missing = []
    for unit, row in layout.tensors():
        if unit.name(row) not in names and row.alias is None:
            missing += [name for name in unit.disk_names(row) if name not in names]
    return missing


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{len(names)} tensors ({shown}, ...)" if len(names) > 3 else shown
