"""Put other tensors or attributes into a module for the length of one call, and put the old ones back whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ABSENT = object()


@dataclass(frozen=True)
class Slot:
    """The place of one parameter or buffer inside a module."""

    module: nn.Module
    leaf: str
    buffer: bool

    @classmethod
    def of(cls, root: nn.Module, name: str) -> Slot:
        """The slot of a parameter or buffer by its dotted name."""
        path, _, leaf = name.rpartition(".")
        module = root.get_submodule(path)
        return cls(module, leaf, leaf in module._buffers)

    @property
    def _tensors(self) -> dict[str, Any]:
        return self.module._buffers if self.buffer else self.module._parameters

    def get(self) -> torch.Tensor:
        """The tensor in this place."""
        return self._tensors[self.leaf]

    def set(self, tensor: torch.Tensor) -> None:
        """Put a tensor in this place as it is: no registration, no copy."""
        self._tensors[self.leaf] = tensor


@dataclass(frozen=True)
class Attribute:
    """A value that an attribute of a module has for the length of a call."""

    module: nn.Module
    name: str
    value: Any


@contextmanager
def swapped(
    slots: Sequence[Slot], tensors: Sequence[torch.Tensor], attributes: Sequence[Attribute] = ()
) -> Iterator[None]:
    """Hold ``tensors`` in ``slots``, and ``attributes`` on their modules' instances, inside a ``with`` block."""
    old_tensors = [slot.get() for slot in slots]
    old_values = [attribute.module.__dict__.get(attribute.name, _ABSENT) for attribute in attributes]
    try:
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.set(tensor)
        for attribute in attributes:
            attribute.module.__dict__[attribute.name] = attribute.value
        yield
    finally:
        for slot, tensor in zip(slots, old_tensors, strict=True):
            slot.set(tensor)
        for attribute, value in zip(attributes, old_values, strict=True):
            if value is _ABSENT:
                attribute.module.__dict__.pop(attribute.name, None)
            else:
                attribute.module.__dict__[attribute.name] = value
