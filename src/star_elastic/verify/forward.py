"""Running a folder: transformers loads it, its logits are finite, and they are those of the parent's view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from star_elastic.elastic import ElasticModel
from star_elastic.layout import Layout
from star_elastic.loading import load_model
from star_elastic.submodel import Submodel
from star_elastic.verify.report import Fault

ROWS, TOKENS, SEED = 3, 24, 0
TOLERANCE = 1e-5  # of the largest logit; the same operations on the same numbers, with other strides
VIEW = "verified"


def forward_faults(
    folder: Path, layout: Layout, parent: Path | None, submodel: Submodel | None
) -> tuple[list[Fault], str]:
    """Run a folder on random tokens in fp32 and compare it with the parent's view; what is wrong, and what was looked at.

    Args:
        folder: loaded as a whole.
        layout: its table.
        parent: folder of its parent, loaded as a whole too; None runs only ``folder``.
        submodel: which nested model of the parent it is.

    Raises:
        CheckpointError: transformers cannot load one of them.
    """
    embedding = next(unit for unit in layout.units if unit.kind == "embedding")
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, embedding.rows[0].shape[0], (ROWS, TOKENS), generator=generator)
    found = _logits(load_model(folder, device=torch.device("cpu"), dtype=torch.float32), ids)
    about = f"{ROWS} x {TOKENS} random tokens in fp32"
    if not torch.isfinite(found).all():
        return [Fault("logits", "finite numbers", f"{int((~torch.isfinite(found)).sum()):,} NaN or infinite")], about
    if parent is None or submodel is None:
        return [], f"{about}, finite logits"
    family = ElasticModel.from_pretrained(parent, submodels={VIEW: submodel}, dtype=torch.float32)
    wanted = _logits(family.submodel(VIEW), ids)
    difference = largest_difference(found, wanted)
    about = f"{about}, logits within {difference:.1g} of the parent's view"
    if difference <= TOLERANCE:
        return [], about
    return [Fault("logits", f"those of the parent's view within {TOLERANCE:g}", f"{difference:.3g} apart")], about


def largest_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference of two tensors of logits, as a share of the largest logit that is wanted."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()
