"""The budget's loss over single choices (ours), beside the published one over expected widths.

The published loss is |cost of the expected widths / target - 1|. It is also zero where a router is undecided between a choice far
above the budget and one far below: the expectation lies between, and when the temperature falls, one of them is left, off the
budget, without a gradient to come back. The loss here is the expectation of the error over choices. It is zero only where all
probability lies on choices inside the tolerance. Axes choose independently, so it is a contraction of the table of all errors
with the probabilities of one axis after the other.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from star_elastic.budget import Budget
from star_elastic.combinations import Combinations
from star_elastic.router import Probabilities

MOST_CHOICES = 100_000  # combinations of candidates whose errors are held


def can_list(space: Combinations) -> bool:
    """Whether there are few enough combinations to list; with layers that choose for themselves there rarely are."""
    return math.prod(map(len, space.options)) <= MOST_CHOICES


class ChoiceLoss:
    """Expected error of the choices for one budget.

    Args:
        space: What can be chosen.
        budget: The target.
        tolerance: Errors up to this count as none.
    """

    def __init__(self, space: Combinations, budget: Budget, tolerance: float) -> None:
        self.keys, sizes = space.keys, [len(options) for options in space.options]
        picks = np.array(list(itertools.product(*map(range, sizes))), dtype=np.int64)  # (combinations, keys)
        errors = np.abs(space.price(budget, picks) / budget.target - 1)
        inside = (errors <= tolerance) & space.fits(picks)
        errors = np.where(
            space.fits(picks), errors, np.maximum(errors, 1)
        )  # widths that do not fit cannot be chosen at all
        self._excess = torch.tensor(np.where(inside, 0, errors), dtype=torch.float32).view(sizes)
        self._inside = torch.tensor(inside, dtype=torch.float32).view(sizes)

    def __call__(self, probabilities: Probabilities) -> Tensor:
        """The loss, differentiable in the probabilities."""
        return self._expected(self._excess, probabilities)

    def inside(self, probabilities: Probabilities) -> float:
        """The probability of a choice inside the tolerance."""
        return float(self._expected(self._inside, probabilities))

    def _expected(self, table: Tensor, probabilities: Probabilities) -> Tensor:
        for key in self.keys:
            row = probabilities[key]
            table = torch.tensordot(row, table.to(row), dims=([0], [0]))
        return table
