"""How sharply a router chooses, as a pure function of the step: resuming needs no state, and asking past the end is no error."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Anneal:
    """Temperature and scale of a router's logits (Nemotron Elastic, arXiv 2511.16664).

    Probabilities are softmax((scale x logits + noise) / tau). Tau falls by a constant factor per step and the scale rises
    linearly; both reach their ends at the last planned step and stay there.

    Attributes:
        total: planned number of steps.
        tau_start: temperature at step 0.
        tau_end: temperature at the last step.
        scale_start: scale at step 0.
        scale_end: scale at the last step.

    Example:
        >>> anneal = Anneal(11)
        >>> [(round(anneal.tau(step), 3), anneal.scale(step)) for step in (0, 5, 10, 99)]
        [(1.0, 1.0), (0.224, 5.5), (0.05, 10.0), (0.05, 10.0)]
    """

    total: int
    tau_start: float = 1.0
    tau_end: float = 0.05
    scale_start: float = 1.0
    scale_end: float = 10.0

    def __post_init__(self) -> None:
        if self.total < 1 or not self.tau_start >= self.tau_end > 0 or min(self.scale_start, self.scale_end) <= 0:
            raise ValueError(
                f"a schedule has at least one step, tau that falls to above 0, and scales above 0, not {self.total} steps, "
                f"tau {self.tau_start:g} to {self.tau_end:g}, scale {self.scale_start:g} to {self.scale_end:g}"
            )

    def tau(self, step: int) -> float:
        """Temperature of the step about to be taken, counted from 0."""
        done = self._done(step)
        return self.tau_end if done == 1 else self.tau_start * (self.tau_end / self.tau_start) ** done

    def scale(self, step: int) -> float:
        """What the logits are multiplied by at the step about to be taken, counted from 0."""
        return self.scale_start + (self.scale_end - self.scale_start) * self._done(step)

    def steps_to(self, tau: float) -> int | None:
        """The first step whose temperature is at most ``tau``; None where the schedule never gets there."""
        if tau >= self.tau_start:
            return 0
        if tau < self.tau_end:
            return None
        share = math.log(tau / self.tau_start) / math.log(self.tau_end / self.tau_start)
        return math.ceil(share * (self.total - 1) - 1e-9)  # a whole number of steps, less rounding

    def _done(self, step: int) -> float:
        """Part of the schedule that lies behind, clamped to [0, 1]."""
        return 1.0 if step >= self.total - 1 else max(step, 0) / (self.total - 1)
