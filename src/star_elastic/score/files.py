"""What scoring writes: the scores themselves, and beside them in words and numbers what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from star_elastic.checkpoint import target_folder
from star_elastic.layout import Layout
from star_elastic.orders import DEPTH_ORDER, SCORES_FACTS, SCORES_FILE
from star_elastic.score.curve import kept_shares
from star_elastic.score.measure import Scores
from star_elastic.score.methods import ScoreOptions, methods_for
from star_elastic.score.probe import ProbeReport
from star_elastic.score.probe_report import write_probe
from star_elastic.score.report import ScoreReport
from star_elastic.version import VERSION

FACTS_VERSION = 2


def meanings(options: ScoreOptions, layout: Layout) -> dict[str, str]:
    """By axis, in words, what its numbers are."""
    return {axis: methods_for(axis)[options.method(axis)] for axis in layout.axes}


def make_report(
    out: Path | str,
    scores: Scores,
    layout: Layout,
    widths: Mapping[str, Sequence[int]],
    about: Mapping[str, Any],
    probed: ProbeReport | None = None,
) -> ScoreReport:
    """What is told of scores."""
    return ScoreReport(
        out=Path(out),
        tokens=scores.tokens,
        samples=scores.samples,
        kept=kept_shares({key: score for key, score in scores.tensors.items() if key != "depth"}, layout, widths),
        idle_experts=scores.idle_experts,
        depth_order=scores.depth_order,
        depth_errors=dict(scores.depth_errors or {}),
        facts={"format_version": FACTS_VERSION, "star_elastic": VERSION, **about, "keys": sorted(scores.tensors)},
        probe=probed,
    )


def write_scores(out: Path | str, parent: Path | str, scores: Scores, report: ScoreReport) -> None:
    """Write all files into a new folder, which appears whole or not at all."""
    tensors = {key: tensor.contiguous() for key, tensor in scores.tensors.items()}
    if scores.depth_order is not None:
        tensors[DEPTH_ORDER] = torch.tensor(scores.depth_order, dtype=torch.int32)
    with target_folder(out, parent) as folder:
        save_file(tensors, folder / SCORES_FILE)
        (folder / SCORES_FACTS).write_text(json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if report.probe is not None:
            write_probe(folder, report.probe)
