"""From what a user asks of ``slice`` to one nested model: by name, by widths, or by a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from star_elastic import cost
from star_elastic.engines import engine_commands, engine_lines
from star_elastic.errors import MOST_NAMES, ElasticError, RemoteError, WidthError
from star_elastic.export import Gguf
from star_elastic.families.base import Config, itemsize
from star_elastic.inspect import submodel_cost, with_full
from star_elastic.ladder import Budget, Choice, choose
from star_elastic.layout import Layout
from star_elastic.opened import OpenedSource, is_hub_name, open_source
from star_elastic.per_layer import by_width
from star_elastic.rewrite import NewModel
from star_elastic.slice import (
    Size,
    SlicePlan,
    SliceReport,
    check_folders,
    plan_sizes,
    scratch_path,
    write_sizes,
)
from star_elastic.slice_gguf import GgufFile, plan_files, write_files
from star_elastic.source import read_source
from star_elastic.submodel import ElasticConfig, Submodel, open_elastic
from star_elastic.units import format_bytes, format_count, parse_count, parse_size

PER_LAYER_NOTE = (
    "note: its layers differ in width, which no transformers config can say: the folder loads with star_elastic's "
    "ElasticModel.from_pretrained, not with transformers alone"
)


class RequestError(ElasticError, ValueError):
    """A size asked for in no way, in several ways at once, or in words that cannot be read."""


@dataclass(frozen=True)
class SizeRequest:
    """The size that a user wants; exactly one of the three is set.

    Attributes:
        name: a nested model's name.
        submodel: explicit widths and kept layers.
        budget: an upper bound; its dtype is filled in from the model.
        learned: the budget is a target, which the checkpoint's router is asked for.
    """

    name: str | None = None
    submodel: Submodel | None = None
    budget: Budget | None = None
    learned: bool = False

    @classmethod
    def parse(
        cls,
        *,
        to: str | None = None,
        widths: Sequence[str] = (),
        layers: str | None = None,
        params: str | None = None,
        active_params: str | None = None,
        memory: str | None = None,
        context: int | None = None,
        batch: int | None = None,
        learned: bool = False,
    ) -> SizeRequest:
        """Read the options of the command line, before any file is opened.

        Raises:
            RequestError: not exactly one kind of size was given, a width or layer cannot be read, ``context`` or ``batch``
                go with another kind than ``memory``, or ``learned`` with no budget.
            QuantityError: a number or size cannot be read.
        """
        given = {
            "--to": to is not None,
            "--width/--layers": bool(widths) or layers is not None,
            "--params": params is not None,
            "--active-params": active_params is not None,
            "--memory": memory is not None,
        }
        named = [option for option, is_given in given.items() if is_given]
        if len(named) != 1:
            problem = f"{' and '.join(named)} exclude each other" if named else "no size is given"
            raise RequestError(f"{problem}: say exactly one of {', '.join(given)}")
        check_goes_with("--memory", memory is not None, {"--context": context, "--batch": batch})
        limits = {"params": params, "active_params": active_params, "memory": memory}
        if learned and all(limit is None for limit in limits.values()):
            raise RequestError(f"--learned means nothing with {named[0]}: give --params, --active-params or --memory")
        if to is not None:
            return cls(name=to)
        if given["--width/--layers"]:
            return cls(submodel=Submodel(widths=parse_widths(widths), layers=parse_layers(layers)))
        return cls(budget=parse_budget(**limits, context=context, batch=batch), learned=learned)


def parse_budget(
    *,
    params: str | None = None,
    active_params: str | None = None,
    memory: str | None = None,
    context: int | None = None,
    batch: int | None = None,
) -> Budget:
    """Read the budget options of the command line.

    Raises:
        RequestError: not exactly one budget was given, or ``context`` or ``batch`` with another than ``memory``.
        QuantityError: a number or size cannot be read.
    """
    given = {"--params": params, "--active-params": active_params, "--memory": memory}
    named = [option for option, text in given.items() if text is not None]
    if len(named) != 1:
        problem = f"{' and '.join(named)} exclude each other" if named else "no budget is given"
        raise RequestError(f"{problem}: say exactly one of {', '.join(given)}")
    check_goes_with("--memory", memory is not None, {"--context": context, "--batch": batch})
    if params is not None:
        return Budget("params", parse_count(params))
    if active_params is not None:
        return Budget("active_params", parse_count(active_params))
    sizes: dict[str, Any] = {"context": context, "batch": batch}
    return Budget("memory", parse_size(str(memory)), **{name: n for name, n in sizes.items() if n is not None})


def check_goes_with(option: str, given: bool, others: Mapping[str, object]) -> None:
    """Refuse options that would be ignored without another one.

    Raises:
        RequestError: one of ``others`` is not None while ``option`` is not ``given``.
    """
    for name, value in others.items():
        if value is not None and not given:
            raise RequestError(f"{name} {value} means nothing without {option}: leave it out, or give {option} too")


def stored_format(config: Config, layout: Layout) -> str:
    """The format in which a model's weights are counted for a memory budget."""
    if any(row.stored for _, row in layout.tensors()):
        return cost.STORED
    return "fp32" if itemsize(config) == 4 else "bf16"


