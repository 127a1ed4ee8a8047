"""Measure what the units of a model cost in seconds, at a ladder of widths (``latency`` reads the result).

No weights are loaded: each point is a model of one layer (and what it cannot run without), built from the config at those
widths and filled with random numbers. Time depends on shapes, not on values, but for one thing: which experts tokens go to.
Random routers spread them about evenly, as a balanced one does. So a model far larger than the machine can be profiled.

What is timed is the model's own code inside a call of the whole model, from the moment it enters a unit until it leaves it.
"""

from __future__ import annotations

import itertools
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from star_elastic.errors import UnknownNameError, WidthError, nearest
from star_elastic.latency import Conditions, LatencyTable, Machine, Model, Point, UnitLatency, check_new_file
from star_elastic.layout import Layout, Unit
from star_elastic.loading import choose_device, choose_dtype, layout_in, transformers_reads
from star_elastic.progress import progress_bar
from star_elastic.selection import RequestError
from star_elastic.submodel import open_elastic
from star_elastic.unit_timer import CpuClock, CudaClock, Timing, UnitTimer
from star_elastic.version import VERSION

FRACTIONS = (1.0, 0.75, 0.5)  # of the parent's width, where no ladder is given
NOISE = 0.25  # spread over median above which a measurement is called noisy

Ladders = Mapping[str, Sequence[int]]


Measure = Callable[[Unit, Mapping[str, int]], Timing]
"""Times one unit of the parent at given widths."""


def profile_model(
    model: Path | str,
    out: Path | str,
    *,
    widths: Sequence[str] = (),
    phase: str = "decode",
    batch: int = 1,
    context: int | None = None,
    warmup: int = 3,
    repeats: int = 20,
    device: str = "auto",
    dtype: str = "auto",
    progress: bool = True,
) -> LatencyTable:
    """Measure a model's units and write the table as JSON.

    Args:
        model: a model folder; its config.json is enough.
        out: the file to write; must not exist.
        widths: ``AXIS=N,N,...`` words: which widths to measure, the parent's own always among them; axes that are not named are
            measured at the parent's width only. None: every axis at 1, 0.75 and 0.5 of the parent's.
        phase: ``decode`` or ``prefill``, see ``latency.Conditions``.
        batch: sequences at once.
        context: tokens per sequence: those before the decoded one, or those of the prompt; 1024, or what the model allows.
        warmup: calls before the measured ones, at each point.
        repeats: measured calls at each point.
        device: ``auto``, ``cpu``, ``cuda``, ...
        dtype: ``auto`` (as stored), ``float32``, ``bfloat16``, ``float16``.
        progress: show a bar, and the table at the end.

    Raises:
        TargetError, CheckpointError, UnknownNameError, WidthError, RequestError, DeviceError: before anything is measured.

    Example:
        >>> profile_model("sorted", "decode.json", widths=["hidden=64,96,128"]).conditions.phase  # doctest: +SKIP
        'decode'
    """
    check_new_file(out)
    where, kind = choose_device(device), choose_dtype(dtype)
    config, layout, _ = open_elastic(model)
    layout = layout_in(kind, config, layout)
    ladders = read_ladders(layout, widths) if widths else default_ladders(layout)
    longest, more = config.get("max_position_embeddings"), warmup + repeats if phase == "decode" else 0
    if context is None:
        context = min(1024, max(1, (longest or 1024) - more))
    if longest is not None and context + more > longest:
        raise RequestError(
            f"context {context} needs {context + more} positions, the model's max_position_embeddings is {longest}"
        )
    with transformers_reads(model):
        own = AutoConfig.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    used = kind if isinstance(kind, torch.dtype) else own.dtype or torch.float32
    conditions = Conditions(
        phase=phase,  # type: ignore[arg-type]
        batch=batch,
        context=context,
        dtype=str(used).removeprefix("torch."),
        warmup=warmup,
        repeats=repeats,
    )
    clock = CudaClock() if where.type == "cuda" else CpuClock()
    timer = UnitTimer(own, layout, conditions, device=where, dtype=used, clock=clock)
    table = measure_table(layout, ladders, conditions, machine_of(where), timer, progress=progress)
    table.save(out)
    if progress:
        print_table(table, Console())
        print(f"wrote {out}")
    return table


def read_ladders(layout: Layout, words: Sequence[str]) -> dict[str, list[int]]:
    """Read ``AXIS=N,N,...`` words into widths by axis, ascending, the parent's own among them.

    Raises:
        RequestError, UnknownNameError, WidthError: a word that cannot be read, an unknown axis, an illegal width.
    """
    ladders: dict[str, list[int]] = {}
    for word in words:
        name, equals, numbers = word.partition("=")
        parts = [part.strip() for part in numbers.split(",")]
        if not equals or not all(part.isascii() and part.isdecimal() and len(part) < 12 for part in parts):
            raise RequestError(f"cannot read --width {word!r}: want AXIS=N,N,... such as hidden=1920,2016")
        if name not in layout.width_axes:
            raise UnknownNameError(f"this model has no axis {name!r}: {nearest(name, layout.width_axes)}")
        if name in ladders:
            raise RequestError(f"--width names {name} twice: put all its widths into one")
        axis = layout.axes[name]
        for part in parts:
            axis.check(int(part))
        ladders[name] = sorted({axis.size, *map(int, parts)})
    if not fits_everywhere(layout, ladders):
        rule = "; ".join(sorted({coupling.why for coupling in layout.couplings}))
        raise WidthError(
            f"not every combination of these widths can be built ({rule}): measure fewer of these axes at once"
        )
    return ladders


