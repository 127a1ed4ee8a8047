"""Nested models by name, and ``elastic.json``, the file that lists them beside an ordinary transformers checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationError,
    model_serializer,
)

from star_elastic.axes import Widths
from star_elastic.errors import CheckpointError, ReservedNameError, UnknownNameError, nearest
from star_elastic.families import layout_of
from star_elastic.layout import Layout
from star_elastic.per_layer import own_table
from star_elastic.presets import Preset, get_preset, recognise

FORMAT_VERSION = 1
PER_LAYER_VERSION = 2  # of files that say widths per layer, which a reader of version 1 would cut wrong
FILE_NAME = "elastic.json"
FULL = "full"
MOST_DEPTH = 100


def _layer_number(key: Any) -> Any:
    """Keys of JSON objects are texts; a layer's number is written in one way only."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and str(int(key)) == key else key


LayerWidths = dict[str, dict[Annotated[int, Strict(), BeforeValidator(_layer_number)], Annotated[int, Strict()]]]
"""Axis -> layer -> width."""


class Submodel(BaseModel):
    """A nested model: how much of each axis it keeps.

    Attributes:
        widths: width per axis; an axis that is left out keeps the parent's.
        layers: the parent's decoder layers that stay, ascending; None keeps all.
        layer_widths: axis -> the parent's layer -> its own width, which comes before the shared one; empty where layers agree.

    Example:
        >>> Submodel(widths={"hidden": 1920, "expert_ffn": 960})
        Submodel(widths={'hidden': 1920, 'expert_ffn': 960}, layers=None)
        >>> Submodel(widths={"hidden": 1920}, layer_widths={"expert_ffn": {1: 960, 4: 1280}}).keyed_widths
        {'hidden': 1920, ('expert_ffn', 1): 960, ('expert_ffn', 4): 1280}
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    widths: dict[str, int] = Field(default_factory=dict)
    layers: tuple[int, ...] | None = Field(default=None, strict=False)
    layer_widths: LayerWidths = Field(default_factory=dict)

    @classmethod
    def of(cls, widths: Widths, layers: tuple[int, ...] | None = None) -> Submodel:
        """A nested model from widths that are keyed by axis or (axis, layer), as ``cost`` takes them."""
        shared: dict[str, int] = {}
        own: LayerWidths = {}
        for key, width in widths.items():
            if isinstance(key, tuple):
                own.setdefault(key[0], {})[key[1]] = width
            else:
                shared[key] = width
        return cls(widths=shared, layers=layers, layer_widths=own)

    @property
    def keyed_widths(self) -> dict[str | tuple[str, int], int]:
        """All widths, keyed by axis or (axis, layer), as ``cost`` takes them."""
        keyed: dict[str | tuple[str, int], int] = dict(self.widths.items())
        for axis, own in self.layer_widths.items():
            keyed |= {(axis, layer): width for layer, width in own.items()}
        return keyed

    def depth(self, layout: Layout) -> int:
        """How many of the parent's layers it has."""
        return layout.num_layers if self.layers is None else len(self.layers)

    def check(self, layout: Layout) -> None:
        """Raise WidthError or UnknownNameError if a model of this layout cannot be cut so."""
        layout.check(self.keyed_widths, self.layers)

    def completed(self, layout: Layout) -> Submodel:
        """The same nested model in its one full spelling.

        Every width axis is spelled out, and all layers kept is None. Where kept layers differ along an axis, each has its own
        width in ``layer_widths``, and ``widths`` holds the widest; where they agree, ``widths`` alone says it.
        """
        layers = None if self.layers == tuple(range(layout.num_layers)) else self.layers
        widths, layer_widths = layout.complete(self.widths), {}
        for axis in (axis for axis in widths if self.layer_widths.get(axis)):
            having = [layer for layer in layout.layers_with(axis) if layers is None or layer in layers]
            own = {layer: self.layer_widths[axis].get(layer, widths[axis]) for layer in having}
            if own:
                widths[axis] = max(own.values())
            if len(set(own.values())) > 1:
                layer_widths[axis] = own
        return Submodel(widths=widths, layers=layers, layer_widths=layer_widths)

    def is_full(self, layout: Layout) -> bool:
        """Whether this is the parent itself."""
        return self.completed(layout) == Submodel().completed(layout)

    def new_numbers(self, layout: Layout) -> dict[int, int]:
        """Kept layer of the parent -> its number in the nested model."""
        layers = range(layout.num_layers) if self.layers is None else self.layers
        return {kept: number for number, kept in enumerate(layers)}

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Readers of version 1 know no such field.
        return {name: value for name, value in handler(self).items() if name != "layer_widths" or value}

    def __repr_args__(self) -> Any:
        return [(name, value) for name, value in super().__repr_args__() if name != "layer_widths" or value]


