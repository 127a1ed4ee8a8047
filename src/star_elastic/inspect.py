"""What a model can be cut to, and what each nested size costs. Read from config.json alone: no weights, no torch.

``describe`` gathers the facts, ``print_description`` shows them to people, ``Description.as_json`` to programs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from star_elastic import cost
from star_elastic.axes import Axis, AxisWidths, widths_of
from star_elastic.errors import CheckpointError
from star_elastic.layout import Dim, Layout, runs
from star_elastic.per_layer import by_width, span
from star_elastic.presets import get_preset
from star_elastic.submodel import FULL, ElasticConfig, Submodel, open_elastic
from star_elastic.units import format_bytes, format_count

STORED_FORMATS = cost.FORMATS[1:]


@dataclass(frozen=True)
class SubmodelCost:
    """What one nested model keeps and costs.

    Attributes:
        widths: every width axis, spelled out; the widest where layers differ.
        layers: the parent's layers that stay, or None for all.
        layer_widths: axis -> the parent's layer -> width, where layers differ.
        params: total parameters; buffers are not among them.
        active_params: parameters that one token uses, both embedding matrices counted.
        active_params_without_embedding: the same without the input embedding.
        bytes: resident bytes of all weights and buffers, by format.
        kv_bytes_per_token: keys and values of one token, two bytes a number.
        state_bytes_per_sequence: convolution and SSM states of one sequence.
        copied_bytes: bytes (bf16) of the tensors that cannot be views of the parent when this submodel is held in memory.
        copied_axes: the cut axes that cause those copies.
    """

    widths: dict[str, int]
    layers: tuple[int, ...] | None
    layer_widths: dict[str, dict[int, int]]
    params: int
    active_params: int
    active_params_without_embedding: int
    bytes: dict[str, int]
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    copied_bytes: int
    copied_axes: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """Everything ``inspect`` shows.

    Attributes:
        source: the folder, or the preset's name.
        layout: the model's table.
        elastic: nested models and what is known of their origin.
        submodels: cost by name; the whole model is among them, as ``full`` if no listed name stands for it.
    """

    source: str
    layout: Layout
    elastic: ElasticConfig
    submodels: dict[str, SubmodelCost]

    def as_json(self) -> dict[str, object]:
        """One JSON object; numbers are exact."""
        return {
            "source": self.source,
            "family": self.layout.family,
            "layers": [unit.kind for unit in self.layout.units if unit.layer is not None],
            "axes": {name: _axis_json(axis) for name, axis in self.layout.axes.items()},
            "sorted_axes": list(self.elastic.sorted_axes),
            **({"own_widths": self.layout.own_widths} if self.layout.own_widths else {}),
            "submodels": {name: asdict(submodel) for name, submodel in self.submodels.items()},
        }


def describe(source: Path | str | None = None, *, preset: str | None = None) -> Description:
    """Describe a model folder, a published model, or a folder with a published model's sizes.

    Args:
        source: a model folder or its config.json; weights are not looked at.
        preset: name of a published model.

    Raises:
        CheckpointError: neither is given, or config.json or elastic.json is missing or damaged.
        UnknownNameError: unknown family or preset.

    Example:
        >>> describe(preset="nemotron-3-nano-30b-a3b").submodels["30b"].params
        31577937344
    """
    if source is not None:
        folder = Path(source)
        folder = folder.parent if folder.name == "config.json" and folder.is_file() else folder
        _, layout, elastic = open_elastic(folder, preset=preset, per_layer=True)
    elif preset is not None:
        layout, elastic = get_preset(preset).layout, ElasticConfig.of_preset(get_preset(preset))
    else:
        raise CheckpointError("nothing to inspect: give a model folder, or --preset NAME")
    submodels = {name: submodel_cost(layout, submodel) for name, submodel in with_full(layout, elastic).items()}
    return Description(str(source or preset), layout, elastic, submodels)


def with_full(layout: Layout, elastic: ElasticConfig) -> dict[str, Submodel]:
    """The nested models, led by ``full`` unless one of them is already the whole model."""
    listed = elastic.submodels
    missing = not any(submodel.is_full(layout) for submodel in listed.values())
    return {FULL: Submodel(), **listed} if missing else dict(listed)


def submodel_cost(layout: Layout, submodel: Submodel) -> SubmodelCost:
    """Count one nested model."""
    submodel = submodel.completed(layout)
    widths, layers = submodel.keyed_widths, submodel.layers
    copied_bytes, copied_axes = copies(layout, submodel)
    return SubmodelCost(
        widths=submodel.widths,
        layers=layers,
        layer_widths=submodel.layer_widths,
        params=cost.params(layout, widths, layers),
        active_params=cost.active_params(layout, widths, layers),
        active_params_without_embedding=cost.active_params(layout, widths, layers, embedding=False),
        bytes={dtype: int(cost.weight_bytes(layout, widths, layers, dtype)) for dtype in stored_formats(layout)},
        kv_bytes_per_token=cost.kv_bytes_per_token(layout, widths, layers),
        state_bytes_per_sequence=cost.state_bytes_per_sequence(layout, widths, layers),
        copied_bytes=copied_bytes,
        copied_axes=copied_axes,
    )


def stored_formats(layout: Layout) -> tuple[str, ...]:
    """Formats in which weights are counted; the folder's own first, where it is quantized."""
    quantized = any(row.stored for _, row in layout.tensors())
    return (cost.STORED, *STORED_FORMATS) if quantized else STORED_FORMATS


