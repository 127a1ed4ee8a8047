"""Soft masks between their limits, for every family and axis: towards 0 they become the cut model, towards 1 the parent.

Only a swap of the top-k experts may jump. Where another axis is masked every expert is therefore routed to, so that none swaps.
"""

from __future__ import annotations

import functools
from functools import cache

import pytest
import torch
from hand_cut import batch
from tiny import FAMILIES, tiny_qwen3_moe

from star_elastic.elastic import ElasticModel
from star_elastic.masks import hard_masks
from star_elastic.submodel import Submodel

ALL = "all"
BUILDERS = {**FAMILIES, "qwen3_moe normed": functools.partial(tiny_qwen3_moe, norm_topk_prob=True)}


@cache
def elastic_of(family: str, top_k: int) -> ElasticModel:
    model = BUILDERS[family]()
    has_experts = hasattr(model.config, "num_experts_per_tok")
    return ElasticModel(BUILDERS[family](num_experts_per_tok=top_k) if has_experts else model)


def model_for(family: str, axis: str) -> ElasticModel:
    """Top-2 of 8 experts where experts are masked, all 8 otherwise."""
    return elastic_of(family, 2 if axis == "experts" else 8)


def hard_of(family: str, axis: str) -> dict[str, torch.Tensor]:
    """A hard mask about half way down one axis, or down every axis but experts."""
    layout = model_for(family, axis).layout
    halves = {}
    for name, one in layout.width_axes.items():
        if name == "experts" and axis != "experts":
            continue  # all 8 are routed to
        legal = one.legal()
        halves[name] = legal[(len(legal) - 1) // 2]
    if layout.couplings and "mamba_heads" in halves:  # Granite's Mamba width stays a multiple of hidden
        halves |= {"hidden": 32, "mamba_heads": 4, "mamba_head_dim": 8}
    layers = tuple(range(1, layout.num_layers)) if axis in ("depth", ALL) else None
    if axis == ALL:
        return hard_masks(layout, Submodel(widths=halves, layers=layers))
    return hard_masks(layout, Submodel(widths={} if axis == "depth" else {axis: halves[axis]}, layers=layers))


CASES = [(family, axis) for family in BUILDERS for axis in [*elastic_of(family, 2).layout.axes, ALL]]


@pytest.mark.parametrize(("family", "axis"), CASES)
def test_soft_masks_go_continuously_to_both_limits(family, axis):
    """What a member at distance d from its limit changes vanishes with d; half way it is plain to see."""
    elastic, hard = model_for(family, axis), hard_of(family, axis)
    ids = batch()

    def logits(value):
        """With every dropped member at ``value``."""
        with torch.no_grad(), elastic.masked({name: mask + value * (1 - mask) for name, mask in hard.items()}):
            return elastic(ids).logits

    with torch.no_grad():
        parent = elastic.model(ids).logits
        with elastic.masked(hard):
            cut = elastic(ids).logits
    for limit, wanted, towards in ((0.0, cut, 1.0), (1.0, parent, -1.0)):
        far, near, nearer = (
            ((logits(limit + towards * d) - wanted).abs().max() / wanted.abs().max()).item() for d in (0.5, 1e-4, 1e-6)
        )
        assert far > 1e-2
        assert near < 0.05 * far
        assert nearer < 0.1 * near + 1e-5
    assert torch.equal(logits(1.0), parent), "masks of ones are the untouched parent, bit for bit"
    assert torch.equal(logits(0.0), cut)
