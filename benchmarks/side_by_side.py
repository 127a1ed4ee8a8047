"""Timing things against each other: all run in turn, round after round, so that a busy machine slows every one of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
FEWEST_ROUNDS = 3  # quartiles of fewer say nothing


def interleaved(
    sides: Mapping[str, Callable[[], Any]], rounds: int, limit: float, clock: str = "wall"
) -> dict[str, list[float]]:
    """Seconds of every side in every round, after one round that warms up.

    Args:
        sides: What to run, by name; each round begins with another one.
        rounds: How many, at most.
        limit: Seconds of wall time after which no further round begins, once there are three.
        clock: ``wall``, or ``cpu`` for this process's CPU seconds.
    """
    names, now, begin = list(sides), CLOCKS[clock], time.perf_counter()
    for run in sides.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - begin > limit:
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = now()
            sides[name]()
            taken[name].append(now() - start)
    return taken


def ratio_row(ours: Sequence[float], other: Sequence[float], **labels: Any) -> dict[str, Any]:
    """The median of the rounds' ratios, its quartiles, and both sides' median milliseconds."""
    low, middle, high = statistics.quantiles((one / two for one, two in zip(ours, other, strict=True)), n=4)
    return labels | {
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rounds": len(ours),
        "ours": round(1e3 * statistics.median(ours), 1),
        "other": round(1e3 * statistics.median(other), 1),
        "unit": "ms",
    }
