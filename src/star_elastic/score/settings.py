"""Settings of a run that are wrong, or would do nothing, refused before any work. Plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from star_elastic.score.methods import REMOVALS, ScoreOptions
from star_elastic.selection import RequestError
from star_elastic.train.packing import Packing

Waiting = Literal["memory", "disk"]
"""Where hidden states wait between the layers of a layerwise run."""


def check_settings(*, packing: Any, layerwise: Any, resume: bool, seed: Any, counts: Mapping[str, Any]) -> None:
    """Refuse what cannot be run.

    Args:
        packing: how documents fill rows.
        layerwise: where hidden states wait, or None.
        resume: whether to go on from an earlier run.
        seed: 0 or more.
        counts: by option, numbers that must be whole and at least 1; None is a default.

    Raises:
        RequestError: a value that is none of the known ones, a number below the least, or ``resume`` where nothing is saved.
    """
    _check_choice("packing", packing, get_args(Packing))
    if layerwise is not None:
        _check_choice("layerwise", layerwise, get_args(Waiting))
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)
    check_count("seed", seed, least=0)
    if resume and layerwise == "memory":
        raise RequestError("--layerwise memory saves nothing that --resume could continue: --layerwise disk does")


def check_depth_samples(wanted: int | None, options: ScoreOptions) -> None:
    """Raise RequestError where rows for iterative removal are asked for, and layers are ranked otherwise."""
    method = options.method("depth")
    if wanted is not None and method not in REMOVALS:
        raise RequestError(
            f"--depth-samples {wanted} is for depth={' or '.join(REMOVALS)}, and here depth={method}: leave it out"
        )


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise RequestError unless a value is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{name} is {value!r}: want a whole number, {least} or more")


def _check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RequestError(f"{name} is {value!r}: want {' or '.join(known)}")
