"""An axis is a kind of component that every nested model keeps a prefix of: hidden channels, heads, experts, ...

A width is how many members a nested model keeps. On a grouped axis (query heads in KV groups, Mamba heads in SSM groups, experts
in expert groups) the "prefix" of width ``k`` is the first ``k / groups`` members of *every* group: a flat prefix would leave
whole groups dead, because member ``h`` reads the keys, or the B and C, of group ``h // (size / groups)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from star_elastic.errors import UnknownNameError, WidthError, nearest

DEPTH = "depth"
"""The axis whose members are layers; a nested model names those that it keeps instead of a width."""

AxisWidths = Mapping[str, Any]
"""Axis name -> width: an int, or any number that multiplies and adds, such as a tensor that carries a gradient."""

Widths = AxisWidths | Mapping[str | tuple[str, int], Any]
"""Widths of a whole model: by axis, or by ``(axis, layer)`` where layers differ, as masks are keyed."""


@dataclass(frozen=True)
class Rule:
    """What a legal width must satisfy, and why: a multiple of ``multiple`` and at least ``minimum``."""

    why: str
    multiple: int = 1
    minimum: int = 1

    def allows(self, width: int) -> bool:
        """Whether ``width`` satisfies this rule."""
        return width % self.multiple == 0 and width >= self.minimum


@dataclass(frozen=True)
class Axis:
    """One axis of an elastic model.

    Attributes:
        name: for example ``hidden`` or ``mamba_heads``.
        size: the parent's width. The parent's own width is always legal.
        groups: into how many equal, contiguous groups the members are divided; a cut takes equally from each.
        rules: what other widths must satisfy.
        scope: ``"model"`` when all layers share one order of members (the residual stream has one order), ``"layer"`` when
            each layer has its own.

    Example:
        >>> Axis("heads", 16, groups=4, rules=(Rule("heads are cut inside each of 4 KV groups", 4, 4),)).members(8)
        [0, 1, 4, 5, 8, 9, 12, 13]
    """

    name: str
    size: int
    groups: int = 1
    rules: tuple[Rule, ...] = ()
    scope: str = "layer"

    @cached_property
    def step(self) -> int:
        """Distance between neighbouring legal widths below the parent's own."""
        return math.lcm(self.groups, *(rule.multiple for rule in self.rules))

    @cached_property
    def minimum(self) -> int:
        """Smallest legal width."""
        least = max([1, *(rule.minimum for rule in self.rules)])
        return min(self.size, math.ceil(least / self.step) * self.step)

    def legal(self) -> list[int]:
        """All legal widths, ascending; the last is the parent's own."""
        return [*range(self.minimum, self.size, self.step), self.size]

    def is_legal(self, width: int) -> bool:
        """Whether a nested model may have this width."""
        return width == self.size or (self.minimum <= width < self.size and width % self.step == 0)

    def neighbours(self, width: float) -> list[int]:
        """The legal widths nearest to ``width``: one below and one above, or the only one at either end."""
        legal = self.legal()
        below = [w for w in legal if w <= width]
        above = [w for w in legal if w > width]
        return [*below[-1:], *above[:1]]

    def check(self, width: int) -> None:
        """Raise WidthError in one line if ``width`` is illegal: why, and which widths next to it are legal."""
        if isinstance(width, bool) or not isinstance(width, int):
            raise WidthError(f"{self.name} width {width!r} is not a whole number")
        if self.is_legal(width):
            return
        broken = [rule.why for rule in self.rules if not rule.allows(width)]
        if width > self.size:
            reason = f"the parent has only {self.size}"
        elif width < 1:
            reason = "a width is at least 1"
        else:
            reason = "; ".join(broken) or f"widths go in steps of {self.step}"
        options = " and ".join(str(w) for w in self.neighbours(width))
        raise WidthError(f"{self.name} width {width} is illegal: {reason}; nearest legal: {options}")

    def at_most(self, width: float) -> int:
        """The largest legal width not above ``width``, or the smallest legal one where all are above it."""
        if width >= self.size:
            return self.size
        return max(self.minimum, int(width) // self.step * self.step)

    def members(self, width: int) -> list[int]:
        """Positions kept at ``width``: the first ``width / groups`` of every group, in storage order."""
        per_group, kept = self.size // self.groups, width // self.groups
        return [group * per_group + i for group in range(self.groups) for i in range(kept)]


@dataclass(frozen=True)
class Coupling:
    """Axes whose widths must fit together: the product over ``whole`` is a multiple of the product over ``part``."""

    whole: tuple[str, ...]
    part: tuple[str, ...]
    why: str

    def holds(self, widths: Mapping[str, int]) -> bool:
        """Whether ``widths``, one for every axis, fit together."""
        return math.prod(widths[name] for name in self.whole) % math.prod(widths[name] for name in self.part) == 0

    def check(self, axes: Mapping[str, Axis], widths: Mapping[str, int]) -> None:
        """Raise WidthError in one line where ``widths`` do not fit: why, and what each axis could be beside the others."""
        if self.holds(widths):
            return
        whole, part = (" x ".join(f"{name} {widths[name]}" for name in names) for names in (self.whole, self.part))
        options = [option for name in (*self.part, *self.whole) if (option := self._option(axes[name], widths))]
        nearest_legal = f"; nearest legal: {', or '.join(options)}" if options else ""
        raise WidthError(f"{whole} is no multiple of {part}: {self.why}{nearest_legal}")

    def _option(self, axis: Axis, widths: Mapping[str, int]) -> str:
        """The nearest widths of one axis, below and above, that fit the others as they are."""
        fitting = [width for width in axis.legal() if self.holds({**widths, axis.name: width})]
        below = [width for width in fitting if width < widths[axis.name]][-1:]
        above = [width for width in fitting if width > widths[axis.name]][:1]
        return f"{axis.name} {' and '.join(str(width) for width in below + above)}" if below or above else ""


def widths_of(widths: Widths, layer: int | None) -> AxisWidths:
    """The widths by axis that hold in one layer (None: outside the stack): the layer's own before the shared ones.

    Example:
        >>> widths_of({"hidden": 48, "ffn": 32, ("ffn", 3): 16}, 3)
        {'hidden': 48, 'ffn': 16}
    """
    shared = {key: width for key, width in widths.items() if isinstance(key, str)}
    own = {key[0]: width for key, width in widths.items() if isinstance(key, tuple) and key[1] == layer}
    return shared | own


def check_widths(axes: Mapping[str, Axis], widths: Mapping[str, int]) -> None:
    """Raise UnknownNameError for an axis that this model does not have, WidthError for an illegal width."""
    for name, width in widths.items():
        if name not in axes:
            raise UnknownNameError(f"this model has no axis {name!r}: {nearest(name, axes)}")
        axes[name].check(width)


def row_alignment(itemsize: int, names: Iterable[str]) -> dict[str, Rule]:
    """Rules for axes that form the rows of matrices: a row must be whole 16-byte units.

    Grouped matrix products over experts refuse other strides, and plain ones lose bit-for-bit equality between a view of the
    parent and the exported folder.
    """
    multiple = max(1, 16 // itemsize)
    why = f"matrix rows are whole 16-byte units, so multiples of {multiple} at {itemsize} bytes a number"
    return {name: Rule(why, multiple, multiple) for name in names}
