"""The facts that make a checkpoint elastic, measured on the demo's own folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from star_elastic.elastic import ElasticModel
from star_elastic.loading import load_model
from star_elastic.train.report import Choice
from star_elastic.verify.forward import largest_difference

CPU = torch.device("cpu")
BUDGET_TOLERANCE = 0.05
TOLERANCE = 1e-5  # of the largest logit, in fp32: a permuted sum rounds differently


@dataclass(frozen=True)
class Fact:
    """One claim, whether it holds, and the measurement behind it."""

    claim: str
    holds: bool
    measured: str


@torch.inference_mode()
def sorted_equals_parent(parent: Path, sorted_parent: Path, ids: torch.Tensor) -> Fact:
    """The sorted parent computes what the parent computes. ids: (B, T)."""
    before = load_model(parent, device=CPU)(input_ids=ids).logits
    after = load_model(sorted_parent, device=CPU)(input_ids=ids).logits
    difference = largest_difference(after, before)
    return Fact(
        "the sorted parent's logits equal the parent's",
        difference <= TOLERANCE,
        f"largest difference {difference:.1e} of the largest logit, limit {TOLERANCE:.0e}",
    )


@torch.inference_mode()
def views_equal_folders(elastic: ElasticModel, slices: Mapping[str, Path], ids: torch.Tensor) -> Fact:
    """Every submodel on views computes what its exported folder computes. ids: (B, T).

    The weights are the same numbers; sums may round differently, since a matrix library may pick another kernel for rows that
    lie apart in memory.
    """
    largest = 0.0
    for name, folder in slices.items():
        exported = load_model(folder, device=CPU)(input_ids=ids).logits
        largest = max(largest, largest_difference(elastic.submodel(name)(input_ids=ids).logits, exported))
    return Fact(
        "each submodel's logits on views equal its exported folder's",
        largest <= TOLERANCE,
        f"largest difference {largest:.1e} of the largest logit, limit {TOLERANCE:.0e}",
    )


def sizes_share_memory(elastic: ElasticModel, names: list[str]) -> Fact:
    """All sizes in memory together hold no more bytes than the largest alone."""
    alone = storage_bytes([elastic.model])
    together = storage_bytes([elastic.model, *(elastic.submodel(name) for name in names)])
    return Fact(
        f"{len(names)} sizes in memory cost the largest one's bytes",
        together == alone,
        f"{together:,} bytes for all, {alone:,} for the largest",
    )


def budgets_are_met(choices: Mapping[str, Choice], slices: Mapping[str, Path]) -> Fact:
    """Every exported folder holds about the parameters that its budget asked for, counted in the folder itself."""
    errors = {}
    for name, choice in choices.items():
        held = sum(parameter.numel() for parameter in load_model(slices[name], device=CPU).parameters())
        errors[name] = held / choice.target - 1
    return Fact(
        f"each exported folder is within {BUDGET_TOLERANCE:.0%} of its budget",
        all(abs(error) <= BUDGET_TOLERANCE for error in errors.values()),
        ", ".join(f"{name} {error:+.1%}" for name, error in errors.items()),
    )


def storage_bytes(models: list[Any]) -> int:
    """Bytes of the distinct storages behind all parameters of all models."""
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for model in models
        for parameter in model.parameters()
    }
    return sum(storages.values())
