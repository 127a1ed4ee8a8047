"""Measuring nested models of one parent, which is loaded only when a loss is wanted that is not known yet."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import torch

from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError
from star_elastic.evaluate import held_out_loss
from star_elastic.layout import Layout
from star_elastic.loading import load_model
from star_elastic.search.cache import Cache
from star_elastic.submodel import ElasticConfig, Submodel
from star_elastic.train.data import Calibration


class Meter:
    """Held-out losses of nested models.

    Args:
        parent: the model folder.
        layout: its table.
        rows: what to measure on.
        cache: what is known, and where to put what is measured.
        device: where to run.
        dtype: of the weights.

    Attributes:
        measured: how many losses the cache did not know.
    """

    def __init__(
        self,
        parent: Path | str,
        layout: Layout,
        rows: Calibration,
        cache: Cache,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.parent, self.layout, self.rows, self.cache = parent, layout, rows, cache
        self.device, self.dtype = device, dtype
        self.measured = 0

    def loss(self, submodel: Submodel) -> float:
        """Nats per token, as the exported slice would have it.

        Raises:
            CheckpointError: it is not finite; such a loss is not kept.
        """
        submodel = submodel.completed(self.layout)
        known = self.cache.get(submodel)
        if known is not None:
            return known
        self._model.add("measured", submodel)
        loss = held_out_loss(self._model, self.rows, submodel="measured")
        if not math.isfinite(loss):
            raise CheckpointError(f"{self.parent}: the model's loss at {self._cut(submodel)} is {loss}: {self._suspects()}")
        self.cache.put(submodel, loss)
        self.measured += 1
        return loss

    def _cut(self, submodel: Submodel) -> str:
        """The axes that a nested model cuts, for messages."""
        full = self.layout.complete({})
        cut = [f"{name}={width}" for name, width in submodel.widths.items() if width != full[name]]
        if submodel.layers is not None:
            cut.append(f"layers {','.join(map(str, submodel.layers))}")
        return f"widths {', '.join(cut)}" if cut else "full width"

    def _suspects(self) -> str:
        weights = "look for NaN or infinity among its weights"
        return weights if self.dtype == torch.float32 else f"{weights}, or try --dtype float32"

    @cached_property
    def _model(self) -> ElasticModel:
        model = load_model(self.parent, device=self.device, dtype=self.dtype)
        return ElasticModel(model, ElasticConfig(family=self.layout.family))
