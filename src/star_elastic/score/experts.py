"""Routed experts, run so that what happens inside can be heard.

transformers keeps all experts of a layer as one module with fused tensors, and computes them by grouped products; there is no
inner module to hook. Here the same function is written out, one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from star_elastic.layout import Row, Tap, Unit


@dataclass(frozen=True)
class FusedExperts:
    """Routed experts whose weights are single tensors (E, F, D) and (E, D, F), run one expert at a time.

    Attributes:
        up: (E, F, D).
        down: (E, D, F).
        activation: between the two.
    """

    up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, unit: Unit, tap: Tap, module: Any) -> FusedExperts:
        """Find the two tensors by what the table says of their dimensions: the axis indexes rows of one, columns of the other."""
        rows = [row for row in unit.rows if row.routed and row.name.startswith(f"{tap.module}.")]

        def tensor(dimension: int) -> Tensor:
            [row] = [row for row in rows if tap.axis in row.dims[dimension].axes]
            return module.get_parameter(_leaf(row))

        return cls(up=tensor(1), down=tensor(2), activation=module.act_fn)

    @property
    def count(self) -> int:
        """Number of experts, E."""
        return self.up.shape[0]

    def run(self, hidden: Tensor, choice: Tensor, weight: Tensor, hear: Callable[[int, Tensor, Tensor], None]) -> Tensor:
        """The weighted sum of each token's chosen experts.

        Args:
            hidden: (N, D) one row per token.
            choice: (N, K) experts of each token. A number outside 0..E-1 means no expert and adds nothing.
            weight: (N, K) what multiplies each chosen expert's output.
            hear: told, for every expert in use, its number, its tokens (S,), and the activations before ``down`` (S, F).

        Returns:
            (N, D), in the dtype of ``hidden``.
        """
        output = torch.zeros_like(hidden, dtype=weight.dtype)
        for expert in range(self.count):
            token, slot = torch.where(choice == expert)
            if token.numel() == 0:
                continue
            inner = self.activation(nn.functional.linear(hidden[token], self.up[expert]))
            hear(expert, token, inner)
            answer = nn.functional.linear(inner, self.down[expert]) * weight[token, slot, None]
            output.index_add_(0, token, answer.to(output.dtype))
        return output.to(hidden.dtype)


def _leaf(row: Row) -> str:
    return row.name.rsplit(".", 1)[-1]
