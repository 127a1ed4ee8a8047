"""Several folders filled in one pass over a source: each of its tensors is read once, for all who take something of it.

Work is done in units of some megabytes of the source, in file order; several threads may do several units at once, and finished
units are counted in order, so that a journal needs one number to say what is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

from star_elastic.checkpoint.cut import TensorCut
from star_elastic.checkpoint.durable import sync_path
from star_elastic.checkpoint.journal import Journal
from star_elastic.checkpoint.ranges import ByteRange, merged
from star_elastic.checkpoint.target import clear
from star_elastic.checkpoint.writer import Advance, WeightFiles
from star_elastic.errors import ChecksumError

GAP_BYTES = 2**20  # rather read than asked for apart
UNIT_BYTES = 16 * 2**20
SYNC_BYTES, SYNC_SECONDS = 2**29, 5.0  # between two entries of the journal: syncing waits for the disk

Item = TypeVar("Item")


class Source(Protocol):
    """Where the bytes of the source's files come from, where they do not just lie on the disk."""

    def fetch_bytes(self, units: Sequence[Unit]) -> int:
        """Bytes that ``need`` will have to get for all of these."""
        ...

    def room(self, units: Sequence[Unit], threads: int) -> dict[Path, int]:
        """Bytes that will lie on the disk at once, and the folder in which they do."""
        ...

    def need(self, path: Path, ranges: Sequence[ByteRange], advance: Advance) -> None:
        """Return when these bytes of a file can be read; called from several threads."""
        ...

    def release(self, path: Path, ranges: Sequence[ByteRange]) -> None:
        """These bytes are not needed again; called in file order.

        Raises:
            ChecksumError: they were not those of the source.
        """
        ...

    def cancel(self) -> None:
        """Give up what ``need`` waits for."""
        ...


@dataclass
class Output:
    """A folder to be filled.

    Attributes:
        folder: it exists.
        cuts: the tensors to write.
        files: where they lie in it.
        journal: counts what is done, so that a later process goes on.
    """

    folder: Path
    cuts: Sequence[TensorCut]
    files: WeightFiles
    journal: Journal | None = None
    done: int = 0

    def begin(self) -> None:
        """Go on where the journal says, if the weight files are as planned; else start over. Other files are removed."""
        self.done = self.journal.done if self.journal and self.files.are_begun(self.folder) else 0
        clear(self.folder, keep={file.name for file in self.files.files} if self.done else set())
        if not self.done:
            self.files.begin(self.folder)

    def give_up(self) -> None:
        """Nothing of what was done may be used."""
        if self.journal is not None:
            self.journal.forget()

    def commit(self) -> None:
        """Enter what is done into the journal, once it is on the disk."""
        if self.journal is not None and self.done > self.journal.done:
            for file in self.files.files:
                sync_path(self.folder / file.name)
            self.journal.record(self.done)


@dataclass
class Unit:
    """Neighbouring tensors of one file, and what is made of them."""

    path: Path
    nbytes: int = 0
    jobs: list[tuple[Output, TensorCut]] = field(default_factory=list)

    @cached_property
    def ranges(self) -> list[ByteRange]:
        """Bytes of the file that all jobs together read, with small gaps; asked for once all jobs are there."""
        return merged((found for _, cut in self.jobs for found in cut.ranges(GAP_BYTES)), GAP_BYTES)


def write_units(
    units: Sequence[Unit],
    outputs: Sequence[Output],
    advance: Advance = lambda done: None,
    *,
    threads: int = 1,
    source: Source | None = None,
) -> None:
    """Fill folders with their weights.

    Args:
        units: what ``plan_units`` says is left of ``outputs``.
        outputs: begun.
        advance: told how many bytes were written since it was last called, or fetched where there is a ``source``.
        threads: units that are worked on at once.
        source: where bytes come from that are not on the disk yet.
    """

    def work(unit: Unit) -> None:
        if source is not None:
            source.need(unit.path, unit.ranges, advance)
        for output, cut in unit.jobs:
            output.files.write(output.folder, cut, _ignore if source else advance)

    log = _Log(outputs, source)
    try:
        for unit in in_order(work, units, threads, cancel=source.cancel if source else _ignore):
            log.finished(unit)
        if source is not None:  # what lies on this disk is synced with the folder, in a moment
            log.commit()
    except ChecksumError:
        for output in outputs:
            output.give_up()
        raise
    except BaseException:
        if source is not None:  # what was fetched is kept
            log.commit()
        raise


class _Log:
    """Finished units that are not yet surely on the disk."""

    def __init__(self, outputs: Sequence[Output], source: Source | None) -> None:
        self.outputs = outputs
        self.source = source
        self._open: list[Unit] = []
        self._last = time.monotonic()

    def finished(self, unit: Unit) -> None:
        for output, _ in unit.jobs:
            output.done += 1
        self._open.append(unit)
        if sum(unit.nbytes for unit in self._open) >= SYNC_BYTES or time.monotonic() - self._last >= SYNC_SECONDS:
            self.commit()

    def commit(self) -> None:
        if self.source is not None:  # first, because this tells whether the bytes were right
            for unit in self._open:
                self.source.release(unit.path, unit.ranges)
        for output in self.outputs:
            output.commit()
        self._open.clear()
        self._last = time.monotonic()


def _ignore(*_: object) -> None:
    pass


def plan_units(outputs: Sequence[Output]) -> list[Unit]:
    """What is left to do, in file order."""
    jobs = []
    for output in outputs:
        jobs += [(output, cut) for cut in sorted(output.cuts, key=_place)[output.done :]]
    units: list[Unit] = []
    for _, group in groupby(sorted(jobs, key=lambda job: _place(job[1])), key=lambda job: _place(job[1])):
        same_tensor = list(group)
        info = same_tensor[0][1].info
        if not units or units[-1].path != info.path or units[-1].nbytes + info.nbytes > UNIT_BYTES:
            units.append(Unit(info.path))
        units[-1].nbytes += info.nbytes
        units[-1].jobs += same_tensor
    return units


def _place(cut: TensorCut) -> tuple[str, int]:
    return str(cut.info.path), cut.info.offset


def in_order(
    work: Callable[[Item], None], items: Iterable[Item], threads: int, cancel: Callable[[], None] = lambda: None
) -> Iterator[Item]:
    """Work on items, several at once, and yield each, in the given order, when it is done.

    Where the caller stops or ``work`` raises, ``cancel`` is called, what has begun is waited for, and the rest is left.
    """
    if threads == 1:
        for item in items:
            work(item)
            yield item
        return
    with ThreadPoolExecutor(threads) as pool:
        begun: deque[tuple[Item, Future[None]]] = deque()
        try:
            for item in items:
                begun.append((item, pool.submit(work, item)))
                if len(begun) > threads:
                    yield _finish(begun)
            while begun:
                yield _finish(begun)
        except BaseException:
            cancel()
            for _, future in begun:
                future.cancel()
            raise


def _finish(begun: deque[tuple[Item, Future[None]]]) -> Item:
    item, future = begun[0]
    future.result()
    begun.popleft()
    return item
