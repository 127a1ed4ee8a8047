"""A run from its recipe to its result: check, train, write.

A frozen parent teaches its own nested models: ``trainer`` has the stages and checkpoints of that, ``learner`` the models and what
one step does to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import torch

from star_elastic.train.check import check_run
from star_elastic.train.interrupt import StopRequest
from star_elastic.train.ranks import joined
from star_elastic.train.recipe import Recipe, load_recipe, override
from star_elastic.train.report import TrainReport
from star_elastic.train.state import RunFolder
from star_elastic.train.trainer import Trainer, TrainingStopped


def train_family(
    recipe: Recipe | Path | str, overrides: Sequence[str] = (), resume: bool = False, progress: bool = True
) -> TrainReport:
    """Distil all submodels of a family from the frozen parent in one run, and write an elastic checkpoint.

    Started by ``torchrun``, its processes share the run: each runs its part of every batch, and the numbers are those of one
    process, to rounding. The main process reports, writes, and tells mistakes.

    Args:
        recipe: A recipe, or the YAML file of one.
        overrides: ``key=value`` changes to it, such as ``optimizer.lr=3e-4``.
        resume: Continue the unfinished run of this recipe from its last checkpoint; the result is the same, bit for bit on
            CPU, as without the interruption.
        progress: Show a progress bar and, at the end, a table.

    Returns:
        The numbers that are also in ``training.json`` of the output folder.

    Raises:
        RecipeError, WidthError, UnknownNameError, BudgetError, DataError, CheckpointError, TargetError: before any weight is
            loaded, for whatever in the recipe, the parent or the data is not right.
        TrainingStopped: on Ctrl-C or SIGTERM, or when the search ends off its budgets, after saving a checkpoint; or when the
            loss or gradient is not finite.
        StoppedElsewhere: on all but the main process, instead of any of these.

    Example:
        >>> train_family("recipes/demo.yaml", ["seed=1"]).submodels["small"].kd_recent
    """
    with joined() as ranks:
        with ranks.agreed():
            recipe = override(recipe, overrides) if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
            run = RunFolder(recipe, ranks)
        shown = progress and ranks.is_main
        with _told_what_is_kept(run):
            report = _run(run, resume, shown)
        run.remove()
    if shown:
        report.print()
    return report


def _run(run: RunFolder, resume: bool, shown: bool) -> TrainReport:
    """Check everything, train, and write the result."""
    recipe, ranks = run.recipe, run.ranks
    with ranks.agreed():
        plan = check_run(run, resume)
    if shown:  # the report has them again, but a long run is worth a warning before it
        for note in plan.notes:
            print(f"note: {note}", flush=True)
    with run.open(), _own_randomness(plan.device):
        trainer = Trainer(plan, run)
        if resume:
            trainer.restore()
        with StopRequest() as stop, closing(trainer.metrics):
            trainer.train(stop, shown)
        report = trainer.finish()
        trainer.metrics.keep_events(recipe.output)
    return report


@contextmanager
def _told_what_is_kept(run: RunFolder) -> Iterator[None]:
    """Say where a run can go on that Ctrl-C ended outside its steps: while loading, say, or the second of two.

    Raises:
        TrainingStopped: for KeyboardInterrupt, where there is a checkpoint.
    """
    try:
        yield
    except KeyboardInterrupt:
        if (latest := run.latest()) is None:
            raise
        raise TrainingStopped(
            f"interrupted; the last checkpoint is {latest}: continue with the same command and --resume"
        ) from None


def _own_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Give the caller its random state back at the end."""
    gpu = [] if device.type == "cpu" else [device.index or 0]
    return torch.random.fork_rng(gpu, device_type=device.type if gpu else "cuda")
