"""Verbs that rank components: score, sort, search."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from star_elastic.cli.app import Batch, Context, Device, Dtype, app


class Layerwise(StrEnum):
    """Where hidden states wait between two layers."""

    memory = "memory"
    disk = "disk"


class Packing(StrEnum):
    """How documents are put into samples."""

    cross = "cross"
    apart = "apart"


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
            help="Rank an axis otherwise; may be repeated. experts: reap, reap_sum, activation, frequency, router_weight, "
            "random. depth: removal, kl, cosine, none. heads: weighted, activation (as published), weight_norm, random. "
            "mamba_heads, mamba_head_dim: output, activation (as published), weight_norm, random. Others: activation, weighted, "
            "weight_norm, random.",
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
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of the order of the data, and of random methods.")
    ] = 0,
    layerwise: Annotated[
        Layerwise | None,
        typer.Option(
            help="Read the model layer by layer, for one larger than memory; where hidden states wait meanwhile."
        ),
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
    context: Context = None,
    batch: Batch = None,
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
