"""Scoring a model folder: check, load, measure, write."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from star_elastic.checkpoint import Checkpoint, check_target, weights_sample_sha256
from star_elastic.errors import DataError
from star_elastic.layout import Layout
from star_elastic.loading import (
    check_batches,
    check_tokenizer,
    choose_device,
    choose_dtype,
    layout_in,
    load_model,
)
from star_elastic.rewrite import locate
from star_elastic.score.files import make_report, meanings, write_scores
from star_elastic.score.finite import check_weights
from star_elastic.score.layerwise import layerwise_options, score_layerwise
from star_elastic.score.measure import Scores, score_model
from star_elastic.score.methods import DEPTH_SAMPLES, ScoreOptions, parse_curve_widths
from star_elastic.score.probe import ProbeOptions, ProbeReport, probe_rows, probe_scores
from star_elastic.score.probe_report import print_probe
from star_elastic.score.report import ScoreReport, print_report
from star_elastic.score.settings import Waiting, check_depth_samples, check_settings
from star_elastic.score.state import RunState
from star_elastic.skeleton import saved_tensors
from star_elastic.submodel import open_elastic
from star_elastic.train.data import Calibration, calibration_batches
from star_elastic.train.documents import load_tokenizer
from star_elastic.train.packing import Packing

DEFAULT_LENGTH = 8192


def score_parent(
    parent: Path | str,
    out: Path | str,
    data: Any,
    *,
    samples: int = 1024,
    seq_len: int | None = None,
    batch_size: int = 1,
    packing: Packing = "cross",
    methods: Mapping[str, str] | None = None,
    kept: Mapping[str, int] | None = None,
    per_expert: bool = False,
    depth_samples: int | None = None,
    widths: Sequence[str] = (),
    probe: ProbeOptions | None = None,
    layerwise: Waiting | None = None,
    seed: int = 0,
    resume: bool = False,
    save_every: int = 64,
    device: str = "auto",
    dtype: str = "auto",
    progress: bool = True,
) -> ScoreReport:
    """Rank the members of every axis on calibration data, and say what cuts would keep.

    Writes a folder with ``scores.safetensors`` (fp32, one number per member) and ``scores.json``. Everything that can be checked
    without weights is checked before they are loaded.

    Args:
        parent: the model folder, with its tokenizer.
        out: the folder to make. A long run leaves ``OUT.run`` beside it until it has finished.
        data: what ``train.data.calibration_batches`` takes: a text, JSON-lines or parquet file, a folder, a hub name, a mixture.
        samples: rows to read at most.
        seq_len: tokens per row; default: 8,192, or what the model allows where that is less.
        batch_size: rows per forward pass.
        packing: ``cross`` fills rows with documents one after the other; ``apart`` gives each its own row, padded.
        methods: by axis, what to rank by; see ``score.methods``.
        kept: for ``mamba_head_dim``, the channels by which Mamba heads are judged; see ``ScoreOptions``.
        per_expert: give every routed expert an order of its channels for itself, beside the layer's.
        depth_samples: rows that iterative removal of layers reads; default: 16.
        widths: ``AXIS=N`` or ``AXIS=P%``: further widths at which to show what a cut keeps.
        probe: measure held-out loss of one-shot cuts as well; those widths and ``widths`` are cut. Adds ``probe.json``, and
            ``probe.png`` where matplotlib is installed.
        layerwise: read the model layer by layer, for one that does not fit into memory; hidden states wait in ``memory`` or on
            ``disk``. Layers are then ranked by cosine. It saves, on disk, after each layer, and not at all in memory.
        seed: of the order of documents, and of random methods.
        resume: go on from ``OUT.run`` where it exists; scores are then those of an uninterrupted run, bit for bit.
        save_every: batches between two saves.
        device: ``auto`` takes a GPU where there is one.
        dtype: ``auto`` keeps the stored one.
        progress: show progress bars where stderr is a terminal, and at the end a table.

    Raises:
        CheckpointError: the parent is missing or damaged, or ``OUT.run`` is of another run.
        NotFiniteError: weights, activations or scores are NaN or infinite; nothing is written.
        TargetError: ``out`` is not empty or lies inside the parent, or ``OUT.run`` exists and ``resume`` is not given.
        DataError: the data cannot be read or holds no token; rows exceed the model's positions; the tokenizer is another model's.
        UnknownNameError, WidthError, RequestError: see ``ScoreOptions.check``, ``check_settings`` and ``parse_curve_widths``.
        ScoringStopped: on Ctrl-C or SIGTERM, where ``OUT.run`` can be continued.

    Example:
        >>> report = score_parent("parent", "scores", "calibration.jsonl", samples=64, seq_len=512)
        >>> report.kept["hidden"]
        {56: 0.93, 48: 0.81, 32: 0.59, 16: 0.34}
    """
    counts = {"samples": samples, "seq_len": seq_len, "batch_size": batch_size, "depth_samples": depth_samples}
    check_settings(
        packing=packing, layerwise=layerwise, resume=resume, seed=seed, counts={**counts, "save_every": save_every}
    )
    config, layout, _ = open_elastic(parent)
    options = ScoreOptions(methods or {}, kept or {}, per_expert, depth_samples or DEPTH_SAMPLES, seed)
    if layerwise:
        options = layerwise_options(options, probe=probe is not None)
    options.check(layout)
    check_depth_samples(depth_samples, options)
    shown = parse_curve_widths(widths, layout)
    length = row_length(config, seq_len)
    checkpoint = Checkpoint.open(parent)
    locate(layout, checkpoint)
    check_target(out, parent)
    where, kind = choose_device(device), choose_dtype(dtype)
    rows: dict[str, Any] = {"seq_len": length, "batch_size": batch_size, "packing": packing, "seed": seed}
    tokenizer = load_tokenizer(parent)
    check_tokenizer(tokenizer, layout)
    calibration = calibration_batches(data, tokenizer, samples=samples, **rows)
    check_batches(calibration.batches, layout)
    held_out = None
    if probe is not None:
        runs_in = layout_in(kind, config, layout)  # cuts are run, so their widths must be legal in this dtype
        probe, held_out = prepare_probe(probe, data, shown, calibration, tokenizer, runs_in, rows)
    identity = {
        **identify(checkpoint, layout, calibration, options),
        "batch_size": batch_size,
        "device": str(where),
        "dtype": str(kind).removeprefix("torch."),
        "layerwise": layerwise,
    }
    state = RunState(out, identity, save_every)
    state.check(resume=resume)
    job = Job(checkpoint, layout, options, calibration, where, kind, layerwise, state, probe, held_out)
    with state.kept():
        scores, used, probed = job.measure(progress and sys.stderr.isatty())
        about = {"parent": str(parent), "data": str(data), "seq_len": length, "packing": packing, **identity}
        about |= {"dtype": str(used).removeprefix("torch."), "meaning": meanings(options, layout)}
        report = make_report(out, scores, layout, shown, about, probed)
        write_scores(out, parent, scores, report)
    state.remove()
    if progress:
        print_report(report, layout, Console())
        if report.probe is not None:
            print_probe(report.probe, Console())
    return report


@dataclass(frozen=True)
class Job:
    """What there is to measure, checked before any weight is loaded."""

    checkpoint: Checkpoint
    layout: Layout
    options: ScoreOptions
    calibration: Calibration
    device: torch.device
    dtype: torch.dtype | str
    layerwise: Waiting | None
    state: RunState
    probe: ProbeOptions | None
    held_out: Calibration | None

    def measure(self, progress: bool) -> tuple[Scores, torch.dtype, ProbeReport | None]:
        """Load, score and probe; with the dtype of the weights."""
        batches = self.calibration.batches
        where: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        shared: dict[str, Any] = {"state": self.state, "progress": progress}
        if self.layerwise:
            waiting = self.layerwise
            scores, used = score_layerwise(
                self.checkpoint, self.layout, batches, self.options, waiting=waiting, **where, **shared
            )
            return scores, used, None
        model = load_model(self.checkpoint.folder, **where)
        check_weights(saved_tensors(model))
        scores = score_model(model, self.layout, batches, self.options, **shared)
        if self.probe is None or self.held_out is None:
            return scores, model.dtype, None
        return scores, model.dtype, probe_scores(model, self.layout, scores, self.held_out, self.probe, progress=progress)


def prepare_probe(
    probe: ProbeOptions,
    data: Any,
    widths: Mapping[str, Sequence[int]],
    calibration: Calibration,
    tokenizer: Any,
    layout: Layout,
    rows: Mapping[str, Any],
) -> tuple[ProbeOptions, Calibration]:
    """A probe with its data and widths filled in, and the rows it measures loss on. Raises as ``ProbeOptions.check``."""
    probe = replace(probe, data=data, skip=calibration.samples) if probe.data is None else probe
    probe = replace(probe, widths={**widths, **probe.widths})
    probe.check(layout)
    return probe, probe_rows(probe, tokenizer, layout, **rows)


def identify(checkpoint: Checkpoint, layout: Layout, calibration: Calibration, options: ScoreOptions) -> dict[str, Any]:
    """What of a run decides its numbers: model, data and methods."""
    return {
        "parent_fingerprint": layout.fingerprint,
        "weights_sample_sha256": weights_sample_sha256(checkpoint),
        "data_sha256": calibration.sha256,
        **options.as_json(layout),
    }


def row_length(config: Mapping[str, Any], wanted: int | None) -> int:
    """Tokens per row: as wanted, or 8,192, or what the model allows.

    Raises:
        DataError: more than the model allows.
    """
    allowed = config.get("max_position_embeddings")
    if not isinstance(allowed, int):
        return wanted or DEFAULT_LENGTH
    if wanted is not None and wanted > allowed:
        raise DataError(f"rows of {wanted} tokens are longer than the model's {allowed} positions: --seq-len {allowed} or less")
    return wanted or min(DEFAULT_LENGTH, allowed)