def copies(layout: Layout, submodel: Submodel) -> tuple[int, tuple[str, ...]]:
    """Bytes (bf16) that a submodel in memory adds to its parent, and the axes that cause them.

    A dimension whose kept positions are one contiguous run is a view of the parent; any other is gathered into a copy.
    """
    keyed = submodel.completed(layout).keyed_widths
    known: dict[tuple[Dim, tuple[tuple[str, int], ...]], bool] = {}

    def gathered(dim: Dim, widths: AxisWidths) -> bool:
        key = dim, tuple((axis, widths[axis]) for axis in sorted(dim.axes))
        if key not in known:
            index = dim.index(layout.members(widths))
            known[key] = index is not None and len(runs(index)) > 1
        return known[key]

    total = 0.0
    axes: set[str] = set()
    for unit, row in layout.tensors(submodel.layers):
        widths = widths_of(keyed, unit.layer)
        causes = [dim for dim in row.dims if gathered(dim, widths)]
        if causes and row.alias is None:
            total += row.numel(widths) * cost.bytes_per_number(row, "bf16")
            axes.update(axis for dim in causes for axis in dim.axes if widths[axis] != layout.axes[axis].size)
    return int(total), tuple(sorted(axes))


def legal_text(axis: Axis) -> str:
    """Legal widths in a few characters: ``8..2688 step 8``."""
    if axis.minimum == axis.size:
        return f"{axis.size} only"
    last = axis.legal()[-2] if axis.size % axis.step else axis.size
    step = f" step {axis.step}" if axis.step > 1 else ""
    return f"{axis.minimum}..{last}{step}" + ("" if last == axis.size else f", or {axis.size}")


def _axis_json(axis: Axis) -> dict[str, object]:
    rules = [rule.why for rule in axis.rules]
    legal = {"minimum": axis.minimum, "step": axis.step, "text": legal_text(axis), "why": rules}
    return {"size": axis.size, "groups": axis.groups, "scope": axis.scope, "legal": legal}


def run_inspect(source: Path | None, *, preset: str | None, as_json: bool) -> None:
    """Describe a model on stdout, as tables or as one JSON object. Raises as ``describe`` does."""
    description = describe(source, preset=preset)
    if as_json:
        print(json.dumps(description.as_json(), indent=2))
    else:
        print_description(description, Console())


