"""Errors that a user can cause. Every message is one line: what is wrong, with the offending value, and what would be right.

The command line prints the message and exits with code 2; as a library each class is also the builtin kind that a caller would
expect, so ``except ValueError`` works.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 12  # that a message lists


class ElasticError(Exception):
    """Base of all errors caused by the user's input."""


class WidthError(ElasticError, ValueError):
    """A width, or a set of kept layers, that the model cannot be cut to."""


class UnknownNameError(ElasticError, LookupError):
    """A submodel, preset, family, axis or tensor name that does not exist."""


class ReservedNameError(ElasticError, ValueError):
    """A submodel named as something that means something else."""


class CheckpointError(ElasticError, ValueError):
    """A folder or file that is missing, damaged, or disagrees with its config."""


class TargetError(ElasticError, FileExistsError):
    """An output folder that must not be written: it is not empty, or lies inside the source."""


class RemoteError(ElasticError, ConnectionError):
    """A model of the hub that does not exist, is not ours to read, or cannot be fetched."""


class ChecksumError(RemoteError):
    """A file whose bytes are not those that the hub has a hash of."""


class RecipeError(ElasticError, ValueError):
    """A training recipe with an unknown key or an impossible value."""


class StoppedElsewhere(ElasticError):
    """Another process of the same run has told the user already what is wrong; this one ends without a word."""


class DataError(ElasticError, ValueError):
    """Calibration or training data that cannot be read, or holds nothing to learn from."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a mistyped ``name``: the closest known name first, then all of them.

    Example:
        >>> nearest("smal", ["small", "full"])
        "did you mean 'small'? known: full, small"
    """
    names = sorted(known)
    if not names:
        return "none are known"
    shown = ", ".join(names[:MOST_NAMES])
    listing = f"known: {shown}" if len(names) <= MOST_NAMES else f"known: {shown}, ... ({len(names)} in all)"
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}? {listing}" if close else listing
