"""Verbs that measure time: profile."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import Device, Dtype, app


class Phase(StrEnum):
    """What a call does."""

    decode = "decode"
    prefill = "prefill"


@app.command()
def profile(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder; its config.json is enough.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.json", help="The file to write; must not exist.")],
    width: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=N,N,...",
            help="Measure these widths, beside the parent's; may be repeated. Otherwise every axis at 1, 0.75 and 0.5.",
        ),
    ] = None,
    phase: Annotated[
        Phase, typer.Option(help="decode: one more token after --context ones; prefill: read --context tokens.")
    ] = Phase.decode,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences at once.")] = 1,
    context: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens per sequence; 1024, or what the model allows.")
    ] = None,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Calls before the measured ones, at each point.")] = 3,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Measured calls at each point.")] = 20,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure what a model's units cost in seconds at several widths, for budgets of latency.

    \b
    Example:
      star-elastic profile ./sorted decode.json --width hidden=1920,2016 --width expert_ffn=960 --batch 8
    """
    from star_elastic.profile import profile_model

    profile_model(
        model,
        out,
        widths=width or [],
        phase=phase.value,
        batch=batch,
        context=context,
        warmup=warmup,
        repeats=repeats,
        device=device,
        dtype=dtype,
    )
