"""Skeletons: a nested model's modules without weights, on the meta device, ready to run on parts of the parent's tensors.

A skeleton is the parent's own class, built from the parent's config with a few fields changed. Its shapes come from
transformers, the cuts from the table; where the two differ something is wrong with one of them, and nothing runs.

Where layers differ in width, no one config describes the model. Its config then holds the widest widths, and each layer of other
widths is built from a config of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from star_elastic.axes import widths_of
from star_elastic.cut import Cut, plan_cut
from star_elastic.errors import CheckpointError
from star_elastic.families import FAMILIES
from star_elastic.gates import keep_gates_fp32
from star_elastic.layout import Layout, Members, Unit
from star_elastic.submodel import Submodel
from star_elastic.swap import Slot


@dataclass(frozen=True)
class Part:
    """One tensor of a nested model: where it lies in the parent, where it goes in the skeleton, and the cut between.

    ``alias`` is the full name of the tensor that it is tied to, in the parent as in the skeleton.
    """

    name: str
    source: Slot
    target: Slot
    cut: Cut
    alias: str | None = None


@dataclass(frozen=True)
class Pair:
    """A unit of the parent by path, the skeleton's module in its stead, and the tensors to cut."""

    path: str
    child: nn.Module
    parts: tuple[Part, ...]


class Skeleton:
    """A nested model on the meta device, in the parent's class, unit by unit beside the parent.

    Attributes:
        model: the nested model without weights.
        pairs: its units with what they take from the parent.

    Raises:
        RuntimeError: a shape differs from the table's cut, which is a fault of the family file.
    """

    def __init__(self, parent: PreTrainedModel, layout: Layout, submodel: Submodel) -> None:
        self.model, own_configs = build(model_class(parent), parent.config, layout, submodel)
        compare_shapes(self.model, layout, submodel)
        keyed, units = submodel.keyed_widths, list(numbered_units(layout, submodel))
        self.pairs = [
            pair_unit(parent, self.model, unit, path, layout.members(widths_of(keyed, unit.layer)))
            for unit, path in units
        ]
        keep_gates_fp32(self.model.get_submodule(module) for unit, path in units if (module := unit.router_path(path)))
        self._parent = parent
        self._twins = list(twins(parent, self.model, {path: unit.module for unit, path in units}))
        theirs = vars(parent.config)
        self._edited = [
            (config, {name for name, value in vars(config).items() if theirs.get(name) != value})
            for config in (self.model.config, *own_configs)
        ]

    def follow(self) -> None:
        """Take over what may have changed on the parent: config (attention implementation, ...), training mode, buffers."""
        for config, edited in self._edited:
            settings = {name: value for name, value in vars(self._parent.config).items() if name not in edited}
            vars(config).update(settings)
        for source, target in self._twins:
            target.training = source.training
            for name in target._non_persistent_buffers_set:
                target._buffers[name] = source._buffers[name]


def build(
    cls: type[PreTrainedModel], config: Any, layout: Layout, submodel: Submodel
) -> tuple[PreTrainedModel, list[Any]]:
    """A nested model without weights, on the meta device, and the configs of the layers that need one of their own.

    Args:
        cls: the parent's class.
        config: the parent's config object.
        layout: its table.
        submodel: the nested model, in its full spelling.
    """
    own_configs: dict[tuple[Any, ...], Any] = {}
    with torch.device("meta"), no_init_weights():
        model = cls(edited_config(config, layout, submodel.widths, submodel.layers))
        units = (unit for unit in layout.kept_units(submodel.layers) if unit.layer is not None)
        for number, unit in enumerate(units):
            own = own_widths(layout, submodel, unit)
            if own.items() <= submodel.widths.items():
                continue
            key = tuple(own.items())
            if key not in own_configs:
                own_configs[key] = edited_config(model.config, layout, {**submodel.widths, **own}, None)
            path = unit.path.format(number)
            layer: Any = type(model.get_submodule(path))
            model.set_submodule(path, layer(own_configs[key], number))
    return model, list(own_configs.values())


