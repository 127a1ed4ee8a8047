"""The parts of a recipe that are off unless asked for."""

from __future__ import annotations

from typing import Literal

from star_elastic.train.recipe_types import Positive, Section

Tracker = Literal["tensorboard", "wandb"]


class BalanceRecipe(Section):
    """Even loads for the experts (arXiv 2408.15664), for models that are trained from scratch.

    A parent that is trained already has its loads: leave it off there.

    Attributes:
        step: How far the selection bias of an expert moves after each step, against the error of its load.
    """

    step: Positive = 1e-3
