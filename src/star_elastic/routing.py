"""How a router selects experts when an expert mask is in force: one function per kind of router.

The masked gate goes where the model's own code already multiplies: an expert's gate is scaled before renormalisation, and its
selection score gets ``log m``. At m = 1 nothing changes, bit for bit; at m = 0 the expert is never selected, so both limits
equal the sliced model. Between them only a swap of the top-k jumps.

These are the only lines of the package that re-implement a transformers module. ``gates.in_fp32`` calls them, so that they need
not think of autocast.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from star_elastic.layout import Unit


@dataclass(frozen=True)
class ActiveRouter:
    """An expert router as it computes under a lens.

    Attributes:
        unit: the parent's unit that it belongs to.
        module: what is called: the parent's router, or under the sliced lens the nested model's.
        members: the parent's number of each of the module's experts, in the module's order.
        kept: the parent's numbers of the experts that the nested model keeps.
    """

    unit: Unit
    module: nn.Module
    members: list[int]
    kept: list[int]


class Route(Protocol):
    """(router module, hidden states [..., D], expert mask [E]) -> logits [B*T, E], gates [B*T, k], experts [B*T, k]."""

    def __call__(
        self, router: Any, hidden_states: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def route_sigmoid_bias(
    router: Any, hidden_states: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sigmoid scores, selected with a correction bias that never enters the gate (DeepSeek-V3, NemotronH)."""
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


def route_softmax_topk(
    router: Any, hidden_states: torch.Tensor, mask: torch.Tensor, *, fp32_gates: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the top-k, renormalised where the router says so (Qwen3-MoE, Mixtral).

    ``log m`` on a logit multiplies the expert's probability by m before any renormalisation. ``fp32_gates``: the model does not
    round its gates to the dtype of the logits.
    """
    logits, masked_logits = masked_router_logits(router, hidden_states, mask)
    gates, experts = torch.topk(masked_logits.softmax(dim=-1), router.top_k, dim=-1)
    if getattr(router, "norm_topk_prob", True):
        gates = gates / gates.sum(dim=-1, keepdim=True)
    return masked_logits.to(logits.dtype), gates if fp32_gates else gates.to(logits.dtype), experts


def route_topk_softmax(
    router: Any, hidden_states: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The top-k logits, then softmax over those alone (Granite)."""
    _, masked_logits = masked_router_logits(router, hidden_states, mask)
    chosen, experts = masked_logits.topk(router.top_k, dim=-1)
    return masked_logits, chosen.softmax(dim=-1).type_as(hidden_states), experts


def masked_router_logits(
    router: Any, hidden_states: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A softmax router's logits [B*T, E], as the model computes them, and in fp32 with ``log m`` added: -inf where m is 0."""
    logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), router.weight)
    mask = mask.float()
    # log has no gradient at 0 that arithmetic could use: inf times a zero probability is NaN. An expert that is out gets none.
    log_mask = torch.where(mask > 0, mask, 1).log().masked_fill(mask <= 0, float("-inf"))
    return logits, logits.float() + log_mask


ROUTES: dict[str, Route] = {
    "sigmoid_bias": route_sigmoid_bias,
    "softmax_topk": route_softmax_topk,
    "softmax_topk_fp32": functools.partial(route_softmax_topk, fp32_gates=True),
    "topk_softmax": route_topk_softmax,
}
