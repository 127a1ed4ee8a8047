"""How a nested model takes its part of one tensor that lies in memory.

A prefix of a dimension is a view, no copy. Positions in several runs (heads in groups, the segments of Mamba-2's input
projection) have no common stride and are gathered by ``index_select``. Both are differentiable, so gradients arrive in the
right region of the parent's tensor, and zeros elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from star_elastic.layout import Members, Row, runs


@dataclass
class Cut:
    """The steps that take a nested model's part of one tensor.

    Attributes:
        narrows: ``(dim, start, length)`` of every dimension whose kept positions are one run.
        gathers: ``(dim, positions)`` of every dimension whose kept positions are several runs.
    """

    narrows: tuple[tuple[int, int, int], ...] = ()
    gathers: tuple[tuple[int, torch.Tensor], ...] = ()
    _on_device: dict[torch.device, tuple[tuple[int, torch.Tensor], ...]] = field(default_factory=dict, repr=False)

    @property
    def is_view(self) -> bool:
        """Whether the part shares the tensor's storage."""
        return not self.gathers

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of ``tensor``; narrows come first, so that a gather copies no more than it must."""
        if self.narrows:
            tensor = narrow(tensor, self.narrows)
        for dim, positions in self._positions(tensor.device) if self.gathers else ():
            tensor = tensor.index_select(dim, positions)
        return tensor

    def _positions(self, device: torch.device) -> tuple[tuple[int, torch.Tensor], ...]:
        if device not in self._on_device:
            self._on_device[device] = tuple((dim, positions.to(device)) for dim, positions in self.gathers)
        return self._on_device[device]


def narrow(tensor: torch.Tensor, narrows: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """``tensor`` narrowed along several dimensions at once, as a view.

    A chain of ``Tensor.narrow`` builds one full-size gradient of zeros per dimension in backward; ``as_strided`` builds one. A
    compiler, which cannot trace storage offsets, merges the chain by itself.
    """
    if len(narrows) == 1 or torch.compiler.is_compiling():
        for narrowed in narrows:
            tensor = tensor.narrow(*narrowed)
        return tensor
    shape, strides, offset = list(tensor.shape), tensor.stride(), tensor.storage_offset()
    for dim, start, length in narrows:
        shape[dim] = length
        offset += start * strides[dim]
    return tensor.as_strided(shape, strides, offset)


def plan_cut(row: Row, members: Members) -> Cut:
    """The cut of a row's in-memory tensor, given the kept members of each axis that is cut."""
    narrows: list[tuple[int, int, int]] = []
    gathers: list[tuple[int, torch.Tensor]] = []
    for number, dim in enumerate(row.dims):
        index = dim.index(members)
        if index is None:
            continue
        parts = runs(index)
        if len(parts) > 1:
            gathers.append((number, torch.tensor(index)))
        else:
            narrows.append((number, *parts[0]))
    return Cut(tuple(narrows), tuple(gathers))


def is_view(row: Row, members: Members) -> bool:
    """Whether cutting ``row`` copies nothing."""
    return plan_cut(row, members).is_view
