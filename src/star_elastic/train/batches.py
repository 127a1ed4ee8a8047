"""The batches of a run, stage after stage: documents go on where the stage before has stopped."""

from __future__ import annotations

from collections.abc import Iterator

from torchdata.stateful_dataloader import StatefulDataLoader

from star_elastic.train.data import Batch, pad_token, training_loader
from star_elastic.train.prepare import Plan
from star_elastic.train.stages import Stage


def stage_loader(plan: Plan, stage: Stage, after: StatefulDataLoader | None) -> StatefulDataLoader:
    """The loader of a stage; ``after`` is that of the stage before, of rows of another length perhaps."""
    return training_loader(
        plan.documents,
        plan.recipe.data,
        length=stage.sequence_length,
        batch_size=stage.batch_size,
        seed=plan.recipe.seed,
        pad=pad_token(plan.tokenizer),
        after=after,
    )


def planned_batches(plan: Plan) -> Iterator[tuple[int, Batch]]:
    """Every batch of a run whose search is not extended, with the number of its stage, in the order of training."""
    loader, before = None, None
    batches: Iterator[Batch] = iter(())
    for number, stage in enumerate(plan.stages):
        if before is None or not stage.reads_like(before):
            loader = stage_loader(plan, stage, loader)
            batches = iter(loader)
        for _ in range(stage.steps):
            yield number, next(batches)
        before = stage
