"""The table: for every parameter of a model, which axis indexes each of its dimensions.

A dimension is a concatenation of segments, a segment is a product of factors (the first varies slowest), a factor is an axis
or a constant. Mamba-2's input projection, for example, is written::

    mamba_heads*mamba_head_dim + mamba_heads!*mamba_head_dim! + groups*state + groups*state + mamba_heads, hidden

that is rows z, x, B, C, dt and columns ``hidden``. ``!`` marks the one place where an axis is masked: multiplying there, and
nowhere else, lets a soft mask enter a path exactly once.

Everything the package does to a model is a reading of this table: which positions a nested model keeps (``Dim.index``), how
sorting permutes (the same, with a permutation for members), where masks multiply (``Factor.masked``, ``Row.norm``,
``Unit.router``), how many parameters there are (``Dim.width``), how large caches are (``Unit.states``). This module is plain
Python, so that ``inspect`` answers without importing torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from star_elastic.axes import Axis, AxisWidths, Coupling
from star_elastic.axes import Widths as Widths  # re-exported, as is widths_of
from star_elastic.axes import widths_of as widths_of
from star_elastic.legal import check_cut

Members = Mapping[str, Sequence[int]]
"""Axis name -> positions to take, in the order to take them: a prefix to slice, a permutation to sort."""


@dataclass(frozen=True)
class Factor:
    """One factor of a segment: an axis of the parent's ``size``, or a constant (``axis`` is None)."""

    size: int
    axis: str | None = None
    masked: bool = False


