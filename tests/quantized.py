"""Quantized folders by the names and layouts of the published checkpoints, filled with random codes; and their numbers.

``reference`` turns them back by the definitions of the formats, number by number tables, and shares nothing with the package.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_folder
from torch import Tensor

TINY: dict[str, Any] = {
    "pattern": "MEM*E",
    "mamba_head_dim": 16,
    "head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
}
"""A tiny NemotronH in which blocks of 16 can be cut along most axes."""

PUBLISHED = re.compile(r"backbone\.layers\.(0\.mixer\.(in|out)_proj|\d+\.mixer\.(shared_)?experts\..*_proj)\.weight")
"""Which matrices of ``TINY`` are quantized as in the published recipe: not attention, nor the Mamba layer before it."""

UNQUANTIZED = re.compile(r"embed|lm_head|\.gate\.weight|router")
"""Matrices that no recipe quantizes."""

EXCLUDED = [
    "lm_head",
    *(f"backbone.layers.3.mixer.{name}_proj" for name in "qkvo"),
    "backbone.layers.2.mixer.in_proj",
    "backbone.layers.2.mixer.out_proj",
    "backbone.layers.0.mixer.conv1d",
    "backbone.layers.2.mixer.conv1d",
]


def e2m1(code: int) -> float:
    """A four-bit number: sign, two bits of exponent (bias 1), one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def e4m3(code: int) -> float:
    """An eight-bit number: sign, four bits of exponent (bias 7), three of mantissa; no infinity, NaN where all ones."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


E2M1 = np.array([e2m1(code) for code in range(16)], np.float32)
E4M3 = np.array([e4m3(code) for code in range(256)], np.float32)


def codes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random E4M3 numbers of either sign, none of them NaN."""
    numbers = torch.randint(0, 127, shape, generator=generator) + 128 * torch.randint(0, 2, shape, generator=generator)
    return numbers.to(torch.uint8).view(torch.float8_e4m3fn)


def scale(generator: torch.Generator) -> Tensor:
    """One positive fp32 number."""
    return 0.001 + 0.01 * torch.rand((), generator=generator)


def pack(name: str, shape: tuple[int, ...], form: str, generator: torch.Generator) -> dict[str, Tensor]:
    """A random matrix [R, C] stored in a format, as the tensors that ModelOpt writes."""
    stem = name.removesuffix("weight")
    if form == "fp8":
        weight = {name: codes(shape, generator), f"{stem}weight_scale": scale(generator)}
    else:
        rows, columns = shape
        weight = {
            name: torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
            f"{stem}weight_scale": codes((rows, columns // 16), generator).float().abs().to(torch.float8_e4m3fn),
            f"{stem}weight_scale_2": scale(generator),
        }
    return {**weight, f"{stem}input_scale": scale(generator)}


def quantized_folder(
    path: Path,
    form: str | Callable[[str], str | None],
    *,
    section: bool = True,
    sidecar: bool = True,
    seed: int = 0,
    **edits: Any,
) -> Path:
    """A tiny quantized folder.

    Args:
        path: new folder.
        form: ``fp8`` or ``nvfp4`` in the published places; or the format of each matrix by name, None for BF16.
        section: whether config.json says how it is quantized.
        sidecar: whether there is a hf_quant_config.json.
        seed: of the numbers.
        **edits: of the tiny model.
    """
    of = form if callable(form) else lambda name: form if PUBLISHED.fullmatch(name) else None
    generator = torch.Generator().manual_seed(seed)
    tiny_folder(path, seed=seed, **{**TINY, "dtype": "bfloat16", **edits})
    stored = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        keep = tensor if "gate" in name else tensor.to(torch.bfloat16)
        chosen = of(name)
        stored |= pack(name, tuple(tensor.shape), chosen, generator) if chosen else {name: keep.contiguous()}
    stored["backbone.layers.3.mixer.k_proj.k_scale"] = scale(generator)
    stored["backbone.layers.3.mixer.v_proj.v_scale"] = scale(generator)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    declare(path, "MIXED_PRECISION" if callable(form) else form.upper(), section, sidecar)
    return path


def quantized_family(path: Path, family: str, form: str, seed: int = 0) -> Path:
    """A tiny model of any family in which every matrix of a linear layer is quantized, but not the head and routers."""
    generator = torch.Generator().manual_seed(seed)
    FAMILIES[family](seed, **(TINY if family == "nemotron_h" else {}), dtype="bfloat16").save_pretrained(path)
    stored = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if tensor.dim() == 2 and name.endswith(".weight") and not UNQUANTIZED.search(name):
            stored |= pack(name, tuple(tensor.shape), form, generator)
        else:
            stored[name] = (tensor if "gate" in name else tensor.to(torch.bfloat16)).contiguous()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    declare(path, form.upper(), sidecar=False, ignore=["lm_head"])
    return path


def declare(path: Path, algorithm: str, section: bool = True, sidecar: bool = True, **said: Any) -> None:
    """Say in a folder how it is quantized, in the words of ModelOpt."""
    producer = {"name": "modelopt", "version": "0.29.0"}
    config = json.loads((path / "config.json").read_text())
    config["dtype"] = "bfloat16"
    if section:
        group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "config_groups": {"group_0": group},
            "ignore": EXCLUDED,
            "producer": producer,
            **said,
        }
    (path / "config.json").write_text(json.dumps(config))
    if sidecar:
        inner = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": EXCLUDED, **said}
        (path / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": inner}))


def reference(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The fp32 numbers of every tensor of the unquantized model, by name: scales are used up, cache scales left out."""
    numbers = {}
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        if last.endswith("scale") or last == "weight_scale_2":
            continue
        numbers[name] = _numbers(name.removesuffix("weight"), tensor, tensors)
    return numbers


def _numbers(stem: str, tensor: Tensor, tensors: dict[str, Tensor]) -> np.ndarray:
    if tensor.dtype == torch.float8_e4m3fn:
        return E4M3[tensor.view(torch.uint8).numpy()] * tensors[f"{stem}weight_scale"].numpy()
    if tensor.dtype == torch.uint8:
        packed = tensor.numpy()
        plain = np.empty((packed.shape[0], 2 * packed.shape[1]), np.float32)
        plain[:, 0::2], plain[:, 1::2] = E2M1[packed % 16], E2M1[packed // 16]
        blocks = E4M3[tensors[f"{stem}weight_scale"].view(torch.uint8).numpy()]
        return plain * np.repeat(blocks * tensors[f"{stem}weight_scale_2"].numpy(), 16, axis=1)
    return tensor.float().numpy()


def plain_folder(source: Path, path: Path) -> Path:
    """The numbers of a quantized folder as an ordinary fp32 folder."""
    path.mkdir()
    numbers = reference(load_file(source / "model.safetensors"))
    save_file({name: torch.tensor(one) for name, one in numbers.items()}, path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return path