def print_description(description: Description, console: Console) -> None:
    """Print the axes, then the nested models side by side."""
    layout = description.layout
    kinds = Counter(unit.kind for unit in layout.units if unit.layer is not None)
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    heading = f"{description.source}: {layout.family}, {layout.num_layers} layers ({layers})"
    console.print(heading, highlight=False, soft_wrap=True)
    for axis, own in layout.own_widths.items():
        told = f"{axis}: {by_width(own)} (config.json holds the widest; load with ElasticModel.from_pretrained)"
        console.print(told, highlight=False, soft_wrap=True)
    console.print(_axes_table(layout, description.elastic))
    for why, axes in _reasons(layout).items():
        console.print(f"{', '.join(axes)}: {why}", highlight=False, soft_wrap=True)
    console.print(_submodels_table(layout, description.submodels))
    for name, submodel in description.submodels.items():
        for axis, own in submodel.layer_widths.items():
            console.print(f"{name}: {axis} {by_width(own)}", highlight=False, soft_wrap=True)
    note = "copied: what a submodel in memory cannot share with its parent; a slice on disk is always whole"
    console.print(note, highlight=False, soft_wrap=True)


def _axes_table(layout: Layout, elastic: ElasticConfig) -> Table:
    table = Table(title="axes", title_justify="left")
    for heading in ("axis", "full", "legal widths", "sorted"):
        table.add_column(heading, justify="right" if heading == "full" else "left")
    for name, axis in layout.axes.items():
        table.add_row(name, str(axis.size), legal_text(axis), "yes" if name in elastic.sorted_axes else "no")
    return table


def _reasons(layout: Layout) -> dict[str, list[str]]:
    """Why some widths are illegal: each reason once, with the axes that it binds."""
    reasons: dict[str, list[str]] = {}
    for name, axis in layout.axes.items():
        for rule in axis.rules:
            reasons.setdefault(rule.why, []).append(name)
    for coupling in layout.couplings:
        reasons.setdefault(coupling.why, []).extend((*coupling.part, *coupling.whole))
    return reasons | {f"at least one {kind} layer stays": ["depth"] for kind in sorted(layout.required_kinds)}


def _submodels_table(layout: Layout, submodels: Mapping[str, SubmodelCost]) -> Table:
    table = Table(title="submodels", title_justify="left")
    table.add_column("")
    for name in submodels:
        table.add_column(name, justify="right")
    costs = list(submodels.values())
    for axis, full in layout.complete({}).items():
        own = [submodel.layer_widths.get(axis) for submodel in costs]
        if any(own) or any(submodel.widths[axis] != full for submodel in costs):
            shown = (span(layers) if layers else str(s.widths[axis]) for s, layers in zip(costs, own, strict=True))
            table.add_row(axis, *shown)
    if any(submodel.layers is not None for submodel in costs):
        table.add_row("layers", *(str(len(s.layers) if s.layers is not None else layout.num_layers) for s in costs))
    table.add_row("parameters", *(format_count(s.params) for s in costs))
    table.add_row("active", *(format_count(s.active_params) for s in costs))
    table.add_row("active, no input embedding", *(format_count(s.active_params_without_embedding) for s in costs))
    for dtype in stored_formats(layout):
        label = "weights as stored" if dtype == cost.STORED else f"weights in {dtype}"
        table.add_row(label, *(format_bytes(s.bytes[dtype]) for s in costs))
    table.add_row("KV per token", *(format_bytes(s.kv_bytes_per_token) for s in costs))
    table.add_row("state per sequence", *(format_bytes(s.state_bytes_per_sequence) for s in costs))
    table.add_row("copied in memory", *(format_bytes(s.copied_bytes) for s in costs))
    if any(s.copied_axes for s in costs):
        table.add_row("copied because of", *(", ".join(s.copied_axes) or "-" for s in costs))
    return table
