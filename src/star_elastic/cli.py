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
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from star_elastic.errors import ElasticError, nearest
from star_elastic.version import VERSION


class Layerwise(StrEnum):
    """Where hidden states wait between two layers."""

    memory = "memory"
    disk = "disk"


class Packing(StrEnum):
    """How documents are put into samples."""

    cross = "cross"
    apart = "apart"


app = typer.Typer(
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
def score(
    parent: Annotated[Path, typer.Argument(metavar="PARENT", help="The model folder to score.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for scores.safetensors and scores.json.")],
    data: Annotated[
        str, typer.Option(metavar="FILE", help="Text, .jsonl or .parquet file, or a datasets folder or name.")
    ],
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="How many samples to read.")] = 1024,
    seq_len: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens per sample; 8192, or what the model allows.")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Samples per forward pass.")] = 1,
    packing: Annotated[
        Packing, typer.Option(help="cross: documents follow each other in a sample; apart: one each, padded.")
    ] = Packing.cross,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=NAME",
            help="Rank an axis otherwise; may be repeated. experts: reap, activation, frequency, router_weight, random. "
            "depth: removal, cosine, none. Others: activation, weight_norm, random.",
        ),
    ] = None,
    kept: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=N", help="Judge Mamba heads by the N best channels only: mamba_head_dim=N."),
    ] = None,
    per_expert: Annotated[
        bool, typer.Option("--per-expert", help="Give each expert an order of its channels for itself as well.")
    ] = False,
    depth_samples: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Samples for removing layers; each costs a run per pair of layers; 16."),
    ] = None,
    width: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=N", help="Show also what this width keeps (N, or P%); may be repeated."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure also what one-shot cuts of each axis cost in held-out loss.")
    ] = False,
    probe_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Held-out tokens for --probe, which this implies; 8192.")
    ] = None,
    probe_data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Data for --probe, not --data's rows that were not scored on.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the order of the data, and of random methods.")] = 0,
    layerwise: Annotated[
        Layerwise | None,
        typer.Option(help="Read the model layer by layer, for one larger than memory; where hidden states wait meanwhile."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run from OUT.run.")] = False,
    save_every: Annotated[int, typer.Option(metavar="N", min=1, help="Batches between two saves to OUT.run.")] = 64,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Rank the members of every axis on calibration data, and show what cuts would keep.

    \b
    Examples:
      star-elastic score ./parent ./scores --data calibration.jsonl --samples 256 --seq-len 2048
      star-elastic score ./parent ./scores --data calibration.jsonl --samples 256 --probe
      star-elastic score ./parent ./scores --data calibration.jsonl --method depth=cosine --method experts=frequency
    """
    from star_elastic.score import ProbeOptions, score_parent
    from star_elastic.score.methods import parse_kept, parse_methods

    score_parent(
        parent,
        out,
        data,
        samples=samples,
        seq_len=seq_len,
        batch_size=batch_size,
        packing=packing.value,
        methods=parse_methods(method or ()),
        kept=parse_kept(kept or ()),
        per_expert=per_expert,
        depth_samples=depth_samples,
        widths=width or (),
        probe=ProbeOptions(probe_tokens or 8192, probe_data) if probe or probe_tokens or probe_data else None,
        layerwise=layerwise.value if layerwise else None,
        seed=seed,
        resume=resume,
        save_every=save_every,
        device=device,
        dtype=dtype,
        progress=True,
    )


@app.command()
def sort(
    parent: Annotated[Path, typer.Argument(metavar="PARENT", help="The model folder to sort.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the sorted model.")],
    scores: Annotated[Path, typer.Option(metavar="FILE", help="scores.safetensors, or the folder that `score` wrote.")],
) -> None:
    """Reorder the weights by importance; the model computes what it did before, and submodels become prefixes.

    \b
    Example:
      star-elastic sort ./parent ./sorted --scores ./scores
    """
    from star_elastic.sort import sort_parent

    elastic = sort_parent(parent, out, scores)
    print(f"wrote {out}: sorted {', '.join(elastic.sorted_axes)}")


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The training recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values to set in the recipe.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the recipe's output folder.")] = False,
) -> None:
    """Distil all submodels from the frozen parent in one run.

    \b
    Examples:
      star-elastic train recipes/family.yaml
      star-elastic train recipes/family.yaml steps=2000 output=./family-2
      star-elastic train recipes/family.yaml --resume
    """
    from star_elastic.train import train_family

    train_family(recipe, overrides or [], resume=resume)


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


@app.command()
def search(
    parent: Annotated[Path, typer.Argument(metavar="PARENT", help="A sorted model folder, with its tokenizer.")],
    data: Annotated[
        str, typer.Option(metavar="FILE", help="Held-out text, .jsonl or .parquet file, or a datasets folder or name.")
    ],
    params: Annotated[str | None, typer.Option(metavar="N", help="At most N parameters (12e9, 12B).")] = None,
    active_params: Annotated[str | None, typer.Option(metavar="N", help="At most N active per token.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="At most SIZE (24GiB): weights, caches, states.")
    ] = None,
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per sequence, for --memory.")] = 8192,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences at once, for --memory.")] = 1,
    axes: Annotated[
        str | None, typer.Option(metavar="A,B", help="Cut only these axes; all that are sorted if left out.")
    ] = None,
    candidates: Annotated[int, typer.Option(metavar="N", min=1, help="Measure at most N nested models.")] = 24,
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Held-out tokens to measure each on.")] = 8192,
    seq_len: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Tokens per row; 8192, or what the model allows.")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows per forward pass.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the order of the data.")] = 0,
    cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file of measured losses, to reuse and to add to.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Find the widths under a budget that cost least in held-out loss, without training, and say how to cut them.

    Say the budget in exactly one way: --params, --active-params or --memory.

    \b
    Examples:
      star-elastic search ./sorted --data held-out.jsonl --active-params 2e9 --cache ./losses.json
      star-elastic search ./sorted --data held-out.jsonl --params 12B --axes hidden,expert_ffn
    """
    from star_elastic.selection import parse_budget

    budget = parse_budget(params=params, active_params=active_params, memory=memory, context=context, batch=batch)
    # Not before the budget was read: this imports torch.
    from star_elastic.search import search_parent, show_search

    report = search_parent(
        parent,
        budget,
        data,
        axes=None if axes is None else [name.strip() for name in axes.split(",")],
        candidates=candidates,
        tokens=tokens,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        cache=cache,
        device=device,
        dtype=dtype,
    )
    show_search(report, as_json=as_json)


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
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=MAX_SEED, help="Another parent, another order of the data.")] = 0,
) -> None:
    """Train a small family from scratch on this machine and show what makes it elastic.

    \b
    Example:
      star-elastic demo --out demo-out
    """
    from star_elastic.demo import run_demo

    if not run_demo(out, quick=quick, seed=seed).passed:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 for a mistake of the user, told in one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command = typer.main.get_command(app)
    # Its warnings (a kernel that this machine lacks, ...) are for programmers; ours are one line each.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if arguments is None:
        signal.signal(signal.SIGTERM, _interrupt)  # asked to stop, we clean up as after Ctrl-C
    try:
        # Not command.main(): that would turn an interrupt into a silent exit code of its own.
        with command.make_context("star-elastic", list(words)) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        return _fail(_usage_message(error, words))
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
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    if words[0].startswith("-") or words[0] in verbs:
        return error.format_message()
    return f"no command {words[0]!r}; {nearest(words[0], verbs)}"
