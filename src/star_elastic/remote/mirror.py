"""A folder that stands for a model of the hub: headers and small files are there, tensors come when they are asked for."""

from __future__ import annotations

import hashlib
import mmap
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from star_elastic.checkpoint import scratch_folder
from star_elastic.checkpoint.companions import is_companion
from star_elastic.checkpoint.onepass import SYNC_BYTES, Unit
from star_elastic.checkpoint.ranges import ByteRange, length, merged
from star_elastic.checkpoint.reader import INDEX, SINGLE
from star_elastic.checkpoint.writer import Advance, write_at
from star_elastic.errors import ChecksumError, RemoteError
from star_elastic.opened import OpenedSource
from star_elastic.remote.http import RangeReader
from star_elastic.remote.hub import IMPATIENCE, PATIENCE, HubModel, Patience, RemoteFile, find_model
from star_elastic.submodel import FILE_NAME, read_json

ALWAYS = frozenset({"config.json", FILE_NAME, "README.md", INDEX, "hf_quant_config.json"})
HEADER_GUESS = 2**18  # most headers are shorter; a longer one costs a second request
CONNECTIONS = 4
HASH_BYTES = 2**20


@contextmanager
def open_hub(
    name: str, revision: str | None = None, scratch: Path | None = None, patience: Patience | None = None
) -> Iterator[OpenedSource]:
    """Open a model of the hub: small files and headers are fetched now, tensors on demand.

    Args:
        name: ``org/name``.
        revision: branch, tag or commit; the main branch if left out.
        scratch: a folder to make, and to remove in the end; a temporary one if left out.
        patience: how often to try again.

    Raises:
        RemoteError: no such model or revision; not ours to read; not reachable; not a model in safetensors; damaged.
        TargetError: another process uses ``scratch``.
    """
    model = find_model(name, revision, patience or IMPATIENCE)
    with ExitStack() as stack:
        if scratch is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="star-elastic-")))
        else:
            folder = stack.enter_context(scratch_folder(scratch))
        mirror = HubMirror(model, folder, RangeReader(name, patience or PATIENCE))
        mirror.open()
        yield OpenedSource(folder, identity=f"{name}@{model.commit}", parent=name, fetch=mirror)


@dataclass
class _Weights:
    """A weight file: what the hub has, and how much of the copy here was hashed."""

    remote: RemoteFile
    ranged: bool = True
    complete: bool = False
    hashed: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    lock: threading.Lock = field(default_factory=threading.Lock)


