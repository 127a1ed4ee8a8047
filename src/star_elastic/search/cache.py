"""Losses that were measured, in a JSON file, so that a second search or one that was interrupted need not measure them again."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from star_elastic.errors import CheckpointError, TargetError
from star_elastic.submodel import Submodel, read_json

FORMAT_VERSION = 1


class Subject(BaseModel):
    """What a loss is of, beside the nested model: the same weights, on the same tokens, in the same dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parent_fingerprint: str
    weights_sample_sha256: str
    data_sha256: str
    dtype: str


class Entry(Subject):
    """One measured loss, in nats per token; widths are spelled out for every axis."""

    widths: dict[str, int]
    layers: tuple[int, ...] | None
    loss: FiniteFloat


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format_version: int
    losses: list[Entry]


class Cache:
    """Losses of nested models of one subject; other subjects in the same file are kept as they are.

    Args:
        path: the file, made at the first loss; None keeps losses in memory only.
        subject: what is measured now.

    Raises:
        CheckpointError: the file cannot be read, or is of another format.
        TargetError: its folder does not exist.
    """

    def __init__(self, path: Path | str | None, subject: Subject) -> None:
        self.path = None if path is None else Path(path)
        self.subject = subject
        self._entries = {} if self.path is None else {_key(entry): entry for entry in _read(self.path)}

    def get(self, submodel: Submodel) -> float | None:
        """The loss of a nested model with all its widths spelled out, or None where it was not measured."""
        entry = self._entries.get(_key(self._entry(submodel, 0.0)))
        return None if entry is None else entry.loss

    def put(self, submodel: Submodel, loss: float) -> None:
        """Record a loss; the file before stays whole until the new one is."""
        entry = self._entry(submodel, loss)
        self._entries[_key(entry)] = entry
        if self.path is None:
            return
        losses = [entry.model_dump(mode="json") for entry in self._entries.values()]
        fresh = self.path.with_name(f".{self.path.name}.partial")
        text = json.dumps({"format_version": FORMAT_VERSION, "losses": losses}, indent=1, allow_nan=False)
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.replace(self.path)

    def _entry(self, submodel: Submodel, loss: float) -> Entry:
        return Entry(**self.subject.model_dump(), widths=submodel.widths, layers=submodel.layers, loss=loss)


def _key(entry: Entry) -> str:
    return json.dumps(entry.model_dump(mode="json", exclude={"loss"}), sort_keys=True)


def _read(path: Path) -> list[Entry]:
    if not path.parent.is_dir():
        raise TargetError(f"--cache {path}: folder {path.parent} does not exist")
    if not path.exists():
        return []
    try:
        content = _File.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is no cache of a search: {where}: {first['msg']}") from None
    if content.format_version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format_version {content.format_version}; this version reads {FORMAT_VERSION}")
    return content.losses
