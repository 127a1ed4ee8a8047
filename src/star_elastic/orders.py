"""Orders of members: which keys a model's scores may have, and the best-first order that scores stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from star_elastic.axes import DEPTH, Axis
from star_elastic.errors import CheckpointError, UnknownNameError, nearest
from star_elastic.layout import Layout, Located, Members
from star_elastic.submodel import read_json

Orders = Mapping[str, Sequence[int]]
"""``hidden``, ``layers.3.experts``, or ``layers.3.experts.5.expert_ffn`` -> positions, most important first."""

SCORES_FILE = "scores.safetensors"
SCORES_FACTS = "scores.json"
DEPTH_ORDER = "depth_order"
"""Key of the layers' order, which need not be that of their scores (key ``DEPTH``, one per layer): see ``score.depth``."""


def axis_key(axis: Axis, layer: int | None) -> str:
    """Key of an axis's order: the bare name where the whole model shares one order, else with the layer."""
    return axis.name if axis.scope == "model" else f"layers.{layer}.{axis.name}"


def member_key(found_layer: int | None, counted: str, member: int, axis: str) -> str:
    """Key of an order that a single member of ``counted`` has for itself: ``layers.3.experts.5.expert_ffn``."""
    return f"layers.{found_layer}.{counted}.{member}.{axis}"


def axis_keys(layout: Layout) -> dict[str, Axis]:
    """Every key of a whole axis."""
    return {
        axis_key(layout.axes[name], unit.layer): layout.axes[name]
        for unit, row in layout.tensors()
        for name in row.axes
    }


def member_keys(layout: Layout) -> dict[str, str]:
    """Every key of a single expert, with the whole axis's key that it is more specific than."""
    keys: dict[str, str] = {}
    for unit, row in layout.tensors():
        if row.routed:
            (counted,) = row.dims[0].axes
            own = [layout.axes[name] for name in row.axes - {counted} if layout.axes[name].scope == "layer"]
            for axis in own:
                general = axis_key(axis, unit.layer)
                keys |= {member_key(unit.layer, counted, m, axis.name): general for m in range(row.dims[0].size)}
    return keys


