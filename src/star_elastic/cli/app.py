"""The frame of the command line: the application that the verbs join, and the options that several of them share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from star_elastic.paths import expanded
from star_elastic.version import VERSION

Verb = TypeVar("Verb", bound=Callable[..., Any])

PATH_WORDS = frozenset({"source", "against", "data", "probe_data", "python"})
"""Arguments of verbs that are text because they may be a path or something else."""


class App(typer.Typer):
    """An application whose verbs get paths with ``~`` expanded, which a shell leaves alone in quotes and after a ``=``."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Verb], Verb]:
        """As in typer."""
        register = super().command(name, **settings)

        def decorate(verb: Verb) -> Verb:
            register(_expanding(verb))
            return verb

        return decorate


def _expanding(verb: Verb) -> Verb:
    def expand(name: str, value: Any) -> Any:
        if isinstance(value, Path):
            return Path(expanded(str(value)))
        return expanded(value) if name in PATH_WORDS and isinstance(value, str) else value

    @functools.wraps(verb)
    def call(**arguments: Any) -> Any:
        return verb(**{name: expand(name, value) for name, value in arguments.items()})

    return call  # type: ignore[return-value]


app = App(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Start with: star-elastic inspect --preset nemotron-3-nano-30b-a3b; then see: star-elastic VERB --help",
)

MAX_SEED = 2**63 - 1  # what torch takes

Preset = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME", help="Widths of a published family, for a folder without elastic.json."),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:0, ...")]

Dtype = Annotated[str, typer.Option(metavar="NAME", help="auto (as stored), float32, bfloat16 or float16.")]

Context = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens per sequence, for --memory; 8192 if left out.")
]
Batch = Annotated[int | None, typer.Option(metavar="N", min=1, help="Sequences at once, for --memory; 1 if left out.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"star-elastic {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One checkpoint, many sizes: turn a language model into a family of nested models, and slice any of them out."""
