"""Where documents come from: files, ``datasets`` folders and hub datasets, all as sequences with random access.

Files of text and JSON lines are indexed by byte spans and read on demand, so their size is bounded by the disk and not by
memory; parquet, folders and hub names go through ``datasets``, which memory-maps them. Text and JSON lines are read through once
when they are opened: a broken line is then told before any weight is loaded, not in the middle of a night.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from star_elastic.errors import DataError, nearest
from star_elastic.train.recipe import SourceRecipe

Message = dict[str, Any]
Document = str | list[Message]  # raw text, or a conversation

ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # anything else is text
TEXT_ENDINGS = (".txt", ".md", ".rst")  # what a directory of text files is searched for
PIECE_BYTES = 1 << 20


class Source(Protocol):
    """Documents with random access.

    Attributes:
        name: How messages call the source.
    """

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def place(self, index: int) -> str:
        """Where a document lies, for messages: file and line, or row."""


def open_source(recipe: SourceRecipe) -> Source:
    """Open one source and check that it can be read and holds something.

    Raises:
        DataError: missing, unreadable, of an unknown kind, without the wanted field, or empty.
    """
    if recipe.hub is not None:
        source: Source = _open_table(recipe, [])
    else:
        files, form = _find_files(recipe)
        if form == "text":
            source = TextSource(recipe.name, files, recipe.sample_by)
        elif form == "jsonl":
            source = JsonSource(recipe.name, files, recipe.field)
        else:
            source = _open_table(recipe, files, form)
    if not any(_holds_text(source[index]) for index in range(len(source))):
        raise DataError(f"{recipe.name} holds no text: {len(source)} documents, all empty")
    return source


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
                row = _parse_row(raw, f"{file}:{line}")
                if self.field is None:
                    self.field = choose_field(row, f"{file}:{line}")
                if self.field not in row:
                    raise DataError(f"{file}:{line}: no field {self.field!r}; {nearest(self.field, row)}")
                check_document(row[self.field], f"{file}:{line}: field {self.field!r}")
                self._add(number, start, len(raw))

    def __getitem__(self, index: int) -> Document:
        return json.loads(self._read(index))[self.field] or ""


class TableSource:
    """A ``datasets`` table: a parquet file, a folder on disk, or a dataset of the hub."""

    def __init__(self, name: str, table: Any, field: str | None) -> None:
        self.name, self.field = name, field or choose_field(table.features, name)
        if self.field not in table.features:
            raise DataError(f"{name}: no field {self.field!r}; {nearest(self.field, table.features)}")
        self._column = table.select_columns([self.field])

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> Document:
        value = self._column[index][self.field] or ""
        check_document(value, f"{self.place(index)}: field {self.field!r}")
        return value

    def place(self, index: int) -> str:
        return f"{self.name}: row {index}"


def choose_field(row: Any, place: str) -> str:
    """``messages`` where there is one, else ``text``.

    Raises:
        DataError: neither is there.
    """
    for field in ("messages", "text"):
        if field in row:
            return field
    raise DataError(f"{place}: neither 'messages' nor 'text'; name the field: one of {', '.join(sorted(row))}")


def check_document(value: Any, place: str) -> None:
    """Refuse what is neither text nor a conversation; None counts as empty text.

    Raises:
        DataError: names the place and the type found.
    """
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list):
        raise DataError(f"{place} holds {type(value).__name__}; it must be text, or a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{place}: a message must be an object with 'role' and 'content', not {str(message)[:60]!r}")


def _holds_text(document: Document) -> bool:
    if isinstance(document, str):
        return bool(document.strip())
    return any(str(message.get("content") or "").strip() for message in document)


def _parse_row(raw: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
        raise DataError(f"{place}: not valid JSON ({reason}); JSON lines hold one object in each line") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: holds a JSON {type(row).__name__}; JSON lines hold one object in each line")
    return row


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


def _find_files(recipe: SourceRecipe) -> tuple[list[Path], str]:
    """The files of a source, and how to read them."""
    path = Path(str(recipe.path))
    if path.is_dir():
        if recipe.format == "dataset" or (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return [path], "dataset"
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_ENDINGS and file.is_file())
        if not files:
            raise DataError(f"directory {path} holds no {', '.join(TEXT_ENDINGS)} file; give a glob such as {path}/**/*.py")
    else:
        files = [path] if path.is_file() else _matches(path)
    if not files:
        raise DataError(f"data {recipe.path} does not exist")
    forms = {ENDINGS.get(file.suffix.lower(), "text") for file in files} if recipe.format == "auto" else {recipe.format}
    if len(forms) > 1:
        raise DataError(f"{recipe.path} mixes {', '.join(sorted(forms))} files; make one source of each")
    return files, forms.pop()


def _matches(pattern: Path) -> list[Path]:
    """The files that a glob means, absolute or relative."""
    begin = Path(pattern.anchor)
    return sorted(file for file in begin.glob(str(pattern.relative_to(begin))) if file.is_file())


def _open_table(recipe: SourceRecipe, files: Sequence[Path], form: str = "hub") -> Source:
    with _quiet_datasets() as datasets:
        try:
            if form == "dataset":
                table = datasets.load_from_disk(str(files[0]))
            elif form == "parquet":
                table = datasets.Dataset.from_parquet([str(file) for file in files])
            else:
                table = datasets.load_dataset(recipe.hub, recipe.subset, split=recipe.split, revision=recipe.revision)
        except Exception as error:  # datasets raises whatever its readers, its cache or the network raise
            reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise DataError(f"{recipe.name} cannot be read: {reason[0]}") from None
        if isinstance(table, datasets.DatasetDict):
            if recipe.split not in table:
                raise DataError(f"{recipe.name}: no split {recipe.split!r}; {nearest(recipe.split, table)}")
            table = table[recipe.split]
    return TableSource(recipe.name, table, recipe.field)


@contextmanager
def _quiet_datasets() -> Iterator[Any]:
    """``datasets`` without its own progress bars, put back as they were."""
    import datasets

    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if not silent:
            datasets.enable_progress_bars()
