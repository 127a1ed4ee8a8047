"""Files of text and JSON lines as byte spans: read through once to check them, then on demand.

So the size of a file is bounded by the disk and not by memory, and a broken line is told before any weight is loaded, not in the
middle of a night.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from star_elastic.errors import DataError, nearest
from star_elastic.train.rows import Document, check_document, choose_field, parse_row

PIECE_BYTES = 1 << 20


class _Spans:
    """Byte spans in files. Three flat arrays: a million lines take 24 MB, not a million Python objects."""

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name = name
        self._files = list(files)
        self._file, self._start, self._length = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._file)

    def _add(self, file: int, start: int, length: int) -> None:
        self._file.append(file)
        self._start.append(start)
        self._length.append(length)

    def _read(self, index: int) -> bytes:
        with self._files[self._file[index]].open("rb") as stream:
            stream.seek(self._start[index])
            return stream.read(self._length[index])

    def place(self, index: int) -> str:
        file = self._files[self._file[index]]
        with file.open("rb") as stream:
            line = stream.read(self._start[index]).count(b"\n") + 1
        return f"{file}:{line}"


class TextSource(_Spans):
    """Plain text files. One of more than 1 MiB is taken in pieces that end at a line: tokenizing needs many times its input."""

    def __init__(self, name: str, files: Sequence[Path], sample_by: str) -> None:
        super().__init__(name, files)
        for number, file in enumerate(self._files):
            for start, block in _blocks(file, sample_by):
                _decode(block, file)
                if block.strip():
                    self._add(number, start, len(block))

    def __getitem__(self, index: int) -> str:
        return self._read(index).decode("utf-8")


class JsonSource(_Spans):
    """JSON lines: one object a line, with the text or the conversation in ``field``."""

    def __init__(self, name: str, files: Sequence[Path], field: str | None) -> None:
        super().__init__(name, files)
        self.field = field
        for number, file in enumerate(self._files):
            for line, (start, raw) in enumerate(_blocks(file, "line"), start=1):
                if not raw.strip():
                    continue
                row = parse_row(raw, f"{file}:{line}")
                if self.field is None:
                    self.field = choose_field(row, f"{file}:{line}")
                if self.field not in row:
                    raise DataError(f"{file}:{line}: no field {self.field!r}; {nearest(self.field, row)}")
                check_document(row[self.field], self.field, f"{file}:{line}")
                self._add(number, start, len(raw))

    def __getitem__(self, index: int) -> Document:
        return json.loads(self._read(index))[self.field] or ""


def _decode(block: bytes, file: Path) -> None:
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text; convert it, or leave it out") from None


def _blocks(file: Path, sample_by: str) -> Iterator[tuple[int, bytes]]:
    """(first byte, bytes) of every line, paragraph or document of a file."""
    try:
        with file.open("rb") as stream:
            start, block = 0, bytearray()
            for line in stream:
                ends = {
                    "line": True,
                    "paragraph": not line.strip(),
                    "document": len(block) + len(line) >= PIECE_BYTES,
                }[sample_by]
                block += line
                if ends:
                    yield start, bytes(block)
                    start, block = start + len(block), bytearray()
            if block:
                yield start, bytes(block)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