@dataclass(frozen=True)
class Segment:
    """A product of factors, row-major: the first factor varies slowest."""

    factors: tuple[Factor, ...]

    @cached_property
    def size(self) -> int:
        """Number of positions in the parent."""
        return math.prod(factor.size for factor in self.factors)

    def width(self, widths: AxisWidths) -> Any:
        """Number of positions at ``widths``."""
        return math.prod(widths.get(f.axis, f.size) if f.axis else f.size for f in self.factors)

    def index(self, members: Members) -> list[int]:
        """Positions, inside the segment, of the given members of each axis."""
        index = [0]
        for factor in self.factors:
            kept = members.get(factor.axis, range(factor.size)) if factor.axis else range(factor.size)
            index = [position * factor.size + member for position in index for member in kept]
        return index


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor: segments side by side."""

    segments: tuple[Segment, ...]

    @cached_property
    def size(self) -> int:
        """Number of positions in the parent."""
        return sum(segment.size for segment in self.segments)

    @cached_property
    def axes(self) -> frozenset[str]:
        """Names of the axes that index this dimension."""
        return frozenset(f.axis for segment in self.segments for f in segment.factors if f.axis)

    @cached_property
    def masked_axes(self) -> frozenset[str]:
        """Names of the axes whose mask multiplies along this dimension."""
        return frozenset(f.axis for segment in self.segments for f in segment.factors if f.axis and f.masked)

    def width(self, widths: AxisWidths) -> Any:
        """Number of positions at ``widths``; differentiable where the widths are."""
        return sum(segment.width(widths) for segment in self.segments)

    def index(self, members: Members) -> list[int] | None:
        """Positions of the given members along this dimension, or None where no axis in ``members`` touches it."""
        if self.axes.isdisjoint(members):
            return None
        index: list[int] = []
        offset = 0
        for segment in self.segments:
            index += [offset + position for position in segment.index(members)]
            offset += segment.size
        return index


@dataclass(frozen=True)
class Norm:
    """Marks a weight as an RMS norm's: ``groups`` statistics over equal parts; ``eps`` is the module's attribute.

    ``fused_in`` names the module that, in training, may pass the norm's weight and eps to one fused kernel instead of calling it.
    """

    groups: int = 1
    eps: str = "variance_epsilon"
    fused_in: str | None = None


GATE = "weight"  # of an expert router's module


@dataclass(frozen=True)
class Router:
    """Marks a unit's expert router: its module, how it selects, and the axis it selects from.

    ``kind`` is ``sigmoid_bias`` (select on sigmoid + bias, weigh by sigmoid), ``softmax_topk`` (softmax over all experts, gates
    in the model's dtype; ``softmax_topk_fp32``: in fp32) or ``topk_softmax`` (softmax over the chosen ones). In all of them
    the gate, what the stream is multiplied by, is the module's ``GATE``.
    """

    module: str
    kind: str
    axis: str = "experts"


@dataclass(frozen=True)
class Tap:
    """Where scoring reads the activations of an axis.

    Which channels belong to which member is not said here: the row ``{module}.weight`` says it, by its columns for an ``input``
    and by its rows for an ``output``. Where that dimension masks the axis in one segment (``!``), only that segment counts.

    Attributes:
        axis: the axis to score.
        module: relative to the unit.
        side: ``input`` or ``output`` of a module; or ``experts`` for fused routed experts, called with hidden states, chosen
            experts and gates, where experts are judged by what they put out and their channels by what enters the last matrix.
        over: a further axis of the same channels, of which only the kept members count; of all others, all count.
        readers: modules, relative to the unit, whose matrices read what is heard, where that is not ``module`` alone. Which
            matrices: the rows under them that have the axis in their last dimension (``Unit.reading``).
        method: the one scoring method that reads here; None for those that read activations where an axis has one place.

    Example:
        ``Tap("heads", "mixer.o_proj", "input")`` on columns ``heads!*head_dim`` scores each head over its ``head_dim`` channels.
    """

    axis: str
    module: str
    side: str
    over: str | None = None
    readers: tuple[str, ...] = ()
    method: str | None = None


@dataclass(frozen=True)
class State:
    """A cache tensor, in the same grammar as parameters: per token (keys and values) or per sequence (conv, SSM).

    ``itemsize`` is its bytes per number, or None where it follows the model's dtype.
    """

    name: str
    dims: tuple[Dim, ...]
    per_token: bool
    itemsize: int | None = None


@dataclass(frozen=True)
class Row:
    """One row of the table: a parameter or buffer of a unit.

    Attributes:
        name: in memory, relative to the unit.
        dims: what indexes each dimension.
        on_disk: name in a checkpoint where it differs; ``{}`` stands for a member of the first dimension, stored one tensor
            each (experts). Several names: each segment of the next dimension is a tensor of its own (gate and up, which are one
            matrix in memory).
        routed: a token uses only the router's top-k members of the first dimension.
        buffer: sliced and saved, but no parameter.
        fp32: kept in fp32 whatever the model's dtype.
        formats: the quantized formats in which this matrix is stored.
        alias: in-memory full name of the parameter that this one is tied to.
        stored: the quantized format in which the checkpoint at hand stores this matrix (``quant.bound_layout``).
    """

    name: str
    dims: tuple[Dim, ...]
    on_disk: str | tuple[str, ...] | None = None
    routed: bool = False
    buffer: bool = False
    fp32: bool = False
    norm: Norm | None = None
    formats: frozenset[str] = frozenset()
    alias: str | None = None
    stored: str | None = None

    @cached_property
    def axes(self) -> frozenset[str]:
        """Names of the axes that index any dimension."""
        return frozenset().union(*(dim.axes for dim in self.dims))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the parent."""
        return tuple(dim.size for dim in self.dims)

    @property
    def disk_names(self) -> tuple[str, ...]:
        """Names in a checkpoint, relative to the unit: one, or one per stored segment."""
        return self.on_disk if isinstance(self.on_disk, tuple) else (self.on_disk or self.name,)

    @property
    def unrolled(self) -> bool:
        """Whether a checkpoint stores one tensor per member of the first dimension."""
        return "{}" in self.disk_names[0]

    @property
    def pieces(self) -> list[tuple[int | None, int | None]]:
        """The tensors that a checkpoint stores the row as: (member, segment), None where it is not divided so."""
        members: Sequence[int | None] = range(self.dims[0].size) if self.unrolled else (None,)
        segments: Sequence[int | None] = range(len(self.disk_names)) if len(self.disk_names) > 1 else (None,)
        return [(member, segment) for member in members for segment in segments]

    def cut_shape(self, widths: AxisWidths) -> tuple[Any, ...]:
        """Shape at ``widths``."""
        return tuple(dim.width(widths) for dim in self.dims)

    def numel(self, widths: AxisWidths) -> Any:
        """Number of elements at ``widths``; differentiable where the widths are."""
        return math.prod(self.cut_shape(widths))


@dataclass(frozen=True)
class Unit:
    """A part of the model that runs as one call: token embedding, decoder layer, final norm or head.

    ``path`` and ``disk_path`` hold ``{}`` where the layer number goes. ``layer`` is None outside the decoder stack.
    """

    path: str
    disk_path: str
    kind: str
    rows: tuple[Row, ...]
    layer: int | None = None
    router: Router | None = None
    taps: tuple[Tap, ...] = ()
    states: tuple[State, ...] = ()

    def name(self, row: Row, layer: int | None = None) -> str:
        """Full in-memory name of a row, as if the unit were layer number ``layer`` (default: its own)."""
        return f"{self.path.format(self.layer if layer is None else layer)}.{row.name}"

    def disk_name(
        self, row: Row, layer: int | None = None, member: int | None = None, segment: int | None = None
    ) -> str:
        """Full on-disk name of one of a row's ``pieces``."""
        tail = row.disk_names[segment or 0]
        return f"{self.disk_path.format(self.layer if layer is None else layer)}.{tail.format(member)}"

    def disk_names(self, row: Row) -> list[str]:
        """Full on-disk names of all of a row's ``pieces``."""
        return [self.disk_name(row, member=member, segment=segment) for member, segment in row.pieces]

    def reading(self, tap: Tap) -> list[Row]:
        """Matrices of the unit that read, by their columns, what a tap hears."""
        within = tuple(f"{module}." for module in tap.readers or (tap.module,))
        return [
            row
            for row in self.rows
            if row.name.startswith(within) and tap.axis in row.dims[-1].axes and len(row.dims) > 1
        ]

    @property
    def module(self) -> str:
        """In-memory path of the unit's module."""
        return self.path.format(self.layer)

    def router_path(self, at: str | None = None) -> str:
        """In-memory path of the expert router, as if the unit lay at ``at`` (default: its own place); empty without one."""
        return "" if self.router is None else f"{at or self.module}.{self.router.module}"

    def stays_whole(self, row: Row) -> bool:
        """Whether every process of a training run holds a row in full and in its own dtype: vectors, fp32 rows, router gates."""
        gate = self.router is not None and row.name == f"{self.router.module}.{GATE}"
        return gate or row.buffer or row.fp32 or len(row.dims) == 1


@dataclass(frozen=True)
class Located:
    """What a tensor name stands for: a row of a unit, or on disk perhaps one of its ``pieces``."""

    unit: Unit
    row: Row
    on_disk: bool
    member: int | None = None
    segment: int | None = None

    @property
    def dims(self) -> tuple[Dim, ...]:
        """Dimensions of the tensor under this name."""
        dims = self.row.dims if self.member is None else self.row.dims[1:]
        return dims if self.segment is None else (Dim(dims[0].segments[self.segment : self.segment + 1]), *dims[1:])

    @property
    def member_axis(self) -> str | None:
        """The axis that ``member`` counts along."""
        return None if self.member is None else self.row.dims[0].segments[0].factors[0].axis

    def renamed(self, layer: int | None = None, member: int | None = None) -> str:
        """The name, in the same scheme, for another layer number and member number."""
        if not self.on_disk:
            return self.unit.name(self.row, layer)
        return self.unit.disk_name(self.row, layer, self.member if member is None else member, self.segment)


@dataclass(frozen=True)
class Layout:
    """The whole table of one model.

    Attributes:
        family: name of the model family (``model_type`` in config.json).
        axes: every axis by name, ``depth`` included.
        units: embedding, decoder layers in order, final norm, head.
        top_k: experts that a token uses; None without routed experts.
        required_kinds: kinds of layer of which at least one must stay.
        couplings: axes whose widths must fit together.
        logits_divisor: what the model divides the head's answer by.
        own_widths: axis -> layer -> width, where the layers of the model itself differ in width. Such a model comes out of a cut
            per layer, its table holds constants instead of width axes (``per_layer.own_table``), and it is not cut again.
    """

    family: str
    axes: Mapping[str, Axis]
    units: tuple[Unit, ...]
    top_k: int | None = None
    required_kinds: frozenset[str] = field(default_factory=frozenset)
    couplings: tuple[Coupling, ...] = ()
    logits_divisor: float = 1.0
    own_widths: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def width_axes(self) -> dict[str, Axis]:
        """The axes that index tensors: all but ``depth``."""
        return {name: axis for name, axis in self.axes.items() if name != "depth"}

    @property
    def stream(self) -> Axis:
        """The axis of the residual stream: what passes between units has its width."""
        return self.axes["hidden"]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the parent."""
        return self.axes["depth"].size

    def complete(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Widths for every width axis: those given, and the parent's own elsewhere."""
        return {name: widths.get(name, axis.size) for name, axis in self.width_axes.items()}

    def layers_with(self, axis: str) -> list[int]:
        """Numbers of the decoder layers that have parameters along an axis."""
        units = (unit for unit in self.units if any(axis in row.axes for row in unit.rows))
        return [unit.layer for unit in units if unit.layer is not None]

    def check(self, widths: Widths, layers: Sequence[int] | None = None) -> None:
        """Refuse what cannot be cut.

        Raises:
            UnknownNameError: an axis that the model does not have.
            WidthError: an illegal width, widths that do not fit together, a width for a layer that cannot have one of its own, or
                kept layers that are out of range, repeated, out of order, or miss a needed kind.
        """
        check_cut(self, widths, layers)

    def fits(self, widths: Mapping[str, int]) -> bool:
        """Whether legal ``widths`` also fit together."""
        return all(coupling.holds(self.complete(widths)) for coupling in self.couplings)

    def members(self, widths: Mapping[str, int]) -> dict[str, Sequence[int]]:
        """Kept members of every axis that ``widths`` cuts (axes at the parent's own width are left out).

        A prefix is a ``range``: plans remember what they computed by members, and a range is compared at once.
        """
        axes = {name: self.axes[name] for name, width in widths.items() if width != self.axes[name].size}
        return {
            name: range(widths[name]) if axis.groups == 1 else axis.members(widths[name]) for name, axis in axes.items()
        }

    def kept_units(self, layers: Sequence[int] | None = None) -> Iterator[Unit]:
        """Units of a nested model, in order: all of them, or only the decoder layers in ``layers``."""
        for unit in self.units:
            if layers is None or unit.layer is None or unit.layer in layers:
                yield unit

    def tensors(self, layers: Sequence[int] | None = None) -> Iterator[tuple[Unit, Row]]:
        """Every row of every kept unit."""
        for unit in self.kept_units(layers):
            for row in unit.rows:
                yield unit, row

    @cached_property
    def _names(self) -> dict[str, Located]:
        names: dict[str, Located] = {}
        for unit, row in self.tensors():
            names[unit.name(row)] = Located(unit, row, on_disk=False)
            for member, segment in row.pieces:
                name = unit.disk_name(row, member=member, segment=segment)
                names[name] = Located(unit, row, True, member, segment)
        return names

    def find(self, name: str) -> Located | None:
        """What ``name`` stands for, in memory or on disk; None if the table does not know it."""
        return self._names.get(name)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the architecture: equal for two models whose tables, shapes and top-k are equal."""
        lines = [
            f"{self.family} top_k={self.top_k}",
            *(f"{unit.name(row)} {row.shape}{f' = {row.alias}' if row.alias else ''}" for unit, row in self.tensors()),
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def runs(index: Sequence[int]) -> list[tuple[int, int]]:
    """Compress positions into maximal contiguous runs ``(start, length)``; a prefix is one run from 0.

    Example:
        >>> runs([0, 1, 4, 5, 6])
        [(0, 2), (4, 3)]
    """
    found: list[tuple[int, int]] = []
    for position in index:
        if found and position == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((position, 1))
    return found


def parse_dims(text: str, axes: Mapping[str, Axis], constants: Mapping[str, int]) -> tuple[Dim, ...]:
    """Read a row's dimensions: ``,`` between dimensions, ``+`` between segments, ``*`` between factors, ``!`` masks here.

    Raises:
        KeyError: a factor that is no axis, no constant and no number; a fault of the table, not of the user.
    """

    def factor(word: str) -> Factor:
        name, masked = word.strip().removesuffix("!"), word.strip().endswith("!")
        if name in axes:
            return Factor(axes[name].size, name, masked)
        return Factor(int(name) if name.isdecimal() else constants[name])

    def dim(part: str) -> Dim:
        return Dim(tuple(Segment(tuple(factor(w) for w in segment.split("*"))) for segment in part.split("+")))

    return tuple(dim(part) for part in text.split(","))
