"""Scoring a model in memory: one forward pass for every width axis, then iterative removal of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from star_elastic.errors import DataError
from star_elastic.layout import Layout
from star_elastic.progress import progress_bar
from star_elastic.score.activations import Recorder
from star_elastic.score.collect import collect
from star_elastic.score.depth import Removal, depth_order, first_samples, passes, remove_layers
from star_elastic.score.methods import REMOVALS, ScoreOptions
from star_elastic.score.state import RunState
from star_elastic.score.weights import WeightSums

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Scores:
    """Importance of every member of every scored axis.

    Attributes:
        tensors: by key, ``hidden``, ``depth``, ``layers.{i}.{axis}`` or ``layers.{i}.experts.{e}.{axis}``; fp32, one number per
            member. ``depth`` holds for each layer the change at its removal, or 1 - cosine; its order is ``depth_order``.
        idle_experts: by layer, the experts that no token reached.
        samples: rows with at least one real token.
        tokens: real tokens.
        depth_order: layers from most to least important; None where depth was not ranked.
        depth_errors: by number of layers kept, the change of the logits or predictions; see ``changes``.
    """

    tensors: dict[str, Tensor]
    idle_experts: dict[int, list[int]]
    samples: int
    tokens: int
    depth_order: tuple[int, ...] | None = None
    depth_errors: Mapping[int, float] | None = None


def score_model(
    model: PreTrainedModel,
    layout: Layout,
    batches: Iterable[Batch],
    options: ScoreOptions | None = None,
    *,
    state: RunState | None = None,
    progress: bool = False,
) -> Scores:
    """Score a transformers causal LM in memory; its mode is restored afterwards.

    Args:
        model: with the structure that ``layout`` describes.
        layout: the model's table, which says where to listen.
        batches: each with ``input_ids`` and, where there is padding on either side, ``attention_mask``, (B, T).
        options: what to measure; default: every axis by its first method.
        state: where to save what is gathered, and to go on from.
        progress: show bars.

    Raises:
        UnknownNameError, WidthError, RequestError: see ``ScoreOptions.check``.
        DataError: no real token, or none that reached some layer.
        CheckpointError: NaN or infinite activations; names the module.
    """
    options = options or ScoreOptions()
    options.check(layout)
    listed = list(batches)
    count_tokens(listed, layout)
    saved = state.load() if state else {}
    recorder = Recorder(layout, options)
    with _measuring(model):
        if "batches" in saved:
            recorder.restore({name.removeprefix("sums/"): t for name, t in saved.items() if name.startswith("sums/")})
        start = int(saved.get("batches", torch.tensor(0)))
        listen(model, recorder, listed, start=start, state=state, progress=progress)
        removal = None
        if options.method("depth") in REMOVALS:
            removal = _remove(model, recorder, listed, saved, state, progress)
        weights = WeightSums(layout, options)
        for unit in layout.units:
            weights.add(model, unit)
        return summarise(recorder, weights, listed, removal)


def count_tokens(batches: Sequence[Batch], layout: Layout) -> tuple[int, int]:
    """Samples with a real token, and real tokens.

    Raises:
        DataError: there are none.
    """
    masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in batches]
    samples, tokens = sum(int(mask.any(1).sum()) for mask in masks), sum(int(mask.sum()) for mask in masks)
    if tokens == 0:
        layers = [unit.module for unit in layout.units if unit.layer is not None]
        raise DataError(f"the calibration data holds no real token, so {layers[0]} to {layers[-1]} cannot be scored")
    return samples, tokens


def listen(
    model: Any,
    recorder: Recorder,
    batches: Sequence[Batch],
    *,
    start: int = 0,
    state: RunState | None = None,
    progress: bool = False,
) -> None:
    """Run every batch from number ``start`` on, without the head, and let the recorder hear it."""
    device = next(model.parameters()).device
    total = sum(batch["input_ids"].numel() for batch in batches)
    with recorder.listening(model), progress_bar("scoring", total, "tokens", shown=progress) as advance:
        for number, batch in enumerate(batches):
            ids = batch["input_ids"].to(device)
            if number >= start:
                mask = batch.get("attention_mask", torch.ones_like(ids)).to(device)
                with recorder.batch(mask):
                    model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
                if state:
                    state.after_batch(partial(_state, recorder, number + 1))
            advance(ids.numel())


def summarise(recorder: Recorder, weights: WeightSums, batches: Sequence[Batch], removal: Removal | None) -> Scores:
    """Scores of everything that was gathered."""
    layout = recorder.layout
    samples, tokens = count_tokens(batches, layout)
    tensors = collect(recorder, weights)
    by_layer: dict[int, float] = {}
    errors: dict[int, float] = {}
    order: Sequence[int] | None = None
    if removal is not None:
        by_layer = dict(zip(removal.removed, removal.errors, strict=True))
        errors = {layout.num_layers - 1 - gone: error for gone, error in enumerate(removal.errors[:-1])}
        order = removal.removed[::-1]
    elif recorder.cosines:
        by_layer = {layer: sums.importance() for layer, sums in recorder.cosines.items()}
        order = depth_order(by_layer, layout)
    if order is not None:
        tensors["depth"] = torch.tensor([by_layer[layer] for layer in range(layout.num_layers)], dtype=torch.float32)
    idle = {layer: sums.idle() for layer, sums in recorder.experts.items()}
    return Scores(
        tensors,
        {layer: experts for layer, experts in idle.items() if experts},
        samples,
        tokens,
        None if order is None else tuple(order),
        errors,
    )


def _remove(
    model: Any,
    recorder: Recorder,
    batches: Sequence[Batch],
    saved: Mapping[str, Tensor],
    state: RunState | None,
    progress: bool,
) -> Removal:
    """Iterative removal over the first samples, going on where ``saved`` left off."""
    layout, options = recorder.layout, recorder.options
    some = list(first_samples(batches, options.depth_samples, next(model.parameters()).device))
    kept = {name.removeprefix("depth/"): tensor for name, tensor in saved.items() if name.startswith("depth/")}
    sums = _state(recorder, len(batches))

    def after_batch(done: Removal) -> None:
        if state:
            state.after_batch(lambda: sums | {f"depth/{name}": tensor for name, tensor in done.state().items()})

    with progress_bar("scoring depth", passes(layout, len(some)), "runs", shown=progress) as advance:
        done = Removal.restored(kept) if kept else None
        told: Any = {"advance": advance, "after_batch": after_batch}
        return remove_layers(model, layout, some, method=options.method("depth"), done=done, **told)


def _state(recorder: Recorder, batches: int) -> dict[str, Tensor]:
    return {"batches": torch.tensor(batches), **{f"sums/{name}": tensor for name, tensor in recorder.state().items()}}


@contextmanager
def _measuring(model: Any) -> Iterator[None]:
    """Eval mode without gradients; the mode is put back."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
