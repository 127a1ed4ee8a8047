"""Searching a parent: check, list what fits, measure, rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from star_elastic import cost
from star_elastic.checkpoint import Checkpoint, weights_sample_sha256
from star_elastic.ladder import Budget
from star_elastic.layout import Layout
from star_elastic.loading import (
    check_batches,
    check_tokenizer,
    choose_device,
    choose_dtype,
    layout_in,
    transformers_reads,
)
from star_elastic.progress import progress_bar
from star_elastic.rewrite import locate
from star_elastic.score.run import row_length
from star_elastic.search.cache import Cache, Subject
from star_elastic.search.choose import choose_axes
from star_elastic.search.grid import make_grid
from star_elastic.search.meter import Meter
from star_elastic.search.report import Candidate, SearchReport
from star_elastic.search.walk import next_member
from star_elastic.selection import stored_format
from star_elastic.streamed import stored_dtype
from star_elastic.submodel import Submodel, open_elastic
from star_elastic.train.data import held_out_batches
from star_elastic.train.documents import load_tokenizer


def search_parent(
    parent: Path | str,
    budget: Budget,
    data: Any,
    *,
    axes: Sequence[str] | None = None,
    candidates: int = 24,
    tokens: int = 8192,
    seq_len: int | None = None,
    batch_size: int = 1,
    seed: int = 0,
    cache: Path | str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: bool = True,
) -> SearchReport:
    """The best legal widths at or under a budget, by held-out loss of one-shot slices. Nothing is trained or written.

    Everything that can be checked without weights is checked before they are loaded, and they are loaded only if a loss is
    wanted that the cache does not know.

    Args:
        parent: a model folder with its tokenizer, sorted by importance.
        budget: the limit; the format of a memory budget is taken from the parent.
        data: text that was not used for scoring: what ``train.data.held_out_batches`` takes.
        axes: which axes may be cut. Default: those that the parent is sorted along, or all where it is not sorted; ``depth``
            where layers are ranked; ``experts`` not under a budget on active parameters, which does not see them.
        candidates: how many nested models to measure at most.
        tokens: held-out tokens.
        seq_len: tokens per row; default: 8,192, or what the model allows where that is less.
        batch_size: rows per forward pass.
        seed: of the order of documents.
        cache: JSON file of losses, read and added to.
        device: ``auto`` takes a GPU where there is one.
        dtype: ``auto`` keeps the stored one.
        progress: show a bar.

    Raises:
        CheckpointError: the parent or the cache is missing or damaged, or a loss is not finite.
        TargetError: the folder of the cache does not exist.
        WidthError: nothing fits the budget; says what can be reached.
        UnknownNameError, RequestError: an axis that the model does not have, twice, or ``depth`` where layers are not ranked.
        DataError: the data cannot be read, or is not for this model.

    Example:
        >>> report = search_parent("sorted", Budget("active_params", 2_000_000_000), "text.jsonl")  # doctest: +SKIP
        >>> report.command                                                                          # doctest: +SKIP
        'star-elastic slice sorted sorted-cut --width hidden=1920 --width expert_ffn=960'
    """
    config, layout, elastic = open_elastic(parent)
    budget = replace(budget, dtype=stored_format(config, layout))
    chosen, notes = choose_axes(layout, elastic, budget, axes)
    checkpoint = Checkpoint.open(parent)
    locate(layout, checkpoint)
    where, kind = choose_device(device), _weights_dtype(dtype, checkpoint)
    grid = make_grid(layout_in(kind, config, layout), budget, chosen, elastic.depth_order)
    length = row_length(config, seq_len)
    tokenizer = load_tokenizer(parent)
    check_tokenizer(tokenizer, layout)
    rows = held_out_batches(data, tokenizer, tokens=tokens, seq_len=length, batch_size=batch_size, seed=seed)
    check_batches(rows.batches, layout)
    subject = Subject(
        parent_fingerprint=layout.fingerprint,
        weights_sample_sha256=weights_sample_sha256(checkpoint),
        data_sha256=rows.sha256,
        dtype=str(kind).removeprefix("torch."),
    )
    meter = Meter(parent, layout, rows, Cache(cache, subject), device=where, dtype=kind)
    tried: list[int] = []
    losses: list[float] = []
    count = min(candidates, len(grid.shares))
    with progress_bar("searching", (count + 1) * rows.tokens, "tokens", shown=progress) as advance:
        whole = meter.loss(Submodel())
        advance(rows.tokens)
        while len(tried) < count and (number := next_member(grid.shares, tried, losses)) is not None:
            loss = meter.loss(grid.member(number))
            tried.append(number)
            losses.append(loss)
            advance(rows.tokens)
    found = [_candidate(layout, budget, grid.member(number), loss) for number, loss in zip(tried, losses, strict=True)]
    return SearchReport(
        parent=Path(parent),
        layout=layout,
        budget=budget,
        axes=chosen,
        ladder=grid.text,
        notes=notes,
        whole=_candidate(layout, budget, Submodel(), whole),
        candidates=tuple(sorted(found, key=lambda candidate: candidate.loss)),
        measured=meter.measured,
        tokens=rows.tokens,
        data_sha256=rows.sha256,
    )


def _weights_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that weights are loaded in: ``auto`` and the stored one by its name are one subject of the cache."""
    from transformers import AutoConfig

    kind = choose_dtype(name)
    if isinstance(kind, torch.dtype):
        return kind
    with transformers_reads(checkpoint.folder):
        config = AutoConfig.from_pretrained(str(checkpoint.folder), local_files_only=True, trust_remote_code=False)
    return stored_dtype(config, checkpoint)


def _candidate(layout: Layout, budget: Budget, submodel: Submodel, loss: float) -> Candidate:
    submodel = submodel.completed(layout)
    return Candidate(
        submodel=submodel,
        cost=budget.cost(layout, submodel),
        params=int(cost.params(layout, submodel.widths, submodel.layers)),
        active_params=int(cost.active_params(layout, submodel.widths, submodel.layers)),
        loss=loss,
    )
