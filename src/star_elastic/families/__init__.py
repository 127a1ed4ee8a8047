"""Model families: one file each, holding the table and the map from axes to config fields."""

from __future__ import annotations

from star_elastic.errors import UnknownNameError, nearest
from star_elastic.families import granitemoehybrid, llama, mixtral, nemotron_h, qwen3, qwen3_moe
from star_elastic.families.base import Config, Family
from star_elastic.layout import Layout

_FILES = (nemotron_h, llama, qwen3, qwen3_moe, mixtral, granitemoehybrid)

FAMILIES: dict[str, Family] = {file.FAMILY.name: file.FAMILY for file in _FILES}

__all__ = ["FAMILIES", "Config", "Family", "family_of", "layout_of"]


def family_of(config: Config) -> Family:
    """The family of a parsed config.json.

    Raises:
        UnknownNameError: no family file describes its ``model_type``.
    """
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        raise UnknownNameError(f"model_type {name!r} is not a family with a table: {nearest(name, FAMILIES)}")
    return FAMILIES[name]


def layout_of(config: Config) -> Layout:
    """The table of the model that a parsed config.json describes.

    Raises:
        UnknownNameError: no family file describes its ``model_type``.
        CheckpointError: the config misses a field or holds an impossible value.
    """
    return family_of(config).layout(config)
