"""GGUF files, made by llama.cpp's own converter: everything is checked first, and the file appears whole or not at all."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from star_elastic.checkpoint import Checkpoint, check_space
from star_elastic.checkpoint.durable import sync_path
from star_elastic.engines import unfit
from star_elastic.errors import CheckpointError, TargetError, nearest
from star_elastic.families import FAMILIES, layout_of
from star_elastic.families.base import LLAMA_CPP
from star_elastic.llama_cpp import Converter, ConverterError
from star_elastic.progress import progress_bar
from star_elastic.quant import read_quantized
from star_elastic.submodel import own_widths_in, read_json

BITS = {"F32": 32.0, "BF16": 16.0, "F16": 16.0, "Q8_0": 8.5}
"""Type of a GGUF file -> bits per number of a matrix."""

VECTOR_BITS = 32.0  # of all that is no matrix, whatever the type


@dataclass(frozen=True)
class Gguf:
    """How GGUF files are made.

    Attributes:
        kind: type of the files, a key of ``BITS``.
        converter: what makes them.
    """

    kind: str
    converter: Converter

    @classmethod
    def parse(cls, kind: str, converter: Path | str | None = None, python: Path | str | None = None) -> Gguf:
        """Read the options of the command line.

        Raises:
            ConverterError: no such type, or no converter; says how to get it.
        """
        if kind.upper() not in BITS:
            raise ConverterError(f"unknown type {kind!r} of a GGUF file: {nearest(kind.upper(), BITS)}")
        return cls(kind.upper(), Converter.find(converter, python))

    def check_model(
        self, name: object, config: Mapping[str, Any], *, quantized: str = "", per_layer: Collection[str] = ()
    ) -> None:
        """Refuse a model of which no GGUF file can be made that computes the same.

        Args:
            name: the folder's, for the message.
            config: its config.json. Of families without a table the converter says itself what it thinks.
            quantized: how its weights are quantized by ModelOpt; empty where they are not.
            per_layer: axes along which its layers differ.

        Raises:
            CheckpointError: its layers differ in width, or its weights are quantized.
            ConverterError: llama.cpp does not run it, or this converter does not understand it.
        """
        if per_layer:
            raise CheckpointError(
                f"{name} is a slice whose layers differ in {', '.join(per_layer)}: no GGUF file can say that"
            )
        if quantized:
            raise CheckpointError(
                f"{name} is quantized ({quantized}), and only unquantized weights are converted: take a slice of the unquantized "
                "checkpoint, with --type Q8_0 if it shall be small"
            )
        found = unfit(config, LLAMA_CPP) if config.get("model_type") in FAMILIES else None
        if found is not None and not (found.elsewhere and self.converter.chosen):
            hint = ": give a --python that has transformers 4" if found.elsewhere else ""
            raise ConverterError(f"{name} cannot become a GGUF file: {found.why}{hint}")

    def nbytes(self, shapes: Iterable[tuple[int, ...]]) -> int:
        """Bytes of a file with tensors of these shapes, but for the vocabulary."""
        return int(sum(math.prod(shape) * (BITS[self.kind] if len(shape) > 1 else VECTOR_BITS) for shape in shapes) / 8)

    def write(self, folder: Path, target: Path, size: int, *, progress: bool = True) -> None:
        """Convert a folder; ``target`` appears whole or not at all.

        Args:
            folder: checked by ``check_model``.
            target: checked by ``check_file``.
            size: bytes that it will have, about, for a progress bar on a terminal.
            progress: draw that.

        Raises:
            ConverterError: the converter refuses the folder; says what it said last.
        """
        # A folder beside the file: the converter may write more than one.
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            partial = scratch / target.name
            with progress_bar("convert", size, "bytes", shown=progress and sys.stderr.isatty()) as advance:
                self.converter.convert(folder, partial, self.kind, scratch / "said", advance)
            sync_path(partial)
            partial.rename(target)
            sync_path(target.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def export_gguf(
    folder: Path | str,
    out: Path | str,
    *,
    kind: str = "BF16",
    converter: Path | str | None = None,
    python: Path | str | None = None,
    progress: bool = True,
) -> Path:
    """Convert a transformers folder to one GGUF file.

    Args:
        folder: a slice, or any folder that the converter knows; its weights are not quantized by ModelOpt.
        out: the file to write; it appears whole or not at all.
        kind: ``F32``, ``BF16``, ``F16`` or ``Q8_0``.
        converter: llama.cpp's folder, or the script in it; looked for in ``LLAMA_CPP`` and ``PATH`` if left out.
        python: the Python to run it with, which has what llama.cpp's requirements list; this one if left out.
        progress: draw a progress bar on a terminal.

    Returns:
        ``out``.

    Raises:
        ConverterError: no such type; the converter is not found, or refuses the folder; llama.cpp does not run the model.
        CheckpointError: the folder is damaged, quantized, brings code, or has layers that differ in width; or the disk is too
            small.
        TargetError: ``out`` exists, or there is no folder to write it into.

    Example:
        >>> export_gguf("small", "small.gguf", kind="Q8_0")  # doctest: +SKIP
    """
    folder, target = Path(folder), Path(out).absolute()
    gguf = Gguf.parse(kind, converter, python)
    checkpoint = Checkpoint.open(folder)
    _refuse_code(folder)
    own, known = own_widths_in(folder), checkpoint.config.get("model_type") in FAMILIES
    quantized = read_quantized(layout_of(checkpoint.config), checkpoint).text if known and not own else ""
    gguf.check_model(folder, checkpoint.config, quantized=quantized, per_layer=own)
    check_file(target)
    size = gguf.nbytes(info.shape for info in checkpoint.tensors.values())
    check_space({target: size})
    gguf.write(folder, target, size, progress=progress)
    return Path(out)


def check_file(target: Path) -> None:
    """Raise TargetError where a file must not be written: it exists, or its folder does not."""
    if target.exists():
        raise TargetError(f"target {target} exists: choose another name, or remove it first")
    if not target.parent.is_dir():
        raise TargetError(f"target {target} cannot be made: there is no folder {target.parent}")


def _refuse_code(folder: Path) -> None:
    """Raise CheckpointError where a folder would have the converter run code of its own."""
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).exists() and "auto_map" in read_json(folder / name):
            raise CheckpointError(
                f"{folder / name} has an auto_map, so llama.cpp's converter would run code that comes with the model: "
                "remove that field"
            )
