"""Scoring a model folder: check, load, one forward pass over the calibration data, write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from star_elastic.checkpoint import Checkpoint, check_target, target_folder
from star_elastic.errors import DataError
from star_elastic.layout import Layout
from star_elastic.loading import check_tokens, choose_device, choose_dtype, load_model
from star_elastic.orders import SCORES_FACTS, SCORES_FILE
from star_elastic.progress import progress_bar
from star_elastic.rewrite import locate
from star_elastic.score.activations import Recorder, collect
from star_elastic.score.report import ScoreReport, kept_shares, print_report
from star_elastic.submodel import open_elastic
from star_elastic.version import VERSION

FACTS_VERSION = 1
METHOD = "per sample the mean over real tokens of |activation|; over samples the root of the sum of squares"


@dataclass(frozen=True)
class Scores:
    """Importance of every member of every scored axis.

    Attributes:
        tensors: by key, ``hidden`` or ``layers.{i}.{axis}``; fp32, one number per member.
        idle_experts: by layer, the experts that no token reached.
        samples: rows with at least one real token.
        tokens: real tokens.
    """

    tensors: dict[str, Tensor]
    idle_experts: dict[int, list[int]]
    samples: int
    tokens: int


def score_model(model: PreTrainedModel, layout: Layout, batches: Iterable[dict[str, Tensor]]) -> Scores:
    """Score a transformers causal LM in memory; its mode is restored afterwards.

    Args:
        model: with the structure that ``layout`` describes.
        layout: the model's table, which says where to listen.
        batches: each with ``input_ids`` and, where there is padding on either side, ``attention_mask``, (B, T).

    Raises:
        DataError: no real token, or none that reached some layer.
        CheckpointError: NaN or infinite activations; names the module.
    """
    recorder = Recorder(layout)
    device = next(model.parameters()).device
    body = model.base_model  # without the head: no [B, T, V] logits
    was_training = model.training
    model.eval()
    samples = tokens = 0
    try:
        with torch.inference_mode(), recorder.listening(model):
            for batch in batches:
                ids = batch["input_ids"].to(device)
                mask = batch.get("attention_mask", torch.ones_like(ids)).to(device)
                with recorder.batch(mask):
                    body(input_ids=ids, attention_mask=mask, use_cache=False)
                samples += int(mask.any(1).sum())
                tokens += int(mask.sum())
    finally:
        model.train(was_training)
    if tokens == 0:
        layers = [unit.module for unit in layout.units if unit.taps]
        raise DataError(f"the calibration data holds no real token, so {layers[0]} to {layers[-1]} cannot be scored")
    idle = {layer: [e for e, n in enumerate(served) if n == 0] for layer, served in recorder.expert_tokens.items()}
    return Scores(collect(recorder), {layer: experts for layer, experts in idle.items() if experts}, samples, tokens)


def score_parent(
    parent: Path | str,
    out: Path | str,
    data: Any,
    *,
    samples: int = 1024,
    seq_len: int = 8192,
    batch_size: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    progress: bool = True,
) -> ScoreReport:
    """Rank the channels of ``hidden``, ``ffn``, ``expert_ffn`` and ``shared_ffn`` by their activations on calibration data.

    Writes a folder with ``scores.safetensors`` (fp32; keys ``hidden`` and ``layers.{i}.{axis}``) and ``scores.json``.

    Args:
        parent: the model folder, with its tokenizer.
        out: the folder to make.
        data: what ``train.data.calibration_batches`` takes: a text, JSON-lines or parquet file, a folder, a hub name, a mixture.
        samples: rows to read at most.
        seq_len: tokens per row.
        batch_size: rows per forward pass.
        device: ``auto`` takes a GPU where there is one.
        dtype: ``auto`` keeps the stored one.
        progress: show a progress bar and a table of what cuts would keep.

    Raises:
        CheckpointError: the parent is missing or damaged, or its activations are not finite.
        TargetError: ``out`` is not empty or lies inside the parent.
        DataError: the data cannot be read, holds no token, or one outside the vocabulary.

    Example:
        >>> report = score_parent("parent", "scores", "calibration.jsonl", samples=64, seq_len=512)
        >>> report.kept["hidden"]
        {48: 0.81, 32: 0.59}
    """
    from star_elastic.train.data import calibration_batches
    from star_elastic.train.documents import load_tokenizer

    _, layout, _ = open_elastic(parent)
    locate(layout, Checkpoint.open(parent))
    check_target(out, parent)
    where, kind = choose_device(device), choose_dtype(dtype)
    calibration = calibration_batches(
        data, load_tokenizer(parent), samples=samples, seq_len=seq_len, batch_size=batch_size
    )
    for batch in calibration.batches:
        check_tokens(batch["input_ids"], layout)
    model = load_model(parent, device=where, dtype=kind)
    with progress_bar("scoring", calibration.tokens, "tokens", shown=progress) as advance:
        scores = score_model(model, layout, _counted(calibration.batches, advance))
    report = ScoreReport(
        out=Path(out),
        tokens=scores.tokens,
        samples=scores.samples,
        kept=kept_shares(scores.tensors, layout),
        idle_experts=scores.idle_experts,
        facts={
            "format_version": FACTS_VERSION,
            "method": METHOD,
            "keys": sorted(scores.tensors),
            "seq_len": seq_len,
            "data": str(data),
            "data_sha256": calibration.sha256,
            "parent": str(parent),
            "parent_fingerprint": layout.fingerprint,
            "device": str(where),
            "dtype": str(model.dtype).removeprefix("torch."),
            "star_elastic": VERSION,
        },
    )
    write_scores(out, parent, scores.tensors, report)
    if progress:
        print_report(report, layout, Console())
    return report


def _counted(batches: Iterable[dict[str, Tensor]], advance: Any) -> Iterator[dict[str, Tensor]]:
    """Pass batches on; each is reported once the next is asked for, that is, when it has been scored."""
    for batch in batches:
        yield batch
        advance(int(batch["attention_mask"].sum()))


def write_scores(out: Path | str, parent: Path | str, tensors: dict[str, Tensor], report: ScoreReport) -> None:
    """Write both files into a new folder, which appears whole or not at all."""
    with target_folder(out, parent) as folder:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / SCORES_FILE)
        (folder / SCORES_FACTS).write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
