"""Which submodel a step trains: one budget per step, drawn with given probabilities.

The sampler owns its random generator. Sharing torch's global one would tie the choice to every other draw of the program, and a
run could not be resumed, or compared with another one, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class BudgetSampler:
    """Draws one submodel name per step (method of arXiv 2511.16664: uniform in the first stage, skewed in the second).

    Args:
        probabilities: Name to probability. Normalised to sum 1; the order of the names is part of the draw.
        seed: Seed of the sampler's own generator.

    Example:
        >>> sampler = BudgetSampler({"full": 0.5, "mid": 0.3, "small": 0.2}, seed=0)
        >>> sampler.draw_several(1)[0] in {"full", "mid", "small"}
        True
    """

    def __init__(self, probabilities: Mapping[str, float], seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.reweigh(probabilities)

    def reweigh(self, probabilities: Mapping[str, float]) -> None:
        """Draw with other probabilities from now on: a new stage."""
        self.names = tuple(probabilities)
        self._weights = torch.tensor(list(probabilities.values()), dtype=torch.float64)

    def draw_several(self, count: int) -> list[str]:
        """Different submodels for one step, one after the other, each among those that are left.

        With a count of all submodels, every step trains all of them, whatever the probabilities.
        """
        names, weights = list(self.names), self._weights
        drawn = []
        for _ in range(count):
            edges = torch.cumsum(weights / weights.sum(), dim=0)
            point = torch.rand((), generator=self._generator, dtype=torch.float64)
            index = int(torch.searchsorted(edges, point, right=True))
            while index >= len(names) or weights[index] == 0:  # rounding may leave the last edge just below 1
                index -= 1
            drawn.append(names.pop(index))
            weights = torch.cat([weights[:index], weights[index + 1 :]])
        return drawn

    def state(self) -> Tensor:
        """The generator's state, uint8, for a checkpoint."""
        return self._generator.get_state()

    def restore(self, state: Tensor) -> None:
        """Continue exactly where ``state`` was taken."""
        self._generator.set_state(state)
