"""The redundancy curve: what share of its importance an axis keeps at a width. What a user looks at to choose budgets.

The same cut is free on one model and fatal on another; where importance is spread evenly, half the width keeps half of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from star_elastic.axes import Axis
from star_elastic.layout import Layout
from star_elastic.orders import best_first

FRACTIONS = (0.9, 0.75, 0.5, 0.25)
"""Parts of the parent's width at which the kept share is always shown."""


def axis_of(key: str, layout: Layout) -> Axis:
    """The axis that a key of ``scores.safetensors`` ranks: ``hidden``, ``layers.3.expert_ffn``."""
    return layout.axes[key.rsplit(".", 1)[-1]]


def kept_shares(
    scores: Mapping[str, Tensor], layout: Layout, widths: Mapping[str, Sequence[int]] | None = None
) -> dict[str, dict[int, float]]:
    """For each key, width -> share of the summed importance held by the best members, which grouped axes keep in every group.

    Args:
        scores: by key, one number per member. Unmeasured experts (negative) count as nothing.
        layout: the model's table.
        widths: further widths by axis, beside the legal ones at or below ``FRACTIONS`` of the parent's.
    """
    more = widths or {}
    return {
        key: _shares(score, axis_of(key, layout), more.get(axis_of(key, layout).name, ())) for key, score in scores.items()
    }


def curve_widths(axis: Axis, more: Sequence[int] = ()) -> list[int]:
    """Widths shown for an axis, descending."""
    usual = {axis.at_most(fraction * axis.size) for fraction in FRACTIONS} - {axis.size}
    return sorted({*usual, *more}, reverse=True)


def _shares(score: Tensor, axis: Axis, more: Sequence[int]) -> dict[int, float]:
    held = score.double().clamp(min=0)
    best = held[best_first(score.double().numpy(), axis)]
    total = float(held.sum())
    return {w: float(best[axis.members(w)].sum()) / total if total else w / axis.size for w in curve_widths(axis, more)}
