"""Models whose layers differ in width: the table of such a model, cut out of one whose layers agree.

No config of transformers can say it. The config of such a model holds the widest width of each axis, and beside it lies, by axis
and layer, what each layer really has. Its table is the one of that config with constants in place of axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from star_elastic.axes import DEPTH, AxisWidths, Rule, widths_of
from star_elastic.layout import Dim, Factor, Layout, Row, Segment, State, Unit

LayerWidths = Mapping[str, Mapping[int, int]]
"""Axis -> layer -> width."""

WHOLE = "its layers differ in width, so it is not cut again"


def own_table(layout: Layout, own_widths: LayerWidths) -> Layout:
    """The table of a model whose layers differ in width.

    Args:
        layout: the table of its config, which holds the widest width of each axis.
        own_widths: the widths of its layers on the axes along which they differ.

    Raises:
        WidthError, UnknownNameError: the config cannot be cut so.
    """
    keyed: dict[str | tuple[str, int], int] = {
        (axis, layer): width for axis, by_layer in own_widths.items() for layer, width in by_layer.items()
    }
    layout.check(keyed)
    units = tuple(_own_unit(unit, widths_of(keyed, unit.layer)) for unit in layout.units)
    depth = layout.axes[DEPTH]
    axes = {DEPTH: replace(depth, rules=(Rule(WHOLE, depth.size, depth.size),))}
    return replace(layout, units=units, axes=axes, couplings=(), own_widths=own_widths)


def by_width(own: Mapping[int, int]) -> str:
    """The widths of layers along one axis, for people.

    Example:
        >>> by_width({1: 960, 4: 1280, 6: 960})
        '960 in layers 1, 6; 1280 in layer 4'
    """
    told = []
    for width in sorted(set(own.values())):
        layers = [str(layer) for layer, other in own.items() if other == width]
        told.append(f"{width} in layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}")
    return "; ".join(told)


def span(own: Mapping[int, int]) -> str:
    """Smallest and largest width of layers that differ, in a few characters: ``960..1280``."""
    return f"{min(own.values())}..{max(own.values())}"


def _own_unit(unit: Unit, widths: AxisWidths) -> Unit:
    rows = tuple(_own_row(row, widths) for row in unit.rows)
    states = tuple(_own_state(state, widths) for state in unit.states)
    return replace(unit, rows=rows, states=states, taps=())


def _own_row(row: Row, widths: AxisWidths) -> Row:
    return replace(row, dims=tuple(_own_dim(dim, widths) for dim in row.dims))


def _own_state(state: State, widths: AxisWidths) -> State:
    return replace(state, dims=tuple(_own_dim(dim, widths) for dim in state.dims))


def _own_dim(dim: Dim, widths: AxisWidths) -> Dim:
    return Dim(tuple(Segment(tuple(_constant(f, widths) for f in segment.factors)) for segment in dim.segments))


def _constant(factor: Factor, widths: AxisWidths) -> Factor:
    return Factor(widths.get(factor.axis, factor.size) if factor.axis else factor.size)
