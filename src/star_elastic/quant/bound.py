"""The table of a quantized folder: the family's, with each matrix's stored format, and only those widths that keep blocks whole.

Blocks of NVFP4 lie along the columns of a matrix. A cut keeps them whole if every contiguous run of kept columns starts and ends
on a multiple of 16. That is more than a legal total: 6 of 8 heads of 4 channels in 2 groups are 24 columns, in two runs of 12.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from star_elastic.axes import Axis, Rule
from star_elastic.layout import Dim, Layout, Row
from star_elastic.quant.formats import BLOCK, NVFP4, LocatedPart


def bound_layout(layout: Layout, parts: Mapping[str, LocatedPart]) -> Layout:
    """A table that knows how a folder stores its matrices.

    Args:
        layout: the family's table.
        parts: from ``quantized_parts``.

    Returns:
        The table, with ``Row.stored`` filled in where all pieces of a row have one format, and with rules on the axes along
        whose members a block lies.
    """
    forms: dict[str, set[str]] = {}
    columns: set[Dim] = set()
    for part in parts.values():
        if part.form is not None and part.part is part.form.parts[0]:
            forms.setdefault(part.unit.name(part.row), set()).add(part.form.name)
            if part.form is NVFP4:
                columns.add(part.matrix_dims[1])

    def stored(name: str, row: Row) -> Row:
        return replace(row, stored=next(iter(forms[name]))) if len(forms.get(name, ())) == 1 else row

    units = tuple(replace(unit, rows=tuple(stored(unit.name(row), row) for row in unit.rows)) for unit in layout.units)
    return replace(layout, units=units, axes=bound_axes(layout.axes, columns))


def expected_layout(layout: Layout, form: str) -> Layout:
    """The same for a folder of which only config.json is there: as the family's table says it would be stored."""
    rows = [row for _, row in layout.tensors() if form in row.formats]
    units = tuple(
        replace(unit, rows=tuple(replace(row, stored=form) if form in row.formats else row for row in unit.rows))
        for unit in layout.units
    )
    columns = {row.dims[-1] for row in rows} if form == NVFP4.name else set()
    return replace(layout, units=units, axes=bound_axes(layout.axes, columns))


def bound_axes(axes: Mapping[str, Axis], columns: Iterable[Dim]) -> dict[str, Axis]:
    """Axes with a further rule wherever one of ``columns`` is indexed by them and the blocks along it bind it."""
    steps: dict[str, int] = {}
    for dim in columns:
        for name in dim.axes:
            steps[name] = math.lcm(steps.get(name, 1), _step(dim, axes[name]))
    return {
        name: _bound(axis, min(steps[name], axis.size)) if steps.get(name, 1) > 1 else axis
        for name, axis in axes.items()
    }


def _bound(axis: Axis, step: int) -> Axis:
    return replace(axis, rules=(*axis.rules, Rule(f"NVFP4 blocks of {BLOCK} must stay whole", step, step)))


def _step(dim: Dim, axis: Axis) -> int:
    """Widths of ``axis`` below the parent's own must be multiples of this; its size where no other width keeps blocks whole.

    Each group of members is one run for every combination of the factors before, as wide as the factors after. Runs begin
    where the parent has them. It is enough to look at each axis alone: where the factors after are cut too, their own rule makes
    them whole blocks.
    """
    step, offset = 1, 0
    for segment in dim.segments:
        for place, factor in enumerate(segment.factors):
            if factor.axis != axis.name:
                continue
            inside = math.prod(other.size for other in segment.factors[place + 1 :])
            group = axis.size // axis.groups * inside
            runs = segment.size // group
            if offset % BLOCK or (runs > 1 and group % BLOCK):
                return axis.size
            step = math.lcm(step, axis.groups * BLOCK // math.gcd(BLOCK, inside))
        offset += segment.size
    return step