class HubMirror:
    """The files of a model in a local folder, filled on demand; a ``checkpoint.Source``.

    Attributes:
        model: what it stands for.
        folder: where it lies.
        whole_files: weight files that the server sends only as a whole.
        verified: weight files that were read whole and have the hash that the hub says.
    """

    def __init__(self, model: HubModel, folder: Path, reader: RangeReader) -> None:
        self.model = model
        self.folder = folder
        self.whole_files: list[str] = []
        self.verified: list[str] = []
        self._reader = reader
        self._files: dict[Path, _Weights] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files on the hub."""
        return sum(file.remote.size for file in self._files.values())

    @property
    def file_count(self) -> int:
        """Number of weight files on the hub."""
        return len(self._files)

    def checked(self) -> str:
        """What is known about the bytes that were read, for people."""
        rest = ", the others, read in part, by length and header" if len(self.verified) < self.file_count else ""
        return (
            f"checked: config, tokenizer and index by hash; {len(self.verified)} of {self.file_count} weight files "
            f"by SHA-256{rest}"
        )

    def open(self) -> None:
        """Fetch the small files, and the header of each weight file.

        Raises:
            RemoteError: see ``open_hub``.
        """
        self._refuse_other_formats()
        for name, file in self.model.files.items():
            if name in ALWAYS or is_companion(name):
                self._fetch_small(file)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for _ in pool.map(self._fetch_header, self._weight_files()):
                pass

    def _refuse_other_formats(self) -> None:
        names = self.model.files
        if "config.json" not in names:
            raise RemoteError(f"{self.model.name} holds no config.json: it is not a transformers model")
        if INDEX in names or SINGLE in names:
            return
        pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
        found = f"only pickled weights ({pickled[0]})" if pickled else f"neither {SINGLE} nor {INDEX}"
        raise RemoteError(f"{self.model.name} holds {found}: only safetensors can be read from the hub")

    def _weight_files(self) -> list[RemoteFile]:
        """Those that the index names; what is wrong with an index is told when the folder is opened."""
        names = {SINGLE}
        if INDEX in self.model.files:
            weight_map = read_json(self.folder / INDEX).get("weight_map")
            names |= {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
        return [file for name, file in sorted(self.model.files.items()) if name in names and "/" not in name]

    def _fetch_small(self, file: RemoteFile) -> None:
        """Download a file whole, and compare it with the hash that the hub says."""
        path = self.folder / file.name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as opened:
            self._reader.read(file, 0, file.size, lambda at, chunk: opened.write(chunk), whole_answers=True)
        content = path.read_bytes()
        if file.sha256 is not None and hashlib.sha256(content).hexdigest() != file.sha256:
            raise ChecksumError(f"{file.name} of {self.model.name} has not the SHA-256 that the hub says")
        git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if file.git_sha1 is not None and git != file.git_sha1:
            raise ChecksumError(f"{file.name} of {self.model.name} has not the hash that the hub says")

    def _fetch_header(self, file: RemoteFile) -> None:
        """Make a weight file of full length with its header; what is wrong with a header is told when it is parsed."""
        path = self.folder / file.name
        weights = self._files[path] = _Weights(file)
        with path.open("wb") as opened:

            def write(at: int, chunk: bytes) -> None:
                write_at(opened.fileno(), chunk, at)

            have = min(file.size, HEADER_GUESS)
            weights.ranged = self._reader.read(file, 0, have, write, whole_answers=True)
            with path.open("rb") as written:
                end = min(file.size, 8 + int.from_bytes(written.read(8), "little"))
            if end > have:
                self._reader.read(file, have, end, write, whole_answers=not weights.ranged)
            opened.truncate(file.size)
        self._hash(path, weights, end)
        if not weights.ranged:
            self.whole_files.append(file.name)

    def fetch_bytes(self, units: Sequence[Unit]) -> int:
        """Bytes to fetch for all of these; a file that comes only as a whole is counted so, once."""
        ranged = sum(length(unit.ranges) for unit in units if self._files[unit.path].ranged)
        whole = {unit.path for unit in units if not self._files[unit.path].ranged}
        return ranged + sum(self._files[path].remote.size for path in whole)

    def room(self, units: Sequence[Unit], threads: int) -> dict[Path, int]:
        """Ranges go when they are cut, some hundred megabytes later; whole files too."""
        needed = self.fetch_bytes(units)
        if self.whole_files:
            return {self.folder: needed}
        largest = max((length(unit.ranges) for unit in units), default=0)
        return {self.folder: min(needed, SYNC_BYTES + (threads + 1) * largest)}

    def need(self, path: Path, ranges: Sequence[ByteRange], advance: Advance) -> None:
        """Fetch these ranges into the file; or all of it, once, where the server knows no ranges."""
        file = self._files[path]
        with path.open("r+b", buffering=0) as opened:

            def write(at: int, chunk: bytes) -> None:
                write_at(opened.fileno(), chunk, at)
                advance(len(chunk))

            if file.ranged:
                for start, stop in ranges:
                    self._reader.read(file.remote, start, stop, write)
                return
            with file.lock:
                if not file.complete:
                    self._reader.read(file.remote, 0, file.remote.size, write, whole_answers=True)
                    self._hash(path, file, file.remote.size)
                    file.complete = True

    def release(self, path: Path, ranges: Sequence[ByteRange]) -> None:
        """Give these bytes back to the disk, after hashing them where nothing before them was left out.

        Raises:
            ChecksumError: the file is whole with them, and has another hash than the hub says.
        """
        file = self._files[path]
        for start, stop in merged(ranges):
            if start == file.hashed and not file.complete:
                self._hash(path, file, stop)
            punch(path, start, stop)

    def cancel(self) -> None:
        """Stop fetching."""
        self._reader.cancel()

    def _hash(self, path: Path, file: _Weights, stop: int) -> None:
        """Hash on to ``stop``; compare when that is the end."""
        with path.open("rb") as opened:
            opened.seek(file.hashed)
            while file.hashed < stop:
                chunk = opened.read(min(HASH_BYTES, stop - file.hashed))
                file.digest.update(chunk)
                file.hashed += len(chunk)
        if file.hashed == file.remote.size and file.remote.sha256 is not None:
            if file.digest.hexdigest() != file.remote.sha256:
                raise ChecksumError(
                    f"{file.remote.name} of {self.model.name} has not the SHA-256 that the hub says: start again"
                )
            self.verified.append(file.remote.name)


def punch(path: Path, start: int, stop: int) -> None:
    """Turn the whole pages between two bytes of a file into a hole, where the file system can; elsewhere they stay."""
    page = mmap.PAGESIZE
    first, last = -(-start // page) * page, stop // page * page
    remove = getattr(mmap, "MADV_REMOVE", None)
    if remove is None or first >= last:
        return
    with path.open("r+b") as file, suppress(OSError), mmap.mmap(file.fileno(), 0) as mapped:
        mapped.madvise(remove, first, last - first)
