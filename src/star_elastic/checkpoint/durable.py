"""Bytes that survive a power cut: the system may keep what it said was written in memory for half a minute."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Return when a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return when a folder and everything in it is on the disk."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            sync_tree(entry)
        elif entry.is_file():
            sync_path(entry)
    sync_path(folder)
