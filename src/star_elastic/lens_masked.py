"""The masked lens: the parent's own modules at full width, on parameters multiplied by masks.

The table says where: each axis is masked at exactly one place (``!``), so that a soft mask enters a path once. Three things are
no parameters and are declared by the table instead: the eps of a norm, the selection of experts, and the gate of a block.
A hard mask computes what the sliced lens computes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from star_elastic.gates import in_fp32
from star_elastic.layout import Dim, Layout, Norm, Row, Unit
from star_elastic.masks import Masks, check_masks, of_layer, vector
from star_elastic.routing import ROUTES, ActiveRouter
from star_elastic.swap import Attribute, Slot, swapped

HALF = 0.5  # a soft mask above it counts as in, where something must be in or out


@dataclass(frozen=True)
class MaskedUnit:
    """What the masks change in one unit: factors per tensor, attributes, and the gate of its output."""

    slots: list[Slot]
    factors: list[torch.Tensor]
    attributes: list[Attribute]
    gate: torch.Tensor | None


class MaskedLens:
    """Runs the parent under masks, differentiably in the masks as well as in the parameters.

    Everything that the masks alone determine is computed here, outside any checkpointed unit.

    Args:
        model: the parent, patched by ``switch.install``.
        layout: its table.
        masks: mask per axis or (axis, layer).

    Raises:
        UnknownNameError, WidthError: a mask that does not fit the model.
    """

    def __init__(self, model: nn.Module, layout: Layout, masks: Masks) -> None:
        check_masks(layout, masks)
        self._model, self._layout, self._masks = model, layout, masks
        self._units: dict[str, MaskedUnit] = {}
        for unit in layout.units:
            active = of_layer(masks, unit.layer)
            self._units[unit.module] = mask_unit(model.get_submodule(unit.module), unit, active)

    def run(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the call of the parent's ``module`` at ``path`` under the masks."""
        unit = self._units.get(path)
        if unit is None:
            return type(module).forward(module, *args, **kwargs)
        tensors = [masked(slot.get(), factor) for slot, factor in zip(unit.slots, unit.factors, strict=True)]
        with swapped(unit.slots, tensors, unit.attributes):
            output = type(module).forward(module, *args, **kwargs)
        return output if unit.gate is None else gated(args[0], output, unit.gate)

    def routers(self) -> Iterator[ActiveRouter]:
        """The expert routers of the layers that are more in than out; their kept experts are those more in than out."""
        for unit in self._layout.units:
            masks = of_layer(self._masks, unit.layer)
            if unit.router is None or ("depth" in masks and masks["depth"][unit.layer] <= HALF):
                continue
            members = list(range(self._layout.axes[unit.router.axis].size))
            mask = masks.get(unit.router.axis)
            kept = members if mask is None else [m for m in members if mask[m] > HALF]
            module = self._model.get_submodule(unit.router_path())
            yield ActiveRouter(unit, module, members, kept)


def masked(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """A parameter times its factor, in the parameter's dtype."""
    return tensor * factor.to(tensor.dtype)


def gated(residual: torch.Tensor, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """residual + gate * (output - residual), exact at both ends: a gate of 0 skips the block."""
    return torch.lerp(residual.to(output.dtype), output, gate.to(output.dtype))


def mask_unit(module: nn.Module, unit: Unit, masks: Mapping[str, torch.Tensor]) -> MaskedUnit:
    """Read from the table what ``masks`` change in one unit."""
    factors = {row.name: factor for row in unit.rows if (factor := mask_factor(row, masks)) is not None}
    # Lenses are checkpointed around the swap of tensors, so transformers' own checkpointing inside it is off.
    attributes = [Attribute(module, "gradient_checkpointing", False)]
    for row in unit.rows:
        share = None if row.norm is None else kept_share(row.dims[0], row.norm, masks)
        if row.norm is not None and share is not None:
            factors[row.name] = share.sqrt().repeat_interleave(row.dims[0].size // row.norm.groups)
            attributes += norm_attributes(module, row, row.norm, share)
    if unit.router is not None and unit.router.axis in masks:
        router = module.get_submodule(unit.router.module)
        route = functools.partial(ROUTES[unit.router.kind], mask=masks[unit.router.axis])
        attributes.append(Attribute(router, "forward", functools.partial(in_fp32, route, router)))
    gate = masks["depth"][unit.layer] if "depth" in masks and unit.layer is not None else None
    return MaskedUnit([Slot.of(module, name) for name in factors], list(factors.values()), attributes, gate)


def mask_factor(row: Row, masks: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What a parameter is multiplied by: the vectors of its marked dimensions, broadcast to its shape; None for nothing."""
    factor = None
    for number, dim in enumerate(row.dims):
        along = vector(dim, masks, marked_only=True)
        if along is not None:
            along = along.view([-1 if other == number else 1 for other in range(len(row.dims))])
            factor = along if factor is None else factor * along
    return factor


def kept_share(dim: Dim, norm: Norm, masks: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """k/N of each of a norm's groups, [G], with k the sum of the squared masks; None where no mask reaches the norm.

    With the plain sum, a half-soft mask would inflate what the norm puts out: its input has shrunk by m, its square by m^2.
    """
    along = vector(dim, masks, marked_only=False)
    return None if along is None else along.square().view(norm.groups, -1).mean(dim=1)


def norm_attributes(module: nn.Module, row: Row, norm: Norm, share: torch.Tensor) -> list[Attribute]:
    """The eps of a norm whose mean square runs over all N channels of a group, while only k of them count.

    With weight x sqrt(k/N) and eps x k/N the masked norm is the norm over k channels: x*sqrt(k/N) / sqrt(ss/N + eps*k/N) is
    x / sqrt(ss/k + eps).
    """
    home = module.get_submodule(row.name.rpartition(".")[0])
    attributes = [Attribute(home, norm.eps, getattr(home, norm.eps) * share[:, None])]
    if norm.fused_in is not None:
        # In training, this module may hand weight and a plain number eps to one fused kernel; in evaluation it calls the norm.
        attributes.append(Attribute(module.get_submodule(norm.fused_in), "training", False))
    return attributes
