"""What a folder says about its quantization: ``quantization_config`` in config.json, and ModelOpt's ``hf_quant_config.json``.

Published folders have one of them or both. They say by which method and recipe, and which modules were left out; in which format
a matrix lies is told by its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from star_elastic.errors import CheckpointError
from star_elastic.quant.formats import BLOCK, FP8, NVFP4
from star_elastic.submodel import read_json

SIDECAR = "hf_quant_config.json"
SECTION = "quantization_config"
METHOD = "modelopt"
MIXED = "MIXED_PRECISION"

ALGORITHMS = {"FP8": FP8.name, "NVFP4": NVFP4.name, "W4A16_NVFP4": NVFP4.name}
"""ModelOpt's ``quant_algo`` -> format of the matrices."""


@dataclass(frozen=True)
class Declared:
    """What a folder says.

    Attributes:
        algorithm: ModelOpt's ``quant_algo``.
        formats: formats that its matrices may have.
        section: ``quantization_config`` of config.json, where it has one.
        sidecar: content of hf_quant_config.json, where there is one.
    """

    algorithm: str
    formats: frozenset[str]
    section: dict[str, Any] | None
    sidecar: dict[str, Any] | None

    @property
    def text(self) -> str:
        """Method and algorithm, for people."""
        return f"{self.algorithm} by ModelOpt"


def read_declared(folder: Path, config: Mapping[str, Any]) -> Declared | None:
    """What a folder says about its quantization; None where it says nothing.

    Raises:
        CheckpointError: a method or recipe that is not known here, by name; or the two files disagree.
    """
    section = config.get(SECTION)
    sidecar = read_json(folder / SIDECAR) if (folder / SIDECAR).exists() else None
    if not section and sidecar is None:
        return None
    inner = sidecar.get("quantization") if sidecar is not None else None
    if sidecar is not None and not isinstance(inner, dict):
        raise CheckpointError(f"{folder / SIDECAR} has no quantization: it is not ModelOpt's file")
    if section:
        _check_method(folder, section)
    found = {str(said["quant_algo"]).upper() for said in (section, inner) if said and said.get("quant_algo")}
    if len(found) != 1:
        raise CheckpointError(
            f"{folder}: config.json and {SIDECAR} say {' and '.join(sorted(found))}: keep the right one"
            if found
            else f"{folder} is quantized, but neither config.json nor {SIDECAR} gives a quant_algo"
        )
    algorithm = found.pop()
    layers = [layer for said in (section, inner) if said for layer in _layers(said)]
    for name, said in layers:
        _check_algorithm(f"{folder}: {name}", str(said.get("quant_algo")).upper(), said)
    if algorithm == MIXED:
        return Declared(algorithm, frozenset(ALGORITHMS.values()), section or None, sidecar)
    _check_algorithm(str(folder), algorithm, inner or {})
    return Declared(algorithm, frozenset({ALGORITHMS[algorithm]}), section or None, sidecar)


def _check_method(folder: Path, section: Any) -> None:
    if not isinstance(section, dict):
        raise CheckpointError(f"{folder}: config.json: {SECTION} must be an object, not {section!r}")
    method, producer = section.get("quant_method"), section.get("producer")
    if method is None and isinstance(producer, dict):
        method = producer.get("name")
    if method != METHOD:
        raise CheckpointError(
            f"{folder} is quantized ({method}): only ModelOpt's FP8 and NVFP4 and unquantized weights can be read"
        )


def _layers(said: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    layers = said.get("quantized_layers")
    return [(name, one) for name, one in layers.items() if isinstance(one, dict)] if isinstance(layers, dict) else []


def _check_algorithm(where: str, algorithm: str, said: Mapping[str, Any]) -> None:
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"{where} is quantized as {algorithm} of ModelOpt, which is not known here: known are {', '.join(ALGORITHMS)}"
        )
    group = said.get("group_size")
    if ALGORITHMS[algorithm] == NVFP4.name and group not in (None, BLOCK):
        raise CheckpointError(f"{where} has a group_size of {group}: NVFP4 has blocks of {BLOCK}")
