"""What a folder says about itself, against what it is: config.json in itself, the model card's widths, elastic.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from star_elastic import cost
from star_elastic.card import RECORD, read_front_matter
from star_elastic.checkpoint import TensorInfo
from star_elastic.checkpoint.companions import CODE_FIELD, TOKENIZER_CONFIG
from star_elastic.checkpoint.compare import same_bytes
from star_elastic.errors import CheckpointError, ElasticError
from star_elastic.families import family_of, layout_of
from star_elastic.layout import Layout
from star_elastic.per_layer import LayerWidths
from star_elastic.submodel import FILE_NAME, ElasticConfig, checked_table, read_config, read_json
from star_elastic.tied import stored_twice
from star_elastic.verify.report import Fault

CONFIG = "config.json"
CARD = "README.md"


def config_faults(config: Mapping[str, Any], layout: Layout, tensors: Mapping[str, TensorInfo]) -> list[Fault]:
    """Fields that contradict each other or the tensors: a stale pattern string or layer count, code, a tie that is none."""
    family = family_of(config)
    edited = {**config, **family.config_edits(config, layout.complete({}), None)}
    faults = [
        Fault(f"{CONFIG}: {name}", f"{value!r}, as its layers are", f"{config[name]!r}")
        for name, value in family.json_fields(edited).items()
        if name in config and config[name] != value
    ]
    return faults + _tie_faults(layout, tensors)


def code_faults(folder: Path, config: Mapping[str, Any]) -> list[Fault]:
    """Where transformers would look for code: any in config.json, and a tokenizer's that is not in the folder."""
    faults = []
    if CODE_FIELD in config:
        missing = _missing_code(folder, config[CODE_FIELD])
        gone = f", of which {', '.join(missing)} is not here" if missing else ""
        found = f"{config[CODE_FIELD]!r}{gone}"
        faults.append(Fault(f"{CONFIG}: {CODE_FIELD}", "none: native classes load it", found))
    if not (folder / TOKENIZER_CONFIG).is_file():
        return faults
    try:
        tokenizer = read_json(folder / TOKENIZER_CONFIG)
    except CheckpointError as error:
        return [*faults, Fault(TOKENIZER_CONFIG, "a JSON object", str(error))]
    if missing := _missing_code(folder, tokenizer.get(CODE_FIELD)):
        expected = "none, or code that is in the folder"
        faults.append(Fault(f"{TOKENIZER_CONFIG}: {CODE_FIELD}", expected, f"{', '.join(missing)}, which is not here"))
    return faults


def _missing_code(folder: Path, auto_map: Any) -> list[str]:
    """Files of code that an ``auto_map`` points to and that a folder lacks; ``org/name--module`` is another's, on the hub."""
    values = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    names = {f"{one.rpartition('.')[0]}.py" for one in flat if isinstance(one, str)}
    return sorted(name for name in names if "--" in name or not (folder / name).is_file())


def _tie_faults(layout: Layout, tensors: Mapping[str, TensorInfo]) -> list[Fault]:
    """Tied tensors that are stored nevertheless, with other numbers: whoever loads them would ignore one."""
    return [
        Fault(f"{CONFIG}: tie_word_embeddings", f"equal {copy} and {home}", "different ones")
        for copy, home in stored_twice(tensors, layout).items()
        if not same_bytes(tensors[copy], tensors[home])
    ]


def record_faults(folder: Path, layout: Layout) -> tuple[list[Fault], str]:
    """Differences between the widths that the model card or elastic.json records and those of config.json; what was looked at."""
    faults: list[Fault] = []
    seen = []
    record = read_front_matter(folder).get(RECORD)
    if record is not None:
        seen.append(CARD)
        faults += _card_faults(record, folder, layout)
    if (folder / FILE_NAME).exists():
        seen.append(FILE_NAME)
        try:
            elastic = ElasticConfig.load(folder)
            if elastic.own_widths and not layout.own_widths:
                checked_table(folder, layout, elastic.own_widths)
            elastic.check(layout)
        except ElasticError as error:
            faults.append(Fault(FILE_NAME, f"nested models of {CONFIG}", str(error)))
    return faults, " and ".join(seen)


def _by_layer(widths: LayerWidths, number: Mapping[int, int] | None = None) -> dict[str, int]:
    """Facts about widths of single layers; ``number`` gives layers of the parent their numbers here."""
    numbers = number or {}
    return {
        f"width of {axis} in layer {numbers.get(layer, layer)}": width
        for axis, own in widths.items()
        for layer, width in own.items()
    }


def _card_faults(record: Any, folder: Path, layout: Layout) -> list[Fault]:
    """What the model card says of widths, layers and parameters, where config.json says otherwise."""
    widths = record.get("widths") if isinstance(record, Mapping) else None
    layers = record.get("layers") if isinstance(record, Mapping) else None
    by_layer = record.get("layer_widths") or {} if isinstance(record, Mapping) else None
    if not (
        isinstance(widths, Mapping)
        and isinstance(by_layer, Mapping)
        and all(isinstance(own, Mapping) for own in by_layer.values())
        and (layers is None or (isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)))
    ):
        return [Fault(f"{CARD}: {RECORD}", "widths, layers and params", f"{record!r}")]
    widest = layout_of(read_config(folder)).complete({})
    number = {layer: number for number, layer in enumerate(layers or range(layout.num_layers))}
    own = {f"width of {axis}": width for axis, width in widest.items()} | _by_layer(layout.own_widths)
    own |= {"number of layers": layout.num_layers, "parameters": cost.params(layout, {})}
    said = {f"width of {axis}": width for axis, width in widths.items()}
    said |= _by_layer(by_layer, number)
    said |= {
        "number of layers": layout.num_layers if layers is None else len(layers),
        "parameters": record.get("params"),
    }
    # A cut of layers may leave none that has some axis; how wide it was is still on record.
    gone = {f"width of {axis}" for axis in widths if layers is not None and axis not in widest}
    return [
        Fault(f"{CARD}: {fact}", f"{own.get(fact)}, as {CONFIG} says", f"{said.get(fact)}")
        for fact in {**own, **said}
        if own.get(fact) != said.get(fact) and fact not in gone
    ]
