"""From sums to scores: one number for each member of each axis, by key."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from star_elastic.layout import Layout, Tap, Unit
from star_elastic.orders import axis_key, best_first, member_key
from star_elastic.score.activations import Recorder
from star_elastic.score.finite import check_scores
from star_elastic.score.methods import listens
from star_elastic.score.spots import Spot, expert_channel_axes, expert_key, place_of, spot_of
from star_elastic.score.weights import WeightSums, random_scores


def collect(recorder: Recorder, weights: WeightSums) -> dict[str, Tensor]:
    """Scores of every width axis, fp32.

    Keys are ``hidden``, ``layers.{i}.{axis}`` and, for experts' own orders, ``layers.{i}.experts.{e}.{axis}``. An axis with one
    order for the whole model is summed over all places where it is heard.

    Args:
        recorder: after the last batch.
        weights: of every unit.

    Raises:
        DataError: a tap saw no token.
        NotFiniteError: scores that are NaN or infinite, such as norms of weights that are.
    """
    layout, options = recorder.layout, recorder.options
    chosen = {axis: options.method(axis) for axis in layout.width_axes}
    scores = {
        **weights.norms(),
        **random_scores(layout, {axis for axis, method in chosen.items() if method == "random"}, options.seed),
        **_experts(recorder, weights),
    }
    for unit, tap in _heard(layout):
        if tap.axis != "experts" and listens(tap, chosen[tap.axis]):
            key = axis_key(layout.axes[tap.axis], unit.layer)
            importance = _importance(recorder, weights, unit, tap, scores)
            scores[key] = scores[key] + importance if key in scores else importance
    scores |= _each_expert(recorder, weights)
    check_scores(scores)
    return {key: score.float() for key, score in sorted(scores.items())}


def _heard(layout: Layout) -> Iterator[tuple[Unit, Tap]]:
    """All taps; those that are judged over another axis come after it."""
    taps = [(unit, tap) for unit in layout.units for tap in unit.taps]
    yield from sorted(taps, key=lambda pair: pair[1].over is not None)


def _importance(recorder: Recorder, weights: WeightSums, unit: Unit, tap: Tap, scores: dict[str, Tensor]) -> Tensor:
    channels = _weighed(recorder, weights, place_of(unit, tap))
    if tap.side == "experts":
        return channels
    spot = spot_of(unit, tap)
    kept: dict[str, list[int]] = {}
    if tap.over is not None and tap.over in recorder.options.kept:
        axis, width = recorder.layout.axes[tap.over], recorder.options.kept[tap.over]
        order = best_first(scores[axis_key(axis, unit.layer)].numpy(), axis)
        kept[axis.name] = [order[member] for member in axis.members(width)]
    return member_norms(channels, spot, tap.axis, kept)


def _weighed(recorder: Recorder, weights: WeightSums, place: str) -> Tensor:
    """Importance of the channels of a place, times the norms of what reads them where a method wants that, fp64 (C,).

    Routed experts that are weighed one by one add up: squares, since each token's parts come from different experts.
    """
    if place in recorder.channels:
        channels = recorder.channels[place].importance()
        return channels * weights.columns[place] if place in weights.columns else channels
    experts = [key for key in weights.columns if key.startswith(f"{place}.") and recorder.channels[key].heard]
    return torch.stack([_weighed(recorder, weights, key) for key in experts]).square().sum(0).sqrt()


def member_norms(channels: Tensor, spot: Spot, axis: str, kept: dict[str, list[int]]) -> Tensor:
    """L2 norm of each member's channels [Nemotron Elastic eq. 3 and 4], counting only the ``kept`` members of other axes.

    Args:
        channels: importance of every channel of the spot, fp64 (C,).
        spot: says which member of which axis each channel is.
        axis: whose members to score, M of them.
        kept: positions by axis.

    Returns:
        (M,)
    """
    factors = spot.segment.factors
    grid = channels.reshape([factor.size for factor in factors])
    for place, factor in enumerate(factors):
        if factor.axis in kept:
            grid = grid.index_select(place, torch.tensor(kept[factor.axis]))
    [own] = [place for place, factor in enumerate(factors) if factor.axis == axis]
    return grid.movedim(own, 0).flatten(1).square().sum(1).sqrt() if grid.ndim > 1 else grid


def _experts(recorder: Recorder, weights: WeightSums) -> dict[str, Tensor]:
    """Scores of routed experts, by layer."""
    scores: dict[str, Tensor] = {}
    for unit in recorder.layout.units:
        if unit.router is None or unit.layer is None:
            continue
        axis = recorder.layout.axes[unit.router.axis]
        method, norms = recorder.options.method(axis.name), weights.routers[unit.layer]
        if method == "router_weight":
            scores[axis_key(axis, unit.layer)] = norms
        elif method != "random":
            scores[axis_key(axis, unit.layer)] = recorder.experts[unit.layer].importance(method, norms)
    return scores


def _each_expert(recorder: Recorder, weights: WeightSums) -> dict[str, Tensor]:
    """An order for every expert by itself; an expert that no token reached has none, and follows its layer's."""
    scores: dict[str, Tensor] = {}
    for unit in recorder.layout.units if recorder.options.per_expert else ():
        for tap in unit.taps:
            if tap.side != "experts" or tap.axis not in expert_channel_axes(unit):
                continue
            assert unit.router is not None
            for expert in range(recorder.layout.axes[unit.router.axis].size):
                place = expert_key(place_of(unit, tap), expert)
                if recorder.channels[place].heard:
                    scores[member_key(unit.layer, unit.router.axis, expert, tap.axis)] = _weighed(
                        recorder, weights, place
                    )
    return scores
