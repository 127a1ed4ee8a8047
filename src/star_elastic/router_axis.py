"""The part of a router that chooses along one axis, and one-hot choices that pass gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAK = 0.1  # slope of LeakyReLU below 0


class AxisRouter(nn.Module):
    """One axis: one-hot budget -> Linear -> LeakyReLU(0.1) -> Linear -> a logit per candidate, in one block per choosing layer.

    Args:
        budgets: number of budgets.
        hidden: width between the layers.
        blocks: how many layers choose, or 1.
        candidates: number of candidates.
        std: standard deviation of the weights at first.
        generator: where they come from.
    """

    def __init__(
        self, budgets: int, hidden: int, blocks: int, candidates: int, std: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.first = nn.Parameter(std * torch.randn(hidden, budgets, generator=generator))
        self.second = nn.Parameter(std * torch.randn(blocks * candidates, hidden, generator=generator))
        self.blocks = blocks

    def forward(self, budget: Tensor) -> Tensor:
        """Logits [blocks, C] for a budget vector [budgets]."""
        with torch.autocast(budget.device.type, enabled=False):
            logits = F.linear(F.leaky_relu(F.linear(budget, self.first), LEAK), self.second)
        return logits.view(self.blocks, -1)


def straight_through(soft: Tensor) -> Tensor:
    """One-hot [..., C] of the most probable candidate, bit for bit, with the gradient of ``soft``."""
    hard = F.one_hot(soft.argmax(dim=-1), soft.shape[-1]).to(soft)
    return hard + (soft - soft.detach())  # the bracket is exactly 0
