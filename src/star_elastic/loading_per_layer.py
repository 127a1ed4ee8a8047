"""Loading a slice whose layers differ in width, which transformers cannot build from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from star_elastic.checkpoint import Checkpoint
from star_elastic.layout import Layout
from star_elastic.quant import ANY, SECTION
from star_elastic.rewrite import locate
from star_elastic.skeleton import build, compare_shapes
from star_elastic.streamed import compute_buffers, read_row, stored_dtype
from star_elastic.submodel import Submodel
from star_elastic.swap import Slot


def load_per_layer(
    folder: Path | str,
    layout: Layout,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    attn_implementation: str | None = None,
) -> Any:
    """Load a causal LM whose layers differ in width, in eval mode; code that came with the folder is never run.

    Quantized matrices are dequantized.

    Args:
        folder: the slice.
        layout: its table, ``per_layer.own_table``.
        device: where the weights go.
        dtype: of the weights, except those that are always fp32; ``auto`` keeps the stored one.
        attn_implementation: as for transformers.

    Raises:
        CheckpointError: tensors are missing, damaged, or have the wrong shape.
    """
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    checkpoint = Checkpoint.open(folder)
    locate(layout, checkpoint, quantized=ANY)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    vars(config).pop(SECTION, None)  # matrices are turned into ordinary numbers as they are read
    kind = dtype if isinstance(dtype, torch.dtype) else stored_dtype(config, checkpoint)
    config.dtype = kind
    model, _ = build(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, layout, Submodel())
    compare_shapes(model, layout, Submodel())
    compute_buffers(model, torch.device(device))
    fill(model, checkpoint, layout, torch.device(device), kind)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model.eval()


def fill(model: nn.Module, checkpoint: Checkpoint, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
    """Put a folder's tensors into a model that lies on the meta device; tied ones become one parameter."""
    for unit, row in layout.tensors():
        slot = Slot.of(model, unit.name(row))
        if row.alias is None:
            tensor = read_row(checkpoint, unit, row, torch.float32 if row.fp32 else dtype).to(device)
            slot.set(tensor if slot.buffer else nn.Parameter(tensor))
    for unit, row in layout.tensors():
        if row.alias is not None:
            Slot.of(model, unit.name(row)).set(model.get_parameter(row.alias))
