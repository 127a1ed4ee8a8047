"""Routed experts, run so that what happens inside can be heard, and what is remembered of it.

transformers keeps all experts of a layer as one module with fused tensors, and computes them by grouped products; there is no
inner module to hook. Here the same function is written out, one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from star_elastic.layout import Row, Unit


class Hear(Protocol):
    """Told, for every expert in use: its number, its tokens (S,), their gates (S,), what enters ``down`` (S, F), and the
    expert's output before gating (S, D)."""

    def __call__(self, expert: int, token: Tensor, gate: Tensor, inner: Tensor, answer: Tensor) -> None: ...


@dataclass(frozen=True)
class FusedExperts:
    """Routed experts whose weights are single tensors, run one expert at a time.

    Attributes:
        up: (E, F, D), or (E, 2F, D) where a gate matrix lies above it.
        down: (E, D, F).
        activation: between the two; with a gate matrix it acts on that one alone.
        gated: whether ``up`` holds a gate matrix in its first half.
    """

    up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    gated: bool = False

    @classmethod
    def of(cls, unit: Unit, path: str, module: Any) -> FusedExperts:
        """Find the two tensors by what the table says: their channels index rows of one, columns of the other."""
        rows = [row for row in unit.rows if row.routed and row.name.startswith(f"{path}.")]
        [down] = [row for row in rows if row.dims[2].masked_axes]
        [up] = [row for row in rows if row is not down]
        return cls(
            up=module.get_parameter(_leaf(up)),
            down=module.get_parameter(_leaf(down)),
            activation=module.act_fn,
            gated=len(up.dims[1].segments) == 2,
        )

    @property
    def count(self) -> int:
        """Number of experts, E."""
        return self.up.shape[0]

    def run(self, hidden: Tensor, choice: Tensor, gates: Tensor, hear: Hear) -> Tensor:
        """The weighted sum of each token's chosen experts.

        Args:
            hidden: (N, D) one row per token.
            choice: (N, K) experts of each token. A number outside 0..E-1 means no expert and adds nothing.
            gates: (N, K) what multiplies each chosen expert's output.
            hear: see ``Hear``.

        Returns:
            (N, D), in the dtype of ``hidden``.
        """
        output = torch.zeros_like(hidden, dtype=gates.dtype)
        flat = choice.reshape(-1)
        flat = flat.masked_fill((flat < 0) | (flat >= self.count), self.count)
        order = flat.argsort(stable=True)  # pairs (token, choice) by expert, so that each expert's are one run
        counts = torch.bincount(flat, minlength=self.count + 1)[: self.count].tolist()
        start = 0
        for expert, count in enumerate(counts):
            pair = order[start : start + count]
            start += count
            if count == 0:
                continue
            token, gate = pair // choice.shape[1], gates.reshape(-1)[pair]
            inner = self._inner(nn.functional.linear(hidden[token], self.up[expert]))
            answer = nn.functional.linear(inner, self.down[expert])
            hear(expert, token, gate, inner, answer)
            output.index_add_(0, token, (answer * gate[:, None]).to(output.dtype))
        return output.to(hidden.dtype)

    def _inner(self, raised: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(raised)
        gate, up = raised.chunk(2, dim=-1)
        return self.activation(gate) * up


class ExpertSums:
    """What each expert of a layer did for real tokens, gathered batch by batch.

    Args:
        place: the module listened to, named in errors.
        count: number of experts, E.

    Attributes:
        tokens: real tokens served by each expert, int64 (E,).
        norms: sum over them of the L2 norm of the expert's output before gating, fp64 (E,).
        weighted: the same, each norm times the gate that multiplies the output, fp64 (E,).
    """

    def __init__(self, place: str, count: int) -> None:
        self.place = place
        self.tokens = torch.zeros(count, dtype=torch.int64)
        self.norms = torch.zeros(count, dtype=torch.float64)
        self.weighted = torch.zeros(count, dtype=torch.float64)

    def add(self, expert: int, real: Tensor, gate: Tensor, answer: Tensor) -> None:
        """Add one expert's outputs (S, D) and gates (S,) for its tokens, of which ``real`` (S,) are no padding."""
        self._move(answer.device)
        norm = torch.linalg.vector_norm(answer, dim=1, dtype=torch.float64).masked_fill(~real, 0)
        self.tokens[expert] += real.sum()
        self.norms[expert] += norm.sum()
        self.weighted[expert] += (norm * gate.double()).masked_fill(~real, 0).sum()

    def finish_batch(self) -> None:
        """Nothing is left open between batches."""

    def finite(self) -> Tensor:
        """Whether all sums are finite numbers, a boolean scalar."""
        return torch.isfinite(self.weighted).all()

    def idle(self) -> list[int]:
        """Experts that no real token reached."""
        return [expert for expert, tokens in enumerate(self.tokens.tolist()) if tokens == 0]

    def importance(self, method: str, router_norms: Tensor) -> Tensor:
        """Scores of all experts, fp64 (E,). REAP: arXiv 2510.13999.

        Experts that no token reached are not measured. They rank last, by ``router_norms`` (E,), and carry -1, -2, ... so that
        no reader takes them for measured.
        """
        tokens, norms, weighted = self.tokens.cpu(), self.norms.cpu(), self.weighted.cpu()
        measured = {
            "reap": weighted / tokens.clamp(min=1),
            "reap_sum": weighted,
            "activation": norms,
            "frequency": tokens.double(),
        }
        score = measured[method].clone()
        best_first = sorted(self.idle(), key=lambda expert: -float(router_norms[expert]))
        for place, expert in enumerate(best_first):
            score[expert] = -1.0 - place
        return score

    def state(self) -> dict[str, Tensor]:
        """Everything gathered so far."""
        return {"tokens": self.tokens, "norms": self.norms, "weighted": self.weighted}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from an earlier ``state``."""
        self.tokens, self.norms, self.weighted = state["tokens"], state["norms"], state["weighted"]

    def _move(self, device: torch.device) -> None:
        if self.tokens.device != device:
            self.tokens, self.norms, self.weighted = (t.to(device) for t in (self.tokens, self.norms, self.weighted))


def _leaf(row: Row) -> str:
    return row.name.rsplit(".", 1)[-1]