def parse_widths(words: Sequence[str]) -> dict[str, int]:
    """Read ``AXIS=N`` words. Raises RequestError if one is malformed or names an axis twice."""
    widths: dict[str, int] = {}
    for word in words:
        axis, equals, number = word.partition("=")
        if not equals or not axis or not _is_number(number):
            raise RequestError(f"cannot read --width {word!r}: want AXIS=N, such as hidden=1920")
        if axis in widths:
            raise RequestError(f"--width names {axis} twice: {widths[axis]} and {number}")
        widths[axis] = int(number)
    return widths


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 12


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Read ``0,1,3``. Raises RequestError if it is anything else."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(_is_number(word) for word in words):
        raise RequestError(f"cannot read --layers {text!r}: want layer numbers to keep, such as 0,1,3")
    return tuple(int(word) for word in words)


@dataclass(frozen=True)
class Selection:
    """The nested model that a request stands for.

    Attributes:
        name: its name, where it has one.
        submodel: its widths and layers, checked.
        lines: how it was found, for people.
    """

    name: str | None
    submodel: Submodel
    lines: tuple[str, ...] = ()


def select(
    request: SizeRequest, config: Config, layout: Layout, elastic: ElasticConfig, folder: Path | None = None
) -> Selection:
    """Find the nested model that ``request`` stands for.

    Args:
        request: the size.
        config: the model's config.json.
        layout: its table.
        elastic: its nested models.
        folder: where it lies with its router, which ``learned`` asks.

    Raises:
        UnknownNameError: no such submodel or axis.
        WidthError: an illegal width or set of layers, or a budget that nothing fits.
        As ``learned.choose_learned`` does.
    """
    if request.name is not None:
        return Selection(request.name, elastic.get(request.name))
    if request.submodel is not None:
        return _explicit(request.submodel, layout, elastic)
    assert request.budget is not None
    if request.learned:
        assert folder is not None
        return _learned(request.budget, layout, elastic, folder)
    return _within(replace(request.budget, dtype=stored_format(config, layout)), layout, elastic)


def _explicit(submodel: Submodel, layout: Layout, elastic: ElasticConfig) -> Selection:
    """Explicit widths; a width of ``depth`` means the best so many layers, or the first where depth was never ranked."""
    widths, layers = dict(submodel.widths), submodel.layers
    lines: tuple[str, ...] = ()
    if "depth" in widths:
        depth = widths.pop("depth")
        if layers is not None:
            raise RequestError(f"--width depth={depth} and --layers exclude each other: say one of them")
        layout.axes["depth"].check(depth)
        order = elastic.depth_order or tuple(range(layout.num_layers))
        layers = tuple(sorted(order[:depth]))
        if elastic.depth_order is None:
            lines = (f"note: depth is not ranked here, so the first {depth} layers stay; --layers says which",)
    chosen = Submodel(widths=widths, layers=layers, layer_widths=submodel.layer_widths)
    chosen.check(layout)
    return Selection(None, chosen, lines)


def _within(budget: Budget, layout: Layout, elastic: ElasticConfig) -> Selection:
    """The largest named nested model that fits, else the largest of the uniform ladder."""
    # A parent that was only sorted names nothing but the whole model, which is no ladder.
    nested = any(not submodel.is_full(layout) for submodel in elastic.submodels.values())
    lines: tuple[str, ...] = ()
    if nested:
        try:
            choice = choose(layout, with_full(layout, elastic), budget)
            return Selection(choice.name, choice.submodel, _said(choice))
        except WidthError as error:
            lines = (f"note: {error}; so widths are taken that were not trained",)
    choice = choose(layout, {}, budget)
    return Selection(None, choice.submodel, (*lines, *_said(choice)))


