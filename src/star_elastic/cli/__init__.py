"""The command line: ``star-elastic VERB``. Each verb parses its arguments and calls one function of another module.

What is unusual: the modules that do the work import torch and transformers, which takes seconds, so each verb imports its
own inside the function; ``--help`` needs none of them. And whatever a user did wrong ends as one line, ``error: ...``, with
exit code 2, while an exception that we did not foresee is our mistake and keeps its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import typer

from star_elastic.cli import caching, checking, look, profiling, publishing, rank, slicing, training
from star_elastic.cli.app import app
from star_elastic.errors import ElasticError, StoppedElsewhere, nearest

__all__ = ["app", "main"]

VERBS = (look, rank, profiling, caching, training, slicing, checking, publishing)  # each registers its verbs on import


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 for a mistake of the user, told in one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # Its warnings (a kernel that this machine lacks, ...) are for programmers; ours are one line each.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if arguments is None:
        signal.signal(signal.SIGTERM, _interrupt)  # asked to stop, we clean up as after Ctrl-C
    try:
        command = typer.main.get_command(app)
        # Not command.main(): that would turn an interrupt into a silent exit code of its own.
        with command.make_context("star-elastic", list(words)) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        return _fail(_usage_message(error, words))
    except StoppedElsewhere:
        return 2
    except ElasticError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; nothing unfinished was kept")
    except BrokenPipeError:
        # The reader of our output has gone (`... | head`). Python would complain once more while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error))
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _usage_message(error: typer.TyperException, words: Sequence[str]) -> str:
    """The parser's own sentence, except for an unknown verb, where we name the nearest one."""
    verbs = [
        command.name or typer.main.get_command_name(command.callback.__name__)
        for command in app.registered_commands
        if command.callback
    ]
    if words[0].startswith("-") or words[0] in verbs:
        return error.format_message()
    return f"no command {words[0]!r}; {nearest(words[0], verbs)}"
