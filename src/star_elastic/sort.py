"""Sorting: put the members of every axis in order of importance, once, so that every nested model is a prefix.

Only the order of rows and columns changes, the same in every tensor that an axis indexes, so the model computes what it did
before, to rounding. On grouped axes (heads in KV groups, Mamba heads in SSM groups) members stay inside their group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from star_elastic.card import read_licence, sorted_card
from star_elastic.checkpoint import MAX_SHARD_BYTES, Checkpoint, TensorCut, check_target, weights_sample_sha256
from star_elastic.errors import CheckpointError
from star_elastic.families import family_of
from star_elastic.layout import Layout, Members
from star_elastic.orders import (
    SCORES_FILE,
    Orders,
    check_orders,
    members_for,
    ordered_axes,
    own_orders,
    read_depth_order,
    read_orders,
)
from star_elastic.parentage import TRAINING, parentage
from star_elastic.quant import read_quantized
from star_elastic.rewrite import NewModel, locate, say_quantized, write_models
from star_elastic.submodel import FULL, ElasticConfig, Submodel, open_elastic
from star_elastic.tied import store_once
from star_elastic.version import VERSION

SORTABLE = frozenset({"fp8"})  # one scale for a whole matrix, whatever the order; blocks of NVFP4 would be torn apart


def sort_parent(
    parent: Path | str,
    out: Path | str,
    scores: Path | str,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> ElasticConfig:
    """Write the parent with every scored axis in descending order of its scores; axes without scores keep their order.

    Args:
        parent: a model folder; read only.
        out: new folder, an elastic checkpoint; it appears whole or not at all.
        scores: ``scores.safetensors``, or the folder that ``score`` wrote. One number per member of an axis; keys such as
            ``hidden``, ``layers.3.experts``, or ``layers.3.experts.5.expert_ffn`` for an order of one expert's own. Layers stay
            where they are; their order goes to ``depth_order``, from which ``slice --width depth=N`` takes the first N.
        max_shard_bytes: larger models are split into files of at most this size.
        progress: draw a progress bar on a terminal.

    Returns:
        The content of the new ``elastic.json``.

    Raises:
        UnknownNameError: scores for an axis or layer that the parent does not have.
        CheckpointError: scores of another model, of the wrong length, or not finite; a damaged parent; a full disk.
        TargetError: ``out`` must not be written.

    Example:
        >>> sort_parent("parent", "sorted", "scores").sorted_axes  # doctest: +SKIP
        ('hidden', 'heads', 'mamba_heads', 'mamba_head_dim', 'experts', 'expert_ffn', 'shared_ffn')
    """
    check_target(out, parent)
    _, layout, _ = open_elastic(parent)
    path = Path(scores) / SCORES_FILE if Path(scores).is_dir() else Path(scores)
    orders = read_orders(path, layout, weights_sample_sha256(Checkpoint.open(parent)))
    layers = read_depth_order(path, layout)
    facts = {"scores_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return sort_folder(
        parent, out, orders, layers=layers, facts=facts, max_shard_bytes=max_shard_bytes, progress=progress
    )


def sort_folder(
    parent: Path | str,
    out: Path | str,
    orders: Orders,
    *,
    layers: tuple[int, ...] | None = None,
    facts: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> ElasticConfig:
    """Write the parent with its members in explicit orders; otherwise as ``sort_parent``.

    Args:
        parent: a model folder; read only.
        out: new folder.
        orders: per key a permutation of the axis that leaves every member in its group. The most specific key wins.
        layers: the decoder layers from most to least important; they stay where they are, and elastic.json names their order.
        facts: further provenance to record.
        max_shard_bytes: larger models are split into files of at most this size.
        progress: draw a progress bar on a terminal.

    Raises:
        UnknownNameError: a key that names no axis or layer of the parent.
        CheckpointError: an order that is no such permutation; a parent whose nested sizes are already trained; a damaged
            parent; a full disk.
        TargetError: ``out`` must not be written.
    """
    check_target(out, parent)
    config, layout, elastic = open_elastic(parent)
    if TRAINING in elastic.provenance:
        raise CheckpointError(
            f"{parent} is trained for its nested sizes, and sorting would take them apart: sort its parent"
        )
    check_orders(orders, layout)
    checkpoint, _ = store_once(Checkpoint.open(parent), layout)
    cuts = plan_sort(layout, checkpoint, orders)
    quantized = read_quantized(layout, checkpoint)
    name = parentage(checkpoint, layout, formats=quantized.formats).name
    elastic = elastic.model_copy(
        update={
            "submodels": {FULL: Submodel().completed(layout), **elastic.submodels},
            "sorted_axes": ordered_axes(orders, layout),
            "depth_order": elastic.depth_order if layers is None else layers,
            "provenance": {
                **elastic.provenance,
                "parent": name,
                **(facts or {}),
                "sorted_by": f"star-elastic {VERSION}",
            },
        }
    )
    title, licence = Path(out).resolve().name, read_licence(checkpoint.folder)
    card = sorted_card(
        title=title, parent=name, axes=elastic.sorted_axes, licence=licence, quantized=quantized.text
    )
    config, quantization = say_quantized(family_of(config).child_config(config, {}, None), checkpoint, cuts)
    model = NewModel(out, cuts, config, card, elastic, quantization)
    write_models(checkpoint, [model], label="sort", max_shard_bytes=max_shard_bytes, progress=progress)
    return elastic


def plan_sort(layout: Layout, checkpoint: Checkpoint, orders: Orders) -> list[TensorCut]:
    """The tensors of a sorted folder, in the source's file order.

    Raises:
        CheckpointError: the folder's tensors are not those of the table.
    """
    cuts = []
    for name, found in locate(layout, checkpoint, quantized=SORTABLE).items():
        members = members_for(found, layout, orders)
        member, by_member = found.member, {}
        if member is not None and found.member_axis in members:
            member = list(members[found.member_axis]).index(member)
        if member is None and found.row.routed:
            own: dict[int, Members] = {m: own_orders(found, m, orders) for m in range(found.dims[0].size)}
            by_member = {m: extra for m, extra in own.items() if extra}
        cuts.append(TensorCut(checkpoint.tensors[name], found.renamed(None, member), found.dims, members, by_member))
    return cuts
