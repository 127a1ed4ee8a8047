"""How much a model's predictions change when something in it is left out: the two measures by which layers are removed."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from star_elastic.layout import Layout

LOGITS_AT_ONCE = 2**25
"""Numbers in one block of logits, [tokens, vocabulary], of which KL needs a handful at a time."""


class Change(Protocol):
    """A sum over tokens of how far a model without something is from the whole, and what to divide it by."""

    def apart(self, hidden: Tensor, full: Tensor) -> Tensor:
        """Summed distance of what the head reads, (N, D), without something and in the whole model; fp64 scalar."""

    def whole(self, full: Tensor) -> Tensor:
        """The divisor's part of these tokens, fp64 scalar."""


class SquaredLogits:
    """Sum of squared logit change over sum of squared full logits [Nemotron Elastic eq. 5].

    Logits never exist here: the head is one matrix W, so the squared length of W d is d' (W' W) d, and no [tokens, vocabulary] is
    needed. A factor on all logits, as Granite has, cancels.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        weight = head_weight(model, layout)
        self._gram = weight.T @ weight  # fp32 (D, D)

    def apart(self, hidden: Tensor, full: Tensor) -> Tensor:
        """Squared change of the logits."""
        return self.whole(hidden - full)

    def whole(self, full: Tensor) -> Tensor:
        """Squared logits."""
        return ((full @ self._gram) * full).sum(dtype=torch.float64)


class PredictionKL:
    """Forward KL(whole || without), the mean over tokens in nats (ours): what training by distillation will have to win back.

    Squared logits count a change of any logit alike, of tokens too that neither model would say.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        self._head = head_weight(model, layout) / layout.logits_divisor
        self._tokens = max(1, LOGITS_AT_ONCE // len(self._head))

    def apart(self, hidden: Tensor, full: Tensor) -> Tensor:
        """Summed KL."""
        total = torch.zeros((), dtype=torch.float64, device=full.device)
        for some, whole in zip(hidden.split(self._tokens), full.split(self._tokens), strict=True):
            known = (whole @ self._head.T).log_softmax(-1)
            excess = known - (some @ self._head.T).log_softmax(-1)
            # Probabilities sum to one on both sides, so this sum of terms >= 0 is that of p * excess, without its cancellation.
            total += (known.exp() * (torch.expm1(-excess) + excess)).sum(dtype=torch.float64)
        return total

    def whole(self, full: Tensor) -> Tensor:
        """Number of tokens."""
        return torch.tensor(len(full), dtype=torch.float64)


CHANGES: dict[str, type[SquaredLogits] | type[PredictionKL]] = {"removal": SquaredLogits, "kl": PredictionKL}
"""By method of ``depth``."""


def head_weight(model: Any, layout: Layout) -> Tensor:
    """The head's matrix, fp32 (V, D)."""
    [head] = [unit for unit in layout.units if unit.kind == "head"]
    weight: Tensor = model.get_submodule(head.module).weight.detach()
    return weight.float()
