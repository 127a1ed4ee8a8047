"""A dry run on stdout: tables for people, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from star_elastic.train.dry_run import COLD, DryRun, dry_run
from star_elastic.train.report import SHORT
from star_elastic.units import format_bytes, format_count, parse_size


def run_dry_run(
    recipe: Path,
    overrides: Sequence[str],
    *,
    world_size: int,
    device_memory: str | None,
    as_json: bool,
    resume: bool = False,
) -> None:
    """Print a dry run on stdout, as tables or as one JSON object.

    Raises:
        QuantityError: ``device_memory`` cannot be read. Otherwise as ``dry_run``.
    """
    limit = None if device_memory is None else parse_size(device_memory)
    planned = dry_run(recipe, overrides, world_size=world_size, device_memory=limit, resume=resume)
    if as_json:
        print(json.dumps(planned.as_json(), indent=2))
    else:
        print_dry_run(planned, Console())


def print_dry_run(planned: DryRun, console: Console) -> None:
    """Show a dry run to people."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    tokens = sum(stage.tokens for stage in planned.stages)
    steps = sum(stage.steps for stage in planned.stages)
    devices = "1 device" if planned.world_size == 1 else f"{planned.world_size} devices"
    say(f"{planned.parent}: {steps:,} steps, {format_count(tokens)} tokens, on {devices}")
    console.print(_stages_table(planned))
    if planned.budgets:
        console.print(_budgets_table(planned))
        for name, budget in planned.budgets.items():
            show = SHORT.get(budget.kind, format_count)
            say(f"{name}: reachable {show(budget.least)} to {show(budget.most)}; nearest widths: {budget.widths}")
        for axis, widths in planned.candidates.items():
            say(f"{axis}: {', '.join(map(str, widths))}")
    else:
        for name, submodel in planned.submodels.items():
            say(f"{name}: {format_count(submodel.params)} parameters, {format_count(submodel.active_params)} active")
    if planned.cold_step is not None:
        say(f"the router's temperature reaches {COLD:g} at search step {planned.cold_step:,}")
    if planned.cache_bytes is not None:
        say(f"the teacher's answers take {format_bytes(planned.cache_bytes)} on disk")
    say(f"memory assumes: {planned.assumed}")
    for warning in planned.warnings:
        say(f"note: {warning}")


def _stages_table(planned: DryRun) -> Table:
    table = Table(title="stages", title_justify="left")
    table.add_column("")
    for number, stage in enumerate(planned.stages):
        table.add_column(f"{number + 1} {stage.phase}", justify="right")
    stages = planned.stages
    table.add_row("steps", *(f"{stage.steps:,}" for stage in stages))
    table.add_row("tokens", *(format_count(stage.tokens) for stage in stages))
    table.add_row("rows per step", *(f"{stage.batch_size} x {stage.sequence_length}" for stage in stages))
    table.add_row("rows per device and pass", *(str(stage.rows_per_pass) for stage in stages))
    table.add_row("recompute activations", *("yes" if stage.checkpointing else "no" for stage in stages))
    for name in stages[0].probabilities:
        table.add_row(f"share of {name}", *(f"{stage.probabilities[name]:.2f}" for stage in stages))
    table.add_section()
    parts = [stage.memory.as_json() for stage in stages]
    for name in parts[0]:
        if any(part[name] for part in parts):
            told = "memory of a device" if name == "total" else name.replace("_", " ")
            table.add_row(told, *(format_bytes(part[name]) for part in parts))
    return table


def _budgets_table(planned: DryRun) -> Table:
    table = Table(title="budgets", title_justify="left")
    for heading in ("", "kind", "target", "share", "nearest", "off by"):
        table.add_column(heading, justify="left" if heading in ("", "kind") else "right")
    for name, plan in planned.budgets.items():
        show = SHORT.get(plan.kind, format_count)
        numbers = (show(plan.target), f"{plan.fraction:.1%}", show(plan.nearest), f"{plan.error:+.2%}")
        table.add_row(name, plan.kind, *numbers)
    return table
