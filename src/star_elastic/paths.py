"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path


def expanded(path: str) -> str:
    """A path whose ``~`` or ``~user`` at the beginning is the home folder, also where a shell left it: in quotes, after a ``=``.

    Anything else, and a user that does not exist, stays as it is.

    Example:
        >>> expanded("~/models")  # doctest: +SKIP
        '/home/me/models'
    """
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:  # no such user
        return path