def _learned(budget: Budget, layout: Layout, elastic: ElasticConfig, folder: Path) -> Selection:
    """What the router of the folder says; it alone needs torch."""
    from star_elastic.learned import choose_learned

    found = choose_learned(folder, layout, elastic, budget)
    return Selection(None, found.submodel, found.lines)


def _said(choice: Choice) -> tuple[str, str]:
    return f"ladder: {choice.ladder}", f"chosen: {choice.summary}"


def unsorted_note(layout: Layout, submodel: Submodel, elastic: ElasticConfig) -> list[str]:
    """A warning where an axis is cut whose members lie in no order of importance. Published families are sorted."""
    whole = submodel.completed(layout)
    cut = [
        name for name, width in whole.widths.items() if width != layout.axes[name].size or name in whole.layer_widths
    ]
    unsorted = [name for name in cut if name not in elastic.sorted_axes]
    if not unsorted or "preset" in elastic.provenance:
        return []
    return [
        f"note: not sorted along {', '.join(unsorted)}: what stays is what comes first; see star-elastic score and sort"
    ]


def describe_cut(layout: Layout, submodel: Submodel, stored: str = "bf16") -> list[str]:
    """What is cut and what remains, one fact a line; ``stored`` is the format of the weights."""
    facts, full = submodel_cost(layout, submodel), submodel_cost(layout, Submodel())
    shared = {axis: width for axis, width in facts.widths.items() if axis not in facts.layer_widths}
    cuts = [f"{axis} {full.widths[axis]} -> {width}" for axis, width in shared.items() if width != full.widths[axis]]
    cuts += [f"{axis} {full.widths[axis]} -> {by_width(own)}" for axis, own in facts.layer_widths.items()]
    if facts.layers is not None:
        cuts.append(f"depth {layout.num_layers} -> {len(facts.layers)} (layers {', '.join(map(str, facts.layers))})")
    weights = cost.weight_bytes(layout, submodel.keyed_widths, facts.layers, dtype=stored)
    total = f"{format_count(facts.params)} ({facts.params:,}), {facts.params / full.params:.1%} of the parent's"
    return [
        f"cut: {', '.join(cuts) or 'nothing, this is the whole model'}",
        f"parameters: {total}; {format_count(facts.active_params)} active",
        f"weights: {format_bytes(weights)} {'as stored' if stored == cost.STORED else f'in {stored}'}",
        *([PER_LAYER_NOTE] if facts.layer_widths else []),
    ]


def run_slice(
    source: Path | str,
    out: Path,
    requests: Sequence[SizeRequest],
    *,
    preset: str | None = None,
    drop: Sequence[str] = (),
    threads: int | None = None,
    gguf: Gguf | None = None,
    dry_run: bool = False,
) -> list[SliceReport]:
    """Slice as asked on the command line, and say on stdout what was chosen and cut.

    One size goes to ``out`` itself, several each to a folder of its name in it. With ``gguf`` a file is made of each, beside it.
    A dry run makes every check of a real one and writes nothing.

    Raises:
        RequestError: a router on the hub is asked for.
        As ``open_elastic``, ``select``, ``slice_sizes``, ``plan_files`` and ``write_files`` do.
    """
    folders = planned_folders(out, requests)
    check_folders(folders, source)
    if is_hub_name(source) and any(request.learned for request in requests):
        raise RequestError("--learned asks a router that lies in a folder, and of the hub only weights are fetched: download it")
    with open_source(source, None if dry_run else scratch_path(out)) as opened:
        model = read_source(opened, drop)
        config, layout, elastic = open_elastic(opened.folder, preset=preset, table=model.layout)
        selections = [select(request, config, layout, elastic, opened.folder) for request in requests]
        sizes = [Size(folder, found.submodel, found.name) for folder, found in zip(folders, selections, strict=True)]
        plan = plan_sizes(model, sizes)  # for its checks, before anything is said
        files = plan_files(gguf, plan) if gguf is not None else []
        for selection in selections:
            if len(sizes) > 1:
                print(f"{selection.name}:")
            notes = unsorted_note(layout, selection.submodel, elastic)
            facts = describe_cut(layout, selection.submodel, stored_format(config, layout))
            for line in (*selection.lines, *facts, *notes):
                print(line)
        lines = [*_dropped_lines(model.dropped), *_tied_lines(model.tied), *_quantized_lines(plan)]
        for line in (*lines, *_fetch_lines(opened, plan)):
            print(line)
        if dry_run or files:
            plan.check_space(threads, {file.path.resolve(): file.nbytes for file in files})
        if dry_run:
            unwritten = [*folders, *(file.path for file in files)]
            print(f"dry run: {' and '.join(map(str, unwritten))} {'was' if len(unwritten) == 1 else 'were'} not written")
            return []
        reports = _write(plan, threads)
        for report in reports:
            print(f"wrote {report.folder}: {report.tensors} tensors, {format_bytes(report.nbytes)}")
        if opened.fetch is not None:
            print(opened.fetch.checked())
    if gguf is not None:
        for line in write_files(gguf, files):
            print(line)
    for number, report in enumerate(reports):
        for line in _engine_lines(plan.models[number], report, plan.source.quantized.text, files[number] if files else None):
            print(line)
    return reports


