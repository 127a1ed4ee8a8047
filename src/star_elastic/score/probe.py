"""The other half of the redundancy curve: what one-shot cuts really cost, in held-out loss.

Shares of importance say how evenly it is spread, not what a cut does to the model. So the model is put in order in memory, and
each cut is run through the sliced lens, which computes exactly what the exported slice of the sorted folder would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from star_elastic import cost
from star_elastic.elastic import ElasticModel
from star_elastic.errors import DataError
from star_elastic.evaluate import held_out_loss
from star_elastic.layout import Layout
from star_elastic.loading import check_batches
from star_elastic.orders import best_first
from star_elastic.progress import progress_bar
from star_elastic.reorder import sort_model
from star_elastic.score.curve import axis_of
from star_elastic.score.finite import NotFiniteError
from star_elastic.score.measure import Batch, Scores
from star_elastic.submodel import ElasticConfig, Submodel
from star_elastic.train.data import Calibration, held_out_batches

FRACTIONS = (0.9, 0.75, 0.5)
"""Parts of the parent's width at which each axis is probed."""


@dataclass(frozen=True)
class ProbeOptions:
    """What to probe, and on what.

    Attributes:
        tokens: held-out tokens to measure loss on.
        data: where they come from; None for the calibration data, behind the rows scored on.
        skip: rows of ``data`` to leave out.
        fractions: of each axis; the largest legal width at or under each is probed.
        widths: further widths by axis.
    """

    tokens: int = 8192
    data: Any = None
    skip: int = 0
    fractions: tuple[float, ...] = FRACTIONS
    widths: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def check(self, layout: Layout) -> None:
        """Raise WidthError or UnknownNameError for a width that the model cannot be cut to, all other axes whole."""
        for axis, widths in self.widths.items():
            for width in widths:
                if axis == "depth":
                    layout.axes[axis].check(width)
                else:
                    layout.check({axis: width})


@dataclass(frozen=True)
class Point:
    """One cut of one axis.

    Attributes:
        axis: the axis that is cut; every other stays whole.
        width: what stays of it, in order of the scores.
        size: the parent's width.
        params: parameters of the slice.
        active_params: parameters that a token uses.
        loss: held-out loss, nats per token.
    """

    axis: str
    width: int
    size: int
    params: int
    active_params: int
    loss: float


@dataclass(frozen=True)
class ProbeReport:
    """What probing found.

    Attributes:
        full: held-out loss of the whole model, nats per token.
        params: parameters of the whole model.
        points: all cuts, by axis, widest first.
        tokens: held-out tokens.
        data_sha256: of their rows.
    """

    full: float
    params: int
    points: tuple[Point, ...]
    tokens: int
    data_sha256: str


def probe_scores(
    model: Any,
    layout: Layout,
    scores: Scores,
    held_out: Calibration,
    options: ProbeOptions | None = None,
    *,
    progress: bool = False,
) -> ProbeReport:
    """Put a scored model in the order of its scores, in place, and measure what cuts of each axis cost.

    Args:
        model: the transformers model that was scored, in evaluation mode; its members are sorted afterwards.
        layout: its table.
        scores: of this model. Axes without scores are cut in the order in which they lie; depth is cut only where it was ranked.
        held_out: rows that were not scored on.
        options: which widths; default: those at or under ``FRACTIONS``.
        progress: show a bar.

    Raises:
        NotFiniteError: a loss that is no number.
    """
    options = options or ProbeOptions()
    sort_model(model, layout, orders_of(scores, layout))
    elastic = ElasticModel(model, ElasticConfig(family=layout.family))
    cuts = probed_cuts(elastic.layout, scores.depth_order, options)  # its widths are legal in the model's dtype
    full, *losses = measure_losses(
        elastic, [Submodel(), *(cut for _, _, cut in cuts)], held_out, label="probing", progress=progress
    )
    if not math.isfinite(full):
        raise NotFiniteError(f"--probe: held-out loss of the whole model is {full}: score without it, or in another --dtype")
    for (axis, width, _), loss in zip(cuts, losses, strict=True):
        if not math.isfinite(loss):
            raise NotFiniteError(f"--probe: held-out loss at {axis}={width} is {loss}: score without it, or in another --dtype")
    points = [
        Point(
            axis=axis,
            width=width,
            size=layout.axes[axis].size,
            params=int(cost.params(layout, cut.widths, cut.layers)),
            active_params=int(cost.active_params(layout, cut.widths, cut.layers)),
            loss=loss,
        )
        for (axis, width, cut), loss in zip(cuts, losses, strict=True)
    ]
    return ProbeReport(full, int(cost.params(layout, {})), tuple(points), held_out.tokens, held_out.sha256)


def probe_rows(options: ProbeOptions, tokenizer: Any, layout: Layout, **rows: Any) -> Calibration:
    """The rows that a probe measures loss on.

    Args:
        options: which data, and how many rows and tokens of it.
        tokenizer: the parent's.
        layout: the parent's table.
        **rows: ``seq_len``, ``batch_size``, ``packing`` and ``seed`` of ``train.data.held_out_batches``.

    Raises:
        DataError: there are none, or they hold a token outside the vocabulary.
    """
    try:
        found = held_out_batches(options.data, tokenizer, tokens=options.tokens, skip=options.skip, **rows)
    except DataError as error:
        hint = ": score fewer --samples, or give --probe-data" if options.skip else ""
        raise DataError(f"--probe: {error}{hint}") from None
    check_batches(found.batches, layout)
    return found


def orders_of(scores: Scores, layout: Layout) -> dict[str, list[int]]:
    """The orders that a folder of these scores would be sorted by."""
    return {
        key: best_first(tensor.numpy(), axis_of(key, layout))
        for key, tensor in scores.tensors.items()
        if key != "depth"
    }


def probed_cuts(
    layout: Layout, depth_order: Sequence[int] | None, options: ProbeOptions
) -> list[tuple[str, int, Submodel]]:
    """Axis, width and nested model of every cut, widest first; depth only where its order is known."""
    cuts = []
    for name, axis in layout.axes.items():
        if name == "depth" and depth_order is None:
            continue
        fitting = [width for width in axis.legal() if name == "depth" or layout.fits({name: width})]
        usual = {max((w for w in fitting if w <= part * axis.size), default=axis.size) for part in options.fractions}
        for width in sorted({*usual, *options.widths.get(name, ())} - {axis.size}, reverse=True):
            if name == "depth":
                cuts.append((name, width, Submodel(layers=tuple(sorted(depth_order[:width])))))  # type: ignore[index]
            else:
                cuts.append((name, width, Submodel(widths={name: width})))
    return cuts


def measure_losses(
    model: ElasticModel,
    submodels: Sequence[Submodel],
    batches: Iterable[Batch],
    *,
    label: str,
    progress: bool = False,
) -> list[float]:
    """Held-out loss of nested models, in nats per token, each as its exported slice would have it.

    Args:
        model: the parent, in evaluation mode.
        submodels: its nested models.
        batches: ``input_ids`` and ``attention_mask``, (B, T).
        label: what the progress bar calls this.
        progress: show it.
    """
    rows = list(batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in rows)
    losses = []
    with progress_bar(label, tokens * len(submodels), "tokens", shown=progress) as advance:
        for submodel in submodels:
            model.add("measured", submodel)
            losses.append(held_out_loss(model, rows, submodel="measured"))
            advance(tokens)
    return losses
