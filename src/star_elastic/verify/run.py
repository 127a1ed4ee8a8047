"""All checks of a folder, in order; those that need what an earlier one found broken are skipped, and say so."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from star_elastic.checkpoint import Checkpoint, TensorInfo
from star_elastic.errors import CheckpointError, ElasticError
from star_elastic.families import layout_of
from star_elastic.layout import Layout
from star_elastic.opened import is_hub_name, open_source
from star_elastic.progress import progress_bar
from star_elastic.quant import read_quantized
from star_elastic.submodel import Submodel, checked_table, own_widths_in, read_config
from star_elastic.tied import stored_twice
from star_elastic.units import format_bytes
from star_elastic.verify import tensors as table
from star_elastic.verify.against import Parent, parent_config_faults, parent_cuts, parent_tensor_faults, submodel_of
from star_elastic.verify.config import CONFIG, code_faults, config_faults, record_faults
from star_elastic.verify.files import check_files
from star_elastic.verify.numbers import number_faults
from star_elastic.verify.report import Fault, Verification


def verify_folder(
    folder: Path | str,
    *,
    against: Path | str | None = None,
    forward: bool = False,
    progress: bool = True,
) -> Verification:
    """Check a model folder: its files, tensors, config and numbers; and that it is its parent's cut.

    Memory stays constant, but for ``forward``, which loads models as a whole.

    Args:
        folder: a slice, an elastic checkpoint, or any model folder of a known family.
        against: the folder or hub name that it was cut from; every tensor must be its cut, bit for bit.
        forward: also load it with transformers, run it, and compare logits with the parent's view, where there is a parent.
        progress: draw a progress bar on a terminal.

    Returns:
        What was checked and what is wrong. Faults of the folder are never raised.

    Raises:
        CheckpointError: ``folder`` is no folder with a config.json, or ``against`` cannot be read.
        ElasticError: ``folder`` is no part of ``against``, or ``forward`` wants a parent that is not on this disk.
        RemoteError: the hub has no such parent, does not give it, or cannot be reached.

    Example:
        >>> verify_folder("small", against="elastic").ok  # doctest: +SKIP
        True
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        read_config(folder)  # says what is missing
    if against is None:
        return _verify(folder, None, forward=forward, progress=progress)
    if forward and is_hub_name(against):
        raise ElasticError(
            f"--forward runs the parent, and {against} is not on this disk: leave --forward out, or get it first"
        )
    with open_source(against) as opened:
        return _verify(folder, Parent.open(opened), forward=forward, progress=progress)


def _verify(folder: Path, parent: Parent | None, *, forward: bool, progress: bool) -> Verification:
    report = Verification(folder)
    config, layout = _check_config(report)
    tensors, faults, about = check_files(folder)
    report.check("files", about, faults)
    later = ["names", "shapes", "dtypes", "config", "record"]
    if layout is None:
        report.skip(f"{CONFIG} describes no model", *later)
    else:
        _check_table(report, config, layout, tensors)
    size = sum(info.nbytes for info in tensors.values())
    with progress_bar("numbers", size, "bytes", shown=progress and sys.stderr.isatty()) as advance:
        report.check("numbers", f"{format_bytes(size)}, all finite", number_faults(tensors, advance))
    submodel = None
    if parent is not None:
        submodel = _check_parent(report, parent, config, layout, tensors, progress=progress)
    if forward:
        _check_forward(report, layout, parent, submodel)
    return report


def _check_config(report: Verification) -> tuple[dict[str, Any], Layout | None]:
    """config.json, and the table of the model that it describes; with elastic.json, where layers differ in width."""
    config: dict[str, Any] = {}
    try:
        config = read_config(report.folder)
        layout = layout_of(config)
    except ElasticError as error:
        report.check("model", "", [Fault(CONFIG, "a model of a known family", str(error))])
        return config, None
    report.check("model", f"a {layout.family} of {layout.num_layers} layers")
    with suppress(ElasticError):  # the check of the record tells it
        if own := own_widths_in(report.folder):
            layout = checked_table(report.folder, layout, own)
    return config, layout


def _check_table(report: Verification, config: dict[str, Any], layout: Layout, tensors: dict[str, TensorInfo]) -> None:
    """Everything that headers and small files say."""
    try:
        quantized = read_quantized(layout, Checkpoint(report.folder, config, tensors))
    except CheckpointError as error:
        report.check("quantization", "", [Fault("tensors", "a quantization that is known, or none", str(error))])
        report.skip("how it is quantized is not clear", "names", "shapes", "dtypes")
    else:
        if quantized.declared:
            report.check("quantization", f"{quantized.text}, {len(quantized.parts)} tensors")
        expected = table.expected_tensors(layout, tensors, quantized.parts)
        report.check("names", f"{len(tensors)} tensors", table.name_faults(layout, tensors, expected))
        report.check("shapes", f"as {CONFIG} describes", table.shape_faults(tensors, expected))
        report.check("dtypes", f"as {CONFIG} says", table.dtype_faults(config, tensors, expected, quantized.parts))
    faults = config_faults(config, layout_of(config), tensors) + code_faults(report.folder, config)
    report.check("config", "consistent", faults)
    faults, about = record_faults(report.folder, layout)
    report.check(
        "record", f"{about or 'none'}: widths, layers, parameters" if about else "no widths are recorded", faults
    )


def _check_parent(
    report: Verification,
    parent: Parent,
    config: dict[str, Any],
    layout: Layout | None,
    tensors: dict[str, TensorInfo],
    *,
    progress: bool,
) -> Submodel | None:
    if layout is None:
        report.skip(f"{CONFIG} describes no model", "parent")
        return None
    submodel = submodel_of(report.folder, layout, parent)
    cuts = parent_cuts(parent, submodel)
    size = sum(cut.nbytes for cut in cuts)
    with progress_bar("parent", size, "bytes", shown=progress and sys.stderr.isatty()) as advance:
        copies = stored_twice(tensors, layout)  # were compared with what they copy
        own = {name: info for name, info in tensors.items() if name not in copies}
        faults = parent_tensor_faults(cuts, own, advance, parent.fetch)
    faults += parent_config_faults(config, parent, submodel)
    report.check("parent", f"{len(cuts)} tensors are the cut of {parent.name}, bit for bit", faults)
    return submodel


def _check_forward(
    report: Verification, layout: Layout | None, parent: Parent | None, submodel: Submodel | None
) -> None:
    if layout is None or not report.ok:
        report.skip("what failed above comes first", "forward")
        return
    from star_elastic.verify.forward import forward_faults  # torch and transformers take seconds

    try:
        faults, about = forward_faults(report.folder, layout, parent.checkpoint.folder if parent else None, submodel)
    except CheckpointError as error:
        faults, about = [Fault("transformers", "that it loads the folder", str(error))], ""
    report.check("forward", about, faults)
