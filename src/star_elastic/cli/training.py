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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and print steps, costs and memory; load no weights.")
    ] = False,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", metavar="N", min=1, help="With --dry-run: devices that share the run; 1."),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --dry-run: memory of one device, such as 80GiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
) -> None:
    """Distil all submodels from the frozen parent in one run.

    \b
    Examples:
      star-elastic train recipes/family.yaml
      star-elastic train recipes/family.yaml steps=2000 output=./family-2
      star-elastic train recipes/family.yaml --resume
      star-elastic train recipes/nano-v3.yaml --dry-run --world-size 8 --device-memory 80GiB
    """
    if dry_run:
        from star_elastic.train.dry_run_report import run_dry_run

        run_dry_run(
            recipe,
            overrides or [],
            world_size=world_size or 1,
            device_memory=device_memory,
            as_json=as_json,
            resume=resume,
        )
        return
    if world_size is not None or device_memory is not None or as_json:
        raise typer.BadParameter("--world-size, --device-memory and --json belong to --dry-run")
    from star_elastic.train import train_family

    train_family(recipe, overrides or [], resume=resume)
