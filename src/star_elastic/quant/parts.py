"""Which tensors of a folder are parts of quantized matrices: told by what is there, not by what a recipe would have done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from star_elastic.errors import CheckpointError
from star_elastic.layout import Layout, Located
from star_elastic.quant.foreign import told_by_name
from star_elastic.quant.formats import (
    BLOCK,
    CACHE_SCALES,
    FLOATS,
    FP8,
    NVFP4,
    ONE_NUMBER,
    WEIGHT,
    Format,
    LocatedPart,
    Part,
    format_of,
    sibling,
)


class Described(Protocol):
    """A tensor whose dtype and shape are known."""

    @property
    def dtype(self) -> str:
        """safetensors dtype name."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape."""
        ...


def quantized_parts(layout: Layout, tensors: Mapping[str, Described]) -> dict[str, LocatedPart]:
    """What the tensors that belong to quantized matrices stand for, by name. Tensors of other kinds are left out.

    Args:
        layout: the table of the unquantized model.
        tensors: all tensors of a folder.

    Raises:
        CheckpointError: a matrix is stored in a way that is not known here, which is named where possible; or a scale is
            missing, has a wrong shape, or belongs to nothing.
    """
    parts: dict[str, LocatedPart] = {}
    for name, tensor in tensors.items():
        found = layout.find(name)
        if found is not None and tensor.dtype not in FLOATS:
            parts.update(_matrix(name, found, tensors))
    for name, tensor in tensors.items():
        if name in parts or layout.find(name) is not None:
            continue
        stem, _, suffix = name.rpartition(".")
        matrix = layout.find(f"{stem}.{WEIGHT}")
        if matrix is not None and suffix in CACHE_SCALES:
            parts[name] = _located(name, matrix, CACHE_SCALES[suffix], None, tensor)
        elif layout_name := told_by_name(name):
            raise CheckpointError(f"{name} is stored as {layout_name} store it: {_KNOWN}")
        elif matrix is not None and suffix in _SUFFIXES:
            raise CheckpointError(
                f"{name} is a scale beside {stem}.{WEIGHT}, which is not stored in a format that has one"
            )
    return parts


_KNOWN = f"known are ModelOpt's FP8 (one scale per matrix) and NVFP4 (blocks of {BLOCK})"
_SUFFIXES = frozenset(part.suffix for form in (FP8, NVFP4) for part in form.parts)


def _matrix(name: str, found: Located, tensors: Mapping[str, Described]) -> dict[str, LocatedPart]:
    """The parts of one quantized matrix."""
    dtype, shape = tensors[name].dtype, list(tensors[name].shape)
    form = format_of(dtype)
    if form is None or len(found.dims) != 2 or not name.endswith(f".{WEIGHT}"):
        raise CheckpointError(f"{name} is {dtype} {shape}, which is no layout known here: {_KNOWN}")
    parts = {}
    for part in form.parts:
        part_name = sibling(name, part.suffix)
        if part_name in tensors:
            parts[part_name] = _located(part_name, found, part, form, tensors[part_name])
        elif part.needed:
            other = told_by_name(*(other for other in tensors if other.startswith(sibling(name, WEIGHT))))
            told = f"as {other} store it: {_KNOWN}" if other else f"which needs {part_name}, and that is missing"
            raise CheckpointError(f"{name} is {dtype} {shape}, {told}")
    return parts


def _located(name: str, matrix: Located, part: Part, form: Format | None, tensor: Described) -> LocatedPart:
    located = LocatedPart(
        unit=matrix.unit,
        row=matrix.row,
        on_disk=matrix.on_disk,
        member=matrix.member,
        segment=matrix.segment,
        part=part,
        form=form,
        shape=tensor.shape,
    )
    if tensor.dtype not in part.dtypes:
        raise CheckpointError(f"{name} is {tensor.dtype}; it should be {' or '.join(sorted(part.dtypes))}")
    if part.dims is None:
        if tensor.shape not in ONE_NUMBER:
            kind = "per-channel or block-wise scales" if part.suffix == "weight_scale" else "many numbers"
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, that is {kind}: {_KNOWN}")
        return located
    if form is NVFP4 and located.matrix_dims[1].size % BLOCK:
        raise CheckpointError(f"{name}: {located.matrix_dims[1].size} columns are no whole blocks of {BLOCK}")
    expected = tuple(dim.size for dim in located.dims)
    if tensor.shape != expected:
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}; config.json and {form.name if form else ''} say {list(expected)}"
        )
    return located
