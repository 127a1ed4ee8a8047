"""Hard mask == sliced lens at every legal width of every axis, of every family."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny import FAMILIES, tokens

from star_elastic.elastic import ElasticModel
from star_elastic.masks import hard_masks
from star_elastic.submodel import Submodel

EDITS = {"nemotron_h": {"pattern": "ME*-E", "mamba_head_dim": 16}}  # with a dense MLP


@cache
def elastic_of(family: str) -> ElasticModel:
    return ElasticModel(FAMILIES[family](**EDITS.get(family, {})))


def legal(family: str, axis: str) -> list[Submodel]:
    """Every nested model that is cut along one axis alone; of depth, every one without one layer, or without the last ones.

    Granite's Mamba width must be a multiple of hidden: beside a smaller hidden there are more.
    """
    layout = elastic_of(family).layout
    if axis == "depth":
        every = range(layout.num_layers)
        cuts = [tuple(n for n in every if n != gone) for gone in every] + [tuple(range(n)) for n in every if n]
        return [Submodel(layers=cut) for cut in dict.fromkeys(cuts) if _stands(layout, cut)]
    beside = {"hidden": 32} if layout.couplings and axis.startswith("mamba") else {}
    cuts = [{**beside, axis: width} for width in layout.axes[axis].legal()[:-1]]
    return [Submodel(widths=widths) for widths in cuts if layout.fits(widths)]


def _stands(layout, cut: tuple[int, ...]) -> bool:
    kinds = {unit.kind for unit in layout.kept_units(cut)}
    return all(kind in kinds for kind in layout.required_kinds)


@pytest.mark.parametrize(
    ("family", "axis"), [(family, axis) for family in FAMILIES for axis in elastic_of(family).layout.axes]
)
def test_every_legal_width(family: str, axis: str) -> None:
    elastic, ids = elastic_of(family), tokens(length=12)
    with torch.no_grad():
        whole = elastic(ids).logits
        found = legal(family, axis)
        assert len(found) >= 2
        for number, submodel in enumerate(found):
            elastic.add("cut", submodel)
            wanted = elastic(ids, submodel="cut").logits
            with elastic.masked(hard_masks(elastic.layout, submodel)):
                seen = elastic(ids).logits
            error, largest = (seen - wanted).abs().max(), wanted.abs().max()
            assert error < 1e-5 * largest, f"{number}: {submodel}"
            assert (wanted - whole).abs().max() > 1e-3 * largest, f"{submodel} changes nothing"
