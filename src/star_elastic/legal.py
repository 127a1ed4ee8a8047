"""Which cuts a model allows: widths shared by all layers or of a layer's own, how they fit together, and which layers stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from star_elastic.axes import Coupling, Widths, check_widths, widths_of
from star_elastic.errors import UnknownNameError, WidthError, nearest

if TYPE_CHECKING:
    from star_elastic.layout import Layout


def check_cut(layout: Layout, widths: Widths, layers: Sequence[int] | None) -> None:
    """Refuse what cannot be cut; raises as ``Layout.check`` says."""
    if layout.own_widths and (widths or (layers is not None and list(layers) != list(range(layout.num_layers)))):
        axes = ", ".join(layout.own_widths)
        raise WidthError(f"the layers of this model differ in {axes}: cut the checkpoint that it was cut from instead")
    shared = widths_of(widths, None)
    if "depth" in shared:
        raise WidthError(f"depth is cut by naming the layers that stay: give layers, not a width of {shared['depth']}")
    check_widths(layout.width_axes, shared)
    for key, width in widths.items():
        if isinstance(key, tuple):
            check_own(layout, *key, width)
    if layers is not None:
        check_layers(layout, layers)
    for coupling in layout.couplings:
        check_coupling(layout, coupling, widths, layers)


def check_own(layout: Layout, name: str, layer: int, width: int) -> None:
    """Refuse a width that one layer cannot have for itself.

    Raises:
        UnknownNameError: no such axis.
        WidthError: the axis belongs to the whole model, the layer does not have it, or the width is illegal.
    """
    if name not in layout.axes:
        raise UnknownNameError(f"this model has no axis {name!r}: {nearest(name, layout.axes)}")
    if layout.axes[name].scope == "model":
        raise WidthError(f"{name} is one axis for the whole model: give one width, not one for layer {layer}")
    having = layout.layers_with(name)
    if layer not in having:
        raise WidthError(f"layer {layer} has no {name}; layers that have: {', '.join(map(str, having))}")
    try:
        layout.axes[name].check(width)
    except WidthError as error:
        raise WidthError(f"layer {layer}: {error}") from None


def check_layers(layout: Layout, layers: Sequence[int]) -> None:
    """Raise WidthError unless the kept layers are ascending, exist, and hold every kind that must stay."""
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < layout.num_layers:
        raise WidthError(
            f"kept layers {list(layers)} must be ascending, without repeats, from 0 to {layout.num_layers - 1}"
        )
    kinds = {unit.kind for unit in layout.kept_units(layers)}
    for kind in sorted(layout.required_kinds - kinds):
        having = [unit.layer for unit in layout.units if unit.kind == kind]
        raise WidthError(f"kept layers {list(layers)} hold no {kind} layer: keep at least one of {having}")


def check_coupling(layout: Layout, coupling: Coupling, widths: Widths, layers: Sequence[int] | None) -> None:
    """Raise WidthError unless the widths fit together, in every layer where they are its own.

    The widest of all layers must fit too: they are what the one config of the whole model says.
    """
    axes = {name for name in (*coupling.part, *coupling.whole) if layout.axes[name].scope == "layer"}
    places = {"": layout.complete(widths_of(widths, None))}
    if any(isinstance(key, tuple) and key[0] in axes for key in widths):
        kept = (unit for unit in layout.kept_units(layers) if any(row.axes & axes for row in unit.rows))
        places = {f"layer {unit.layer}: ": layout.complete(widths_of(widths, unit.layer)) for unit in kept}
        widest = {name: max(own[name] for own in places.values()) for name in layout.width_axes}
        places["the widest widths of all layers: "] = widest
    for place, complete in places.items():
        try:
            coupling.check(layout.width_axes, complete)
        except WidthError as error:
            raise WidthError(f"{place}{error}") from None