def check_orders(orders: Orders, layout: Layout) -> None:
    """Refuse orders that would change what the model computes.

    Raises:
        UnknownNameError: a key that names no axis or layer of the model.
        CheckpointError: an order that is no permutation, or moves a member out of its group.
    """
    for key, axis in _resolve(orders, layout).items():
        per_group = axis.size // axis.groups
        if sorted(orders[key]) != list(range(axis.size)):
            raise CheckpointError(f"order of {key} is no permutation of the numbers 0 to {axis.size - 1}")
        moved = [member for place, member in enumerate(orders[key]) if member // per_group != place // per_group]
        if moved:
            raise CheckpointError(
                f"order of {key} moves member {moved[0]} out of its group: members of its {axis.groups} groups do not mix"
            )


def read_orders(path: Path, layout: Layout, weights: str | None = None) -> dict[str, list[int]]:
    """Orders from a file of scores: descending inside each group; ``depth`` is left out.

    Args:
        path: the file; ``scores.json`` beside it says what model it is of.
        layout: the table of the model to order.
        weights: hash of that model's weights.

    Raises:
        UnknownNameError: a key that names no axis or layer of the model.
        CheckpointError: an unreadable file, scores of another model, of a wrong length, or not finite.
    """
    check_scored(path, layout, weights)
    arrays = _read_arrays(path)
    if not arrays:
        raise CheckpointError(f"{path} holds no scores")
    scores = {key: array for key, array in arrays.items() if key not in (DEPTH, DEPTH_ORDER)}
    orders = {}
    for key, axis in _resolve(scores, layout).items():
        _check_values(path, key, scores[key], axis)
        orders[key] = best_first(scores[key], axis)
    return orders


def check_scored(path: Path, layout: Layout, weights: str | None) -> None:
    """Raise CheckpointError if ``scores.json`` beside ``path`` says that the scores are of another model.

    ``weights`` is the hash of the model's weights; None leaves them unchecked.
    """
    facts = path.with_name(SCORES_FACTS)
    if not facts.exists():
        return
    said = read_json(facts)
    if said.get("parent_fingerprint") not in (None, layout.fingerprint):
        raise CheckpointError(f"{facts} is of another model: its parent has other shapes than this one")
    if weights is not None and said.get("weights_sample_sha256") not in (None, weights):
        raise CheckpointError(f"{facts} is of another model: its parent {said.get('parent')} has other weights than this one")


def read_depth_order(path: Path, layout: Layout) -> tuple[int, ...] | None:
    """Layers from most to least important: an explicit order, or else that of the scores; None where depth was not scored.

    Raises:
        CheckpointError: no order of this model's layers, or one whose first layers lack a kind that every nested model needs.
    """
    arrays, axis = _read_arrays(path), layout.axes[DEPTH]
    if DEPTH_ORDER not in arrays and DEPTH not in arrays:
        return None
    if DEPTH in arrays:
        _check_values(path, DEPTH, arrays[DEPTH], axis)
    order = [int(layer) for layer in arrays[DEPTH_ORDER]] if DEPTH_ORDER in arrays else best_first(arrays[DEPTH], axis)
    if sorted(order) != list(range(axis.size)):
        raise CheckpointError(f"{path}: {DEPTH_ORDER} is no permutation of the layers 0 to {axis.size - 1}")
    _check_needed_first(path, order, layout)
    return tuple(order)


def _check_needed_first(path: Path, order: Sequence[int], layout: Layout) -> None:
    """Raise CheckpointError unless the first layers of an order, however few, have every kind that must stay."""
    kinds = {unit.layer: unit.kind for unit in layout.units}
    first = {kinds[layer] for layer in order[: max(layout.axes[DEPTH].minimum, len(layout.required_kinds))]}
    for kind in sorted(layout.required_kinds - first):
        wanted = next(layer for layer in order if kinds[layer] == kind)
        raise CheckpointError(
            f"{path}: by its order of layers, cuts would lose every {kind} layer, of which one must stay: "
            f"give a {DEPTH_ORDER} that begins with one, such as {wanted}"
        )


def _check_values(path: Path, key: str, values: np.ndarray, axis: Axis) -> None:
    if values.shape != (axis.size,):
        raise CheckpointError(f"{path}: {key} has shape {list(values.shape)}; this model has {axis.size} {axis.name}")
    wrong = int((~np.isfinite(values)).sum())
    if wrong:
        raise CheckpointError(f"{path}: {key} has {wrong} scores that are no finite number")


def best_first(scores: np.ndarray, axis: Axis) -> list[int]:
    """Positions in descending order of score, inside each group; equal scores keep their order."""
    per_group = axis.size // axis.groups
    order = np.argsort(-scores.reshape(axis.groups, per_group), axis=1, kind="stable")
    return [int(position) for position in (order + per_group * np.arange(axis.groups)[:, None]).reshape(-1)]


def members_for(found: Located, layout: Layout, orders: Orders) -> dict[str, Sequence[int]]:
    """The order of every axis of one tensor: an expert's own where it has one, else its layer's, else the model's."""
    keys = {name: axis_key(layout.axes[name], found.unit.layer) for name in found.row.axes}
    members = {name: orders[key] for name, key in keys.items() if key in orders}
    return members if found.member is None else {**members, **own_orders(found, found.member, orders)}


def own_orders(found: Located, member: int, orders: Orders) -> Members:
    """The orders that a single expert has for itself."""
    (counted,) = found.row.dims[0].axes
    keys = {name: member_key(found.unit.layer, counted, member, name) for name in found.row.axes}
    return {name: orders[key] for name, key in keys.items() if key in orders}


def ordered_axes(orders: Orders, layout: Layout) -> tuple[str, ...]:
    """Axes that are in order in every layer that has them, be it by an order of each expert."""
    waiting: dict[str, set[str]] = {}
    for own, general in member_keys(layout).items():
        waiting.setdefault(general, set()).add(own)
    unordered = {
        axis.name
        for key, axis in axis_keys(layout).items()
        if key not in orders and not (key in waiting and waiting[key] <= orders.keys())
    }
    return tuple(name for name in layout.width_axes if name not in unordered)


def _resolve(keys: Mapping[str, object], layout: Layout) -> dict[str, Axis]:
    known, single = axis_keys(layout), member_keys(layout)
    for key in keys:
        if key not in known and key not in single:
            raise UnknownNameError(f"no axis of this model is called {key!r}: {nearest(key, known)}")
    return {key: known[single.get(key, key)] for key in keys}


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: give {SCORES_FILE}, or the folder that `score` wrote")
    try:
        with safe_open(path, framework="numpy") as file:
            return {key: file.get_tensor(key) for key in file.offset_keys()}
    except (SafetensorError, OSError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as scores: {' '.join(str(error).split())}") from None
