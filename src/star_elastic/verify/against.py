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
from star_elastic.checkpoint.onepass import GAP_BYTES, Source
from star_elastic.errors import ElasticError
from star_elastic.families import family_of, layout_of
from star_elastic.layout import Layout
from star_elastic.opened import OpenedSource
from star_elastic.quant import bound_layout, read_quantized
from star_elastic.slice import plan_slice
from star_elastic.submodel import ElasticConfig, Submodel, open_elastic, read_config
from star_elastic.tied import store_once
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
        name: for people.
        fetch: gets the bytes of its tensors where they lie on the hub.
    """

    checkpoint: Checkpoint
    layout: Layout
    elastic: ElasticConfig
    name: str
    fetch: Source | None = None

    @classmethod
    def open(cls, source: OpenedSource) -> Parent:
        """Read a parent's headers.

        Raises:
            CheckpointError: it is missing or damaged, or its config ties tensors that differ.
            UnknownNameError: its family has no table.
        """
        _, _, elastic = open_elastic(source.folder)
        checkpoint = Checkpoint.open(source.folder)
        layout = layout_of(checkpoint.config)
        checkpoint, _ = store_once(checkpoint, layout, source.fetch)
        parts = read_quantized(layout, checkpoint).parts
        known = {
            name: info for name, info in checkpoint.tensors.items() if name in parts or layout.find(name) is not None
        }
        name = source.parent or str(source.folder)
        return cls(replace(checkpoint, tensors=known), bound_layout(layout, parts), elastic, name, source.fetch)


def submodel_of(folder: Path, layout: Layout, parent: Parent) -> Submodel:
    """The nested model of ``parent`` that a folder is.

    Widths are its own; which layers were kept is recorded in the model card, or a nested model of the same widths tells.

    Raises:
        ElasticError: it is of another family, is no part of the parent, or nothing says which layers were kept.
    """
    if layout.family != parent.layout.family:
        raise ElasticError(
            f"{folder} is a {layout.family} and {parent.name} a {parent.layout.family}: give its own parent"
        )
    table = layout_of(read_config(folder)) if layout.own_widths else layout
    layers, gone = _kept_layers(folder, table, parent)
    kept = layers or range(layout.num_layers)
    own = {axis: {kept[layer]: width for layer, width in by.items()} for axis, by in layout.own_widths.items()}
    submodel = Submodel(widths={**gone, **table.complete({})}, layers=layers, layer_widths=own)
    try:
        submodel.check(parent.layout)
    except ElasticError as error:
        raise ElasticError(f"{folder} cannot have been cut from {parent.name}: {error}") from None
    return submodel.completed(parent.layout)


def _kept_layers(folder: Path, layout: Layout, parent: Parent) -> tuple[tuple[int, ...] | None, dict[str, int]]:
    """Which layers of the parent a folder has, None for all; and widths of axes that none of them has.

    The latter cut no tensor, but config.json keeps their fields.
    """
    depth = layout.num_layers
    if depth == parent.layout.num_layers:
        return None, {}
    record = read_front_matter(folder).get(RECORD)
    if isinstance(record, Mapping):
        layers, widths = record.get("layers"), record.get("widths")
        if isinstance(layers, list) and all(isinstance(layer, int) for layer in layers):
            return tuple(layers), _gone(widths if isinstance(widths, Mapping) else {}, layout, parent)
    for known in parent.elastic.submodels.values():
        widths = known.completed(parent.layout).widths
        own = {axis: width for axis, width in widths.items() if axis in layout.width_axes}
        if known.layers and len(known.layers) == depth and own == layout.complete({}):
            return known.layers, _gone(widths, layout, parent)
    raise ElasticError(
        f"{folder} has {depth} of the {parent.layout.num_layers} layers of {parent.name}, "
        "and its README.md does not say which"
    )


def _gone(widths: Mapping[str, Any], layout: Layout, parent: Parent) -> dict[str, int]:
    axes = parent.layout.width_axes.keys() - layout.width_axes.keys()
    return {axis: width for axis, width in widths.items() if axis in axes and isinstance(width, int)}


def parent_cuts(parent: Parent, submodel: Submodel) -> list[TensorCut]:
    """The tensors that a slice of ``parent`` has, in the order in which they lie in the parent's files.

    Raises:
        CheckpointError: the parent's tensors are not those of its table.
    """
    cuts = plan_slice(parent.layout, parent.checkpoint, submodel)
    return sorted(cuts, key=lambda cut: (cut.info.path, cut.info.offset))


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
    cuts: list[TensorCut],
    tensors: Mapping[str, TensorInfo],
    advance: Callable[[int], None],
    fetch: Source | None = None,
) -> list[Fault]:
    """Tensors that are not the parent's cut, bit for bit.

    Args:
        cuts: from ``parent_cuts``.
        tensors: the slice's.
        advance: called with the number of bytes compared.
        fetch: gets the parent's bytes, where they do not lie on this disk; one tensor of them does at a time.

    Raises:
        RemoteError: they cannot be fetched, or are not what the hub says.
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
        elif (place := _first_difference(cut, info, advance, fetch)) is not None:
            faults.append(Fault(cut.name, "the parent's cut, bit for bit", f"other numbers, the first at {place}"))
    wanted = {cut.name for cut in cuts}
    faults += [Fault(name, "no tensor that the parent lacks", "one") for name in tensors if name not in wanted]
    return faults


def _first_difference(
    cut: TensorCut, info: TensorInfo, advance: Callable[[int], None], fetch: Source | None
) -> list[int] | None:
    """Position of the first number that differs; None where all are equal. One block of each side is in memory."""
    if fetch is None:
        return _compare(cut, info, advance)
    ranges = cut.ranges(GAP_BYTES)
    fetch.need(cut.info.path, ranges, lambda _: None)
    try:
        return _compare(cut, info, advance)
    finally:
        fetch.release(cut.info.path, ranges)


def _compare(cut: TensorCut, info: TensorInfo, advance: Callable[[int], None]) -> list[int] | None:
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
