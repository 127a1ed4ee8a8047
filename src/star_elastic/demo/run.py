"""The demo, stage by stage. Each stage writes one folder, whole or not at all, and is skipped where its folder exists."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from star_elastic.checkpoint import target_folder
from star_elastic.demo.facts import (
    Fact,
    budgets_are_met,
    sizes_share_memory,
    sorted_equals_parent,
    views_equal_folders,
)
from star_elastic.demo.measure import (
    STAGES,
    Examiner,
    Size,
    as_json,
    measure_sizes,
    print_choices,
    print_facts,
    print_sizes,
)
from star_elastic.demo.pretrain import mixture, train_parent
from star_elastic.demo.settings import FULL, QUICK, Settings
from star_elastic.demo.task import write_data
from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.elastic import ElasticModel
from star_elastic.errors import TargetError
from star_elastic.loading import no_bars
from star_elastic.progress import progress_bar
from star_elastic.score import score_parent
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_parent
from star_elastic.submodel import ElasticConfig, read_json
from star_elastic.train import train_family
from star_elastic.train.documents import load_tokenizer
from star_elastic.train.report import Choice

MARKER = "demo.json"
QUESTION = [{"role": "user", "content": "a+3b-4c+2="}]


@dataclass(frozen=True)
class DemoReport:
    """What the demo measured. ``passed``: all facts hold and, in the full demo, every trained size improved."""

    sizes: list[Size]
    facts: list[Fact]
    passed: bool


class Stages:
    """Runs stages in one output folder and skips those whose result is there.

    Raises:
        TargetError: the folder holds something else, or a demo of other settings.
    """

    def __init__(self, out: Path, settings: Settings, console: Console) -> None:
        self.out, self.console = out, console
        wanted = json.loads(json.dumps(asdict(settings)))
        marker = out / MARKER
        if marker.exists():
            if read_json(marker) != wanted:
                raise TargetError(f"{out} holds a demo of other settings: choose another --out or delete it")
            return
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise TargetError(f"{out} is not empty and holds no demo: choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")

    def run(self, name: str, what: str, work: Callable[[Path], object]) -> Path:
        """Run ``work(folder)``, which makes ``folder`` whole, unless it exists; return the folder."""
        folder = self.out / name
        if folder.exists():
            self.console.print(f"[dim]{what}: done before, reused[/dim]")
        else:
            self.console.print(f"{what} -> {folder}", highlight=False)
            work(folder)
        return folder


def run_demo(out: Path | str = "demo-out", *, quick: bool = False, seed: int = 0, progress: bool = True) -> DemoReport:
    """Train a tiny hybrid parent, make it elastic, slice it, and measure every size.

    Args:
        out: folder for everything; a second run reuses finished stages.
        quick: a short version that checks the facts and claims no accuracy.
        seed: decides the data, the parent's first weights, and the order of training.
        progress: show progress bars.

    Raises:
        TargetError: ``out`` holds something else.
        TrainingStopped: the router did not meet its budgets, or Ctrl-C; the same call goes on where it stopped.

    Example:
        >>> run_demo("demo-out", quick=True).passed
        True
    """
    with no_bars():
        return _run(Path(out), replace(QUICK if quick else FULL, seed=seed), progress, Console())


def _run(out: Path, settings: Settings, progress: bool, console: Console) -> DemoReport:
    stages = Stages(out, settings, console)
    data = stages.run("data", "writing chains and text", lambda folder: _write_data(folder, settings))
    parent = stages.run(
        "parent",
        "training a parent from scratch",
        lambda folder: train_parent(folder, data, settings, progress=progress),
    )
    scores = stages.run("scores", "scoring importance", lambda folder: _score(parent, folder, data, settings, progress))
    sorted_parent = stages.run("sorted", "sorting", lambda folder: sort_parent(parent, folder, scores))
    elastic = stages.run(
        "elastic",
        "learning the widths of three sizes and distilling them in one run",
        lambda folder: _train(folder, sorted_parent, data, settings, progress),
    )
    slices = {
        name: stages.run(f"slices/{name}", f"slicing {name}", partial(_slice, elastic, name=name, progress=progress))
        for name in settings.budgets
    }
    folders = dict(zip(STAGES, (parent, sorted_parent, elastic), strict=True))
    return _examine(out, folders, slices, data, settings, progress, console)


def _write_data(folder: Path, settings: Settings) -> None:
    with target_folder(folder) as made:
        write_data(
            made, rows=settings.rows, text_chars=settings.text_chars, held_out=settings.held_out, seed=settings.seed
        )
        write_tokenizer(made / "tokenizer")


def _score(parent: Path, folder: Path, data: Path, settings: Settings, progress: bool) -> None:
    score_parent(
        parent,
        folder,
        mixture(data),
        samples=8 * settings.batch_size,
        seq_len=settings.length,
        batch_size=32,
        progress=progress,
    )


def demo_recipe(settings: Settings, parent: Path, output: Path, data: Path) -> dict[str, Any]:
    """The recipe of the elastic run, as YAML has it: the router learns in a search stage, its choice settles in another."""
    return {
        "parent": str(parent),
        "output": str(output),
        "budgets": {name: {"params": share} for name, share in settings.budgets.items()},
        "router": {"axes": {axis: list(shares) for axis, shares in settings.axes.items()}},
        "stages": [
            {"phase": phase, "steps": steps, "warmup_steps": steps // 20}
            for phase, steps in (("search", settings.search_steps), ("settle", settings.settle_steps))
        ],
        "data": mixture(data).model_dump(mode="json", exclude_unset=True),
        "sequence_length": settings.length,
        "batch_size": settings.batch_size,
        "optimizer": {"lr": settings.elastic_lr, "min_lr": settings.elastic_lr / 20},
        "activation_checkpointing": False,  # a small model has memory to spare
        "checkpoint_every": 100,
        "seed": settings.seed,
    }


def _train(folder: Path, sorted_parent: Path, data: Path, settings: Settings, progress: bool) -> None:
    """Write the recipe, where a user can read it, and run it; an interrupted run goes on where it stopped."""
    path = folder.with_name("recipe.yaml")
    recipe = demo_recipe(settings, sorted_parent, folder, data)
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    train_family(path, resume=folder.with_name(folder.name + ".run").exists(), progress=progress)


def _slice(elastic: Path, folder: Path, name: str, progress: bool) -> None:
    slice_checkpoint(elastic, folder, ElasticConfig.load(elastic).get(name), name=name, progress=progress)


def _examine(
    out: Path,
    folders: dict[str, Path],
    slices: dict[str, Path],
    data: Path,
    settings: Settings,
    progress: bool,
    console: Console,
) -> DemoReport:
    learned = read_json(folders["trained"] / "training.json")["submodels"]
    choices = {name: Choice(**learned[name]["choice"]) for name in settings.budgets}
    submodels = ElasticConfig.load(folders["trained"]).submodels
    models = {stage: ElasticModel.from_pretrained(folder, submodels=submodels) for stage, folder in folders.items()}
    examiner = Examiner(data, load_tokenizer(folders["trained"]), settings)
    with progress_bar("evaluating", len(models) * len(choices), "models", shown=progress) as advance:
        sizes = measure_sizes(models, examiner, choices, advance)
    parent = sizes[0].quality["unsorted"]
    ids: torch.Tensor = examiner.held_out.batches[0]["input_ids"][:4]
    facts = [
        sorted_equals_parent(folders["unsorted"], folders["sorted"], ids),
        views_equal_folders(models["trained"], slices, ids),
        sizes_share_memory(models["trained"], list(choices)),
        budgets_are_met(choices, slices),
    ]
    passed = all(fact.holds for fact in facts) and (settings.quick or all(size.improved for size in sizes))
    (out / "report.json").write_text(json.dumps(as_json(sizes, parent, facts), indent=2) + "\n", encoding="utf-8")
    print_choices(sizes, console)
    print_sizes(sizes, parent, console)
    if settings.quick:
        console.print("Quick version: it checks the facts below and claims no accuracy.")
    print_facts(facts, console)
    console.print(f"Numbers: {out / 'report.json'}", highlight=False, soft_wrap=True)
    prompt = examiner.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    command = f'star-elastic generate {folders["trained"]} --submodel small --prompt "{prompt}"'
    console.print(f"Try: {command}", highlight=False, soft_wrap=True)
    return DemoReport(sizes, facts, passed)
