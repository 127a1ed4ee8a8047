"""Importance that needs no data: from weights, or from nothing at all, for comparison with what activations say; and the norms of
weights by which activations are multiplied."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from star_elastic.layout import Dim, Layout, Tap, Unit
from star_elastic.orders import axis_key, axis_keys
from star_elastic.score.methods import ScoreOptions, listens
from star_elastic.score.spots import expert_key, place_of, spot_of


@dataclass
class WeightSums:
    """What scores take from weights, gathered unit by unit.

    Attributes:
        layout: the model's table.
        options: which axes are ranked by weights, alone or times activations.
        squares: by key, for each member the sum of squares of all matrix entries that leave with it, fp64.
        routers: by layer, the L2 norm of each expert's row of the router, fp64 (E,).
        columns: by place (``Recorder.channels``), the L2 norm of each channel's columns in what reads it, fp64 (C,).
    """

    layout: Layout
    options: ScoreOptions
    squares: dict[str, Tensor] = field(default_factory=dict)
    routers: dict[int, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def axes(self) -> set[str]:
        """Axes that are ranked by the norm of their weights."""
        return {axis for axis in self.layout.width_axes if self.options.method(axis) == "weight_norm"}

    def add(self, model: nn.Module, unit: Unit) -> None:
        """Add the matrices of a unit. Vectors and buffers do not count; a tied matrix counts once."""
        self._add_squares(model, unit)
        if unit.router is not None and unit.layer is not None:
            self.routers[unit.layer] = router_norms(model, unit)
        for tap in unit.taps:
            if self.options.weighs(tap.axis) and listens(tap, self.options.method(tap.axis)):
                self.columns |= self._columns(model, unit, tap)

    def norms(self) -> dict[str, Tensor]:
        """Roots of the squares, by key."""
        return {key: total.sqrt() for key, total in self.squares.items()}

    def _add_squares(self, model: nn.Module, unit: Unit) -> None:
        for row in unit.rows:
            if row.buffer or row.alias or len(row.dims) < 2 or row.axes.isdisjoint(self.axes):
                continue
            weight = model.get_parameter(unit.name(row)).detach()
            for number, dim in enumerate(row.dims):
                for axis in sorted(dim.axes & self.axes):
                    one = self.layout.axes[axis]
                    total = self.squares.setdefault(
                        axis_key(one, unit.layer), torch.zeros(one.size, dtype=torch.float64)
                    )
                    owner = owners(dim, axis)
                    total.index_add_(0, owner[owner >= 0], line_squares(weight, number)[owner >= 0])

    def _columns(self, model: nn.Module, unit: Unit, tap: Tap) -> dict[str, Tensor]:
        """Norms for one tap, by place; routed experts have one each."""
        weights = [model.get_parameter(unit.name(row)).detach() for row in unit.reading(tap)]
        place = place_of(unit, tap)
        if tap.side != "experts":
            spot = spot_of(unit, tap)
            squares = torch.stack([line_squares(weight, weight.ndim - 1) for weight in weights]).sum(0)
            return {place: squares.narrow(0, spot.start, spot.segment.size).sqrt()}
        [weight] = weights  # (E, D, F)
        return {expert_key(place, expert): line_squares(one, 1).sqrt() for expert, one in enumerate(weight)}


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
