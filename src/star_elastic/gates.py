"""Router gates compute in fp32 under autocast, in every lens.

Which experts a token goes to hangs on small differences between logits. Autocast would round the product of a gate to bf16, even
in a model that asks for fp32 (NemotronH casts both operands, and autocast casts them back). So under autocast both operands and
the product are fp32, whatever dtype stream and weight have. Without autocast the own code of the model decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from star_elastic.layout import GATE
from star_elastic.swap import Slot, swapped
from star_elastic.switch import patch_forward

Gate = Callable[..., Any]
"""(router module, hidden states [..., D]) -> logits, gates and experts, as the module's own forward puts them out."""


def keep_gates_fp32(routers: Iterable[nn.Module]) -> None:
    """Patch a model's expert routers; to patch twice is to patch once."""
    for router in routers:
        patch_forward(router, _patched(type(router)))


def in_fp32(gate: Gate, router: nn.Module, hidden_states: torch.Tensor) -> Any:
    """What ``gate`` computes of ``router`` and ``hidden_states`` [..., D]; of both in fp32 where autocast would round them."""
    device = hidden_states.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return gate(router, hidden_states)
    weight = Slot.of(router, GATE)
    with torch.autocast(device, enabled=False), swapped([weight], [weight.get().float()]):
        return gate(router, hidden_states.float())


def _patched(cls: type[nn.Module]) -> Any:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, hidden_states: torch.Tensor) -> Any:
        return in_fp32(type(self).forward, self, hidden_states)

    return forward
