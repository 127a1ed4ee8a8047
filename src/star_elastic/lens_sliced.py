"""The sliced lens: the nested model's own code, on views of the parent's parameters.

A skeleton (see ``skeleton``) is a *shell*: its units' forwards call the parent's units, which cut the parent's tensors, hold
them in the skeleton's unit for the call, and run that unit's class forward. So code between units reads the nested model's
config, while hooks, checkpointing and sharding stay where they were put: on the parent's units.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from star_elastic.axes import widths_of
from star_elastic.layout import Layout
from star_elastic.routing import ActiveRouter
from star_elastic.skeleton import Skeleton
from star_elastic.submodel import Submodel
from star_elastic.swap import swapped
from star_elastic.switch import relay


class SlicedLens:
    """Runs the parent as one of its nested models, differentiably.

    Args:
        model: the parent, patched by ``switch.install``.
        layout: its table.
        submodel: the nested model, already checked.
        frames: paths of the modules that hold the code between units.
    """

    def __init__(self, model: PreTrainedModel, layout: Layout, submodel: Submodel, frames: tuple[str, ...]) -> None:
        self.submodel, self._layout = submodel, layout
        self._skeleton = Skeleton(model, layout, submodel)
        self._units = {pair.path: pair for pair in self._skeleton.pairs}
        self._frames = {path: self._skeleton.model.get_submodule(path) for path in frames}
        self._recording = False
        for path, module in [*((pair.path, pair.child) for pair in self._skeleton.pairs), *self._frames.items()]:
            relay(module, model.get_submodule(path))

    def _record_outputs(self, parent: Any, frame: Any) -> None:
        # transformers records hidden states and router logits by hooks, which it installs when first asked. Those on the parent's
        # units fire in this lens too, so on the shell's units they would record everything twice; but inside the shell's units
        # they are the only ones that see routers and attention.
        maybe_install_capturing_hooks(parent)
        maybe_install_capturing_hooks(frame)
        for pair in self._skeleton.pairs:
            pair.child._forward_hooks.clear()
        self._recording = True

    def follow(self) -> None:
        """Take over what may have changed on the parent since the last use."""
        self._skeleton.follow()

    def run(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the call of the parent's ``module`` at ``path`` as the nested model computes it."""
        if path in self._frames:
            frame = self._frames[path]
            if not self._recording and path and records(frame, kwargs):
                self._record_outputs(module, frame)
            return type(frame).forward(frame, *args, **kwargs)
        pair = self._units[path]
        if pair.child.training != module.training:
            pair.child.train(module.training)
        tensors = [part.cut(part.source.get()) for part in pair.parts]
        with swapped([part.target for part in pair.parts], tensors):
            return type(pair.child).forward(pair.child, *args, **kwargs)

    def part(self, path: str, name: str) -> torch.Tensor:
        """The nested model's part of one parameter of the parent's unit at ``path``, differentiable."""
        return next(part.cut(part.source.get()) for part in self._units[path].parts if part.name == name)

    def routers(self) -> Iterator[ActiveRouter]:
        """The expert routers of the layers that the nested model keeps."""
        for unit in self._layout.kept_units(self.submodel.layers):
            if unit.router is not None:
                axis = unit.router.axis
                width = widths_of(self.submodel.keyed_widths, unit.layer)[axis]
                members = self._layout.axes[axis].members(width)
                yield ActiveRouter(
                    unit, self._units[unit.module].child.get_submodule(unit.router.module), members, members
                )


def records(frame: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call of a transformers base model is asked, by argument or config, to record something."""
    wanted = (f"output_{name}" for name in frame._can_record_outputs or ())
    return any(kwargs.get(name, getattr(frame.config, name, False)) for name in wanted)