class ElasticConfig(BaseModel):
    """The content of ``elastic.json``.

    Attributes:
        format_version: version of this file format.
        family: model family, as in config.json's ``model_type``.
        submodels: nested models by name. ``full`` always means the whole model, listed or not.
        sorted_axes: axes whose members lie in order of importance.
        depth_order: layers from most to least important, once depth has been scored.
        provenance: where the checkpoint comes from: parent, scores' hash, recipe, tool version.
        own_widths: axis -> layer -> width of the checkpoint itself, where its layers differ: it is a slice with widths per layer,
            and config.json holds the widest. It has no nested models.

    Example:
        >>> ElasticConfig(family="nemotron_h", submodels={"small": Submodel(widths={"hidden": 48})}).get("small").widths
        {'hidden': 48}
    """

    model_config = ConfigDict(extra="forbid")

    format_version: int = FORMAT_VERSION
    family: str
    submodels: dict[str, Submodel] = Field(default_factory=dict)
    sorted_axes: tuple[str, ...] = ()
    depth_order: tuple[int, ...] | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)
    own_widths: LayerWidths = Field(default_factory=dict)

    def get(self, name: str) -> Submodel:
        """A nested model by name.

        Raises:
            UnknownNameError: no such nested model; names the nearest.
        """
        if name in self.submodels:
            return self.submodels[name]
        if name == FULL:
            return Submodel()
        raise UnknownNameError(f"no submodel {name!r}: {nearest(name, {*self.submodels, FULL})}")

    def check(self, layout: Layout) -> None:
        """Raise CheckpointError if the file belongs to another family or lists a submodel that cannot be cut."""
        if self.family != layout.family:
            raise CheckpointError(f"{FILE_NAME} is for family {self.family!r}, config.json for {layout.family!r}")
        for name, submodel in self.submodels.items():
            try:
                check_named(name, submodel, layout)
            except (ValueError, LookupError) as error:
                raise CheckpointError(f"{FILE_NAME}: submodel {name!r}: {error}") from None
        for name in self.sorted_axes:
            if name not in layout.width_axes or self.sorted_axes.count(name) > 1:
                raise CheckpointError(f"{FILE_NAME}: sorted_axes names {name!r} twice, or no such axis exists")
        if self.depth_order is not None and sorted(self.depth_order) != list(range(layout.num_layers)):
            raise CheckpointError(
                f"{FILE_NAME}: depth_order must hold each layer from 0 to {layout.num_layers - 1} once, "
                f"not {list(self.depth_order)}"
            )

    def save(self, folder: Path | str) -> None:
        """Write ``elastic.json`` into a folder."""
        per_layer = self.own_widths or any(submodel.layer_widths for submodel in self.submodels.values())
        content = self.model_dump(mode="json", exclude=None if self.own_widths else {"own_widths"})
        content["format_version"] = PER_LAYER_VERSION if per_layer else FORMAT_VERSION
        text = json.dumps(content, indent=2)
        (Path(folder) / FILE_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path | str) -> ElasticConfig:
        """Read ``elastic.json`` from a folder.

        Raises:
            CheckpointError: missing, not JSON, of a newer version, or with unknown or impossible content.
        """
        path = Path(folder) / FILE_NAME
        raw = read_json(path)
        version = raw.get("format_version")
        if (
            version not in (FORMAT_VERSION, PER_LAYER_VERSION)
            or not isinstance(version, int)
            or isinstance(version, bool)
        ):
            raise CheckpointError(
                f"{path}: format_version {version!r}; this version of star-elastic reads "
                f"{FORMAT_VERSION} and {PER_LAYER_VERSION}"
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise CheckpointError(f"{path}: {_first_mistake(error)}") from None

    @classmethod
    def of_slice(cls, layout: Layout, submodel: Submodel, provenance: Mapping[str, Any]) -> ElasticConfig | None:
        """What lies beside the config of a slice whose layers differ in width, and says how; None where they agree.

        Args:
            layout: the parent's table.
            submodel: the slice, in its full spelling.
            provenance: where it comes from.
        """
        if not submodel.layer_widths:
            return None
        number = submodel.new_numbers(layout)
        own = {axis: {number[n]: width for n, width in by.items()} for axis, by in submodel.layer_widths.items()}
        return cls(family=layout.family, own_widths=own, provenance=dict(provenance))

    @classmethod
    def of_preset(cls, preset: Preset) -> ElasticConfig:
        """The nested sizes of a published model."""
        sizes = {name: Submodel(widths=preset.layout.complete(widths)) for name, widths in preset.sizes.items()}
        return cls(family=preset.layout.family, submodels=sizes, provenance={"preset": preset.name})


def check_named(name: str, submodel: Submodel, layout: Layout) -> None:
    """Refuse a nested model that cannot be cut, or that takes a name which means something else.

    Raises:
        WidthError, UnknownNameError: see ``Submodel.check``.
        ReservedNameError: the name is empty, or is ``full`` and this is not the whole model.
    """
    submodel.check(layout)
    if not name.strip():
        raise ReservedNameError("a submodel needs a name")
    if name == FULL and not submodel.is_full(layout):
        raise ReservedNameError(f"{FULL!r} always means the whole model: choose another name for these widths")


def _first_mistake(error: ValidationError) -> str:
    """The first of pydantic's mistakes as one line, with the nearest known field for an unknown one."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"{where}: {first['msg']}"
    known = ElasticConfig.model_fields if len(first["loc"]) == 1 else Submodel.model_fields
    return f"unknown field {where!r}: {nearest(str(first['loc'][-1]), known)}"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON, not an object, or gives a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            twice = next(key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1)
            raise CheckpointError(f"{path} gives {twice!r} twice: keep one")
        return seen

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=unique)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # among them bytes that are no text, and numbers of thousands of digits
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    if is_deeper(content, MOST_DEPTH):
        raise CheckpointError(f"{path} cannot be read as JSON: it is nested too deeply")
    if "\\ud" in text.lower() and not is_text(json.dumps(content, ensure_ascii=False)):
        raise CheckpointError(f"{path} holds half of a surrogate pair, which is no text")
    return content


def is_deeper(content: Any, depth: int) -> bool:
    """Whether objects and lists lie in each other more than ``depth`` deep: what writes them again would recurse so far."""
    level = [content]
    for _ in range(depth):
        level = [inner for outer in level if isinstance(outer, dict) for inner in outer.values()] + [
            inner for outer in level if isinstance(outer, list) for inner in outer
        ]
    return any(isinstance(inner, dict | list) for inner in level)


def is_text(text: str) -> bool:
    """Whether a string can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_config(folder: Path | str) -> dict[str, Any]:
    """Read a model folder's config.json.

    Raises:
        CheckpointError: the folder or its config.json is missing or unreadable.
    """
    folder = Path(folder)
    if not folder.exists():
        raise CheckpointError(f"folder {folder} does not exist")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} holds no config.json: it is not a model folder")
    return read_json(folder / "config.json")


