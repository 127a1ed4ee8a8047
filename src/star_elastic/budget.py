"""Budgets: what a nested model is meant to cost, as a target that a router is trained to meet. Plain Python.

A budget is written as a fraction of the full model (0.5, ``50%``) or as an absolute number (``12B``, ``24GiB``, ``35ms``). Its
cost is exact at whole widths and differentiable in expected ones. An upper bound on a cost is something else: see ``ladder``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from star_elastic.cost import FORMATS, Layers
from star_elastic.errors import ElasticError, UnknownNameError, nearest
from star_elastic.ladder import Budget as Bound
from star_elastic.layout import Layout
from star_elastic.units import format_milliseconds, parse_count, parse_size

KINDS = ("params", "active_params", "memory", "latency")
EXAMPLES = {"params": "12B", "active_params": "2.1B", "memory": "24GiB", "latency": "35ms"}
FEWEST_PARAMS = 100  # below, an absolute number of parameters is a share that went wrong
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class BudgetError(ElasticError, ValueError):
    """A budget that cannot be read, is not positive, is above the full model, or that no choice of widths reaches."""


class LatencyModel(Protocol):
    """What a latency budget is measured with: seconds at given widths, differentiable in them."""

    def cost(self, layout: Layout, widths: Mapping[Any, Any], layers: Layers = None) -> Any:
        """Seconds at ``widths``, per axis or (axis, layer)."""
        ...


@dataclass(frozen=True)
class Budget:
    """What a nested model is meant to cost.

    Attributes:
        name: of the nested model.
        kind: ``params``, ``active_params``, ``memory`` (all resident weights, KV, conv and SSM state) or ``latency``.
        target: parameters, bytes or seconds.
        fraction: the target over the cost of the full model, in (0, 1].
        context: tokens per sequence, for ``memory``.
        batch: sequences at once, for ``memory``.
        dtype: format of the weights, for ``memory``.
        table: measured times, for ``latency``.

    Example:
        >>> from star_elastic.presets import get_preset
        >>> layout = get_preset("nemotron-3-nano-30b-a3b").layout
        >>> round(Budget.resolve(layout, "12b", "params", "12.43B").fraction, 3)
        0.394
    """

    name: str
    kind: str
    target: float
    fraction: float
    context: int = 8192
    batch: int = 1
    dtype: str = "bf16"
    table: LatencyModel | None = None

    @classmethod
    def resolve(
        cls,
        layout: Layout,
        name: str,
        kind: str,
        value: float | str,
        *,
        context: int = 8192,
        batch: int = 1,
        dtype: str = "bf16",
        table: LatencyModel | None = None,
    ) -> Budget:
        """Read a budget as a person writes it.

        Args:
            layout: the parent's table.
            name: of the nested model.
            kind: what is counted.
            value: a number in (0, 1], or a text such as ``50%``, is a fraction of the full model; a larger number, or a text
                such as ``12B``, ``24GiB`` or ``35ms``, is absolute.
            context: tokens per sequence, for ``memory``.
            batch: sequences at once, for ``memory``.
            dtype: format of the weights, for ``memory``.
            table: measured times, for ``latency``.

        Raises:
            UnknownNameError: an unknown kind or format.
            BudgetError: the value cannot be read, is not positive, or is more than the full model costs; or a latency budget
                has no table.
        """
        if kind not in KINDS:
            raise UnknownNameError(f"budget {name!r}: no kind {kind!r}: {nearest(kind, KINDS)}")
        if dtype not in FORMATS:
            raise UnknownNameError(f"budget {name!r}: no format {dtype!r}: {nearest(dtype, FORMATS)}")
        draft = cls(name, kind, 0.0, 1.0, context, batch, dtype, table)
        full = draft.cost(layout, {})
        number, is_fraction = read_value(name, kind, value)
        target = number * full if is_fraction else number
        if target > full:
            raise BudgetError(
                f"budget {name!r}: {draft.text(target)} is more than the full model's {draft.text(full)}: give at most that"
            )
        # 1.0 exactly for the full model, whichever way it was written
        return cls(name, kind, target, number if is_fraction else target / full, context, batch, dtype, table)

    @property
    def is_full(self) -> bool:
        """Whether this is the whole model."""
        return self.fraction == 1

    def cost(self, layout: Layout, widths: Mapping[Any, Any], layers: Layers = None) -> Any:
        """What widths cost in this budget's kind: exact at whole widths, differentiable in tensors.

        Args:
            layout: the parent's table.
            widths: width per axis, or per (axis, layer); whole numbers, arrays or tensors. Those left out are the parent's.
            layers: which layers count: None for all, the kept ones, or layer -> depth gate.

        Raises:
            BudgetError: a latency budget without its table.
        """
        if self.kind != "latency":
            return self._bound.price(layout, widths, layers)  # type: ignore[arg-type]
        if self.table is None:
            raise BudgetError(
                f"budget {self.name!r} is a latency: give the table of measured times that it was made with"
            )
        return self.table.cost(layout, widths, layers)

    def error(self, layout: Layout, widths: Mapping[Any, Any], layers: Layers = None) -> float:
        """How far widths are from the target: cost / target - 1."""
        return float(self.cost(layout, widths, layers)) / self.target - 1

    def text(self, value: float) -> str:
        """A cost of this kind, for people."""
        return format_milliseconds(value) if self.kind == "latency" else self._bound.text(value)

    @property
    def _bound(self) -> Bound:
        return Bound(self.kind, int(self.target), self.dtype, self.context, self.batch)


def read_value(name: str, kind: str, value: float | str) -> tuple[float, bool]:
    """A budget's value as (number, whether it is a fraction of the full model); see ``Budget.resolve``.

    Raises:
        BudgetError: the value cannot be read, or is not positive.
    """
    wanted = f"want a fraction of the full model such as 0.5, or an absolute number such as {EXAMPLES[kind]}"
    mistake = BudgetError(f"budget {name!r}: cannot read {value!r}: {wanted}")
    if isinstance(value, bool):
        raise mistake
    if isinstance(value, str):
        try:
            number, is_fraction = _read_text(kind, value.strip())
        except ValueError:
            raise mistake from None
    else:
        number, is_fraction = value, value <= 1
    if not math.isfinite(number) or number <= 0:
        raise BudgetError(f"budget {name!r}: {value!r} is not positive: {wanted}")
    if kind in ("params", "active_params") and not is_fraction and number < FEWEST_PARAMS:
        raise BudgetError(
            f"budget {name!r}: {value!r} is above 1, so no fraction, and no number of parameters: {wanted}"
        )
    return number, is_fraction


def _read_text(kind: str, text: str) -> tuple[float, bool]:
    """Raise ValueError for what is no number of this kind."""
    if text.endswith("%"):
        return float(text[:-1]) / 100, True
    try:
        number = float(text)
    except ValueError:
        pass  # it has a unit
    else:
        return number, number <= 1
    if kind == "latency":
        unit = text.lstrip("0123456789.eE+- ")
        if unit not in _SECONDS:
            raise ValueError(text)
        return float(text.removesuffix(unit)) * _SECONDS[unit], False
    return (parse_size if kind == "memory" else parse_count)(text), False


def interpolate(budgets: Sequence[Budget], target: float) -> dict[str, float]:
    """Weights of the two neighbouring budgets of a cost between them, as a router's input (method: mixed one-hots).

    Args:
        budgets: trained ones, of one kind.
        target: parameters, bytes or seconds.

    Returns:
        Name -> weight; the weights sum to 1 and those of other budgets are left out.

    Raises:
        BudgetError: no budgets, kinds that differ, or a target outside the trained ones.
    """
    if not budgets or len({budget.kind for budget in budgets}) > 1:
        kinds = ", ".join(sorted({budget.kind for budget in budgets})) or "none"
        raise BudgetError(f"a cost lies between budgets of one kind, not of {kinds}")
    ascending = sorted(budgets, key=lambda budget: budget.target)
    first, last = ascending[0], ascending[-1]
    if not first.target <= target <= last.target:
        raise BudgetError(
            f"{first.text(target)} is outside the trained budgets, {first.text(first.target)} to {last.text(last.target)}"
        )
    above = next(budget for budget in ascending if budget.target >= target)
    if above.target == target:
        return {above.name: 1.0}
    below = ascending[ascending.index(above) - 1]
    weight = (target - below.target) / (above.target - below.target)
    return {below.name: 1 - weight, above.name: weight}
