"""Importance that needs no data: from weights, or from nothing at all, for comparison with what activations say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from star_elastic.layout import Dim, Layout, Unit
from star_elastic.orders import axis_key, axis_keys


@dataclass
class WeightSums:
    """What scores take from weights, gathered unit by unit.

    Attributes:
        squares: by key, for each member the sum of squares of all matrix entries that leave with it, fp64.
        routers: by layer, the L2 norm of each expert's row of the router, fp64 (E,).
    """

    squares: dict[str, Tensor] = field(default_factory=dict)
    routers: dict[int, Tensor] = field(default_factory=dict)

    def add(self, model: nn.Module, layout: Layout, unit: Unit, axes: set[str]) -> None:
        """Add the matrices of a unit, for some axes. Vectors and buffers do not count; a tied matrix counts once."""
        for row in unit.rows:
            if row.buffer or row.alias or len(row.dims) < 2 or row.axes.isdisjoint(axes):
                continue
            weight = model.get_parameter(unit.name(row)).detach()
            for number, dim in enumerate(row.dims):
                for axis in sorted(dim.axes & axes):
                    key = axis_key(layout.axes[axis], unit.layer)
                    total = self.squares.setdefault(key, torch.zeros(layout.axes[axis].size, dtype=torch.float64))
                    owner = owners(dim, axis)
                    total.index_add_(0, owner[owner >= 0], line_squares(weight, number)[owner >= 0])
        if unit.router is not None and unit.layer is not None:
            self.routers[unit.layer] = router_norms(model, unit)

    def norms(self) -> dict[str, Tensor]:
        """Roots of the squares, by key."""
        return {key: total.sqrt() for key, total in self.squares.items()}


def line_squares(weight: Tensor, dim: int) -> Tensor:
    """Sum of squares over all dimensions but one, fp64."""
    others = [other for other in range(weight.ndim) if other != dim]
    return torch.linalg.vector_norm(weight, dim=others, dtype=torch.float32).double().square().cpu()


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