def own_widths_in(folder: Path | str) -> LayerWidths:
    """The widths of a folder's own layers, by axis and layer, where they differ; empty for every other folder.

    Raises:
        CheckpointError: elastic.json is damaged.
    """
    return ElasticConfig.load(folder).own_widths if (Path(folder) / FILE_NAME).exists() else {}


def refuse_per_layer(folder: Path | str, own_widths: LayerWidths) -> None:
    """Raise CheckpointError where a folder's layers differ in width: nothing is made of such a folder."""
    if own_widths:
        raise CheckpointError(
            f"{folder} is a slice whose layers differ in {', '.join(own_widths)}: it runs and can be inspected, but is not cut, "
            "sorted, scored or trained; take the checkpoint that it was cut from"
        )


def checked_table(folder: Path | str, layout: Layout, own_widths: LayerWidths) -> Layout:
    """``own_table``, with its faults told as those of a folder.

    Raises:
        CheckpointError: config.json and elastic.json disagree.
    """
    try:
        return own_table(layout, own_widths)
    except (ValueError, LookupError) as error:
        raise CheckpointError(f"{Path(folder) / FILE_NAME}: own_widths: {error}") from None


def _read_table(folder: Path, config: dict[str, Any], per_layer: bool) -> Layout:
    """The table of a folder, bound to how its matrices are stored."""
    from star_elastic.quant import layout_in_folder  # it reads checkpoints, which read this module's files

    layout = layout_of(config)
    own_widths = own_widths_in(folder)
    if not per_layer:
        refuse_per_layer(folder, own_widths)
    if own_widths:
        layout = checked_table(folder, layout, own_widths)
    return layout_in_folder(folder, layout)


