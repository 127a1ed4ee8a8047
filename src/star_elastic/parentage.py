"""What the card of a slice may say of its parent: its name, and whether it was trained for its nested models."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from star_elastic.checkpoint import Checkpoint
from star_elastic.layout import Layout
from star_elastic.opened import HUB_NAME
from star_elastic.presets import Preset, recognise
from star_elastic.submodel import FILE_NAME, ElasticConfig

TRAINING = "training"  # what training leaves in the provenance of elastic.json


@dataclass(frozen=True)
class Parentage:
    """What is known of a parent.

    Attributes:
        name: on the hub, where that is known, or its folder's.
        elastic: its nested models; None where neither elastic.json nor a preset names any.
        trained: whether it was trained for them.
        shapes_of: the published model whose shapes it has, where they alone tell what it is: other weights may have them too.
    """

    name: str
    elastic: ElasticConfig | None = None
    trained: bool = False
    shapes_of: Preset | None = None


def parentage(
    checkpoint: Checkpoint, layout: Layout, *, formats: Collection[str] = (), fetched: str | None = None
) -> Parentage:
    """Find out what is known of a parent.

    Args:
        checkpoint: the parent.
        layout: its table.
        formats: quantized formats of its matrices.
        fetched: its name on the hub, where it is read from there.

    Raises:
        CheckpointError: elastic.json is damaged.
    """
    if (checkpoint.folder / FILE_NAME).exists():
        known = ElasticConfig.load(checkpoint.folder)
        return Parentage(fetched or parent_name(checkpoint, known), known, TRAINING in known.provenance)
    preset = recognise(layout)
    if preset is None:
        return Parentage(fetched or parent_name(checkpoint))
    published = fetched in preset.hub.values()
    name = fetched or preset.hub_name(formats) or parent_name(checkpoint)
    return Parentage(name, ElasticConfig.of_preset(preset), published, None if published else preset)


def parent_name(checkpoint: Checkpoint, elastic: ElasticConfig | None = None) -> str:
    """A name for the parent: what elastic.json records, the hub name in config.json, or the folder's name."""
    recorded = elastic.provenance.get("parent") if elastic else None
    origin = str(checkpoint.config.get("_name_or_path", ""))
    match = HUB_NAME.fullmatch(origin)  # older writers left paths of their own machine there
    hub = match["name"] if match else None
    return str(recorded or hub or checkpoint.folder.resolve().name)
