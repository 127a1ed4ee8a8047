"""How a quantized matrix lies in a checkpoint, in the names and layouts that ModelOpt writes.

A matrix ``X.weight`` of R rows and C columns becomes

============== ===================== =========================================== =============
tensor         FP8                   NVFP4                                       a cut
============== ===================== =========================================== =============
weight         E4M3 [R, C]           bytes [R, C/2], two E2M1 numbers in each,   both dimensions
                                     the first in the low four bits
weight_scale   float, one            E4M3 [R, C/16], one per block of 16 columns FP8: whole; NVFP4: both dimensions
weight_scale_2 -                     float, one                                  whole
input_scale    float, one            float, one                                  whole
============== ===================== =========================================== =============

An FP8 number stands for code x weight_scale, an NVFP4 number for code x (weight_scale x weight_scale_2). ``input_scale`` is for
activations and may be missing. ``k_scale`` and ``v_scale`` beside any matrix scale the KV cache, and stay whole.

Columns that share a byte or a scale are one item on disk: ``Packed`` is a dimension counted in such items. So the table's own
dimensions, divided, say what a width keeps of each of these tensors, and no other code knows of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from star_elastic.axes import AxisWidths
from star_elastic.layout import Dim, Factor, Located, Members, Segment

BLOCK = 16
PER_BYTE = 2
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
WEIGHT = "weight"

Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Packed(Dim):
    """A dimension of which ``per`` neighbours are one stored item. Cuts keep whole items (see ``blocks``)."""

    per: int = 1

    @cached_property
    def size(self) -> int:
        """Number of items in the parent."""
        return sum(segment.size for segment in self.segments) // self.per

    def width(self, widths: AxisWidths) -> int:
        """Number of items at ``widths``."""
        return int(super().width(widths)) // self.per

    def index(self, members: Members) -> list[int] | None:
        """Items that hold the given members."""
        index = super().index(members)
        return None if index is None else [position // self.per for position in index[:: self.per]]


@dataclass(frozen=True)
class Part:
    """One of the tensors that a quantized matrix is stored as.

    Attributes:
        suffix: what its name has in place of the ``weight`` of the matrix.
        dtypes: safetensors dtypes that it may have.
        dims: its dimensions, given the matrix's; None where it is one number.
        needed: whether every matrix of the format has it.
    """

    suffix: str
    dtypes: frozenset[str]
    dims: Callable[[Dims], Dims] | None = None
    needed: bool = True


@dataclass(frozen=True)
class Format:
    """A way to store a matrix: its name, and its parts, of which the first replaces the matrix."""

    name: str
    parts: tuple[Part, ...]


INPUT_SCALE = Part("input_scale", FLOATS, needed=False)

FP8 = Format(
    "fp8",
    (
        Part(WEIGHT, frozenset({"F8_E4M3"}), lambda dims: dims),
        Part("weight_scale", FLOATS),
        INPUT_SCALE,
    ),
)
NVFP4 = Format(
    "nvfp4",
    (
        Part(WEIGHT, frozenset({"U8"}), lambda dims: (dims[0], Packed(dims[1].segments, PER_BYTE))),
        Part("weight_scale", frozenset({"F8_E4M3"}), lambda dims: (dims[0], Packed(dims[1].segments, BLOCK))),
        Part("weight_scale_2", FLOATS),
        INPUT_SCALE,
    ),
)
FORMATS = {form.name: form for form in (FP8, NVFP4)}

CACHE_SCALES = {suffix: Part(suffix, FLOATS, needed=False) for suffix in ("k_scale", "v_scale")}

ONE_NUMBER = ((), (1,))
"""Shapes of a tensor that holds one number."""


def format_of(dtype: str) -> Format | None:
    """The format whose matrices have this dtype on disk."""
    return next((form for form in FORMATS.values() if dtype in form.parts[0].dtypes), None)


@dataclass(frozen=True, kw_only=True)
class LocatedPart(Located):
    """One of the tensors that a quantized matrix is stored as; otherwise as the matrix itself.

    Attributes:
        part: which of them.
        form: the format of the matrix; None where the tensor only lies beside it, as scales of the KV cache do.
        shape: as it is stored.
    """

    part: Part
    form: Format | None
    shape: tuple[int, ...]

    @property
    def matrix_dims(self) -> Dims:
        """Dimensions of the matrix that it belongs to."""
        return super().dims

    @cached_property
    def dims(self) -> Dims:
        """Dimensions of this tensor."""
        if self.part.dims is None:
            return tuple(Dim((Segment((Factor(size),)),)) for size in self.shape)
        return self.part.dims(self.matrix_dims)

    def renamed(self, layer: int | None = None, member: int | None = None) -> str:
        """The name for another layer number and member number."""
        return sibling(super().renamed(layer, member), self.part.suffix)


def sibling(weight: str, suffix: str) -> str:
    """The name of a part of the matrix ``weight``."""
    return weight.removesuffix(WEIGHT) + suffix
