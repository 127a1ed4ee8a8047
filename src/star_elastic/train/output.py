"""The elastic checkpoint that a run writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from star_elastic.checkpoint import copy_companions
from star_elastic.elastic import ElasticModel
from star_elastic.families import family_of
from star_elastic.loading import no_bars
from star_elastic.router import Router
from star_elastic.submodel import read_config
from star_elastic.train.card import family_card
from star_elastic.train.report import TrainReport


def write_family(
    folder: Path, student: ElasticModel, report: TrainReport, *, parent: Path, metrics: Path, router: Router | None
) -> None:
    """Fill a folder: an ordinary model folder, elastic.json, training.json, a card, and the router where one has learned.

    Args:
        folder: An empty one.
        student: Trained weights, in the dtypes to write, and the nested models.
        report: The run's numbers.
        parent: Where tokenizer and licence come from.
        metrics: ``metrics.jsonl`` of the run.
        router: Kept beside the weights; nothing at inference needs it.
    """
    with no_bars():
        student.model.save_pretrained(folder)
    # The architecture is the parent's; transformers would write its config without a few fields that others read.
    config = read_config(parent)
    config = family_of(config).child_config(config, {}, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    student.config.save(folder)
    copy_companions(parent, folder)
    card = family_card(report, student.layout, student.config, parent=parent)
    (folder / "README.md").write_text(card, encoding="utf-8")
    report.write(folder)
    if router is not None:
        router.save(folder)
    if metrics.exists():
        shutil.copyfile(metrics, folder / "metrics.jsonl")