def own_widths(layout: Layout, submodel: Submodel, unit: Unit) -> dict[str, int]:
    """The widths that a layer has for itself: those of the nested model, and those of a model whose layers differ anyway."""
    by_axis = {**layout.own_widths, **submodel.layer_widths}
    return {axis: own[unit.layer] for axis, own in by_axis.items() if unit.layer is not None and unit.layer in own}


def model_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of a model; the one below where ``fully_shard`` has put its own in front."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def child_config(model: PreTrainedModel, layout: Layout, submodel: Submodel) -> Any:
    """The nested model's config object; where its layers differ, with the widest widths."""
    return edited_config(model.config, layout, submodel.widths, submodel.layers)


def edited_config(config: Any, layout: Layout, widths: Mapping[str, int], layers: Sequence[int] | None) -> Any:
    """A copy of a config object with widths and layers of its own, never rebuilt from a dict, which loses renamed fields."""
    edited = copy.deepcopy(config)
    for name, value in FAMILIES[layout.family].config_edits(config.to_dict(), widths, layers).items():
        setattr(edited, name, value)
    return edited


def numbered_units(layout: Layout, submodel: Submodel) -> Iterator[tuple[Unit, str]]:
    """Each kept unit with its module path in the nested model, where decoder layers are numbered anew."""
    kept = 0
    for unit in layout.kept_units(submodel.layers):
        yield unit, unit.path.format(kept)
        kept += unit.layer is not None


def pair_unit(parent: nn.Module, skeleton: nn.Module, unit: Unit, path: str, members: Members) -> Pair:
    """A kept unit, with the cuts that make its nested form at ``path`` in the skeleton."""
    source, target = parent.get_submodule(unit.module), skeleton.get_submodule(path)
    parts = tuple(
        Part(row.name, Slot.of(source, row.name), Slot.of(target, row.name), plan_cut(row, members), row.alias)
        for row in unit.rows
    )
    return Pair(unit.module, target, parts)


def twins(parent: nn.Module, skeleton: nn.Module, renamed: Mapping[str, str]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Every module of the parent that the skeleton has too, beside it; ``renamed`` maps a unit's new path to its old."""
    for path, module in skeleton.named_modules():
        unit = next((new for new in renamed if path == new or path.startswith(f"{new}.")), None)
        yield parent.get_submodule(path if unit is None else renamed[unit] + path.removeprefix(unit)), module


def compare_shapes(model: nn.Module, layout: Layout, submodel: Submodel) -> None:
    """Raise RuntimeError unless the model's parameters and saved buffers are exactly the table's, cut to ``submodel``."""
    keyed = submodel.keyed_widths
    table = {
        f"{path}.{row.name}": row.cut_shape(widths_of(keyed, unit.layer))
        for unit, path in numbered_units(layout, submodel)
        for row in unit.rows
    }
    real = {name: tuple(tensor.shape) for name, tensor in saved_tensors(model)}
    for name in sorted(table.keys() | real.keys()):
        if table.get(name) != real.get(name):
            raise RuntimeError(
                f"internal error: the {layout.family} table has {name} as {table.get(name, 'nothing')}, "
                f"transformers has {real.get(name, 'nothing')}"
            )


def check_tied(model: nn.Module, layout: Layout) -> None:
    """Refuse a model whose config ties two tensors that its weights keep apart.

    Raises:
        CheckpointError: names both.
    """
    for unit, row in layout.tensors():
        if row.alias is not None and model.get_parameter(unit.name(row)) is not model.get_parameter(row.alias):
            raise CheckpointError(
                f"config.json ties {unit.name(row)} to {row.alias}, but the weights hold two different tensors: "
                "set tie_word_embeddings to false"
            )


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name, without ``state_dict``, whose hooks would reshard a sharded model."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, buffer
