"""Verbs that prepare training: cache-teacher."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import app


class Stored(StrEnum):
    """Formats of log-probabilities."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


@app.command()
def cache_teacher(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The training recipe.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    top_k: Annotated[int, typer.Option("--top-k", metavar="K", min=1, help="Most probable tokens to keep.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values to set in the recipe.")
    ] = None,
    dtype: Annotated[Stored, typer.Option(help="Format of the log-probabilities.")] = Stored.FP16,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run from OUT.run.")] = False,
) -> None:
    """Store the frozen parent's answers to a recipe's data, so that training needs no teacher.

    \b
    Examples:
      star-elastic cache-teacher recipes/family.yaml ./answers --top-k 64
      star-elastic train recipes/family.yaml teacher_cache=./answers
    """
    from star_elastic.train.cache_run import cache_teacher as run

    run(recipe, out, top_k, dtype=dtype.value, overrides=overrides or [], resume=resume).print()
