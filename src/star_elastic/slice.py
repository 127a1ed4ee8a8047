"""Slicing: from an elastic checkpoint, or any parent folder, to an ordinary transformers folder of a nested model.

Plan, then apply: ``plan_slice`` says for every tensor which positions stay, from the table alone; applying streams them.

Where the layers of the nested model differ in width, no config of transformers can describe them. The folder then carries an
``elastic.json`` that does, and is loaded by ``ElasticModel.from_pretrained``; transformers refuses its shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from star_elastic import cost
from star_elastic.axes import widths_of
from star_elastic.card import read_licence, slice_card
from star_elastic.checkpoint import MAX_SHARD_BYTES, Checkpoint, TensorCut, check_target
from star_elastic.families import family_of, layout_of
from star_elastic.layout import Layout
from star_elastic.rewrite import TRAINING, locate, parent_name, write_model
from star_elastic.submodel import FILE_NAME, ElasticConfig, Submodel, own_widths_in, refuse_per_layer


@dataclass(frozen=True)
class SliceReport:
    """What was written.

    Attributes:
        folder: the slice.
        submodel: its widths, every axis spelled out, and kept layers.
        params: total parameters.
        active_params: parameters that a token uses, both embedding matrices counted.
        nbytes: bytes of the weights.
        tensors: number of tensors in the files.
    """

    folder: Path
    submodel: Submodel
    params: int
    active_params: int
    nbytes: int
    tensors: int


def slice_checkpoint(
    source: Path | str,
    out: Path | str,
    submodel: Submodel,
    *,
    name: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> SliceReport:
    """Cut a nested model out into a folder of its own. No training, no torch, constant memory.

    Args:
        source: an elastic checkpoint, or any model folder of a known family; read only.
        out: new folder; it appears whole or not at all.
        submodel: widths per axis and kept layers; axes left out stay whole.
        name: the submodel's name, for the model card; looked up in elastic.json where left out.
        max_shard_bytes: larger models are split into files of at most this size.
        progress: draw a progress bar on a terminal.

    Raises:
        WidthError, UnknownNameError: the source cannot be cut so.
        CheckpointError: the source is damaged or is not what its config says, or the disk is full.
        TargetError: ``out`` must not be written.

    Example:
        >>> slice_checkpoint("elastic", "small", Submodel(widths={"hidden": 1920}))  # doctest: +SKIP
    """
    check_target(out, source)
    refuse_per_layer(source, own_widths_in(source))
    checkpoint = Checkpoint.open(source)
    layout = layout_of(checkpoint.config)
    submodel.check(layout)
    submodel = submodel.completed(layout)
    cuts = plan_slice(layout, checkpoint, submodel)
    nbytes = sum(cut.nbytes for cut in cuts)
    elastic = ElasticConfig.load(source) if (checkpoint.folder / FILE_NAME).exists() else None
    parent, named = (
        parent_name(checkpoint, elastic),
        name or (_known_as(submodel, elastic, layout) if elastic else None),
    )
    card = slice_card(
        layout,
        submodel,
        title=Path(out).resolve().name,
        parent=parent,
        nbytes=nbytes,
        licence=read_licence(checkpoint.folder),
        named=named,
        trained=elastic is not None and TRAINING in elastic.provenance,
    )
    config = family_of(checkpoint.config).child_config(checkpoint.config, submodel.widths, submodel.layers)
    write_model(
        out,
        checkpoint,
        cuts,
        config,
        card,
        elastic=ElasticConfig.of_slice(layout, submodel, {"parent": parent, "submodel": named}),
        label="slice",
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    return SliceReport(
        folder=Path(out),
        submodel=submodel,
        params=cost.params(layout, submodel.keyed_widths, submodel.layers),
        active_params=cost.active_params(layout, submodel.keyed_widths, submodel.layers),
        nbytes=nbytes,
        tensors=len(cuts),
    )


def plan_slice(layout: Layout, checkpoint: Checkpoint, submodel: Submodel) -> list[TensorCut]:
    """The tensors of a slice, in file order; layers and experts that stay are renumbered from 0.

    Args:
        layout: the source's table.
        checkpoint: the source; only headers are read.
        submodel: a legal nested model.

    Raises:
        CheckpointError: the folder's tensors are not those of the table.
    """
    keyed, layer_number = submodel.keyed_widths, submodel.new_numbers(layout)
    members_in = {layer: layout.members(widths_of(keyed, layer)) for layer in (None, *layer_number)}
    cuts = []
    for name, found in locate(layout, checkpoint).items():
        if found.unit.layer is not None and found.unit.layer not in layer_number:
            continue
        layer = None if found.unit.layer is None else layer_number[found.unit.layer]
        member, members = found.member, members_in[found.unit.layer]
        if member is not None and found.member_axis in members:
            kept = members[found.member_axis]
            if member not in kept:
                continue
            member = kept.index(member)
        cuts.append(TensorCut(checkpoint.tensors[name], found.renamed(layer, member), found.dims, members))
    return cuts


def _known_as(submodel: Submodel, elastic: ElasticConfig, layout: Layout) -> str | None:
    return next((name for name, known in elastic.submodels.items() if known.completed(layout) == submodel), None)
