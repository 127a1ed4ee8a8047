"""Importance that needs no data: from weights, or from nothing at all, for comparison with what activations say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from star_elastic.layout import Dim, Layout, Unit
from star_elastic.orders import axis_key, axis_keys


def weight_norms(model: nn.Module, layout: Layout, axes: set[str]) -> dict[str, Tensor]:
    """For each member, the root of the sum of squares of all matrix entries that leave with it, fp64, by key.

    Vectors (norms, biases) and buffers do not count; a tied matrix counts once.
    """
    squares: dict[str, Tensor] = {}
    for unit, row in layout.tensors():
        if row.buffer or row.alias or len(row.dims) < 2:
            continue
        for number, dim in enumerate(row.dims):
            for axis in sorted(dim.axes & axes):
                others = [d for d in range(len(row.dims)) if d != number]
                weight = model.get_parameter(unit.name(row)).detach()
                lines = torch.linalg.vector_norm(weight, dim=others, dtype=torch.float32).double().square().cpu()
                key = axis_key(layout.axes[axis], unit.layer)
                total = squares.setdefault(key, torch.zeros(layout.axes[axis].size, dtype=torch.float64))
                owner = owners(dim, axis)
                total.index_add_(0, owner[owner >= 0], lines[owner >= 0])
    return {key: total.sqrt() for key, total in squares.items()}


def owners(dim: Dim, axis: str) -> Tensor:
    """Which member of ``axis`` each position of a dimension belongs to, or -1, int64."""
    parts = []
    for segment in dim.segments:
        position = torch.arange(segment.size)
        owner = torch.full_like(position, -1)
        stride = segment.size
        for factor in segment.factors:
            stride //= factor.size
            if factor.axis == axis:
                owner = position // stride % factor.size
        parts.append(owner)
    return torch.cat(parts)


def router_norms(model: nn.Module, unit: Unit) -> Tensor:
    """L2 norm of each expert's row of the router, fp64 (E,)."""
    assert unit.router is not None
    weight = model.get_parameter(f"{unit.module}.{unit.router.module}.weight").detach()
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).double().cpu()


def random_scores(layout: Layout, axes: set[str], seed: int) -> Mapping[str, Tensor]:
    """Uniform random numbers for every key of some axes, fp64; they depend on nothing but the seed and the key."""
    return {key: _uniform(axis.size, f"{seed}/{key}") for key, axis in axis_keys(layout).items() if axis.name in axes}


def _uniform(count: int, seed: str) -> Tensor:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") >> 1  # manual_seed takes 63 bits
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
