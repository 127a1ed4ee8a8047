"""What slicing and sorting share: a folder's tensors checked against its table, and a new folder written from planned cuts."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from star_elastic.checkpoint import (
    MAX_SHARD_BYTES,
    Checkpoint,
    Journal,
    Output,
    Source,
    TensorCut,
    WeightFiles,
    check_space,
    check_target,
    copy_companions,
    plan_units,
    target_folder,
    write_units,
)
from star_elastic.errors import CheckpointError
from star_elastic.families import layout_of
from star_elastic.layout import Layout, Located
from star_elastic.per_layer import LayerWidths, own_table
from star_elastic.progress import progress_bar
from star_elastic.quant import (
    SECTION,
    SIDECAR,
    Quantized,
    quantized_parts,
    read_declared,
    read_quantized,
    renamed_files,
)
from star_elastic.submodel import ElasticConfig
from star_elastic.version import VERSION


def locate(
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    quantized: Collection[str] = (),
    known: Quantized | None = None,
    hint: str = "",
) -> dict[str, Located]:
    """What each tensor of a folder stands for, in file order.

    Args:
        layout: the folder's table.
        checkpoint: the folder; only headers are read.
        quantized: formats of quantized matrices that the caller can do something with.
        known: how the folder is quantized, where the caller has found that out.
        hint: what to do about tensors that the table does not know, for the message.

    Raises:
        CheckpointError: the folder holds a tensor that the table does not know, or misses one, or holds one twice under two
            names; or a shape or dtype is not what config.json says; or it is quantized otherwise. The message names the first
            few.
    """
    known = known or read_quantized(layout, checkpoint)
    known.allow(quantized, checkpoint.folder)
    located: dict[str, Located] = {}
    for name, info in checkpoint.tensors.items():
        found = known.parts.get(name) or layout.find(name)
        if found is None:
            unknown = [other for other in checkpoint.tensors if other not in known.parts and layout.find(other) is None]
            raise CheckpointError(
                f"{info.path} holds {_few(unknown)} that a {layout.family} of this config does not have{hint}"
            )
        expected = tuple(dim.size for dim in found.dims)
        if info.shape != expected:
            raise CheckpointError(
                f"{info.path}: {name} has shape {list(info.shape)}; config.json says {list(expected)}"
            )
        located[name] = found
    _check_complete(layout, checkpoint, located)
    return located


@dataclass(frozen=True)
class NewModel:
    """A model folder to be written.

    Attributes:
        out: where to; it appears whole or not at all.
        cuts: its tensors.
        config: content of config.json.
        card: content of README.md.
        elastic: content of elastic.json, where it gets one.
        quantization: content of hf_quant_config.json, where it gets one.
        work: says what decides the bytes, so that the same work goes on after a kill; None always starts over.
    """

    out: Path | str
    cuts: Sequence[TensorCut]
    config: dict[str, Any]
    card: str
    elastic: ElasticConfig | None = None
    quantization: dict[str, Any] | None = None
    work: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(cut.nbytes for cut in self.cuts)


def write_models(
    checkpoint: Checkpoint,
    models: Sequence[NewModel],
    *,
    label: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
    threads: int = 1,
    source: Source | None = None,
) -> None:
    """Write model folders in one pass: weights, config.json, the small files of the source, and a model card each.

    Raises:
        CheckpointError: cuts are not what their config describes, or the disk is too small.
        TargetError: a folder must not be written.
    """
    for model in models:
        check_against_config(model.cuts, model.config, model.elastic.own_widths if model.elastic else {})
    check_space({check_target(model.out, checkpoint.folder): model.nbytes for model in models})
    with ExitStack() as stack:
        outputs = []
        for model in models:
            files = WeightFiles(model.cuts, max_shard_bytes)
            journal = _journal(model, files, keep=source is not None)
            folder = stack.enter_context(target_folder(model.out, checkpoint.folder, journal=journal))
            outputs.append(Output(folder, model.cuts, files, journal))
            outputs[-1].begin()
            _write_small_files(model, checkpoint.folder, folder)
        units = plan_units(outputs)
        if source is None:
            size = sum(cut.nbytes for unit in units for _, cut in unit.jobs)
        else:
            size = source.fetch_bytes(units)
            check_space(
                {**{Path(model.out).resolve(): model.nbytes for model in models}, **source.room(units, threads)}
            )
        with progress_bar(label, size, "bytes", shown=progress and sys.stderr.isatty()) as advance:
            write_units(units, outputs, advance, threads=threads, source=source)
        for output in outputs:
            output.files.finish(output.folder)


def _write_small_files(model: NewModel, source: Path, folder: Path) -> None:
    copy_companions(source, folder)
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model.card, encoding="utf-8")
    if model.elastic is not None:
        model.elastic.save(folder)
    if model.quantization is not None:
        (folder / SIDECAR).write_text(json.dumps(model.quantization, indent=2) + "\n", encoding="utf-8")


def _journal(model: NewModel, files: WeightFiles, *, keep: bool) -> Journal | None:
    if model.work is None:
        return None
    digest = hashlib.sha256(f"star-elastic {VERSION}\n{model.work}\n".encode())
    for file in files.files:
        digest.update(file.header)
    return Journal(model.out, digest.hexdigest(), keep=keep)


def say_quantized(
    config: dict[str, Any], checkpoint: Checkpoint, cuts: Sequence[TensorCut]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What a new folder says about its quantization, by the names that modules have in it.

    Args:
        config: the new config.json.
        checkpoint: the source.
        cuts: the tensors of the new folder.

    Returns:
        config.json, and the content of hf_quant_config.json where the source has one.
    """
    declared = read_declared(checkpoint.folder, checkpoint.config)
    if declared is None:
        return config, None
    names: dict[str, str | None] = {**dict.fromkeys(checkpoint.tensors), **{cut.info.name: cut.name for cut in cuts}}
    said = renamed_files(declared, names)
    return (config | {SECTION: said[SECTION]} if SECTION in said else config), said.get(SIDECAR)


