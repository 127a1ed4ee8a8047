"""Scoring a model that does not fit into memory: layer by layer, each read from disk once.

Every batch goes through a layer before the next layer is read; in between, hidden states wait in memory or on disk. What is
heard is what the whole model would have said, because the layer, its inputs and the code around it are the same. Only the order
of layers is found otherwise: removing them one by one would read the model once for every pair, so cosines take its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from star_elastic.checkpoint import Checkpoint
from star_elastic.layout import Layout, Unit
from star_elastic.progress import progress_bar
from star_elastic.score.activations import Recorder
from star_elastic.score.finite import check_weights
from star_elastic.score.hidden import HiddenStates, InMemory, OnDisk
from star_elastic.score.measure import Batch, Scores, count_tokens, summarise
from star_elastic.score.methods import REMOVALS, ScoreOptions
from star_elastic.score.settings import Waiting
from star_elastic.score.stack import Stack
from star_elastic.score.state import RunState
from star_elastic.score.weights import WeightSums
from star_elastic.selection import RequestError
from star_elastic.skeleton import saved_tensors
from star_elastic.streamed import StreamedModel


def layerwise_options(options: ScoreOptions, *, probe: bool = False) -> ScoreOptions:
    """The same options, with layers ranked by cosine where nothing else was asked.

    Raises:
        RequestError: iterative removal was asked for, or a probe, which runs whole models.
    """
    if probe:
        raise RequestError("--probe runs the whole model, and --layerwise never holds it: score without one of them")
    if options.methods.get("depth") in REMOVALS:
        raise RequestError(
            "--layerwise cannot remove layers one by one, which reads the model once for every pair: depth=cosine"
        )
    return ScoreOptions(
        {"depth": "cosine", **options.methods}, options.kept, options.per_expert, options.depth_samples, options.seed
    )


def score_layerwise(
    checkpoint: Checkpoint,
    layout: Layout,
    batches: Sequence[Batch],
    options: ScoreOptions,
    *,
    device: torch.device,
    dtype: torch.dtype | str = "auto",
    waiting: Waiting = "memory",
    state: RunState | None = None,
    progress: bool = False,
) -> tuple[Scores, torch.dtype]:
    """Score a model of which one layer at a time is in memory.

    Args:
        checkpoint: the model's folder.
        layout: its table.
        batches: as for ``score_model``.
        options: see ``layerwise_options``.
        device: where layers run.
        dtype: of the weights.
        waiting: where hidden states wait between layers; on disk they go to the folder of ``state``.
        state: where the sums and, on disk, the hidden states are kept after each layer, to go on from.
        progress: show a bar.

    Returns:
        What ``score_model`` would, and the dtype of the weights.

    Raises:
        As ``score_model``; and CheckpointError: the disk has no room for hidden states, or those to go on from are gone;
        NotFiniteError: NaN or infinite weights.
    """
    options = layerwise_options(options)
    options.check(layout)
    count_tokens(batches, layout)
    streamed = StreamedModel(checkpoint, layout, device=device, dtype=dtype)
    run = _Run(streamed, Recorder(layout, options), WeightSums(layout, options), batches)
    saved = state.load() if state and waiting == "disk" else {}
    done = run.restore(saved) if saved else 0
    hidden: HiddenStates = InMemory()
    if waiting == "disk" and state is not None:
        hidden = _on_disk(state.folder, layout, batches, streamed.dtype, done)
    layers = [unit for unit in layout.units if unit.layer is not None]
    total = sum(batch["input_ids"].numel() for batch in batches) * len(layers)
    with torch.inference_mode(), progress_bar("scoring", total, "layer tokens", shown=progress) as advance:
        with ExitStack() as stack:
            stack.enter_context(streamed.holding(next(unit for unit in layout.units if unit.kind == "final_norm")))
            for unit in layers[done:]:
                tokens = run.layer(unit, hidden, device)
                hidden.turn()
                if state and waiting == "disk":
                    state.save(run.state(unit))
                advance(tokens)
        run.other_weights()
    return summarise(run.recorder, run.weights, batches, None), streamed.dtype


class _Run:
    """What is gathered layer by layer."""

    def __init__(
        self, streamed: StreamedModel, recorder: Recorder, weights: WeightSums, batches: Sequence[Batch]
    ) -> None:
        self.streamed, self.recorder, self.weights, self.batches = streamed, recorder, weights, batches

    def layer(self, unit: Unit, hidden: HiddenStates, device: torch.device) -> int:
        """Take every batch through one layer; the number of tokens."""
        layout, model = self.recorder.layout, self.streamed.model
        assert unit.layer is not None
        tokens = 0
        with ExitStack() as stack:
            if unit.layer == 0:
                stack.enter_context(self.streamed.holding(next(u for u in layout.units if u.kind == "embedding")))
            stack.enter_context(self.streamed.holding(unit))
            control = stack.enter_context(Stack(start=unit.layer, stop=unit.layer + 1).controlling(model, layout))
            stack.enter_context(self.recorder.listening(model, self._heard(unit)))
            self._check_held()
            self.weights.add(model, unit)
            for number, batch in enumerate(self.batches):
                mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).to(device)
                control.hidden = None if unit.layer == 0 else hidden.read(number).to(device)
                # From the second layer on the embedding is gone: any hidden states do to begin with.
                begin = (
                    {"input_ids": batch["input_ids"].to(device)}
                    if unit.layer == 0
                    else {"inputs_embeds": control.hidden}
                )
                with self.recorder.batch(mask):
                    model.base_model(**begin, attention_mask=mask, use_cache=False)
                assert control.output is not None
                hidden.write(number, control.output)
                tokens += mask.numel()
        return tokens

    def other_weights(self) -> None:
        """Check the head's weights; and take from all outside the decoder layers, where an axis is ranked by them."""
        for unit in self.recorder.layout.units:
            if unit.kind == "head" or (unit.layer is None and self.weights.axes):
                with self.streamed.holding(unit):
                    self._check_held()
                    self.weights.add(self.streamed.model, unit)

    def _check_held(self) -> None:
        """Raise NotFiniteError for NaN or infinity in what is in memory now."""
        check_weights((name, tensor) for name, tensor in saved_tensors(self.streamed.model) if not tensor.is_meta)

    def _heard(self, unit: Unit) -> list[Unit]:
        """A layer, with the embedding before the first and the final norm after the last: elsewhere these run for nothing."""
        ends = {"embedding": 0, "final_norm": self.recorder.layout.num_layers - 1}
        return [unit, *(other for other in self.recorder.layout.units if ends.get(other.kind) == unit.layer)]

    def state(self, unit: Unit) -> dict[str, Tensor]:
        """Everything gathered up to a layer."""
        assert unit.layer is not None
        return {
            "layers": torch.tensor(unit.layer + 1),
            **{f"sums/{name}": tensor for name, tensor in self.recorder.state().items()},
            **{f"squares/{key}": tensor for key, tensor in self.weights.squares.items()},
            **{f"columns/{place}": tensor for place, tensor in self.weights.columns.items()},
            **{f"routers/{layer}": tensor for layer, tensor in self.weights.routers.items()},
        }

    def restore(self, saved: dict[str, Tensor]) -> int:
        """Go on from an earlier ``state``: the number of layers that are done."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in saved.items():
            head, _, tail = name.partition("/")
            parts.setdefault(head, {})[tail] = tensor
        self.recorder.restore(parts.get("sums", {}))
        self.weights.squares, self.weights.columns = parts.get("squares", {}), parts.get("columns", {})
        self.weights.routers = {int(layer): tensor for layer, tensor in parts.get("routers", {}).items()}
        return int(saved["layers"])


def _on_disk(folder: Path, layout: Layout, batches: Sequence[Batch], dtype: torch.dtype, layer: int) -> OnDisk:
    shapes = [(batch["input_ids"].shape[0], batch["input_ids"].shape[1]) for batch in batches]
    return OnDisk(folder, shapes, layout.stream.size, dtype, layer)
