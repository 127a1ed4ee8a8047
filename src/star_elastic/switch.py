"""The switch between lenses: patched ``forward``s on a transformers model's units, all reading one plain state object.

Patching ``forward`` on the instance, rather than wrapping the module, keeps everything that others rely on: parameter names,
class, attributes, hooks, tying, ``save_pretrained``, ``deepcopy``. The class's own forward is looked up at each call, because
``fully_shard`` swaps the class of a module. The state is a plain object, not a ContextVar, which ``torch.compile`` cannot trace.

*Units* (embedding, decoder layers, final norm, head) are where parameters are cut or masked, and what is checkpointed. *Frames*
(the causal LM and the base model inside it) hold the code between units.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache


class Lens(Protocol):
    """A way to see the parent: which tensors, and whose code, run when a unit or frame is called."""

    def run(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the call of the parent's ``module``, which lies at ``path``."""
        ...


class Switch:
    """The state that all patched forwards of one model share.

    Attributes:
        lens: the lens in force; None is the model itself.
        checkpointing: keep only each unit's input for backward, and compute the unit again there.
    """

    def __init__(self) -> None:
        self.lens: Lens | None = None
        self.checkpointing = False

    @contextmanager
    def through(self, lens: Lens | None) -> Iterator[None]:
        """Hold a lens inside a ``with`` block; the lens before it comes back even after an exception."""
        before, self.lens = self.lens, lens
        try:
            yield
        finally:
            self.lens = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        # A copied model starts as itself: the lens in force belongs to a `with` block around the original.
        copy = Switch()
        memo[id(self)] = copy
        copy.checkpointing = self.checkpointing
        return copy


class Place:
    """What a patched module knows: its switch, where it lies in the parent, and whether it is a unit."""

    def __init__(self, switch: Switch, path: str, is_unit: bool) -> None:
        self.switch = switch
        self.path = path
        self.is_unit = is_unit


def install(model: nn.Module, units: Iterable[str], frames: Iterable[str]) -> Switch:
    """Patch the units and frames of ``model``, given by path; a model that was patched before keeps its switch."""
    place = getattr(model, "_elastic", None)
    if place is not None:
        return place.switch
    switch = Switch()
    for paths, is_unit in ((units, True), (frames, False)):
        for path in paths:
            module: Any = model.get_submodule(path)
            module._elastic = Place(switch, path, is_unit)
            patch_forward(module, _switched(type(module)))
    return switch


def patch_forward(module: nn.Module, function: Any) -> None:
    """Bind ``function`` as the forward of one instance, under accelerate's hook where there is one."""
    name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    setattr(module, name, types.MethodType(function, module))


def _switched(cls: type[nn.Module]) -> Any:
    # `wraps` keeps the signature, which transformers inspects to see which arguments a model takes.
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        place: Place = self._elastic
        lens = place.switch.lens
        if not (place.is_unit and torch.is_grad_enabled() and _checkpoints(place.switch, self)):
            return _run(lens, place.path, self, args, kwargs)
        call = functools.partial(_run, lens, place.path, self)
        return checkpoint(call, args, _without_cache(kwargs), use_reentrant=False)

    return forward


def _run(lens: Lens | None, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if lens is None:
        return type(module).forward(module, *args, **kwargs)
    return lens.run(path, module, args, kwargs)


def _checkpoints(switch: Switch, module: nn.Module) -> bool:
    # transformers' own flag wraps the class's forward. That is right for the model itself; under a lens the unit would be
    # computed again after its tensors were put back, so the flag is honoured here, around the lens.
    own = module.training and getattr(module, "gradient_checkpointing", False)
    return (switch.checkpointing and not own) if switch.lens is None else (switch.checkpointing or own)


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop caches: recomputing the unit would write to them a second time."""
    return {
        name: False if name == "use_cache" else None if isinstance(value, Cache) else value
        for name, value in kwargs.items()
    }


def relay(module: Any, target: nn.Module) -> None:
    """Make calls of ``module`` calls of ``target``; a plain holder keeps ``target`` out of ``module``'s children."""
    module._elastic = _Holder(target)
    module.forward = types.MethodType(_relayed, module)


class _Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


def _relayed(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._elastic.module(*args, **kwargs)
