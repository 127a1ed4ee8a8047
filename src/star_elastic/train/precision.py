"""In which precision a device multiplies best."""

from __future__ import annotations

import torch


def fast_dtype(device: torch.device) -> torch.dtype | None:
    """bfloat16 where the hardware multiplies it, else None: emulated, it is many times slower than fp32 (20 on an AVX2 core)."""
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    else:
        fast = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else None
