"""Quantized layouts that are not read here, so that a refusal can name them."""

from __future__ import annotations

SUFFIXES = {
    "qweight": "GPTQ and AWQ",
    "qzeros": "GPTQ and AWQ",
    "g_idx": "GPTQ",
    "weight_packed": "compressed-tensors",
    "weight_global_scale": "compressed-tensors",
    "input_global_scale": "compressed-tensors",
    "weight_shape": "compressed-tensors",
    "weight_zero_point": "compressed-tensors",
    "weight_scale_inv": "block-wise FP8 models",
    "pre_quant_scale": "AWQ and SmoothQuant in ModelOpt",
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "SCB": "bitsandbytes",
    "bitsandbytes__nf4": "bitsandbytes",
    "bitsandbytes__fp4": "bitsandbytes",
    "scales": "GPTQ, AWQ and MLX",
    "biases": "MLX",
}
"""Last word of a tensor's name -> who stores such tensors."""

ENDINGS = {"_blocks": "MXFP4 models", "_scales": "MXFP4 models"}


def told_by_name(*names: str) -> str | None:
    """Who stores tensors of these names; None where no name tells."""
    for name in names:
        last = name.rpartition(".")[2]
        told = SUFFIXES.get(last) or next((who for ending, who in ENDINGS.items() if last.endswith(ending)), None)
        if told:
            return told
    return None
