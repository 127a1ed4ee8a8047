"""Sorting a model that lies in memory: ``sort`` without a folder, in place, by the same table.

What it is for: measuring what a sorted folder would give, without writing one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from star_elastic.layout import Dim, Layout, Located, Members
from star_elastic.orders import Orders, check_orders, members_for, own_orders
from star_elastic.skeleton import saved_tensors


@torch.no_grad()
def sort_model(model: nn.Module, layout: Layout, orders: Orders) -> None:
    """Put the members of every ordered axis in order, in place; the model computes what it did before, to rounding.

    Args:
        model: a transformers model with the structure that ``layout`` describes.
        layout: its table.
        orders: as ``sort_folder`` takes them: per key a permutation that leaves every member in its group.

    Raises:
        UnknownNameError: a key that names no axis or layer of the model.
        CheckpointError: an order that is no such permutation.

    Example:
        >>> sort_model(model, layout, {"hidden": best_first(scores, layout.axes["hidden"])})  # doctest: +SKIP
    """
    check_orders(orders, layout)
    tensors = dict(saved_tensors(model))
    for unit, row in layout.tensors():
        if row.alias is None:  # a tied tensor is permuted where it is at home
            tensor = tensors[unit.name(row)]
            tensor.copy_(_sorted(tensor, Located(unit, row, on_disk=False), layout, orders))


def _sorted(tensor: Tensor, found: Located, layout: Layout, orders: Orders) -> Tensor:
    members = members_for(found, layout, orders)
    first, *rest = found.dims
    own = {m: own_orders(found, m, orders) for m in range(first.size)} if found.row.routed else {}
    if not any(own.values()):
        return _permuted(tensor, found.dims, members)
    inside = [_permuted(part, rest, {**members, **own[m]}) for m, part in enumerate(tensor)]
    return torch.stack([inside[m] for m in first.index(members) or range(first.size)])


def _permuted(tensor: Tensor, dims: Sequence[Dim], members: Members) -> Tensor:
    for number, dim in enumerate(dims):
        index = dim.index(members)
        if index is not None:
            tensor = tensor.index_select(number, torch.tensor(index, device=tensor.device))
    return tensor
