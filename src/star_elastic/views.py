"""A nested model as an ordinary transformers model whose parameters are views of the parent's.

It costs no memory beyond the tensors that have to be gathered, and works wherever a transformers model does: ``generate``,
pipelines, evaluation harnesses. Its parameters take no gradient; train through the lens instead.
"""

from __future__ import annotations

import copy
import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from star_elastic.errors import ElasticError
from star_elastic.layout import Layout
from star_elastic.skeleton import Skeleton
from star_elastic.submodel import ElasticConfig, Submodel
from star_elastic.swap import Slot


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
        parts = [part for pair in self._skeleton.pairs for part in pair.parts]
        model = self._skeleton.model
        self._parts = [part for part in parts if part.alias is None]
        self._tied = [(part.target, Slot.of(model, part.alias)) for part in parts if part.alias is not None]
        beside = ElasticConfig.of_slice(layout, submodel, {})
        if self._tied or beside:
            model.save_pretrained = types.MethodType(functools.partial(save, beside=beside), model)
        self._stamps: list[Stamp | None] = [None] * len(self._parts)
        if parent.can_generate():
            model.generation_config = copy.deepcopy(parent.generation_config)

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
        for head, embedding in self._tied:
            head.set(embedding.get())
        return self._skeleton.model.eval()


def save(
    self: PreTrainedModel, save_directory: Any, *args: Any, beside: ElasticConfig | None = None, **kwargs: Any
) -> None:
    """``save_pretrained`` for a model with tied tensors that are views, or one whose layers differ in width.

    Tied tensors are handed over once, under the name they are tied to: transformers would look for them by their memory, and
    fails where a tensor is no contiguous block. ``beside`` is written as elastic.json, without which nothing loads the folder.
    """
    if not args and kwargs.get("state_dict") is None:
        tied = self.all_tied_weights_keys
        kwargs["state_dict"] = {name: tensor for name, tensor in self.state_dict().items() if name not in tied}
    type(self).save_pretrained(self, save_directory, *args, **kwargs)
    if beside is not None:
        beside.save(save_directory)
