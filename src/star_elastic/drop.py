"""Leaving out tensors that a family's table does not know: named by the user, counted, never silent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from star_elastic.checkpoint import Checkpoint
from star_elastic.errors import CheckpointError, nearest
from star_elastic.layout import Layout
from star_elastic.quant import quantized_parts


def drop_tensors(checkpoint: Checkpoint, layout: Layout, patterns: Sequence[str]) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint without the tensors whose names match one of the shell patterns, and those names in file order.

    Raises:
        CheckpointError: a pattern matches nothing, or a tensor that the model needs.
    """
    if not patterns:
        return checkpoint, ()
    scales = quantized_parts(layout, checkpoint.tensors)

    def is_known(name: str) -> bool:
        return name in scales or layout.find(name) is not None

    dropped: set[str] = set()
    for pattern in patterns:
        matching = [name for name in checkpoint.tensors if fnmatchcase(name, pattern)]
        if not matching:
            unknown = [name for name in checkpoint.tensors if not is_known(name)]
            raise CheckpointError(
                f"--drop {pattern!r} matches no tensor of {checkpoint.folder}: {_hint(pattern, unknown)}"
            )
        needed = [name for name in matching if is_known(name)]
        if needed:
            raise CheckpointError(
                f"--drop {pattern!r} matches {needed[0]}, which a {layout.family} needs: "
                "only tensors that its table does not know can be left out"
            )
        dropped |= set(matching)
    kept = {name: info for name, info in checkpoint.tensors.items() if name not in dropped}
    return replace(checkpoint, tensors=kept), tuple(name for name in checkpoint.tensors if name in dropped)


def _hint(pattern: str, unknown: Sequence[str]) -> str:
    return f"not in the table are these: {nearest(pattern, unknown)}" if unknown else "the table knows them all"
