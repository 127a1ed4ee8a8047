"""From packed tensors back to numbers. Products are in fp32, in ModelOpt's order, so that results agree with its to the bit.

E2M1 is sign, two bits of exponent and one of mantissa: eight magnitudes. E4M3 is torch's ``float8_e4m3fn``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from star_elastic.quant.formats import BLOCK, PER_BYTE

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
"""Number of each four-bit code; the highest bit is the sign."""


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Numbers (fp32) [..., C] of bytes (uint8) [..., C/2]: the low four bits of a byte come first."""
    table = torch.tensor(E2M1, device=packed.device)
    codes = torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)
    return table[codes.int()]


def dequantize_fp8(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """A matrix (fp32) [R, C] from E4M3 numbers [R, C] and one scale."""
    return weight.float() * weight_scale.float().reshape(())


def dequantize_nvfp4(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Tensor:
    """A matrix (fp32) [R, C] from bytes [R, C/2], E4M3 block scales [R, C/16] and one scale for all blocks."""
    rows, columns = weight.shape[0], weight.shape[1] * PER_BYTE
    scales = weight_scale.float() * weight_scale_2.float().reshape(())
    blocks = unpack_e2m1(weight).view(rows, columns // BLOCK, BLOCK)
    return (blocks * scales.unsqueeze(-1)).view(rows, columns)


DEQUANTIZE: dict[str, Callable[..., Tensor]] = {"fp8": dequantize_fp8, "nvfp4": dequantize_nvfp4}
"""Format -> function of the format's tensors, in the order of its needed parts."""
