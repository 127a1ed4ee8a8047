"""Verbs that take a folder elsewhere: export to another engine's file, push to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import app


@app.command("export")
def export_verb(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A slice, or any transformers folder.")],
    gguf: Annotated[Path, typer.Option("--gguf", metavar="FILE", help="New GGUF file, for llama.cpp and Ollama.")],
    kind: Annotated[str, typer.Option("--type", metavar="TYPE", help="F32, BF16, F16 or Q8_0.")] = "BF16",
    converter: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="llama.cpp's folder; LLAMA_CPP and PATH are searched if left out."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="Python to run it with; this one if left out.")
    ] = None,
) -> None:
    """Convert a folder to one GGUF file with llama.cpp's own converter, which must be on this machine.

    \b
    Example:
      LLAMA_CPP=~/llama.cpp star-elastic export ./small --gguf small.gguf --type Q8_0
    """
    from star_elastic.export import export_gguf
    from star_elastic.units import format_bytes

    written = export_gguf(folder, gguf, kind=kind, converter=converter, python=python)
    print(f"wrote {written}: {format_bytes(written.stat().st_size)}")
    print(f"run it: llama-cli -m {written} -p Hello")


@app.command("push")
def push_verb(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A slice or an elastic checkpoint.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Name on the hub: org/name.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch to push to; made if it is not there.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="The parent's name on the hub, for the model card.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be pushed; talk to nobody.")] = False,
) -> None:
    """Verify a folder, then publish it on the Hugging Face hub with its model card. Pushed again, it sends what is missing.

    \b
    Examples:
      star-elastic push ./small my-org/small --private --dry-run
      HF_TOKEN=hf_... star-elastic push ./small my-org/small --base-model nvidia/parent
    """
    from star_elastic.push import push_folder

    report = push_folder(folder, repo, private=private, revision=revision, base_model=base_model, dry_run=dry_run)
    for line in report.lines():
        print(line)
