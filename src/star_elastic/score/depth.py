"""Which layers matter: iterative removal by what it changes, or cosines in one pass.

Removal [Nemotron Elastic eq. 5]: from the layers that are left, the one is removed whose absence, together with all removed
before, changes least: logits, or predictions (``changes``). Then all are judged again. That is one run of the model for every
pair of layers, halved by starting each run at the layer in question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from star_elastic.layout import Layout
from star_elastic.score.changes import CHANGES, Change
from star_elastic.score.finite import NotFiniteError
from star_elastic.score.stack import Stack

Batch = Mapping[str, Tensor]


@dataclass
class Removal:
    """How far iterative removal has come.

    Attributes:
        removed: layers, in the order of their removal.
        errors: the change after each removal.
        changes: of the round in progress: by layer, the summed change without it, fp64 (L,).
        full: of the round in progress: what to divide by, fp64 scalar.
        batches: of the round in progress: how many are done.
    """

    removed: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    changes: Tensor | None = None
    full: Tensor | None = None
    batches: int = 0

    def state(self) -> dict[str, Tensor]:
        """Everything, as tensors."""
        found = {
            "removed": torch.tensor(self.removed, dtype=torch.int64),
            "errors": torch.tensor(self.errors, dtype=torch.float64),
            "batches": torch.tensor(self.batches),
        }
        if self.changes is not None and self.full is not None:
            found |= {"changes": self.changes, "full": self.full}
        return found

    @classmethod
    def restored(cls, state: Mapping[str, Tensor]) -> Removal:
        """Continue from an earlier ``state``, exactly."""
        removed, errors = state["removed"].tolist(), state["errors"].tolist()
        return cls(removed, errors, state.get("changes"), state.get("full"), int(state["batches"]))


def remove_layers(
    model: Any,
    layout: Layout,
    batches: Sequence[Batch],
    *,
    method: str = "removal",
    done: Removal | None = None,
    advance: Callable[[int], None] = lambda passes: None,
    after_batch: Callable[[Removal], None] = lambda done: None,
) -> Removal:
    """Remove layer after layer until none is left.

    Layers of a kind that every nested model needs are held back: the last one of such a kind goes after all others.

    Args:
        model: a transformers causal LM in eval mode, under ``inference_mode``.
        layout: its table.
        batches: ``input_ids`` and ``attention_mask``, (B, T), on the model's device.
        method: by which change layers are judged, of ``CHANGES``.
        done: where to go on.
        advance: told the number of judged (layer, batch) pairs.
        after_batch: told the state after each batch of each round.

    Raises:
        NotFiniteError: logits that are NaN or infinite.
    """
    done = done or Removal()
    change = CHANGES[method](model, layout)
    with Stack().controlling(model, layout) as stack:
        while len(done.removed) < layout.num_layers:
            candidates = removable(layout, done.removed)
            for batch in batches[done.batches :]:
                _judge(model, stack, batch, candidates, done, change, layout.num_layers)
                done.batches += 1
                advance(layout.num_layers - len(done.removed))
                after_batch(done)
            assert done.changes is not None and done.full is not None
            errors = done.changes / done.full
            if not bool(torch.isfinite(errors[candidates]).all()):
                raise NotFiniteError(
                    f"logits hold NaN or infinity, or are all zero, so layers cannot be ranked by {method}"
                )
            worst = min(candidates, key=lambda layer: float(errors[layer]))
            done.removed.append(worst)
            done.errors.append(float(errors[worst]))
            done.changes, done.full, done.batches = None, None, 0
    return done


def _judge(
    model: Any, stack: Stack, batch: Batch, candidates: list[int], done: Removal, change: Change, layers: int
) -> None:
    """Add one batch to the changes of every candidate."""
    mask = batch["attention_mask"].bool()
    stack.removed, stack.start, stack.hidden, stack.inputs = frozenset(), 0, None, None
    full = _last_hidden(model, batch)[mask]
    stack.removed, stack.inputs = frozenset(done.removed), {}
    _last_hidden(model, batch)
    inputs, stack.inputs = stack.inputs, None
    changes = torch.zeros(layers, dtype=torch.float64)
    for layer in candidates:
        stack.removed, stack.start, stack.hidden = frozenset({*done.removed, layer}), layer, inputs[layer]
        changes[layer] = change.apart(_last_hidden(model, batch)[mask], full)
    total = change.whole(full).cpu()
    done.changes = changes if done.changes is None else done.changes + changes
    done.full = total if done.full is None else done.full + total


def _last_hidden(model: Any, batch: Batch) -> Tensor:
    """What the head reads, fp32 (B, T, D)."""
    output = model.base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    return output.last_hidden_state.float()


def removable(layout: Layout, removed: Sequence[int]) -> list[int]:
    """Layers that may go next, ascending: those left, without the last of each needed kind while others are left."""
    left = [unit for unit in layout.units if unit.layer is not None and unit.layer not in removed]
    kinds = [unit.kind for unit in left]
    free = [unit for unit in left if unit.kind not in layout.required_kinds or kinds.count(unit.kind) > 1]
    return [unit.layer for unit in free or left if unit.layer is not None]


def passes(layout: Layout, batches: int) -> int:
    """How many (layer, batch) pairs removal judges in all; those held back count as judged."""
    return layout.num_layers * (layout.num_layers + 1) // 2 * batches


def depth_order(scores: Mapping[int, float], layout: Layout) -> list[int]:
    """Layers from most to least important, such that the first layers of the order always hold every needed kind."""
    removed: list[int] = []
    while len(removed) < layout.num_layers:
        removed.append(min(removable(layout, removed), key=lambda layer: scores[layer]))
    return removed[::-1]


def first_samples(batches: Sequence[Batch], samples: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """The first ``samples`` rows, in batches as they come, on a device; rows without a real token do not count."""
    for batch in batches:
        if samples <= 0:
            return
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        rows = mask.any(1).nonzero()[:samples, 0]
        samples -= len(rows)
        if len(rows):
            yield {"input_ids": batch["input_ids"][rows].to(device), "attention_mask": mask[rows].to(device)}
