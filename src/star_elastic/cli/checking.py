"""Verbs that check: verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import app


@app.command("verify")
def verify_verb(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A slice, or any model folder of a known family.")],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PARENT",
            help="The folder or hub name it was cut from: every tensor must be its cut, bit for bit.",
        ),
    ] = None,
    forward: Annotated[
        bool, typer.Option("--forward", help="Also load and run it, and compare logits with the parent's view.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check files, tensors, config, model card and numbers of a folder. Memory stays small, but for --forward.

    The exit code is 0 if all is well, 1 if a check failed or could not be made, and 2 for a mistake in the command.

    \b
    Examples:
      star-elastic verify ./small
      star-elastic verify ./small --against ./elastic --forward
      star-elastic verify ./small --against org/name
    """
    from star_elastic.verify import verify_folder

    report = verify_folder(folder, against=against, forward=forward)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        for check in report.checks:
            for line in check.lines():
                print(line)
    if not report.ok:
        raise typer.Exit(1)
