"""A nested model as an ordinary transformers model whose parameters are views of the parent's.

It costs no memory beyond the tensors that have to be gathered, and works wherever a transformers model does: ``generate``,
pipelines, evaluation harnesses. Its parameters take no gradient; train through the lens instead.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from star_elastic.errors import ElasticError
from star_elastic.layout import Layout
from star_elastic.skeleton import Skeleton
from star_elastic.submodel import Submodel


@dataclass(frozen=True)
class Stamp:
    """What a tensor was when it was cut; a change means that the cut is stale."""

    address: int
    dtype: torch.dtype
    device: torch.device
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, is_view: bool) -> Stamp:
        """The stamp of a source tensor. A view follows changes of values by itself, so only copies watch the version."""
        version = 0 if is_view or tensor.is_inference() else tensor._version
        return cls(tensor.data_ptr(), tensor.dtype, tensor.device, version)


class ViewModel:
    """Keeps one nested model's views up to date.

    Args:
        parent: the model that owns the storage.
        layout: its table.
        submodel: the nested model, already checked.

    Raises:
        ElasticError: the parent's tensors lie on several devices.
    """

    def __init__(self, parent: PreTrainedModel, layout: Layout, submodel: Submodel) -> None:
        devices = sorted({str(parameter.device) for parameter in parent.parameters()})
        if len(devices) > 1:
            raise ElasticError(f"submodel() needs the model on one device, it is on {', '.join(devices)}: use at()")
        self._skeleton = Skeleton(parent, layout, submodel)
        self._parts = [part for pair in self._skeleton.pairs for part in pair.parts]
        self._stamps: list[Stamp | None] = [None] * len(self._parts)
        if parent.can_generate():
            self._skeleton.model.generation_config = copy.deepcopy(parent.generation_config)

    def copied_bytes(self) -> int:
        """Bytes of the tensors that had to be gathered; everything else shares the parent's storage."""
        return sum(part.target.get().nbytes for part in self._parts if not part.cut.is_view)

    def fresh(self) -> PreTrainedModel:
        """The model, after cutting again whatever changed in the parent."""
        self._skeleton.follow()
        for number, part in enumerate(self._parts):
            source = part.source.get().detach()
            stamp = Stamp.of(source, part.cut.is_view)
            if self._stamps[number] != stamp:
                tensor = part.cut(source)
                part.target.set(tensor if part.target.buffer else nn.Parameter(tensor, requires_grad=False))
                self._stamps[number] = stamp
        return self._skeleton.model.eval()
