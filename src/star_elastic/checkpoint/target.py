"""Folders that appear whole or not at all: filled beside their final place, renamed at the end.

The unfinished sibling of ``out/small`` is ``out/.small.partial``. It is locked while its writer lives, so that a second writer
is refused, and one that was killed leaves a sibling without a lock, which the next run clears.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from star_elastic.errors import CheckpointError, TargetError
from star_elastic.units import format_bytes


def check_target(out: Path | str, *sources: Path | str) -> Path:
    """The absolute path of a folder that may be written, which is empty or does not exist; symbolic links are followed.

    Raises:
        TargetError: ``out`` is a file or a non-empty folder, cannot be made where it would lie, or is, contains or lies
            inside one of ``sources``.
    """
    target = Path(out).resolve()
    for source in (Path(given).resolve() for given in sources):
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
    _check_can_make(out, next(parent for parent in target.parents if parent.exists()))
    return target


def _check_can_make(out: Path | str, parent: Path) -> None:
    """Raise TargetError unless folders can be made in ``parent``, the nearest that exists."""
    if not parent.is_dir():
        raise TargetError(f"target {out} cannot be made: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TargetError(f"target {out} cannot be made: {parent} is not writable")


@contextmanager
def target_folder(out: Path | str, *sources: Path | str, size: int = 0) -> Iterator[Path]:
    """Give a temporary folder to fill; when the block ends, it becomes ``out``. On any exception nothing stays.

    Args:
        out: the folder to make; it may exist if it is empty.
        sources: folders that are read meanwhile, which ``out`` must not touch.
        size: bytes that will be written, where known; checked against the free space first.

    Raises:
        TargetError: see check_target; or another process is writing the same target.
        CheckpointError: the disk is full, or the system refuses to write.
    """
    target = check_target(out, *sources)
    made = _make_parents(target)
    partial = target.with_name(f".{target.name}.partial")
    finished = False
    try:
        lock = _lock(partial)
        try:
            check_target(target, *sources)  # once more: another writer may have finished while we waited for nothing
            _check_space(target, size)
            yield partial
            partial.rename(target)
            finished = True
        finally:
            if not finished:
                shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)
    except (TargetError, CheckpointError):
        raise
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}{where}") from error
    finally:
        if not finished:
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
    """Make, empty and lock the temporary folder; return the descriptor that holds the lock."""
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
                _clear(partial)
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


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _check_space(target: Path, size: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise CheckpointError(
            f"not enough space for {target}: needs {format_bytes(size)}, {format_bytes(free)} are free on that disk"
        )
