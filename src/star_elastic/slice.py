"""Slicing: from an elastic checkpoint, or any parent folder, to an ordinary transformers folder of a nested model.

Plan, then apply: ``plan_slice`` says for every tensor which positions stay, from the table alone; applying streams them.

Where the layers of the nested model differ in width, no config of transformers can describe them. The folder then carries an
``elastic.json`` that does, and is loaded by ``ElasticModel.from_pretrained``; transformers refuses its shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from star_elastic import cost
from star_elastic.axes import widths_of
from star_elastic.card import read_licence, slice_card
from star_elastic.checkpoint import (
    MAX_SHARD_BYTES,
    Checkpoint,
    Output,
    TensorCut,
    Unit,
    WeightFiles,
    check_space,
    check_target,
    plan_units,
)
from star_elastic.errors import TargetError
from star_elastic.families import family_of
from star_elastic.layout import Layout, Located
from star_elastic.opened import folder_identity, is_hub_name, open_source
from star_elastic.parentage import Parentage, parentage
from star_elastic.quant import ANY
from star_elastic.rewrite import NewModel, locate, say_quantized, write_models
from star_elastic.source import DROP_HINT, SourceModel, read_source
from star_elastic.submodel import ElasticConfig, Submodel

HUB_THREADS = 4  # connections


@dataclass(frozen=True)
class SliceReport:
    """What was written.

    Attributes:
        folder: the slice.
        submodel: its widths, every axis spelled out, and kept layers.
        params: total parameters.
        active_params: parameters that a token uses, both embedding matrices counted.
        nbytes: bytes of the weights.
        tensors: number of tensors in the files.
        dropped: names of the source's tensors that were left out because the user said so.
    """

    folder: Path
    submodel: Submodel
    params: int
    active_params: int
    nbytes: int
    tensors: int
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Size:
    """A slice to be made.

    Attributes:
        out: new folder; it appears whole or not at all.
        submodel: widths per axis and kept layers; axes left out stay whole.
        name: the submodel's name, for the model card; looked up in elastic.json where left out.
    """

    out: Path | str
    submodel: Submodel
    name: str | None = None


def slice_checkpoint(
    source: Path | str,
    out: Path | str,
    submodel: Submodel,
    *,
    name: str | None = None,
    drop: Sequence[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    threads: int | None = None,
    progress: bool = True,
) -> SliceReport:
    """Cut a nested model out into a folder of its own. No training, no torch, constant memory.

    Args:
        source: an elastic checkpoint, or any model folder of a known family, read only; or a hub name, ``org/name`` or
            ``org/name@revision``, of which only the needed bytes are fetched.
        out: new folder; it appears whole or not at all.
        submodel: widths per axis and kept layers; axes left out stay whole.
        name: the submodel's name, for the model card; looked up in elastic.json where left out.
        drop: shell patterns of tensors to leave out that the family's table does not know, such as ``mtp.*``.
        max_shard_bytes: larger models are split into files of at most this size.
        threads: tensors that are worked on at once; 1 from a folder and 4 from the hub if left out.
        progress: draw a progress bar on a terminal.

    Raises:
        WidthError, UnknownNameError: the source cannot be cut so.
        CheckpointError: the source is damaged or is not what its config says, or the disk is full.
        TargetError: ``out`` must not be written.
        RemoteError: the hub has no such model, does not give it, or cannot be reached.

    Example:
        >>> slice_checkpoint("elastic", "small", Submodel(widths={"hidden": 1920}))  # doctest: +SKIP
    """
    sizes = [Size(out, submodel, name)]
    return slice_sizes(source, sizes, drop=drop, max_shard_bytes=max_shard_bytes, threads=threads, progress=progress)[0]


def slice_sizes(
    source: Path | str,
    sizes: Sequence[Size],
    *,
    drop: Sequence[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    threads: int | None = None,
    progress: bool = True,
) -> list[SliceReport]:
    """Cut several nested models out in one pass, each into a folder of its own; the source is read once.

    Started again after a kill, with the same source and sizes, it goes on where it was.

    Args:
        source: as in ``slice_checkpoint``, like the other arguments.
        sizes: what to cut out, and where to.

    Raises:
        As ``slice_checkpoint`` does; before anything is written where any of the sizes is impossible.

    Example:
        >>> slice_sizes("elastic", [Size("s", Submodel(widths={"hidden": 1920})), Size("m", Submodel())])  # doctest: +SKIP
    """
    check_folders([size.out for size in sizes], source)
    with open_source(source, scratch_path(sizes[0].out)) as opened:
        plan = plan_sizes(read_source(opened, drop), sizes)
        return write_sizes(plan, max_shard_bytes=max_shard_bytes, threads=threads, progress=progress)


def check_folders(folders: Sequence[Path | str], source: Path | str) -> None:
    """Raise TargetError where a folder must not be written, or two are to be written into each other."""
    sources = [] if is_hub_name(source) else [source]
    targets = [check_target(folder, *sources) for folder in folders]
    for number, target in enumerate(targets):
        for other in targets[:number]:
            if target.is_relative_to(other) or other.is_relative_to(target):
                raise TargetError(f"{target} and {other} cannot both be written: give each size a folder of its own")


def scratch_path(out: Path | str) -> Path:
    """Where bytes from the hub wait to be cut, on the disk of the slice."""
    target = Path(out).resolve()
    return target.with_name(f".{target.name}.hub")


@dataclass(frozen=True)
class SlicePlan:
    """Everything that is known before the first byte is written.

    Attributes:
        source: what is cut.
        models: what to write.
        reports: what will have been written.
    """

    source: SourceModel
    models: tuple[NewModel, ...]
    reports: tuple[SliceReport, ...]

    def check_space(self, threads: int | None = None, also: Mapping[Path, int] | None = None) -> None:
        """Raise CheckpointError where a disk is too small, as writing does before anything else.

        Args:
            threads: as in ``slice_checkpoint``.
            also: bytes of further files that will be written afterwards.
        """
        sizes = {Path(model.out).resolve(): model.nbytes for model in self.models}
        fetch = self.source.opened.fetch
        if fetch is not None:
            room = fetch.room(self.units, threads or HUB_THREADS)
            sizes[scratch_path(self.models[0].out)] = sum(room.values())
        check_space({**sizes, **(also or {})})

    @cached_property
    def units(self) -> list[Unit]:
        """The work, if nothing of it is done yet."""
        return plan_units([Output(Path(model.out), model.cuts, WeightFiles(model.cuts)) for model in self.models])


def plan_sizes(source: SourceModel, sizes: Sequence[Size]) -> SlicePlan:
    """Plan several slices.

    Raises:
        As ``slice_sizes`` does.
    """
    checkpoint, layout, opened = source.checkpoint, source.layout, source.opened
    identity = opened.identity or folder_identity(checkpoint)
    parent = parentage(checkpoint, layout, formats=source.quantized.formats, fetched=opened.parent)
    models, reports = [], []
    for size in sizes:
        size.submodel.check(layout)
        submodel = size.submodel.completed(layout)
        size = replace(size, submodel=submodel, name=size.name or _known_as(submodel, parent.elastic, layout))
        cuts = cuts_of(layout, checkpoint, source.located, submodel)
        report = _report(size, layout, cuts, source.dropped)
        config = family_of(checkpoint.config).child_config(checkpoint.config, submodel.widths, submodel.layers)
        config, quantization = say_quantized(config, checkpoint, cuts)
        card = _card(size, report, layout, checkpoint.folder, parent, config, source.quantized.text)
        elastic = ElasticConfig.of_slice(layout, submodel, {"parent": parent.name, "submodel": size.name})
        work = f"slice {submodel.model_dump_json()} of {identity}"
        models.append(NewModel(size.out, cuts, config, card, elastic, quantization, work))
        reports.append(report)
    return SlicePlan(source, tuple(models), tuple(reports))


def write_sizes(
    plan: SlicePlan, *, max_shard_bytes: int = MAX_SHARD_BYTES, threads: int | None = None, progress: bool = True
) -> list[SliceReport]:
    """Write what is planned, in one pass over the source.

    Raises:
        As ``slice_sizes`` does.
    """
    fetch = plan.source.opened.fetch
    write_models(
        plan.source.checkpoint,
        plan.models,
        label="fetch" if fetch else "slice",
        max_shard_bytes=max_shard_bytes,
        progress=progress,
        threads=threads or (HUB_THREADS if fetch else 1),
        source=fetch,
    )
    return list(plan.reports)


def _card(
    size: Size,
    report: SliceReport,
    layout: Layout,
    folder: Path,
    parent: Parentage,
    config: Mapping[str, Any],
    quantized: str,
) -> str:
    return slice_card(
        layout,
        size.submodel,
        title=Path(size.out).resolve().name,
        parent=parent,
        config=config,
        nbytes=report.nbytes,
        licence=read_licence(folder),
        named=size.name,
        dropped=report.dropped,
        quantized=quantized,
    )


def _report(size: Size, layout: Layout, cuts: Sequence[TensorCut], dropped: tuple[str, ...]) -> SliceReport:
    submodel = size.submodel
    return SliceReport(
        folder=Path(size.out),
        submodel=submodel,
        params=cost.params(layout, submodel.keyed_widths, submodel.layers),
        active_params=cost.active_params(layout, submodel.keyed_widths, submodel.layers),
        nbytes=sum(cut.nbytes for cut in cuts),
        tensors=len(cuts),
        dropped=dropped,
    )


def plan_slice(layout: Layout, checkpoint: Checkpoint, submodel: Submodel) -> list[TensorCut]:
    """The tensors of a slice, in file order; layers and experts that stay are renumbered from 0.

    Args:
        layout: the source's table.
        checkpoint: the source; only headers are read.
        submodel: a legal nested model.

    Raises:
        CheckpointError: the folder's tensors are not those of the table.
    """
    return cuts_of(layout, checkpoint, locate(layout, checkpoint, quantized=ANY, hint=DROP_HINT), submodel)


def cuts_of(
    layout: Layout, checkpoint: Checkpoint, located: Mapping[str, Located], submodel: Submodel
) -> list[TensorCut]:
    """``plan_slice``, given what the checkpoint's tensors stand for."""
    keyed, layer_number = submodel.keyed_widths, submodel.new_numbers(layout)
    members_in = {layer: layout.members(widths_of(keyed, layer)) for layer in (None, *layer_number)}
    cuts = []
    for name, found in located.items():
        if found.unit.layer is not None and found.unit.layer not in layer_number:
            continue
        layer = None if found.unit.layer is None else layer_number[found.unit.layer]
        member, members = found.member, members_in[found.unit.layer]
        if member is not None and found.member_axis in members:
            kept = members[found.member_axis]
            if member not in kept:
                continue
            member = kept.index(member)
        cuts.append(TensorCut(checkpoint.tensors[name], found.renamed(layer, member), found.dims, members))
    return cuts


def _known_as(submodel: Submodel, elastic: ElasticConfig | None, layout: Layout) -> str | None:
    listed = elastic.submodels if elastic else {}
    return next((name for name, known in listed.items() if known.completed(layout) == submodel), None)
