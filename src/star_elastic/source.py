"""A model that is to be cut, as its headers and small files tell: read and checked once, for all sizes that are cut out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from star_elastic.checkpoint import Checkpoint
from star_elastic.drop import drop_tensors
from star_elastic.families import layout_of
from star_elastic.layout import Layout, Located
from star_elastic.opened import OpenedSource
from star_elastic.quant import ANY, Quantized, bound_layout, read_quantized
from star_elastic.rewrite import locate
from star_elastic.submodel import own_widths_in, refuse_per_layer
from star_elastic.tied import store_once

DROP_HINT = "; if the model can do without, leave them out with --drop and a pattern of their names"


@dataclass(frozen=True)
class SourceModel:
    """A model whose tensors are all known.

    Attributes:
        opened: where it lies.
        checkpoint: its tensors, without those that are left out.
        layout: its table, bound to how its matrices are stored.
        located: what each tensor stands for, in file order.
        quantized: how it is quantized.
        dropped: names of tensors that are left out because the user said so.
        tied: tensors that are left out because they are stored a second time, and what they are tied to.
    """

    opened: OpenedSource
    checkpoint: Checkpoint
    layout: Layout
    located: Mapping[str, Located]
    quantized: Quantized
    dropped: tuple[str, ...]
    tied: Mapping[str, str]


def read_source(opened: OpenedSource, drop: Sequence[str] = ()) -> SourceModel:
    """Read the headers of a model, and tied tensors that are stored twice.

    Args:
        opened: the model.
        drop: shell patterns of tensors to leave out that the family's table does not know.

    Raises:
        CheckpointError: it is damaged, is not what its config says, or is a slice whose layers differ in width.
        UnknownNameError: its family has no table.
    """
    refuse_per_layer(opened.folder, own_widths_in(opened.folder))
    checkpoint = Checkpoint.open(opened.folder)
    layout = layout_of(checkpoint.config)
    checkpoint, dropped = drop_tensors(checkpoint, layout, drop)
    checkpoint, tied = store_once(checkpoint, layout, opened.fetch)
    quantized = read_quantized(layout, checkpoint)
    layout = bound_layout(layout, quantized.parts)
    located = locate(layout, checkpoint, quantized=ANY, known=quantized, hint=DROP_HINT)
    return SourceModel(opened, checkpoint, layout, located, quantized, dropped, tied)
