"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, *, peak: float, floor: float, warmup: int = 0) -> float:
    """Linear warm-up to ``peak``, then a cosine down to ``floor`` (Nemotron Elastic, arXiv 2511.16664: 60 steps, 1e-4 to 1e-5).

    Args:
        step: Index of the step about to be taken, from 0. Past the planned end the rate stays at ``floor``.
        total: Planned number of steps.
        peak: Rate at the end of the warm-up.
        floor: Rate at the last step and after it.
        warmup: Steps of warm-up; step 0 already moves, at ``peak / warmup``.

    Example:
        >>> [learning_rate(s, 4, peak=1.0, floor=0.0, warmup=2) for s in (0, 1, 2, 3, 99)]
        [0.5, 1.0, 1.0, 0.0, 0.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    span = total - 1 - warmup  # steps between the peak and the last step
    if span <= 0:
        return peak if step < total else floor
    progress = min((step - warmup) / span, 1.0)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