def check_against_config(
    cuts: Sequence[TensorCut], config: dict[str, Any], own_widths: LayerWidths | None = None
) -> None:
    """Compare planned tensors with the table of the config that will be written beside them: names and every shape.

    ``own_widths`` are those that go into elastic.json, where the layers of what is written differ in width.

    A field of the config that does not follow a width would otherwise load as garbage, or not at all.

    Raises:
        CheckpointError: any difference.
    """
    layout = layout_of(json.loads(json.dumps(config)))
    layout = own_table(layout, own_widths) if own_widths else layout
    parts = quantized_parts(layout, {cut.name: cut for cut in cuts})
    for cut in cuts:
        found = parts.get(cut.name) or layout.find(cut.name)
        expected = tuple(dim.size for dim in found.dims) if found else None
        if expected != cut.shape:
            raise CheckpointError(f"the cut gives {cut.name} shape {list(cut.shape)}; its config gives {expected}")
    missing = _missing(layout, {cut.name for cut in cuts})
    if missing:
        raise CheckpointError(f"the cut misses {_few(missing)} that its config describes")


def _check_complete(layout: Layout, checkpoint: Checkpoint, located: dict[str, Located]) -> None:
    missing = _missing(layout, set(located))
    if missing:
        raise CheckpointError(f"{checkpoint.folder} misses {_few(missing)} that its config.json describes")
    for unit, row in layout.tensors():
        in_memory = unit.name(row)
        twice = [name for name in unit.disk_names(row) if name != in_memory and name in located]
        if twice and in_memory in located:
            raise CheckpointError(f"{checkpoint.folder} holds {in_memory} a second time as {_few(twice)}: keep one")


def _missing(layout: Layout, names: set[str]) -> list[str]:
    """On-disk names of tensors that ``names`` holds under neither scheme. A tied tensor may be left out."""
    missing = []
    for unit, row in layout.tensors():
        if unit.name(row) not in names and row.alias is None:
            missing += [name for name in unit.disk_names(row) if name not in names]
    return missing


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{len(names)} tensors ({shown}, ...)" if len(names) > 3 else shown
