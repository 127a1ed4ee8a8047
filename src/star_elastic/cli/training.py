"""Verbs that train: train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import app


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The training recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values to set in the recipe.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the recipe's output folder.")] = False,
) -> None:
    """Distil all submodels from the frozen parent in one run.

    \b
    Examples:
      star-elastic train recipes/family.yaml
      star-elastic train recipes/family.yaml steps=2000 output=./family-2
      star-elastic train recipes/family.yaml --resume
    """
    from star_elastic.train import train_family

    train_family(recipe, overrides or [], resume=resume)
