"""A GGUF file beside each slice: everything that could forbid it is found out before the first tensor is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from star_elastic.errors import TargetError
from star_elastic.export import Gguf
from star_elastic.llama_cpp import ConverterError
from star_elastic.slice import SlicePlan
from star_elastic.units import format_bytes


@dataclass(frozen=True)
class GgufFile:
    """A file to be made.

    Attributes:
        folder: the slice that it is made of.
        path: ``FOLDER.gguf``, beside it.
        nbytes: its size, about.
    """

    folder: Path
    path: Path
    nbytes: int


def plan_files(gguf: Gguf, plan: SlicePlan) -> list[GgufFile]:
    """The files beside planned slices, in their order.

    Raises:
        TargetError: one of them exists, or is to be a slice.
        CheckpointError, ConverterError: see ``Gguf.check_model``; or the converter does not run.
    """
    files = []
    for model, report in zip(plan.models, plan.reports, strict=True):
        gguf.check_model(
            report.folder, model.config, quantized=plan.source.quantized.text, per_layer=tuple(report.submodel.layer_widths)
        )
        files.append(GgufFile(report.folder, file_beside(report.folder), gguf.nbytes(cut.shape for cut in model.cuts)))
    folders = {report.folder.resolve() for report in plan.reports}
    for file in files:
        if file.path.exists() or file.path.resolve() in folders:
            raise TargetError(f"target {file.path} exists: choose another folder than {file.folder}, or remove it first")
    gguf.converter.check_runs()
    return files


def file_beside(folder: Path) -> Path:
    """``sizes/small`` -> ``sizes/small.gguf``."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return named.with_name(f"{named.name}.gguf")


def write_files(gguf: Gguf, files: Sequence[GgufFile]) -> Iterator[str]:
    """Convert finished slices, and say of each file, when it is there, how large it is.

    Raises:
        ConverterError: the converter refuses one; its folder stays.
    """
    for file in files:
        try:
            gguf.write(file.folder, file.path.absolute(), file.nbytes)
        except ConverterError as error:
            raise ConverterError(f"{error}; the slice {file.folder} itself is finished") from None
        yield f"wrote {file.path}: {format_bytes(file.path.stat().st_size)}"
