"""Where documents come from: files, ``datasets`` folders and hub datasets, all as sequences with random access.

Text and JSON lines are read by ``files``; parquet, folders and hub names go through ``datasets``, which memory-maps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from star_elastic.errors import DataError, nearest
from star_elastic.train import hub
from star_elastic.train.files import JsonSource, TextSource
from star_elastic.train.recipe import SourceRecipe
from star_elastic.train.rows import Document, check_document, choose_field, holds_text

ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # anything else is text
TEXT_ENDINGS = (".txt", ".md", ".rst")  # what a directory of text files is searched for


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
    if not any(holds_text(source[index]) for index in range(len(source))):
        raise DataError(f"{recipe.name} holds no text: {len(source)} documents, all empty")
    return source


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
        try:
            value = self._column[index][self.field]
        except UnicodeDecodeError:  # files say that a column is UTF-8, and nobody checks before it is read
            raise DataError(f"{self.place(index)}: field {self.field!r}: not valid Unicode text") from None
        check_document(value, self.field, self.place(index))
        return value or ""

    def place(self, index: int) -> str:
        return f"{self.name}: row {index}"


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
        fault = "is no regular file; save its content to one" if path.exists() else "does not exist"
        raise DataError(f"data {recipe.path} {fault}")
    forms = {ENDINGS.get(file.suffix.lower(), "text") for file in files} if recipe.format == "auto" else {recipe.format}
    if len(forms) > 1:
        raise DataError(f"{recipe.path} mixes {', '.join(sorted(forms))} files; make one source of each")
    return files, forms.pop()


def _matches(pattern: Path) -> list[Path]:
    """The files that a glob means, absolute or relative."""
    begin = Path(pattern.anchor)
    return sorted(file for file in begin.glob(str(pattern.relative_to(begin))) if file.is_file())


def _open_table(recipe: SourceRecipe, files: Sequence[Path], form: str = "hub") -> Source:
    from pyarrow.parquet import ParquetFile

    with hub.quiet_datasets() as datasets:
        online = form != "hub" or hub.answers(recipe)
        try:
            if form == "dataset":
                table = datasets.load_from_disk(str(files[0]))
            elif form == "parquet":
                filled = [str(file) for file in files if ParquetFile(file).metadata.num_rows]  # datasets fails on empty ones
                if not filled:
                    raise ValueError("it has no rows")
                table = datasets.Dataset.from_parquet(filled)
            else:
                with nullcontext() if online else hub.offline():
                    table = datasets.load_dataset(recipe.hub, recipe.subset, split=recipe.split, revision=recipe.revision)
        except Exception as error:  # datasets raises whatever its readers, its cache or the network raise
            reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
            if not online and isinstance(error, ConnectionError):
                reason = "the hub cannot be reached, no copy is in the cache"
            here = "" if form != "hub" or Path(str(recipe.hub)).exists() else f", and there is no {recipe.hub} on this disk"
            raise DataError(f"{recipe.name} cannot be read: {reason}{here}") from None
        if isinstance(table, datasets.DatasetDict):
            if recipe.split not in table:
                raise DataError(f"{recipe.name}: no split {recipe.split!r}; {nearest(recipe.split, table)}")
            table = table[recipe.split]
    return TableSource(recipe.name, table, recipe.field)
