"""Whatever ``train`` refuses before its first step; ``train --dry-run`` refuses the same by asking the same function."""

from __future__ import annotations

import torch

from star_elastic.train.batches import planned_batches
from star_elastic.train.metrics import check_trackers
from star_elastic.train.prepare import Plan, prepare
from star_elastic.train.state import RunFolder
from star_elastic.train.teacher_cache import check_cache


def check_run(run: RunFolder, resume: bool) -> Plan:
    """Check a run as far as it can be without weights; nothing is written.

    Args:
        run: The folder of the run, with its recipe and the processes that will train.
        resume: Whether it goes on from its last checkpoint.

    Raises:
        RecipeError, WidthError, UnknownNameError, ReservedNameError, BudgetError, CheckpointError, DeviceError: as ``prepare``.
        TargetError: the output exists, or an unfinished run that ``resume`` does not ask for.
        TrackerError: a package for ``track`` is missing.
        DataError: data that cannot be read, up to the rows of the first step.
    """
    recipe = run.recipe
    run.check(resume)
    check_trackers(recipe.track, recipe.output)
    plan = prepare(recipe, run.ranks)
    if recipe.teacher_cache is not None:
        check_cache(recipe.teacher_cache, plan)
    with torch.random.fork_rng(devices=[]):  # a loader draws a number
        next(planned_batches(plan))
    return plan
