"""The decoder layers of a transformers model, under control: which of them run, and from where.

Each layer's forward is patched to pass its input on where it is told to. The model's own code between layers (masks, rotary
angles, multipliers) runs as always, so nothing of it is written again here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from star_elastic.layout import Layout


@dataclass
class Stack:
    """What the layers do in the next forward pass.

    Attributes:
        removed: layers that pass their input on.
        start: the first layer that runs; those before it are passed over.
        stop: the first layer that does not run any more, with all after it.
        hidden: (B, T, D) what layer ``start`` reads instead of what the embedding gives; without effect where ``start`` is 0.
        inputs: filled with what each layer reads, where this is a dict.
        output: what the last layer that ran gave.
    """

    removed: frozenset[int] = frozenset()
    start: int = 0
    stop: int | None = None
    hidden: Tensor | None = None
    inputs: dict[int, Tensor] | None = None
    output: Tensor | None = None

    @contextmanager
    def controlling(self, model: nn.Module, layout: Layout) -> Iterator[Stack]:
        """Patch every decoder layer for the duration of the block; the model is as before afterwards, also on errors."""
        layers = [(unit.layer, model.get_submodule(unit.module)) for unit in layout.units if unit.layer is not None]
        for number, layer in layers:
            layer.forward = self._forward(number, layer)
        try:
            yield self
        finally:
            for _, layer in layers:
                del layer.forward  # the class's own shows again

    def _forward(self, number: int, layer: Any) -> Any:
        own = type(layer).forward

        def forward(*inputs: Any, **named: Any) -> Any:
            hidden, rest = (inputs[0], inputs[1:]) if inputs else (named.pop("hidden_states"), ())
            if self.inputs is not None:
                self.inputs[number] = hidden
            if number < self.start:
                # Handed over here and not inside the next layer, so that hooks on it see what it reads.
                return self.hidden if number == self.start - 1 and self.hidden is not None else hidden
            if number in self.removed or (self.stop is not None and number >= self.stop):
                return hidden
            self.output = own(layer, hidden, *rest, **named)
            return self.output

        return forward
