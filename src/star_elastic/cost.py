"""What a nested model costs: exact parameter counts and bytes, read from the table.

Every function takes widths that may be numbers or tensors: counts are polynomials of the widths, exact at whole numbers and
differentiable in between, so that a router can be trained on them. They are keyed by axis, and by ``(axis, layer)`` where layers
differ: a layer's own width comes before the shared one. ``layers`` says which decoder layers count: None for all, a
sequence of kept layers, or a mapping from layer to a weight (a depth gate in [0, 1]).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from star_elastic.axes import AxisWidths, Widths, widths_of
from star_elastic.layout import Layout, Row, Unit

Layers = Sequence[int] | Mapping[int, Any] | None

FORMATS = ("fp32", "bf16", "fp8", "nvfp4")
STORED = "stored"
NVFP4_BLOCK = 16  # numbers that share one E4M3 scale, along the input dimension


def params(layout: Layout, widths: Widths, layers: Layers = None) -> Any:
    """Number of parameters: every trainable tensor once; buffers and tied aliases not at all."""
    return sum(weight * row.numel(own) for _, row, own, weight in _parameters(layout, widths, layers))


def active_params(layout: Layout, widths: Widths, layers: Layers = None, *, embedding: bool = True) -> Any:
    """Parameters that one token uses: all, less the routed experts beyond the router's top-k.

    Args:
        layout: the table.
        widths: width per axis; axes left out count at the parent's own.
        layers: which layers count, as in this module's introduction.
        embedding: whether the input embedding counts.
    """
    total: Any = 0
    for unit, row, own, weight in _parameters(layout, widths, layers):
        if unit.kind == "embedding" and not embedding:
            continue
        used = layout.top_k * math.prod(row.cut_shape(own)[1:]) if row.routed else row.numel(own)
        total = total + weight * used
    return total


def weight_bytes(layout: Layout, widths: Widths, layers: Layers = None, dtype: str = "bf16") -> Any:
    """Resident bytes of all weights, used or not, buffers included.

    Args:
        layout: the table.
        widths: width per axis; axes left out count at the parent's own.
        layers: which layers count.
        dtype: ``fp32`` or ``bf16``; or ``fp8`` / ``nvfp4``, in which the matrices that the family stores in that format take 1
            byte, or 1/2 byte and 1/16 byte of block scales, plus their fp32 tensor scales, and the rest stays bf16; or
            ``stored``: each matrix as in the checkpoint that the table is bound to. Tensors that transformers keeps in fp32
            count 4 bytes a number in every format.
    """
    total: Any = 0
    for _, row, own, weight in _rows(layout, widths, layers):
        if row.alias is None:
            stored = row.numel(own) * bytes_per_number(row, dtype) + scale_bytes(row, own, dtype)
            total = total + weight * stored
    return total


def bytes_per_number(row: Row, dtype: str) -> float:
    """Bytes per number of a row's tensor in a format, block scales included."""
    if row.fp32 or dtype == "fp32":
        return 4
    if dtype == STORED:
        dtype = row.stored or "bf16"
    elif dtype not in row.formats:
        dtype = "bf16"
    if dtype == "bf16":
        return 2
    return 1 if dtype == "fp8" else 0.5 + 1 / NVFP4_BLOCK


def scale_bytes(row: Row, widths: AxisWidths, dtype: str) -> Any:
    """Bytes of fp32 tensor scales: one for the weight and one for its input, per stored matrix."""
    if row.stored is None if dtype == STORED else dtype not in row.formats:
        return 0
    matrices = row.dims[0].width(widths) if row.unrolled else 1
    return 8 * matrices * len(row.disk_names)


def kv_bytes_per_token(layout: Layout, widths: Widths, layers: Layers = None, itemsize: int = 2) -> Any:
    """Bytes of keys and values per token of one sequence, all attention layers together."""
    return _state_bytes(layout, widths, layers, itemsize, per_token=True)


def state_bytes_per_sequence(layout: Layout, widths: Widths, layers: Layers = None, itemsize: int = 2) -> Any:
    """Bytes of convolution and SSM state per sequence, whatever its length."""
    return _state_bytes(layout, widths, layers, itemsize, per_token=False)


def memory_bytes(
    layout: Layout, widths: Widths, layers: Layers = None, *, dtype: str = "bf16", context: int = 8192, batch: int = 1
) -> Any:
    """Bytes to serve a model: all its weights, and caches of ``batch`` sequences of ``context`` tokens."""
    itemsize = 4 if dtype == "fp32" else 2
    per_sequence = context * kv_bytes_per_token(layout, widths, layers, itemsize)
    per_sequence = per_sequence + state_bytes_per_sequence(layout, widths, layers, itemsize)
    return weight_bytes(layout, widths, layers, dtype) + batch * per_sequence


def _state_bytes(layout: Layout, widths: Widths, layers: Layers, itemsize: int, per_token: bool) -> Any:
    total: Any = 0
    for unit, own, weight in _units(layout, widths, layers):
        for state in unit.states:
            if state.per_token == per_token:
                numbers: Any = 1
                for dim in state.dims:
                    numbers = numbers * dim.width(own)
                total = total + weight * numbers * (state.itemsize or itemsize)
    return total


def _units(layout: Layout, widths: Widths, layers: Layers) -> Iterator[tuple[Unit, AxisWidths, Any]]:
    """Units that count, each with the widths that hold in it and its weight."""
    weights = layers if isinstance(layers, Mapping) or layers is None else dict.fromkeys(layers, 1)
    for unit in layout.units:
        weight = 1 if weights is None or unit.layer is None else weights.get(unit.layer, 0)
        if not (isinstance(weight, int) and weight == 0):
            yield unit, widths_of(widths, unit.layer), weight


def _rows(layout: Layout, widths: Widths, layers: Layers) -> Iterator[tuple[Unit, Row, AxisWidths, Any]]:
    for unit, own, weight in _units(layout, widths, layers):
        for row in unit.rows:
            yield unit, row, own, weight


def _parameters(layout: Layout, widths: Widths, layers: Layers) -> Iterator[tuple[Unit, Row, AxisWidths, Any]]:
    for unit, row, own, weight in _rows(layout, widths, layers):
        if not row.buffer and row.alias is None:
            yield unit, row, own, weight