def preset_of(name: str, layout: Layout, model: Path | str) -> Preset:
    """A published model of which a model has the shapes.

    Raises:
        UnknownNameError: no such preset.
        CheckpointError: the model has other shapes.
    """
    preset = get_preset(name)
    if preset.layout.fingerprint != layout.fingerprint:
        raise CheckpointError(f"{model} does not have the shapes of preset {name!r}")
    return preset


def open_elastic(
    folder: Path | str,
    *,
    preset: str | None = None,
    submodels: Mapping[str, Submodel] | None = None,
    per_layer: bool = False,
    table: Layout | None = None,
) -> tuple[dict[str, Any], Layout, ElasticConfig]:
    """Config, table and nested models of a folder, read without weights.

    The nested models come from ``elastic.json``; a folder without one takes those of ``preset``, or of the published model
    that it is recognised as, or none but ``full``. ``submodels`` adds to them.

    Args:
        folder: the model folder.
        preset: take the nested models of this published model.
        submodels: further nested models by name.
        per_layer: whether the caller can handle a slice whose layers differ in width; its table is ``per_layer.own_table``.
        table: the folder's table, bound to how its matrices are stored, where the caller has read it.

    Raises:
        CheckpointError: config.json or elastic.json is missing, damaged, or they disagree.
        UnknownNameError: unknown family or preset.
        WidthError: a given submodel cannot be cut.
    """
    config = read_config(folder)
    layout = table or _read_table(Path(folder), config, per_layer)
    if preset is not None:
        elastic = ElasticConfig.of_preset(preset_of(preset, layout, folder))
    elif (Path(folder) / FILE_NAME).exists():
        elastic = ElasticConfig.load(folder)
    else:
        known = recognise(layout)
        elastic = ElasticConfig.of_preset(known) if known else ElasticConfig(family=layout.family)
    elastic.check(layout)
    for name, submodel in (submodels or {}).items():
        check_named(name, submodel, layout)
    return config, layout, elastic.model_copy(update={"submodels": {**elastic.submodels, **(submodels or {})}})
