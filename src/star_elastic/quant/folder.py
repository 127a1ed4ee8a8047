"""A quantized folder: what it says about itself, and what its tensors are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from star_elastic.errors import CheckpointError
from star_elastic.layout import Layout
from star_elastic.quant.bound import bound_layout, expected_layout
from star_elastic.quant.declared import SIDECAR, Declared, read_declared
from star_elastic.quant.formats import FORMATS, LocatedPart
from star_elastic.quant.parts import quantized_parts
from star_elastic.submodel import read_config

if TYPE_CHECKING:
    from star_elastic.checkpoint import Checkpoint

ANY = frozenset(FORMATS)
"""All formats that are known here."""


@dataclass(frozen=True)
class Quantized:
    """How a folder is quantized.

    Attributes:
        declared: what it says; None where it is not quantized.
        parts: by name, the tensors of quantized matrices, and scales of the KV cache.
    """

    declared: Declared | None = None
    parts: Mapping[str, LocatedPart] = field(default_factory=dict)

    @property
    def formats(self) -> frozenset[str]:
        """Formats in which at least one matrix is stored."""
        return frozenset(part.form.name for part in self.parts.values() if part.form is not None)

    @property
    def text(self) -> str:
        """How the folder is quantized, for people; empty where it is not."""
        return self.declared.text if self.declared else ""

    def allow(self, formats: Collection[str], folder: Any) -> None:
        """Raise CheckpointError if a matrix is stored in a format other than ``formats``."""
        if self.formats - frozenset(formats):
            possible = " or ".join(["unquantized", *sorted(formats)])
            raise CheckpointError(
                f"{folder} is quantized ({self.text}), and this takes {possible} weights: take the model that it was made from"
            )


def read_quantized(layout: Layout, checkpoint: Checkpoint) -> Quantized:
    """How a folder is quantized; headers and small files are read, no weights.

    Raises:
        CheckpointError: in a way that is not known here, or what it says is not what its tensors are.
    """
    declared = read_declared(checkpoint.folder, checkpoint.config)
    found = Quantized(declared, quantized_parts(layout, checkpoint.tensors))
    if declared is None and found.formats:
        name = next(name for name, part in found.parts.items() if part.form is not None)
        raise CheckpointError(
            f"{checkpoint.folder} holds quantized weights ({name}), but neither config.json nor {SIDECAR} says so"
        )
    if declared is not None and not found.formats:
        raise CheckpointError(
            f"{checkpoint.folder} says that it is quantized ({declared.text}), but none of its matrices is"
        )
    for name, part in found.parts.items():
        if declared is not None and part.form is not None and part.form.name not in declared.formats:
            raise CheckpointError(
                f"{checkpoint.folder} says that it is quantized ({declared.text}), but {name} is stored as {part.form.name}"
            )
    return found


def layout_in_folder(folder: Any, layout: Layout) -> Layout:
    """The table of a model, bound to how a folder stores it; the same table where it is not quantized.

    Only config.json is needed: without weights beside it the family's table says what would be quantized.

    Raises:
        CheckpointError: see ``read_quantized``.
    """
    declared = read_declared(folder, read_config(folder))
    if declared is None:
        return layout
    from star_elastic.checkpoint import Checkpoint  # numpy, which most folders are inspected without

    if not any(folder.glob("*.safetensors*")):
        form = "nvfp4" if "nvfp4" in declared.formats else "fp8"
        return expected_layout(layout, form)
    return bound_layout(layout, read_quantized(layout, Checkpoint.open(folder)).parts)
