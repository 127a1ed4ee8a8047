"""Names, shapes and dtypes of tensors, against the table of the folder's own config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from star_elastic.checkpoint import TensorInfo
from star_elastic.layout import Layout, Located
from star_elastic.quant import FLOATS
from star_elastic.verify.report import Fault

DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
FP32 = "F32"


def expected_tensors(layout: Layout, tensors: Mapping[str, Any], parts: Mapping[str, Located]) -> dict[str, Located]:
    """What the config describes, by name: under the names in memory where the folder uses those, else under those on disk.

    Tied tensors are not among them: they may be left out.

    Args:
        layout: the folder's table.
        tensors: what the folder holds.
        parts: which of it belongs to quantized matrices.
    """
    expected: dict[str, Located] = dict(parts)
    for unit, row in layout.tensors():
        if row.alias is not None:
            continue
        name = unit.name(row)
        for wanted in [name] if name in tensors else unit.disk_names(row):
            if wanted not in expected:
                found = layout.find(wanted)
                assert found is not None, wanted  # the table knows its own names
                expected[wanted] = found
    return expected


def name_faults(layout: Layout, tensors: Mapping[str, Any], expected: Mapping[str, Located]) -> list[Fault]:
    """Tensors that are missing, not in the table, or there under both of their names."""
    faults = [Fault(name, "a tensor", "none") for name in expected if name not in tensors]
    for name in tensors:
        if name in expected:
            continue
        known = layout.find(name)
        if known is None:
            faults.append(Fault(name, f"no such tensor in a {layout.family} of this config", "one"))
        elif known.row.alias is None:
            faults.append(Fault(name, f"one tensor, {known.unit.name(known.row)}", "it a second time"))
    return faults


def shape_faults(tensors: Mapping[str, TensorInfo], expected: Mapping[str, Located]) -> list[Fault]:
    """Tensors of other shapes than config.json describes."""
    faults = []
    for name, found in expected.items():
        shape = tuple(dim.size for dim in found.dims)
        if name in tensors and tensors[name].shape != shape:
            faults.append(Fault(name, f"shape {list(shape)}", f"{list(tensors[name].shape)}"))
    return faults


def dtype_faults(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, Located],
    parts: Mapping[str, Located],
) -> list[Fault]:
    """Tensors of another dtype than config.json gives. Vectors and routers may be kept in fp32; dtypes of quantized matrices
    belong to their format.
    """
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    wanted = DTYPE_NAMES.get(said)
    faults = []
    for name, info in tensors.items():
        if name in parts or name not in expected:
            continue
        if wanted is None:
            wanted = info.dtype if info.dtype in FLOATS else None
        spared = expected[name].row.fp32 or len(info.shape) < 2
        if info.dtype != wanted and not (spared and info.dtype == FP32):
            faults.append(Fault(name, f"dtype {wanted or 'a float'}", info.dtype))
    return faults
