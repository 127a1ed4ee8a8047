"""Folders that appear whole or not at all: filled beside their final place, renamed at the end.

The unfinished sibling of ``out/small`` is ``out/.small.partial``. It is locked while its writer lives, so that a second writer
is refused, and one that was killed leaves a sibling without a lock, which the next run clears, or continues where a journal
says how.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from star_elastic.checkpoint.durable import sync_path, sync_tree
from star_elastic.checkpoint.journal import Journal
from star_elastic.errors import CheckpointError, ElasticError, TargetError
from star_elastic.units import format_bytes


def check_target(out: Path | str, *sources: Path | str) -> Path:
    """The absolute path of a folder that may be written, which is empty or does not exist; symbolic links are followed.

    Raises:
        TargetError: ``out`` is a file or a non-empty folder, cannot be made where it would lie, or is, contains or lies
            inside one of ``sources``.
    """
    target = _resolved(out)
    for source in map(_resolved, sources):
        if target == source:
            raise TargetError(f"target {out} is the source itself: choose another folder")
        if target.is_relative_to(source):
            raise TargetError(f"target {out} lies inside the source {source}: choose a folder outside it")
        if source.is_relative_to(target):
            raise TargetError(f"target {out} contains the source {source}: choose another folder")
    if target.exists() and not target.is_dir():
        raise TargetError(f"target {out} is a file: choose the name of a new folder")
    if target.is_dir() and any(target.iterdir()):
        raise TargetError(f"target {out} exists and is not empty: choose another folder, or remove it first")
    _check_can_make(out, _nearest(target))
    return target


def _check_can_make(out: Path | str, parent: Path) -> None:
    """Raise TargetError unless folders can be made in ``parent``, the nearest that exists."""
    if not parent.is_dir():
        raise TargetError(f"target {out} cannot be made: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TargetError(f"target {out} cannot be made: {parent} is not writable")
    if not os.access(parent, os.R_OK):  # a folder is opened to be synced
        raise TargetError(f"target {out} cannot be made: {parent} is not readable")


def _resolved(path: Path | str) -> Path:
    try:
        return Path(path).resolve()
    except (RuntimeError, OSError, ValueError) as error:  # links in a circle, a null byte
        raise TargetError(f"{str(path)!r} is no path that can be followed: {error}") from None


def partial_of(target: Path) -> Path:
    """Where a target is filled."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def target_folder(
    out: Path | str, *sources: Path | str, size: int = 0, journal: Journal | None = None
) -> Iterator[Path]:
    """Give a temporary folder to fill; when the block ends, its files are synced and it becomes ``out``.

    On any exception nothing stays, except for a journal that says to keep what it counts.

    Args:
        out: the folder to make; it may exist if it is empty.
        sources: folders that are read meanwhile, which ``out`` must not touch.
        size: bytes that will be written, where known; checked against the free space first.
        journal: where it counts tensors that an earlier process finished, the folder is given as that process left it.

    Raises:
        TargetError: see check_target; or another process is writing the same target.
        CheckpointError: the disk is full, or the system refuses to write.
    """
    target = check_target(out, *sources)
    made = _make_parents(target)
    partial = partial_of(target)
    finished = kept = False
    try:
        lock = _lock(partial)
        try:
            check_target(target, *sources)  # once more: another writer may have finished while we waited for nothing
            if journal is None or not journal.done:
                clear(partial)
            check_space({target: size})
            yield partial
            sync_tree(partial)
            partial.rename(target)
            finished = True
            sync_path(target.parent)
        finally:
            kept = not finished and journal is not None and journal.keep and journal.done > 0
            if not finished and not kept:
                shutil.rmtree(partial, ignore_errors=True)
            if journal is not None and not kept:
                journal.forget()
            os.close(lock)
    except ElasticError:
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}{where}") from error
    finally:
        if not finished and not kept:
            remove_empty(made)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Give a folder that is empty when the block begins and gone when it ends, whatever an earlier process left there.

    Raises:
        TargetError: another process uses it.
        CheckpointError: it cannot be made.
    """
    made = _make_parents(path)
    try:
        lock = _lock(path)
        try:
            clear(path)
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    finally:
        remove_empty(made)


def _make_parents(target: Path) -> list[Path]:
    """Make the folder that holds ``target``; return the folders that did not exist, innermost first."""
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write into {target.parent}: {error.strerror}") from error
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, innermost first, up to the first that holds something."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # somebody else put something there
            return


def _lock(partial: Path) -> int:
    """Make and lock the temporary folder; return the descriptor that holds the lock."""
    while True:
        partial.mkdir(exist_ok=True)
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # its writer has just finished
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock its writer may have renamed it: then we hold its finished folder, and must let go.
            if partial.exists() and os.path.samestat(os.fstat(lock), partial.stat()):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise TargetError(
                f"another process is writing {partial.name}: wait for it, or choose another folder"
            ) from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def clear(folder: Path, keep: Collection[str] = ()) -> None:
    """Empty a folder, but for the files of these names."""
    for entry in folder.iterdir():
        if entry.name in keep and entry.is_file() and not entry.is_symlink():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def check_space(sizes: Mapping[Path, int]) -> None:
    """Refuse what does not fit: bytes that each folder will take, summed over those that lie on the same disk.

    What an unfinished folder of the same name already takes is used again, or freed.

    Raises:
        CheckpointError: a disk has less free.
    """
    disks: dict[int, list[Path]] = {}
    for target in sizes:
        disks.setdefault(_nearest(target).stat().st_dev, []).append(target)
    for targets in disks.values():
        needed = sum(max(0, sizes[target] - _taken(partial_of(target))) for target in targets)
        free = shutil.disk_usage(_nearest(targets[0])).free
        if needed > free:
            names = " and ".join(str(target) for target in targets if sizes[target])
            raise CheckpointError(
                f"not enough space for {names}: needs {format_bytes(needed)}, {format_bytes(free)} are free on that disk"
            )


def _nearest(target: Path) -> Path:
    """The folder that exists in which ``target`` lies, or will."""
    return next(parent for parent in target.parents if parent.exists())


def _taken(folder: Path) -> int:
    """Bytes on the disk of the files of a folder; holes take none."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