def default_ladders(layout: Layout) -> dict[str, list[int]]:
    """Every axis at its largest legal widths at or under 1, 0.75 and 0.5 of the parent's, as far as all combinations fit."""
    ladders: dict[str, list[int]] = {}
    for name, axis in layout.width_axes.items():
        wider = {**ladders, name: sorted({axis.at_most(axis.size * fraction) for fraction in FRACTIONS})}
        if fits_everywhere(layout, wider):
            ladders = wider
    return ladders


def fits_everywhere(layout: Layout, ladders: Ladders) -> bool:
    """Whether every combination of widths is a model that exists."""
    return all(layout.fits(widths) for widths in combinations(ladders))


def combinations(ladders: Ladders) -> Iterator[dict[str, int]]:
    """Every combination of the ladders' widths, the last axis varying fastest."""
    for widths in itertools.product(*ladders.values()):
        yield dict(zip(ladders, widths, strict=True))


def measure_table(
    layout: Layout,
    ladders: Ladders,
    conditions: Conditions,
    machine: Machine,
    measure: Measure,
    *,
    progress: bool = False,
) -> LatencyTable:
    """Measure every shape of unit at every combination of the widths that its shape depends on.

    Args:
        layout: the parent's table.
        ladders: widths by axis, ascending, each ending with the parent's own; axes left out stay at the parent's.
        conditions: what ``measure`` measures; recorded.
        machine: where; recorded.
        measure: times a unit at given widths.
        progress: show a bar.
    """
    groups = units_by_shape(layout)
    grids = [unit_ladders(layout, group[0], ladders) for group in groups]
    measured: list[UnitLatency] = []
    outside: list[float] = []
    with progress_bar(
        "profiling", sum(sum(1 for _ in combinations(grid)) for grid in grids), "points", shown=progress
    ) as done:
        for group, grid in zip(groups, grids, strict=True):
            points = []
            for widths in combinations(grid):
                timing = measure(group[0], widths)
                points.append(Point(widths=widths, seconds=statistics.median(timing.unit), spread=spread(timing.unit)))
                outside += timing.outside
                done(1)
            paths = tuple(unit.module for unit in group)
            ladder = {name: tuple(widths) for name, widths in grid.items()}
            measured.append(UnitLatency(kind=group[0].kind, units=paths, ladder=ladder, points=tuple(points)))
    return LatencyTable(
        tool=f"star-elastic {VERSION}",
        machine=machine,
        conditions=conditions,
        model=Model(family=layout.family, fingerprint=layout.fingerprint),
        overhead=statistics.median(outside),
        units=tuple(measured),
    )


def units_by_shape(layout: Layout) -> list[list[Unit]]:
    """Units that are built alike, together, in the order of the first of each."""
    groups: dict[Any, list[Unit]] = {}
    for unit in layout.units:
        shape = tuple((row.name, row.dims, row.fp32) for row in unit.rows)
        groups.setdefault((unit.kind, shape, unit.states), []).append(unit)
    return list(groups.values())


def unit_ladders(layout: Layout, unit: Unit, ladders: Ladders) -> dict[str, Sequence[int]]:
    """The ladder of every axis that this unit has; one width, the parent's, where none was asked for."""
    axes = frozenset[str]().union(*(row.axes for row in unit.rows))
    return {name: ladders.get(name, [axis.size]) for name, axis in layout.width_axes.items() if name in axes}


def spread(seconds: Sequence[float]) -> float:
    """Interquartile range; 0 for a single number."""
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return high - low


def machine_of(device: torch.device) -> Machine:
    """The class of machine that numbers are valid for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return Machine(device=device.type, name=name, threads=torch.get_num_threads(), torch=torch.__version__)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def print_table(table: LatencyTable, console: Console) -> None:
    """Show, for each shape of unit, the time at the parent's widths and at the smallest measured ones."""
    conditions, machine = table.conditions, table.machine
    what = f"{conditions.phase}, batch {conditions.batch}, context {conditions.context}, {conditions.dtype}"
    where = f"{machine.name}, {machine.threads} threads" if machine.device == "cpu" else machine.name
    shown = Table(title=f"{what} on {where}", title_justify="left")
    for heading in ("units", "kind", "ms each", "spread", "ms cut", "cut"):
        shown.add_column(heading, justify="left" if heading in ("kind", "cut") else "right")
    for group in table.units:
        full, least = group.points[-1], group.points[0]
        cut = ", ".join(
            f"{axis} {full.widths[axis]} -> {width}"
            for axis, width in least.widths.items()
            if width != full.widths[axis]
        )
        numbers = [f"{1000 * value:.3f}" for value in (full.seconds, full.spread, least.seconds)]
        shown.add_row(str(len(group.units)), group.kind, *numbers, cut or "-")
    console.print(shown)
    total = table.overhead + sum(len(group.units) * group.points[-1].seconds for group in table.units)
    outside = f"of which {1000 * table.overhead:.3f} ms outside the units"
    console.print(f"the whole model: {1000 * total:.3f} ms a call, {outside}", highlight=False, soft_wrap=True)
    noisy = [point for group in table.units for point in group.points if point.spread > NOISE * point.seconds]
    if noisy:
        points = sum(len(group.points) for group in table.units)
        note = f"note: at {len(noisy)} of {points} points the repeats differ by more than {NOISE:.0%}: is this machine busy?"
        console.print(f"{note} More --repeats help.", highlight=False, soft_wrap=True)
