"""What a family file provides, and the few words that all family files share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from star_elastic.axes import Axis, Rule, row_alignment
from star_elastic.errors import CheckpointError
from star_elastic.layout import Layout, Row, parse_dims

Config = Mapping[str, Any]
"""A parsed config.json."""

MOST = {"num_hidden_layers": 1024, "n_routed_experts": 4096, "num_local_experts": 4096}
"""Field -> largest number that is believed: each layer and expert gets tensors with names of their own."""

LARGEST = 2**22
"""The same for all other sizes. A damaged config must not run us out of memory."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Unfit:
    """Why an engine cannot run a model.

    Attributes:
        why: for people, one clause.
        elsewhere: whether only a converter that reads config.json through transformers 5 is at fault: one in an environment with
            transformers 4 can do it.
    """

    why: str
    elsewhere: bool = False


Fit = Callable[[Config], Unfit | None]
"""Whether an engine runs the model of a config.json: None, or why not."""

VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"


def fits(config: Config) -> Unfit | None:
    """An engine that runs every model of a family."""
    return None


class ConfigEdits(Protocol):
    """Fields of a nested model's config, given the parent's config, widths per axis and kept layers (None: all)."""

    def __call__(self, config: Config, widths: Mapping[str, int], layers: Sequence[int] | None) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: ``model_type`` in config.json.
        layout: reads the table of a model from its config.
        config_edits: fields to set, on a config object or in config.json, to get a nested model's config.
        json_fields: further fields that config.json carries for other readers, derived from an edited config; transformers
            computes them and refuses or ignores them as attributes.
        idle_fields: fields that an edited config does better without: other readers take them as a sign of what is not there.
        engines: other engines that have the family's architecture, and which of its models each cannot run.
    """

    name: str
    layout: Callable[[Config], Layout]
    config_edits: ConfigEdits
    json_fields: Callable[[Config], dict[str, Any]] = lambda config: {}
    idle_fields: Callable[[Config], Collection[str]] = lambda config: ()
    engines: Mapping[str, Fit] = field(default_factory=lambda: dict.fromkeys((VLLM, SGLANG, LLAMA_CPP), fits))

    def child_config(self, config: Config, widths: Mapping[str, int], layers: Sequence[int] | None) -> dict[str, Any]:
        """The config.json of a nested model: the parent's with edits; ``auto_map`` goes, since native classes load it."""
        edited = {**config, **self.config_edits(config, widths, layers)}
        for name in ("auto_map", *self.idle_fields(edited)):
            edited.pop(name, None)
        return {**edited, **self.json_fields(edited)}


class Table:
    """Builds rows in the table's grammar, so that a family file reads as a table.

    Args:
        axes: the model's axes by name.
        constants: named sizes that no axis indexes.
    """

    def __init__(self, axes: Mapping[str, Axis], constants: Mapping[str, int]) -> None:
        self.axes = axes
        self.constants = constants

    def row(self, name: str, dims: str, **marks: Any) -> Row:
        """One row: in-memory name relative to the unit, dimensions as text, marks as in ``layout.Row``."""
        return Row(name, parse_dims(dims, self.axes, self.constants), **marks)


def itemsize(config: Config) -> int:
    """Bytes per number of a model's weights; configs without a dtype mean float32."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise CheckpointError(f"config.json: dtype {dtype!r} is not one of {', '.join(ITEMSIZE)}")
    return ITEMSIZE[dtype]


def positive(config: Config, *names: str) -> dict[str, int]:
    """Read fields that must be positive whole numbers.

    Raises:
        CheckpointError: one is missing or is something else.
    """
    for name in names:
        value, most = config.get(name), MOST.get(name, LARGEST)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {name} must be a positive whole number, not {value!r}")
        if value > most:
            raise CheckpointError(
                f"config.json: {name} is {value}, and no model has more than {most}: it must be damaged"
            )
    return {name: config[name] for name in names}


def kinds_of_layers(config: Config, name: str, kinds: Sequence[str]) -> list[str]:
    """Read a field that gives each of ``num_hidden_layers`` one of ``kinds``.

    Raises:
        CheckpointError: it is something else.
    """
    value, count = config.get(name), config["num_hidden_layers"]
    if not isinstance(value, list) or len(value) != count or any(kind not in kinds for kind in value):
        raise CheckpointError(f"config.json: {name} must be {count} of {' and '.join(kinds)}, not {value!r}")
    return value


def divides(config: Config, part: str, whole: str) -> None:
    """Raise CheckpointError unless the field ``part`` divides the field ``whole``."""
    if config[whole] % config[part]:
        raise CheckpointError(f"config.json: {part} {config[part]} does not divide {whole} {config[whole]}")


def at_most(config: Config, part: str, whole: str) -> None:
    """Raise CheckpointError if the field ``part`` is larger than the field ``whole``."""
    if config[part] > config[whole]:
        raise CheckpointError(f"config.json: {part} {config[part]} is larger than {whole} {config[whole]}")


def aligned(config: Config, *names: str) -> dict[str, Rule]:
    """The 16-byte rule for axes that form matrix rows, at this config's dtype."""
    return row_alignment(itemsize(config), names)
