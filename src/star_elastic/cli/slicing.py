"""Verbs that cut: slice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import Preset, app


@app.command("slice")
def slice_verb(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="An elastic checkpoint, a model folder, or a hub name: org/name[@revision]."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the slice.")],
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to", metavar="NAME", help="A submodel named in elastic.json or in the preset; may be repeated."
        ),
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
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Leave out tensors that the family does not know, as mtp.*; may be repeated."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=64, help="Tensors at once: 1, or 4 from the hub.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be cut, write nothing.")] = False,
) -> None:
    """Cut one submodel out into a plain transformers folder. No training, no GPU, little memory.

    Say the size in exactly one way: --to, --width (and --layers), --params, --active-params or --memory. Several --to read
    the source once and write OUT/NAME each. Of a model on the hub only the needed bytes are fetched; the same command goes on
    after an interruption.

    \b
    Examples:
      star-elastic slice ./elastic ./small --to small
      star-elastic slice org/name ./sizes --to 12b --to 23b
      star-elastic slice ./parent ./cut --width hidden=1920 --width expert_ffn=960
      star-elastic slice ./elastic ./fits --memory 24GiB --context 32768 --dry-run
    """
    from star_elastic.selection import SizeRequest, run_slice

    names: list[str | None] = [*to] if to else [None]
    requests = [
        SizeRequest.parse(
            to=name,
            widths=width or (),
            layers=layers,
            params=params,
            active_params=active_params,
            memory=memory,
            context=context,
            batch=batch,
        )
        for name in names
    ]
    run_slice(source, out, requests, preset=preset, drop=drop or (), threads=threads, dry_run=dry_run)
