"""Nested distillation: one run that turns a sorted parent into an elastic checkpoint.

The pieces, in the order in which a run uses them: ``recipe`` and its parts (what to do), ``stages``, ``targets``, ``prepare`` and
``check`` (checks before any weight is loaded), ``rows``, ``files``, ``sources``, ``documents``, ``packing`` and ``data`` (from
bytes to batches), ``curriculum`` and ``schedule`` (which submodel, which learning rate), ``teacher``, ``distill`` and
``gradients`` (the loss), ``anneal``, ``budget_loss`` and ``search`` (the router), ``models``, ``learner``, ``trainer`` and
``loop`` (the run), ``state`` (checkpoints and exact resume), ``summary``, ``report``, ``card`` and ``output``.

Example:
    >>> from star_elastic.train import train_family
    >>> report = train_family("recipes/demo.yaml", ["seed=1", "optimizer.lr=3e-4"])
    >>> report.submodels["small"].kd_recent
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from star_elastic.train.loop import train_family
    from star_elastic.train.recipe import Recipe, load_recipe
    from star_elastic.train.report import TrainReport

__all__ = ["Recipe", "TrainReport", "load_recipe", "train_family"]

# Where each name lives. Imported on first use: a recipe can be checked without importing torch.
_HOMES = {"train_family": "loop", "Recipe": "recipe", "load_recipe": "recipe", "TrainReport": "report"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
