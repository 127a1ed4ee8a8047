"""Which channels a tap listens to, read from the table: of the row that belongs to its module, the part that has its axis."""

from __future__ import annotations

from dataclasses import dataclass

from star_elastic.layout import Segment, Tap, Unit


@dataclass(frozen=True)
class Spot:
    """Channels that a tap listens to: ``segment``, from position ``start``, of what enters or leaves a module."""

    module: str
    side: str
    start: int
    segment: Segment

    @property
    def key(self) -> str:
        """Name of the spot, unique in a model."""
        return f"{self.module}:{self.side}:{self.start}"


def spot_of(unit: Unit, tap: Tap) -> Spot:
    """Where a tap on a module's input or output listens: the segment that masks its axis, or else that has it."""
    [row] = [row for row in unit.rows if row.name == f"{tap.module}.weight"]
    dim = row.dims[-1] if tap.side == "input" else row.dims[0]
    having = [segment for segment in dim.segments if any(f.axis == tap.axis for f in segment.factors)]
    masking = [segment for segment in having if any(f.axis == tap.axis and f.masked for f in segment.factors)]
    [segment] = masking or having
    before = dim.segments[: next(n for n, s in enumerate(dim.segments) if s is segment)]
    return Spot(f"{unit.module}.{tap.module}", tap.side, sum(s.size for s in before), segment)


def place_of(unit: Unit, tap: Tap) -> str:
    """Name, unique in a model, of the place whose channels a tap hears; those of a layer's routed experts are one place."""
    return f"{unit.module}.{tap.module}" if tap.side == "experts" else spot_of(unit, tap).key


def expert_key(place: str, expert: int) -> str:
    """Name of one routed expert at a place."""
    return f"{place}.{expert}"


def expert_count(unit: Unit) -> int:
    """Number of routed experts of a unit."""
    return next(row.dims[0].size for row in unit.rows if row.routed)


def expert_channel_axes(unit: Unit) -> frozenset[str]:
    """Axes of channels inside routed experts."""
    return frozenset().union(*(row.dims[2].masked_axes for row in unit.rows if row.routed))
