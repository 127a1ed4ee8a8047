"""GGUF files, by llama.cpp's own converter: found here, run in a process of its own, its file taken whole or not at all.

The converter asks transformers to run code that comes with a tokenizer. Folders that bring any are therefore refused; a slice
never does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from star_elastic.checkpoint import Checkpoint
from star_elastic.checkpoint.durable import sync_path
from star_elastic.errors import CheckpointError, ElasticError, TargetError, nearest
from star_elastic.progress import progress_bar
from star_elastic.submodel import own_widths_in, read_json

SCRIPT = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"
BITS = {"F32": 32.0, "BF16": 16.0, "F16": 16.0, "Q8_0": 8.5}
"""Type of a GGUF file -> bits per weight, about."""

HOW_TO_GET = (
    f"git clone https://github.com/ggml-org/llama.cpp, then set {VARIABLE} to that folder (or give --converter FOLDER)"
)
POLL_SECONDS = 0.2


class ConverterError(ElasticError, RuntimeError):
    """llama.cpp's converter is not here, or refuses a folder."""


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
        folder: a slice, or any folder that the converter knows.
        out: the file to write; it appears whole or not at all.
        kind: ``F32``, ``BF16``, ``F16`` or ``Q8_0``.
        converter: llama.cpp's folder, or the script in it; looked for in ``LLAMA_CPP`` and ``PATH`` if left out.
        python: the Python to run it with, which has what llama.cpp's requirements list; this one if left out.
        progress: draw a progress bar on a terminal.

    Returns:
        ``out``.

    Raises:
        ConverterError: the converter is not found, or refuses the folder; says what it said last.
        CheckpointError: the folder is damaged, brings code, or has layers that differ in width.
        TargetError: ``out`` exists, or lies inside the folder's place.

    Example:
        >>> export_gguf("small", "small.gguf", kind="Q8_0")  # doctest: +SKIP
    """
    folder, target = Path(folder), Path(out).absolute()
    kind = _known_kind(kind)
    script = find_converter(converter)
    runner = shutil.which(str(python)) if python else sys.executable
    if runner is None:
        raise ConverterError(f"--python {python} is no program: give a Python that has llama.cpp's requirements")
    checkpoint = Checkpoint.open(folder)
    _refuse_code(folder)
    if own := own_widths_in(folder):
        raise CheckpointError(f"{folder} is a slice whose layers differ in {', '.join(own)}: no GGUF file can say that")
    _check_file(target)
    size = int(sum(info.nbytes // info.itemsize for info in checkpoint.tensors.values()) * BITS[kind] / 8)
    # A folder beside the file: the converter may write more than one.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        partial = scratch / target.name
        command = [runner, str(script), str(folder.absolute())]
        command += ["--outfile", str(partial), "--outtype", kind.lower()]
        with progress_bar("convert", size, "bytes", shown=progress and sys.stderr.isatty()) as advance:
            said = _run(command, scratch / "said", lambda: partial.stat().st_size if partial.exists() else 0, advance)
        if not partial.exists():
            raise ConverterError(f"{script} wrote no file: {said}")
        sync_path(partial)
        partial.rename(target)
        sync_path(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Path(out)


def find_converter(given: Path | str | None = None) -> Path:
    """llama.cpp's converter: where ``given`` says, else where the variable LLAMA_CPP says, else on PATH.

    Raises:
        ConverterError: it is not there; says how to get it.
    """
    for source, place in (("--converter", given), (VARIABLE, os.environ.get(VARIABLE))):
        if place:
            script = Path(place) / SCRIPT if Path(place).is_dir() else Path(place)
            if not script.is_file():
                raise ConverterError(f"{source} is {place}, where there is no {SCRIPT}: {HOW_TO_GET}")
            return script.absolute()
    found = shutil.which(SCRIPT) or shutil.which(SCRIPT.removesuffix(".py"))
    if found is None:
        raise ConverterError(f"llama.cpp's {SCRIPT} is not on PATH: {HOW_TO_GET}")
    return Path(found).absolute()


def _known_kind(kind: str) -> str:
    if kind.upper() not in BITS:
        raise ConverterError(f"unknown type {kind!r} of a GGUF file: {nearest(kind.upper(), BITS)}")
    return kind.upper()


def _refuse_code(folder: Path) -> None:
    """Raise CheckpointError where a folder would have the converter run code of its own."""
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).exists() and "auto_map" in read_json(folder / name):
            raise CheckpointError(
                f"{folder / name} has an auto_map, so llama.cpp's converter would run code that comes with the model: "
                "remove that field"
            )


def _check_file(target: Path) -> None:
    if target.exists():
        raise TargetError(f"target {target} exists: choose another name, or remove it first")
    if not target.parent.is_dir():
        raise TargetError(f"target {target} cannot be made: there is no folder {target.parent}")


def _run(command: list[str], log: Path, written: Callable[[], int], advance: Callable[[int], None]) -> str:
    """Run the converter to its end, or end it with us; its last words, in one line.

    Raises:
        ConverterError: it fails.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
        try:
            done = 0
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                advance(written() - done)
                done = written()
        finally:
            process.kill()
            process.wait()
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing"
    if process.returncode:
        hint = (
            "; install llama.cpp's requirements, or give a --python that has them" if "No module named" in last else ""
        )
        raise ConverterError(f"llama.cpp's converter refuses the folder: {last}{hint}")
    return last
