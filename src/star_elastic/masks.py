"""Masks over axes: what they are keyed by, and the vectors that the table makes of them.

A mask has one entry in [0, 1] per member of its axis. Masks are keyed by axis, or by ``(axis, layer)`` where layers differ;
``depth`` is an axis whose members are the decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from star_elastic.axes import Axis
from star_elastic.errors import UnknownNameError, WidthError, nearest
from star_elastic.layout import Dim, Layout
from star_elastic.submodel import Submodel

Masks = Mapping[str | tuple[str, int], torch.Tensor]
"""Axis, or (axis, layer), -> mask [size]."""


def prefix_mask(axis: Axis, width: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The hard mask [size] of a width: ones for the first ``width / groups`` members of every group.

    Raises:
        WidthError: the axis cannot have this width.
    """
    axis.check(width)
    mask = torch.zeros(axis.size, device=device)
    mask[axis.members(width)] = 1
    return mask


def hard_masks(
    layout: Layout, submodel: Submodel, device: torch.device | str | None = None
) -> dict[str | tuple[str, int], torch.Tensor]:
    """The masks that leave exactly a nested model; what it keeps whole has none.

    They are keyed by axis, or by (axis, layer) on an axis along which its layers differ.

    Raises:
        WidthError, UnknownNameError: the model cannot be cut so.
    """
    submodel.check(layout)
    submodel = submodel.completed(layout)
    masks: dict[str | tuple[str, int], torch.Tensor] = {}
    for key, width in submodel.keyed_widths.items():
        axis = layout.axes[key if isinstance(key, str) else key[0]]
        if width < axis.size and key not in submodel.layer_widths:  # there the layers' own widths say everything
            masks[key] = prefix_mask(axis, width, device)
    if submodel.layers is not None:
        gates = torch.zeros(layout.num_layers, device=device)
        gates[list(submodel.layers)] = 1
        masks["depth"] = gates
    return masks


def check_masks(layout: Layout, masks: Masks) -> None:
    """Refuse masks that do not fit the model.

    Raises:
        UnknownNameError: an axis that the model does not have.
        WidthError: a mask of another length than its axis, for a layer that does not exist, or per layer on a model-wide axis.
    """
    for key, mask in masks.items():
        name, layer = key if isinstance(key, tuple) else (key, None)
        if name not in layout.axes:
            raise UnknownNameError(f"this model has no axis {name!r}: {nearest(name, layout.axes)}")
        axis = layout.axes[name]
        if tuple(mask.shape) != (axis.size,):
            raise WidthError(f"the mask of {name} has shape {tuple(mask.shape)}, the axis has {axis.size} members")
        if layer is None:
            continue
        if axis.scope == "model":
            raise WidthError(f"{name} is one axis for the whole model: give one mask, not one for layer {layer}")
        if not 0 <= layer < layout.num_layers:
            raise WidthError(f"a mask is for layer {layer}, layers go from 0 to {layout.num_layers - 1}")


def of_layer(masks: Masks, layer: int | None) -> dict[str, torch.Tensor]:
    """The masks by axis that hold in one layer: the layer's own before the shared ones."""
    shared = {key: mask for key, mask in masks.items() if isinstance(key, str)}
    own = {key[0]: mask for key, mask in masks.items() if isinstance(key, tuple) and key[1] == layer}
    return shared | own


def vector(dim: Dim, masks: Mapping[str, torch.Tensor], marked_only: bool) -> torch.Tensor | None:
    """The masks spread along one dimension, [size]: outer products over a segment's factors, ones elsewhere.

    Args:
        dim: a dimension of the table.
        masks: mask per axis.
        marked_only: take only the factors where the table says that the mask multiplies; otherwise all.

    Returns:
        The vector, or None where no mask applies.
    """
    axes = (dim.masked_axes if marked_only else dim.axes) & masks.keys()
    if not axes:
        return None
    like = masks[min(axes)]
    parts = []
    for segment in dim.segments:
        part = like.new_ones(1)
        for factor in segment.factors:
            applies = factor.axis in axes and (factor.masked or not marked_only)
            part = torch.outer(
                part, masks[factor.axis] if applies and factor.axis else like.new_ones(factor.size)
            ).flatten()
        parts.append(part)
    return torch.cat(parts)
