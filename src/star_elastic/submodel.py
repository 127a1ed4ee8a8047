"""Nested models by name, and ``elastic.json``, the file that lists them beside an ordinary transformers checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from star_elastic.errors import CheckpointError, ReservedNameError, UnknownNameError, nearest
from star_elastic.families import layout_of
from star_elastic.layout import Layout
from star_elastic.presets import Preset, get_preset, recognise

FORMAT_VERSION = 1
FILE_NAME = "elastic.json"
FULL = "full"


class Submodel(BaseModel):
    """A nested model: how much of each axis it keeps.

    Attributes:
        widths: width per axis; an axis that is left out keeps the parent's.
        layers: the parent's decoder layers that stay, ascending; None keeps all.

    Example:
        >>> Submodel(widths={"hidden": 1920, "expert_ffn": 960})
        Submodel(widths={'hidden': 1920, 'expert_ffn': 960}, layers=None)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    widths: dict[str, int] = Field(default_factory=dict)
    layers: tuple[int, ...] | None = Field(default=None, strict=False)

    def check(self, layout: Layout) -> None:
        """Raise WidthError or UnknownNameError if a model of this layout cannot be cut so."""
        layout.check(self.widths, self.layers)

    def completed(self, layout: Layout) -> Submodel:
        """The same nested model with every width axis spelled out; all layers kept is None."""
        layers = None if self.layers == tuple(range(layout.num_layers)) else self.layers
        return Submodel(widths=layout.complete(self.widths), layers=layers)

    def is_full(self, layout: Layout) -> bool:
        """Whether this is the parent itself."""
        return self.completed(layout) == Submodel().completed(layout)


class ElasticConfig(BaseModel):
    """The content of ``elastic.json``.

    Attributes:
        format_version: version of this file format.
        family: model family, as in config.json's ``model_type``.
        submodels: nested models by name. ``full`` always means the whole model, listed or not.
        sorted_axes: axes whose members lie in order of importance.
        depth_order: layers from most to least important, once depth has been scored.
        provenance: where the checkpoint comes from: parent, scores' hash, recipe, tool version.

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
        text = json.dumps(self.model_dump(mode="json"), indent=2)
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
        if version != FORMAT_VERSION or not isinstance(version, int) or isinstance(version, bool):
            raise CheckpointError(
                f"{path}: format_version {version!r}; this version of star-elastic reads {FORMAT_VERSION}"
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise CheckpointError(f"{path}: {_first_mistake(error)}") from None

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
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


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


def open_elastic(
    folder: Path | str, *, preset: str | None = None, submodels: Mapping[str, Submodel] | None = None
) -> tuple[dict[str, Any], Layout, ElasticConfig]:
    """Config, table and nested models of a folder, read without weights.

    The nested models come from ``elastic.json``; a folder without one takes those of ``preset``, or of the published model
    that it is recognised as, or none but ``full``. ``submodels`` adds to them.

    Raises:
        CheckpointError: config.json or elastic.json is missing, damaged, or they disagree.
        UnknownNameError: unknown family or preset.
        WidthError: a given submodel cannot be cut.
    """
    from star_elastic.quant import layout_in_folder  # it reads checkpoints, which read this module's files

    config = read_config(folder)
    layout = layout_in_folder(Path(folder), layout_of(config))
    if preset is not None:
        chosen = get_preset(preset)
        if chosen.layout.fingerprint != layout.fingerprint:
            raise CheckpointError(f"{folder} does not have the shapes of preset {preset!r}")
        elastic = ElasticConfig.of_preset(chosen)
    elif (Path(folder) / FILE_NAME).exists():
        elastic = ElasticConfig.load(folder)
    else:
        known = recognise(layout)
        elastic = ElasticConfig.of_preset(known) if known else ElasticConfig(family=layout.family)
    elastic.check(layout)
    for name, submodel in (submodels or {}).items():
        check_named(name, submodel, layout)
    return config, layout, elastic.model_copy(update={"submodels": {**elastic.submodels, **(submodels or {})}})
