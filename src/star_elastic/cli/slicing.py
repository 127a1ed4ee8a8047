"""Verbs that cut: slice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import Preset, app


@app.command("slice")
def slice_verb(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="An elastic checkpoint, or any model folder of a known family.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the slice.")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="NAME", help="A submodel named in elastic.json or in the preset.")
    ] = None,
    width: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=N", help="Cut an axis to N; may be repeated.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="0,1,3", help="Layers to keep; goes with --width or alone.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(metavar="N", help="Largest with at most N parameters (12e9, 12B).")
    ] = None,
    active_params: Annotated[
        str | None, typer.Option(metavar="N", help="Largest with at most N active per token.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest that fits SIZE (24GiB): weights, caches, states.")
    ] = None,
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per sequence, for --memory.")] = 8192,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences at once, for --memory.")] = 1,
    preset: Preset = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be cut, write nothing.")] = False,
) -> None:
    """Cut one submodel out into a plain transformers folder. No training, no GPU, little memory.

    Say the size in exactly one way: --to, --width (and --layers), --params, --active-params or --memory.

    \b
    Examples:
      star-elastic slice ./elastic ./small --to small
      star-elastic slice ./parent ./cut --width hidden=1920 --width expert_ffn=960
      star-elastic slice ./elastic ./fits --memory 24GiB --context 32768 --dry-run
    """
    from star_elastic.selection import SizeRequest, run_slice

    request = SizeRequest.parse(
        to=to,
        widths=width or (),
        layers=layers,
        params=params,
        active_params=active_params,
        memory=memory,
        context=context,
        batch=batch,
    )
    run_slice(source, out, request, preset=preset, dry_run=dry_run)
