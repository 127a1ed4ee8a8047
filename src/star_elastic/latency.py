"""What a nested model costs in seconds: a table of measured units, read as a function of the widths.

``profile`` measures each kind of unit (embedding, each kind of decoder layer, final norm, head) by itself on a grid of widths
of the axes that it has. The latency of a nested model is the sum over its units of the multilinear interpolation in that grid,
plus what a call spends outside all units. It is exact at measured widths, continuous, and differentiable in widths that are
tensors, so that a router can be trained on it as on a count of parameters. This module is plain Python: tensors pass through
its arithmetic.

A latency belongs to one machine, dtype, batch, context and phase, which the table names. It says nothing about another.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from star_elastic.axes import Widths, widths_of
from star_elastic.cost import Layers
from star_elastic.errors import CheckpointError, TargetError, WidthError
from star_elastic.layout import Layout
from star_elastic.submodel import read_json

FORMAT_VERSION = 1
ROUNDING = 1e-6  # expected widths, which are sums of probabilities, may leave the measured range by this share of it

Seconds = Annotated[FiniteFloat, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(_Part):
    """Where it was measured: kind of device, its name, CPU threads, version of torch."""

    device: str
    name: str
    threads: Size
    torch: str


class Conditions(_Part):
    """What was measured.

    Attributes:
        phase: ``decode``: one more token for each of ``batch`` sequences that hold ``context`` tokens; ``prefill``: reading
            ``batch`` prompts of ``context`` tokens, up to the first answer token's logits.
        dtype: of weights and activations.
        warmup: Calls before the measured ones, at each point.
        repeats: Measured calls at each point.
    """

    phase: Literal["decode", "prefill"]
    batch: Size
    context: Size
    dtype: str
    warmup: Annotated[int, Field(ge=0)]
    repeats: Size


class Model(_Part):
    """Whose units they are: family, and the fingerprint of the architecture."""

    family: str
    fingerprint: str


class Point(_Part):
    """One measurement: widths by axis, median seconds of a call, and the interquartile range of the repeats."""

    widths: dict[str, Size]
    seconds: Seconds
    spread: Seconds


class UnitLatency(_Part):
    """Units of one shape, which cost the same.

    Attributes:
        kind: as the table of the model calls it.
        units: paths of the modules that have this shape.
        ladder: measured widths by axis, ascending.
        points: one for each combination of the ladder's widths.
    """

    kind: str
    units: tuple[str, ...] = Field(min_length=1)
    ladder: dict[str, Annotated[tuple[Size, ...], Field(min_length=1)]]
    points: tuple[Point, ...]

    @model_validator(mode="after")
    def _whole_grid(self) -> UnitLatency:
        for axis, ladder in self.ladder.items():
            if list(ladder) != sorted(set(ladder)):
                raise ValueError(f"{self.kind}: widths of {axis} must ascend, not {list(ladder)}")
        grid = set(itertools.product(*self.ladder.values()))
        if len(self.points) != len(grid) or any(point.widths.keys() != self.ladder.keys() for point in self.points):
            raise ValueError(f"{self.kind}: {len(self.points)} points for a grid of {len(grid)}")
        if self._by_widths.keys() != grid:
            raise ValueError(f"{self.kind}: the points are not those of the ladder")
        return self

    @cached_property
    def _by_widths(self) -> dict[tuple[int, ...], float]:
        return {tuple(point.widths[axis] for axis in self.ladder): point.seconds for point in self.points}

    def seconds(self, widths: Mapping[str, Any]) -> Any:
        """Multilinear interpolation at ``widths``, which hold every axis of the ladder.

        Raises:
            WidthError: a width outside the measured range.
        """
        asked = tuple(widths[axis] for axis in self.ladder)
        if all(isinstance(width, int) for width in asked) and asked in self._by_widths:
            return self._by_widths[asked]  # searches over many whole widths ask for measured ones again and again
        sides = [bracket(axis, ladder, widths[axis]) for axis, ladder in self.ladder.items()]
        total: Any = 0.0
        for corner in itertools.product(*sides):
            share: Any = 1.0
            for _, part in corner:
                share = share * part
            total = total + share * self._by_widths[tuple(width for width, _ in corner)]
        return total


class LatencyTable(_Part):
    """A measured table; ``profile`` writes it as JSON, ``cost`` reads it.

    Attributes:
        format_version: of the file.
        tool: what measured it.
        overhead: seconds of a call outside all units.

    Example:
        >>> table = LatencyTable.load("decode.json")                                     # doctest: +SKIP
        >>> table.cost(layout, {"hidden": 1920, "expert_ffn": 960})                      # doctest: +SKIP
        0.0113
    """

    format_version: int = FORMAT_VERSION
    tool: str
    machine: Machine
    conditions: Conditions
    model: Model
    overhead: Seconds
    units: tuple[UnitLatency, ...]

    @classmethod
    def load(cls, path: Path | str) -> LatencyTable:
        """Read a table.

        Raises:
            CheckpointError: missing, not JSON, of another version, or not a whole table.
        """
        raw = read_json(Path(path))
        if raw.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version {raw.get('format_version')!r}; this version of star-elastic reads {FORMAT_VERSION}"
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(f"{path} is no latency table: {where}: {first['msg']}") from None

    def save(self, path: Path | str) -> None:
        """Write the table; the file appears whole or not at all.

        Raises:
            TargetError, CheckpointError: as ``check_new_file``, or the system refuses to write.
        """
        path = check_new_file(path)
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            partial.rename(path)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)

    def check(self, layout: Layout) -> None:
        """Raise CheckpointError unless this table is of a model with exactly this architecture."""
        if self.model.fingerprint != layout.fingerprint:
            raise CheckpointError(
                f"the latency table was measured on another model ({self.model.family}, fingerprint "
                f"{self.model.fingerprint[:12]}; this one is {layout.family}, {layout.fingerprint[:12]}): profile this one"
            )

    def cost(self, layout: Layout, widths: Widths, layers: Layers = None) -> Any:
        """Seconds of one call of a nested model under the table's conditions.

        Args:
            layout: the parent's table.
            widths: width per axis, or per (axis, layer); axes left out keep the parent's. Numbers, or tensors that carry a
                gradient.
            layers: None for all decoder layers, those kept, or layer -> weight in [0, 1].

        Raises:
            CheckpointError: the table is of another model.
            WidthError: a width outside the measured range.
        """
        self.check(layout)
        full = layout.complete({})
        weights = layers if isinstance(layers, Mapping) or layers is None else dict.fromkeys(layers, 1)
        own_layers = {key[1] for key in widths if isinstance(key, tuple)}
        known: dict[tuple[int, int | None], Any] = {}  # units of one shape and equal widths are interpolated once
        total: Any = self.overhead
        for unit in layout.units:
            weight = 1 if weights is None or unit.layer is None else weights.get(unit.layer, 0)
            if isinstance(weight, int) and weight == 0:
                continue
            number = self._group[unit.module]
            key = (number, unit.layer if unit.layer in own_layers else None)
            if key not in known:
                known[key] = self.units[number].seconds({**full, **widths_of(widths, unit.layer)})
            total = total + weight * known[key]
        return total

    @cached_property
    def _group(self) -> dict[str, int]:
        return {path: number for number, group in enumerate(self.units) for path in group.units}


def bracket(axis: str, ladder: Sequence[int], width: Any) -> list[tuple[int, Any]]:
    """The measured widths on both sides of ``width`` with their shares, which sum to 1; one where only one was measured.

    Raises:
        WidthError: ``width`` lies outside the ladder.
    """
    value = float(width.detach() if hasattr(width, "detach") else width)
    least, most = ladder[0], ladder[-1]
    if not least - ROUNDING * most <= value <= most * (1 + ROUNDING):
        measured = f"from {least} to {most}" if least < most else f"only at {most}"
        raise WidthError(
            f"{axis} width {value:g} lies outside the latency table, which was measured {measured}: profile it there"
        )
    if least == most:
        return [(most, 1.0)]
    above = min(max(bisect_right(ladder, value), 1), len(ladder) - 1)
    low, high = ladder[above - 1], ladder[above]
    share = (width - low) / (high - low)
    return [(low, 1 - share), (high, share)]


def check_new_file(path: Path | str) -> Path:
    """The path of a file that may be written.

    Raises:
        TargetError: something is there already, or its folder does not exist or cannot be written to.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise TargetError(f"target {path} exists: choose another name, or remove it first")
    if not path.parent.is_dir():
        raise TargetError(f"target {path} cannot be made: folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise TargetError(f"target {path} cannot be made: {path.parent} is not writable")
    return path
