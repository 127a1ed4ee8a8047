"""A slice against the model that it was cut from: every tensor, bit for bit, through the table that also cut it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from star_elastic.card import RECORD, read_front_matter
from star_elastic.checkpoint import Checkpoint, TensorCut, TensorInfo
from star_elastic.errors import ElasticError
from star_elastic.families import family_of, layout_of
from star_elastic.layout import Layout
from star_elastic.quant import bound_layout, read_quantized
from star_elastic.slice import plan_slice
from star_elastic.submodel import ElasticConfig, Submodel, open_elastic
from star_elastic.verify.report import Fault

# Fields that a slice may say otherwise: the new names of quantized modules, and who wrote the file.
FREE_FIELDS = frozenset({"quantization_config", "transformers_version", "_name_or_path"})


@dataclass(frozen=True)
class Parent:
    """An opened parent.

    Attributes:
        checkpoint: its tensors, without those that its table does not know.
        layout: its table.
        elastic: its nested models.
    """

    checkpoint: Checkpoint
    layout: Layout
    elastic: ElasticConfig

    @classmethod
    def open(cls, folder: Path | str) -> Parent:
        """Open a parent's folder; only headers are read.

        Raises:
            CheckpointError: it is missing or damaged.
            UnknownNameError: its family has no table.
        """
        _, _, elastic = open_elastic(folder)
        checkpoint = Checkpoint.open(folder)
        layout = layout_of(checkpoint.config)
        parts = read_quantized(layout, checkpoint).parts
        known = {
            name: info for name, info in checkpoint.tensors.items() if name in parts or layout.find(name) is not None
        }
        return cls(replace(checkpoint, tensors=known), bound_layout(layout, parts), elastic)


def submodel_of(folder: Path, layout: Layout, parent: Parent) -> Submodel:
    """The nested model of ``parent`` that a folder is.

    Widths are its own; which layers were kept is recorded in the model card, or a nested model of the same widths tells.

    Raises:
        ElasticError: it is of another family, is no part of the parent, or nothing says which layers were kept.
    """
    if layout.family != parent.layout.family:
        raise ElasticError(
            f"{folder} is a {layout.family} and {parent.checkpoint.folder} a {parent.layout.family}: give its own parent"
        )
    widths = layout.complete({})
    submodel = Submodel(widths=widths, layers=_kept_layers(folder, layout, parent))
    try:
        submodel.check(parent.layout)
    except ElasticError as error:
        raise ElasticError(f"{folder} cannot have been cut from {parent.checkpoint.folder}: {error}") from None
    return submodel.completed(parent.layout)


def _kept_layers(folder: Path, layout: Layout, parent: Parent) -> tuple[int, ...] | None:
    depth = layout.num_layers
    if depth == parent.layout.num_layers:
        return None
    record = read_front_matter(folder).get(RECORD)
    recorded = record.get("layers") if isinstance(record, Mapping) else None
    if isinstance(recorded, list) and all(isinstance(layer, int) for layer in recorded):
        return tuple(recorded)
    for known in parent.elastic.submodels.values():
        if known.layers and len(known.layers) == depth and known.completed(parent.layout).widths == layout.complete({}):
            return known.layers
    raise ElasticError(
        f"{folder} has {depth} of the {parent.layout.num_layers} layers of {parent.checkpoint.folder}, "
        "and its README.md does not say which"
    )


def parent_cuts(parent: Parent, submodel: Submodel) -> list[TensorCut]:
    """The tensors that a slice of ``parent`` has.

    Raises:
        CheckpointError: the parent's tensors are not those of its table.
    """
    return plan_slice(parent.layout, parent.checkpoint, submodel)


def parent_config_faults(config: Mapping[str, Any], parent: Parent, submodel: Submodel) -> list[Fault]:
    """Fields of config.json other than those that a slice of ``parent`` gets."""
    source = parent.checkpoint.config
    cut = family_of(source).child_config(source, submodel.widths, submodel.layers)
    wanted: dict[str, Any] = json.loads(json.dumps(cut))
    return [
        Fault(f"config.json: {name}", _said(wanted, name), _said(config, name))
        for name in sorted({*wanted, *config} - FREE_FIELDS)
        if (name in wanted) != (name in config) or wanted[name] != config[name]
    ]


def _said(config: Mapping[str, Any], name: str) -> str:
    return repr(config[name]) if name in config else "no such field"


def parent_tensor_faults(
    cuts: list[TensorCut], tensors: Mapping[str, TensorInfo], advance: Callable[[int], None]
) -> list[Fault]:
    """Tensors that are not the parent's cut, bit for bit.

    Args:
        cuts: from ``parent_cuts``.
        tensors: the slice's.
        advance: called with the number of bytes compared.
    """
    faults = []
    for cut in cuts:
        info = tensors.get(cut.name)
        if info is None:
            faults.append(Fault(cut.name, "the parent's cut", "no such tensor"))
        elif (info.dtype, info.shape) != (cut.dtype, cut.shape):
            faults.append(
                Fault(cut.name, f"{cut.dtype} {list(cut.shape)}, the parent's cut", f"{info.dtype} {list(info.shape)}")
            )
        elif (place := _first_difference(cut, info, advance)) is not None:
            faults.append(Fault(cut.name, "the parent's cut, bit for bit", f"other numbers, the first at {place}"))
    wanted = {cut.name for cut in cuts}
    faults += [Fault(name, "no tensor that the parent lacks", "one") for name in tensors if name not in wanted]
    return faults


def _first_difference(cut: TensorCut, info: TensorInfo, advance: Callable[[int], None]) -> list[int] | None:
    """Position of the first number that differs; None where all are equal. One block of each side is in memory."""
    start = 0
    with info.path.open("rb") as file:
        file.seek(info.offset)
        for block in cut.blocks():
            wanted = np.frombuffer(block, np.uint8)
            found = np.frombuffer(file.read(len(wanted)), np.uint8)
            if len(found) < len(wanted) or not np.array_equal(wanted, found):
                same = min(len(found), len(wanted))
                differing = np.flatnonzero(wanted[:same] != found[:same])
                place = (start + int(differing[0] if len(differing) else same)) // info.itemsize
                return [int(number) for number in np.unravel_index(place, info.shape or (1,))]
            start += len(wanted)
            advance(len(wanted))
    return None
