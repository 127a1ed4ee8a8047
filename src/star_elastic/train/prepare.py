"""Everything about a run that can be checked before a weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from star_elastic.checkpoint import Checkpoint
from star_elastic.errors import RecipeError, ReservedNameError, UnknownNameError, WidthError
from star_elastic.layout import Layout
from star_elastic.loading import choose_device
from star_elastic.rewrite import locate
from star_elastic.submodel import ElasticConfig, Submodel, check_named, open_elastic
from star_elastic.train.data import open_documents
from star_elastic.train.documents import Documents, load_tokenizer
from star_elastic.train.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """A checked run.

    Attributes:
        recipe: What to do.
        layout: The parent's table.
        elastic: The parent's ``elastic.json`` (or preset), its submodels being those to train.
        probabilities: Per submodel, summing to 1.
        tokenizer: The parent's.
        documents: One per source.
        device: Where to train.
        autocast: Dtype of matrix products; None without autocast.
        notes: What the user should know, though it stops nothing.
    """

    recipe: Recipe
    layout: Layout
    elastic: ElasticConfig
    probabilities: dict[str, float]
    tokenizer: Any
    documents: list[Documents]
    device: torch.device
    autocast: torch.dtype | None
    notes: tuple[str, ...]


def prepare(recipe: Recipe) -> Plan:
    """Check a recipe against the parent, the machine and the data.

    Raises:
        CheckpointError: the parent, its weights' headers or its tokenizer cannot be read, or disagree with its config.json.
        WidthError, UnknownNameError: a submodel that the parent cannot be cut to, or an unknown name.
        RecipeError: rows longer than the model allows; a tokenizer with more tokens than the model.
        ReservedNameError: a submodel ``full`` that is not the whole model.
        DeviceError: no such device here.
        DataError: data that cannot be read or is empty.
    """
    device = choose_device(recipe.device)
    config, layout, elastic = open_elastic(recipe.parent)
    known = open_elastic(recipe.parent, preset=recipe.preset)[2] if recipe.preset else elastic
    elastic = elastic.model_copy(update={"submodels": _submodels(recipe, layout, known)})
    locate(layout, Checkpoint.open(recipe.parent))
    longest = config.get("max_position_embeddings")
    if longest is not None and recipe.sequence_length > longest:
        raise RecipeError(f"sequence_length = {recipe.sequence_length}: the parent's max_position_embeddings is {longest}")
    tokenizer = load_tokenizer(recipe.parent)
    if len(tokenizer) > config["vocab_size"]:
        raise RecipeError(
            f"the tokenizer of {recipe.parent} has {len(tokenizer)} tokens, the model's vocab_size is {config['vocab_size']}"
        )
    return Plan(
        recipe=recipe,
        layout=layout,
        elastic=elastic,
        probabilities=_probabilities(recipe, elastic),
        tokenizer=tokenizer,
        documents=open_documents(recipe.data, tokenizer),
        device=device,
        autocast=_autocast(recipe.precision, device),
        notes=_notes(layout, elastic),
    )


def _submodels(recipe: Recipe, layout: Layout, known: ElasticConfig) -> dict[str, Submodel]:
    """The nested models to train, in the recipe's order, all widths spelled out."""
    if recipe.submodels is None:
        if not known.submodels:
            raise RecipeError(f"no submodels: {recipe.parent} has no elastic.json that lists any; give 'submodels' or 'preset'")
        return {name: submodel.completed(layout) for name, submodel in known.submodels.items()}
    chosen = {}
    for name, entry in recipe.submodels.items():
        if entry.widths is None and entry.layers is None:
            try:
                chosen[name] = known.get(name).completed(layout)
            except UnknownNameError as error:
                raise UnknownNameError(f"{error}; for a new submodel give widths, such as {{hidden: 48}}") from None
            continue
        submodel = Submodel(widths=entry.widths or {}, layers=entry.layers)
        try:
            check_named(name, submodel, layout)
        except (WidthError, UnknownNameError, ReservedNameError) as error:
            raise type(error)(f"submodel {name!r}: {error}") from None
        chosen[name] = submodel.completed(layout)
    return chosen


def _probabilities(recipe: Recipe, elastic: ElasticConfig) -> dict[str, float]:
    given = {name: entry.probability for name, entry in (recipe.submodels or {}).items()}
    shares = {name: given.get(name) or 1.0 for name in elastic.submodels}
    return {name: share / sum(shares.values()) for name, share in shares.items()}


def _autocast(precision: str, device: torch.device) -> torch.dtype | None:
    """bf16 where asked for; with ``auto`` where the hardware multiplies bf16, since emulated it is slower than fp32."""
    if precision == "auto":
        if device.type == "cpu":
            capabilities = torch.cpu.get_capabilities()
            fast = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
        else:
            fast = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else None
    return torch.bfloat16 if precision == "bf16" else None


def _notes(layout: Layout, elastic: ElasticConfig) -> tuple[str, ...]:
    """Axes that a submodel cuts although the parent was never sorted along them."""
    full = layout.complete({})
    cut = {axis for submodel in elastic.submodels.values() for axis, width in submodel.widths.items() if width < full[axis]}
    unsorted = sorted(cut - set(elastic.sorted_axes))
    if not unsorted:
        return ()
    return (f"the parent is not sorted along {', '.join(unsorted)}: submodels keep arbitrary members there; run `sort` first",)
