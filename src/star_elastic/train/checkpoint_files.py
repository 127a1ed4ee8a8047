"""The files of one checkpoint of a run, and how damage to them is found.

``sums.json``, written last, lists them: the SHA-256 of what the main process wrote, the size of shards, which may be terabytes.
Without it a flipped bit would train on as a weight, unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from star_elastic.errors import CheckpointError
from star_elastic.submodel import read_json

STATE_FILE, SUMS_FILE = "state.json", "sums.json"


def write_files(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Fill a checkpoint's folder, in which shards may lie already.

    Args:
        folder: Where.
        tensors: File name without ending -> tensors.
        state: The rest, JSON-ready.
    """
    for name, content in tensors.items():
        save_file({key: tensor.contiguous() for key, tensor in content.items()}, folder / f"{name}.safetensors")
    (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    sums = {name: _sum(folder, name) for name in names}
    (folder / SUMS_FILE).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")


def read_files(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Read what ``write_files`` wrote, shards excepted.

    Raises:
        CheckpointError: a file is missing or is not what was written.
    """
    try:
        for name, written in read_json(folder / SUMS_FILE).items():
            if not (folder / name).is_file():
                raise CheckpointError(f"{name} is missing")
            if _sum(folder, name) != written:
                raise CheckpointError(f"{name} is not what was written")
        tensors = {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}
        return tensors, read_json(folder / STATE_FILE)
    except (CheckpointError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder} cannot be read ({error}); remove it to resume from the one before") from None


def _sum(folder: Path, name: str) -> str | int:
    file = folder / name
    if file.parent != folder:
        return file.stat().st_size
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
