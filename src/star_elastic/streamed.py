"""A model of which only some units are in memory: built without weights, filled from its folder unit by unit.

For whoever has a model larger than the machine and needs one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from star_elastic.checkpoint import Checkpoint
from star_elastic.errors import CheckpointError
from star_elastic.layout import Layout, Row, Unit
from star_elastic.quant.formats import format_of, sibling
from star_elastic.quant.numbers import DEQUANTIZE
from star_elastic.skeleton import compare_shapes
from star_elastic.submodel import Submodel
from star_elastic.swap import Slot

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StreamedModel:
    """A causal LM in eval mode whose units come and go.

    Args:
        checkpoint: the folder, whose tensors are those of the table (``rewrite.locate``).
        layout: its table.
        device: where units go.
        dtype: of the weights; ``auto`` is what config.json says, or else the dtype of the first tensor, as transformers does.
        **kwargs: passed on to transformers' ``from_config``.

    Attributes:
        model: the transformers model; units that are not loaded lie on the meta device.
        dtype: of the weights, except those that are always fp32.
    """

    def __init__(
        self, checkpoint: Checkpoint, layout: Layout, *, device: torch.device, dtype: torch.dtype | str, **kwargs: Any
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        config = AutoConfig.from_pretrained(str(checkpoint.folder), local_files_only=True, trust_remote_code=False)
        vars(config).pop("quantization_config", None)  # matrices are turned into ordinary numbers as they are read
        self.dtype = dtype if isinstance(dtype, torch.dtype) else stored_dtype(config, checkpoint)
        with torch.device("meta"), no_init_weights():
            self.model: Any = AutoModelForCausalLM.from_config(
                config, dtype=self.dtype, trust_remote_code=False, **kwargs
            ).eval()
        compare_shapes(self.model, layout, Submodel())
        compute_buffers(self.model, device)
        self._checkpoint, self._layout, self._device = checkpoint, layout, device

    @contextmanager
    def holding(self, unit: Unit) -> Iterator[None]:
        """Keep a unit in memory for the duration of the block.

        Raises:
            CheckpointError: a file cannot be read.
        """
        module = self.model.get_submodule(unit.module)
        slots = [(Slot.of(module, row.name), row) for row in unit.rows]
        empty = [slot.get() for slot, _ in slots]
        try:
            for slot, row in slots:
                slot.set(self._read(unit, row, slot.get()))
            yield
        finally:
            for (slot, _), tensor in zip(slots, empty, strict=True):
                slot.set(tensor)

    def fill(self) -> Any:
        """The model with all units in memory, to stay.

        Raises:
            CheckpointError: a file cannot be read.
        """
        for unit in self._layout.units:
            for row in unit.rows:
                slot = Slot.of(self.model.get_submodule(unit.module), row.name)
                slot.set(self._read(unit, row, slot.get()))
        self.model.tie_weights()
        return self.model.requires_grad_(True)

    def _read(self, unit: Unit, row: Row, like: Tensor) -> Tensor:
        dtype = torch.float32 if row.fp32 else self.dtype
        stored = self._layout.find(row.alias) if row.alias and unit.name(row) not in self._checkpoint.tensors else None
        source = (stored.unit, stored.row) if stored else (unit, row)
        whole = read_row(self._checkpoint, *source, dtype).to(self._device)
        return nn.Parameter(whole, requires_grad=False) if isinstance(like, nn.Parameter) else whole


def stored_dtype(config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that transformers would load a folder in when nobody says otherwise."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return DTYPES[next(iter(checkpoint.tensors.values())).dtype]


def compute_buffers(model: nn.Module, device: torch.device) -> None:
    """Make the buffers that no checkpoint holds (rotary frequencies) anew: on the meta device they were never computed."""
    for module in model.modules():
        names = module._non_persistent_buffers_set
        if names:
            fresh: Any = type(module)(module.config)
            for name in names:
                module._buffers[name] = fresh._buffers[name].to(device)


def read_row(checkpoint: Checkpoint, unit: Unit, row: Row, dtype: torch.dtype) -> Tensor:
    """One tensor of a unit as it lies in memory, put together from the pieces that are stored.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if unit.name(row) in checkpoint.tensors:
        return _read(checkpoint, unit.name(row)).to(dtype)
    if row.pieces == [(None, None)]:
        return _read(checkpoint, unit.disk_name(row)).to(dtype)
    whole = torch.empty(row.shape, dtype=dtype)
    for member, segment in row.pieces:
        part, dims = (whole, row.dims) if member is None else (whole[member], row.dims[1:])
        if segment is not None:
            before = sum(one.size for one in dims[0].segments[:segment])
            part = part.narrow(0, before, dims[0].segments[segment].size)
        part.copy_(_read(checkpoint, unit.disk_name(row, member=member, segment=segment)))
    return whole


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor by name, or the numbers of a matrix that is stored quantized."""
    form = format_of(checkpoint.tensors[name].dtype)
    if form is None:
        return _stored(checkpoint, name)
    parts = [_stored(checkpoint, sibling(name, part.suffix)) for part in form.parts if part.needed]
    return DEQUANTIZE[form.name](*parts)


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    info = checkpoint.tensors[name]
    try:
        with safe_open(info.path, framework="pt") as file:
            return file.get_tensor(name)
    except OSError as error:
        raise CheckpointError(f"{info.path} cannot be read: {error.strerror or error}") from None
