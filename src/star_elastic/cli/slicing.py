"""Verbs that cut: slice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import Batch, Context, Preset, app


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
    context: Context = None,
    batch: Batch = None,
    learned: Annotated[
        bool, typer.Option("--learned", help="Ask the trained router for widths that cost this budget, not at most it.")
    ] = False,
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
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Also make OUT.gguf, by llama.cpp's converter; see star-elastic export.")
    ] = False,
    kind: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="Of the GGUF file: F32, BF16 (the default), F16 or Q8_0.")
    ] = None,
    converter: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="llama.cpp's folder; LLAMA_CPP and PATH are searched if left out."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="Python to run the converter with; this one if left out.")
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
      star-elastic slice ./elastic ./between --params 18B --learned
      LLAMA_CPP=~/llama.cpp star-elastic slice ./elastic ./small --to small --gguf --type Q8_0
    """
    from star_elastic.export import Gguf
    from star_elastic.selection import SizeRequest, check_goes_with, run_slice

    check_goes_with("--gguf", gguf, {"--type": kind, "--converter": converter, "--python": python})

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
            learned=learned,
        )
        for name in names
    ]
    made = Gguf.parse(kind or "BF16", converter, python) if gguf else None
    run_slice(source, out, requests, preset=preset, drop=drop or (), threads=threads, gguf=made, dry_run=dry_run)
