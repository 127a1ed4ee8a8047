"""The stages of a run with every value spelled out, and where in them a step lies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from star_elastic.errors import nearest

if TYPE_CHECKING:
    from star_elastic.train.recipe import Recipe

SEARCH_SHARE = 100 / 160  # of the published run's tokens, that its first stage has


@dataclass(frozen=True)
class Stage:
    """One stage; see ``StageRecipe`` for what the values mean.

    Attributes:
        probabilities: By nested model, as given; None for the recipe's own.
    """

    phase: Literal["search", "settle"]
    steps: int
    sequence_length: int
    batch_size: int
    accumulate: int
    budgets_per_step: int
    probabilities: Mapping[str, float] | None
    lr: float
    min_lr: float
    warmup_steps: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, padding included."""
        return self.batch_size * self.sequence_length

    def recomputes(self, wanted: bool | Literal["auto"]) -> bool:
        """Whether units are recomputed in the backward pass; ``auto`` does so under masks, whose copies would live until then."""
        return self.phase == "search" if wanted == "auto" else wanted

    def misfit(self, names: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
        """Why a stage cannot train nested models of these names, and which of its keys is wrong; None where it can.

        Probabilities are for known nested models and for all of them; a step cannot train more than can be drawn.
        """
        given = self.probabilities
        if given is not None:
            for name in given:
                if name not in names:
                    return f"probabilities name {name!r}: {nearest(name, names)}", ("probabilities", name)
            if missing := [name for name in names if name not in given]:
                return f"probabilities lack {', '.join(missing)}; 0 leaves one out", ("probabilities",)
        drawn = len(names) if given is None else sum(share > 0 for share in given.values())
        if self.budgets_per_step > drawn:
            return f"budgets_per_step {self.budgets_per_step} is above the {drawn} that can be drawn", ()
        return None

    def reads_like(self, other: Stage) -> bool:
        """Whether batches of both have the same shape, so that one loader serves both."""
        return (self.batch_size, self.sequence_length) == (other.batch_size, other.sequence_length)


def resolve_stages(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages of a recipe. Without any, budgets get the published shape, 5/8 search and 3/8 settle; submodels only settle."""
    if recipe.stages is None:
        steps = steps_of(recipe.steps, recipe.tokens, recipe.batch_size * recipe.sequence_length)
        search = round(steps * SEARCH_SHARE) if recipe.budgets is not None else 0
        return tuple(_stage(recipe, phase, n) for phase, n in (("search", search), ("settle", steps - search)) if n)
    stages = []
    for given in recipe.stages:
        own = {name: value for name, value in given if value is not None and name not in ("phase", "steps", "tokens")}
        rows, length = own.get("batch_size", recipe.batch_size), own.get("sequence_length", recipe.sequence_length)
        stages.append(_stage(recipe, given.phase, steps_of(given.steps, given.tokens, rows * length), **own))
    return tuple(stages)


def steps_of(steps: int | None, tokens: int | None, tokens_per_step: int) -> int:
    """Whole steps, where a length is given in steps or in tokens."""
    return steps or math.ceil((tokens or 0) / tokens_per_step)


def _stage(recipe: Recipe, phase: str, steps: int, **own: object) -> Stage:
    values = {
        "sequence_length": recipe.sequence_length,
        "batch_size": recipe.batch_size,
        "accumulate": recipe.accumulate,
        "budgets_per_step": recipe.budgets_per_step,
        "probabilities": None,
        "lr": recipe.optimizer.lr,
        "min_lr": recipe.optimizer.min_lr,
        "warmup_steps": recipe.optimizer.warmup_steps,
    }
    return Stage(phase=phase, steps=steps, **{**values, **own})  # type: ignore[arg-type]


@dataclass
class Position:
    """Where a run stands.

    Attributes:
        stage: Number of the stage of the next step; the number of stages when the run is done.
        step: Steps done in that stage; a search that is extended goes beyond the planned number.
    """

    stage: int = 0
    step: int = 0
