"""How a router selects experts when an expert mask is in force: one function per kind of router.

The masked gate goes where the model's own code already multiplies: an expert's gate is scaled before renormalisation, and its
selection score gets ``log m``. At m = 1 nothing changes, bit for bit; at m = 0 the expert is never selected, so both limits
equal the sliced model. Between them only a swap of the top-k jumps.

These are the only lines of the package that re-implement a transformers module.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F


class Route(Protocol):
    """(router module, hidden states [..., D], expert mask [E]) -> logits [B*T, E], gates [B*T, k], experts [B*T, k]."""

    def __call__(
        self, router: Any, hidden_states: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def route_sigmoid_bias(
    router: Any, hidden_states: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sigmoid scores, selected with a correction bias that never enters the gate (DeepSeek-V3, NemotronH).

    Scores are fp32 even under autocast, which would otherwise round them.
    """
    with torch.autocast(hidden_states.device.type, enabled=False):
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = F.linear(hidden_states.float(), router.weight.float())
        scores = logits.sigmoid()
        mask = mask.float()
        experts = select_in_groups(router, scores + router.e_score_correction_bias + mask.log())
        gates = (scores * mask).gather(1, experts)
        if router.norm_topk_prob:
            gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, gates * router.routed_scaling_factor, experts


@torch.no_grad()
def select_in_groups(router: Any, choice: torch.Tensor) -> torch.Tensor:
    """The top-k experts [B*T, k] by ``choice`` [B*T, E], among the groups whose two best experts sum highest."""
    grouped = choice.view(len(choice), router.num_group, -1)
    best_two = grouped.topk(2, dim=-1).values.sum(dim=-1)
    open_groups = best_two.topk(router.topk_group, dim=-1, sorted=False).indices
    is_open = torch.zeros_like(best_two, dtype=torch.bool).scatter_(1, open_groups, True)
    choice = grouped.masked_fill(~is_open[:, :, None], float("-inf")).flatten(1)
    return choice.topk(router.top_k, dim=-1, sorted=False).indices


ROUTES: dict[str, Route] = {"sigmoid_bias": route_sigmoid_bias}
