"""Star Elastic: one checkpoint that holds a family of nested models.

The names below are the whole public surface. Each is imported when first used, so that ``import star_elastic`` is instant.

``ElasticModel``
    A transformers model that also runs as any of its nested models::

        model = ElasticModel.from_pretrained("elastic")
        with model.at("small"):
            logits = model(input_ids).logits
        small = model.submodel("small")          # an ordinary transformers model, on views of the parent's weights

``ElasticConfig``
    The nested models of a checkpoint, as in its ``elastic.json``::

        ElasticConfig.load("elastic").get("small").widths

``Submodel``
    One nested model: how much of each axis it keeps::

        Submodel(widths={"hidden": 1920, "expert_ffn": 960})

``Budget``
    An upper bound on parameters, active parameters or memory::

        Budget("memory", 24 * 2**30, context=32768)

``Layout``
    The table that says which axis indexes each dimension of each parameter; ``layout_of`` reads it from a config.json::

        layout = layout_of(json.load(open("parent/config.json")))
        layout.axes["heads"].legal()

One function per verb of the command line:

``describe``
    Axes, legal widths, counts and bytes, from a config alone::

        describe("parent").submodels["full"].params

``score_parent``
    Rank the members of every axis on calibration data::

        score_parent("parent", "scores", data="calibration.jsonl", samples=64, seq_len=512)

``sort_parent``
    Bake that order into the weights, so that every nested model is a prefix::

        sort_parent("parent", "sorted", scores="scores")

``train_family``
    Distil all nested sizes from the frozen parent in one run::

        train_family("recipe.yaml", overrides=["steps=200"])

``search_parent``
    The widths under a budget that cost least in held-out loss, without training::

        search_parent("sorted", Budget("active_params", 2_000_000_000), "held-out.jsonl").command

``slice_checkpoint``
    Cut a nested model out as an ordinary transformers folder::

        slice_checkpoint("elastic", "small", Submodel(widths={"hidden": 1920}))

``generate_text``
    Continue a prompt with one nested model::

        generate_text("elastic", "2 + 2 =", submodel="small")

``run_demo``
    Everything above on a model small enough for two CPU cores::

        run_demo("demo-out")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from star_elastic.version import VERSION

if TYPE_CHECKING:
    from star_elastic.demo import run_demo
    from star_elastic.elastic import ElasticModel
    from star_elastic.families import layout_of
    from star_elastic.generate import generate_text
    from star_elastic.inspect import describe
    from star_elastic.ladder import Budget
    from star_elastic.layout import Layout
    from star_elastic.score import score_parent
    from star_elastic.search import search_parent
    from star_elastic.slice import slice_checkpoint
    from star_elastic.sort import sort_parent
    from star_elastic.submodel import ElasticConfig, Submodel
    from star_elastic.train import train_family

__version__ = VERSION

_HOME = {
    "Budget": "ladder",
    "ElasticConfig": "submodel",
    "ElasticModel": "elastic",
    "Layout": "layout",
    "Submodel": "submodel",
    "describe": "inspect",
    "generate_text": "generate",
    "layout_of": "families",
    "run_demo": "demo",
    "score_parent": "score",
    "search_parent": "search",
    "slice_checkpoint": "slice",
    "sort_parent": "sort",
    "train_family": "train",
}

__all__ = [
    "Budget",
    "ElasticConfig",
    "ElasticModel",
    "Layout",
    "Submodel",
    "describe",
    "generate_text",
    "layout_of",
    "run_demo",
    "score_parent",
    "search_parent",
    "slice_checkpoint",
    "sort_parent",
    "train_family",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'star_elastic' has no attribute {name!r}")
    return getattr(importlib.import_module(f"star_elastic.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
