"""Verbs that look at a model or use it: inspect, generate, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import MAX_SEED, Device, Dtype, Preset, app


@app.command()
def inspect(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="A model folder; its config.json is enough.")
    ] = None,
    preset: Preset = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show the axes of a model, their legal widths, and what each submodel costs.

    \b
    Examples:
      star-elastic inspect ./my-model
      star-elastic inspect --preset nemotron-3-nano-30b-a3b --json
    """
    from star_elastic.inspect import run_inspect

    run_inspect(path, preset=preset, as_json=as_json)


@app.command()
def generate(
    elastic: Annotated[
        Path, typer.Argument(metavar="ELASTIC", help="An elastic checkpoint, or any model folder of a known family.")
    ],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.")],
    submodel: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which submodel writes; the full model if left out.")
    ] = None,
    preset: Preset = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Stop after this many tokens.")] = 256,
    temperature: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="0 always takes the most probable token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=MAX_SEED, help="Seed of the sampling.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Write text with a submodel, run on views of the parent's weights.

    \b
    Example:
      star-elastic generate ./elastic --prompt "2 + 3 =" --submodel small
    """
    from star_elastic.generate import generate_text

    generate_text(
        elastic,
        prompt,
        submodel=submodel,
        preset=preset,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        device=device,
        dtype=dtype,
        stream=True,
    )


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where everything is kept; a second run reuses what is finished.")
    ] = Path("demo-out"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A one-minute version that checks the facts, not the accuracy.")
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=MAX_SEED, help="Another parent, another order of the data.")
    ] = 0,
) -> None:
    """Train a small family from scratch on this machine and show what makes it elastic.

    \b
    Example:
      star-elastic demo --out demo-out
    """
    from star_elastic.demo import run_demo

    if not run_demo(out, quick=quick, seed=seed).passed:
        raise typer.Exit(1)
