"""Loading a quantized folder as an ordinary model: matrices are turned into numbers of the model's dtype, one unit at a time.

transformers knows no ModelOpt: it would load such a folder with a warning, without its scales.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from star_elastic.checkpoint import Checkpoint
from star_elastic.families import layout_of
from star_elastic.quant.declared import read_declared
from star_elastic.quant.folder import ANY
from star_elastic.rewrite import locate
from star_elastic.streamed import StreamedModel
from star_elastic.submodel import read_config


def is_quantized(folder: Path | str) -> bool:
    """Whether a folder says that it is quantized.

    Raises:
        CheckpointError: in a way that is not known here.
    """
    return read_declared(Path(folder), read_config(folder)) is not None


def load_dequantized(
    folder: Path | str, *, device: torch.device, dtype: torch.dtype | str = "auto", **kwargs: Any
) -> Any:
    """A causal LM in eval mode with the numbers that a quantized folder stands for.

    Args:
        folder: FP8 or NVFP4 by ModelOpt.
        device: where the model goes.
        dtype: of its weights; ``auto`` is what config.json says. Products of codes and scales are rounded to it once.
        **kwargs: passed on to transformers' ``from_config``.

    Raises:
        CheckpointError: the folder is damaged or quantized in another way.
    """
    from transformers import GenerationConfig

    checkpoint = Checkpoint.open(folder)
    layout = layout_of(checkpoint.config)
    locate(layout, checkpoint, quantized=ANY)
    streamed = StreamedModel(checkpoint, layout, device=device, dtype=dtype, **kwargs)
    model = streamed.fill()
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model