def _write(plan: SlicePlan, threads: int | None) -> list[SliceReport]:
    """Write the slices; what was fetched for them outlives an interrupt, and is told to."""
    try:
        return write_sizes(plan, threads=threads)
    except KeyboardInterrupt:
        if plan.source.opened.fetch is None:
            raise
        raise RemoteError("interrupted; what is finished is kept: the same command goes on from there") from None


def planned_folders(out: Path, requests: Sequence[SizeRequest]) -> list[Path]:
    """Where each size goes.

    Raises:
        RequestError: several sizes, of which one has a name that is no folder's, or two have the same.
    """
    if len(requests) == 1:
        return [out]
    names = [str(request.name) for request in requests]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"--to {name} is given twice: name each size once")
        if Path(name).name != name or name == "..":
            raise RequestError(f"--to {name!r} cannot name a folder in {out}: slice it alone")
    return [out / name for name in names]


def _dropped_lines(dropped: Sequence[str]) -> list[str]:
    """The first few names, and how many in all; the model card lists each."""
    if not dropped:
        return []
    more = f", ... ({len(dropped)} in all)" if len(dropped) > MOST_NAMES else ""
    return [f"left out: {len(dropped)} tensors: {', '.join(dropped[:MOST_NAMES])}{more}"]


def _tied_lines(tied: Mapping[str, str]) -> list[str]:
    return [
        f"note: {copy} is stored beside {home}, to which config.json ties it; the slice holds it once"
        for copy, home in tied.items()
    ]


def _quantized_lines(plan: SlicePlan) -> list[str]:
    """What can load quantized slices; servers take only those that a config describes, whose layers agree."""
    if not plan.source.quantized.declared:
        return []
    note = f"note: quantized ({plan.source.quantized.text}): "
    per_layer = [bool(report.submodel.layer_widths) for report in plan.reports]
    if all(per_layer):
        return [f"{note}only ElasticModel.from_pretrained can load it, dequantizing it"]
    which = "slices whose layers agree" if any(per_layer) else "the slice"
    return [
        f"{note}transformers cannot load {which}; vLLM, SGLang and TensorRT-LLM can, and ElasticModel.from_pretrained, "
        "dequantizing it"
    ]


def _engine_lines(model: NewModel, report: SliceReport, quantized: str, file: GgufFile | None) -> list[str]:
    """How to run a slice in other engines."""
    commands = engine_commands(
        model.config,
        str(report.folder),
        quantized=bool(quantized),
        per_layer=bool(report.submodel.layer_widths),
        file=str(file.path) if file else None,
    )
    return engine_lines(commands)


def _fetch_lines(opened: OpenedSource, plan: SlicePlan) -> list[str]:
    if opened.fetch is None:
        return []
    needed, whole = opened.fetch.fetch_bytes(plan.units), opened.fetch.nbytes
    lines = [f"to fetch: {format_bytes(needed)} of {format_bytes(whole)} ({needed / max(whole, 1):.0%})"]
    if opened.fetch.whole_files:
        lines.append(f"note: the server gives no parts of files, so {len(opened.fetch.whole_files)} are fetched whole")
    return lines
