"""Everything about a run that can be checked before a weight is loaded."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

import torch

from star_elastic.checkpoint import Checkpoint
from star_elastic.errors import RecipeError, nearest
from star_elastic.families.base import Config
from star_elastic.layout import Layout
from star_elastic.loading import choose_device
from star_elastic.rewrite import locate
from star_elastic.submodel import ElasticConfig, open_elastic, preset_of
from star_elastic.train.balance import bias_rows
from star_elastic.train.data import open_documents
from star_elastic.train.documents import Documents, load_tokenizer
from star_elastic.train.precision import fast_dtype
from star_elastic.train.ranks import ALONE, Ranks
from star_elastic.train.recipe import Recipe
from star_elastic.train.sharding import check_group
from star_elastic.train.stages import Stage
from star_elastic.train.targets import Targets, resolve_targets


@dataclass(frozen=True)
class Outline:
    """What follows from a recipe and the parent's architecture alone.

    Attributes:
        targets: The nested models to train.
        probabilities: By nested model, of each stage; they sum to 1.
        frozen: Names of parameters that are not trained.
    """

    targets: Targets
    probabilities: tuple[dict[str, float], ...]
    frozen: frozenset[str]


@dataclass(frozen=True)
class Plan(Outline):
    """A checked run.

    Attributes:
        recipe: What to do.
        layout: The parent's table.
        elastic: The parent's ``elastic.json`` (or preset), its submodels being those to train; none while they are learned.
        stages: The curriculum.
        tokenizer: The parent's.
        documents: One per source.
        device: Where to train.
        autocast: Dtype of matrix products; None without autocast.
        ranks: The processes of the run.
    """

    recipe: Recipe
    layout: Layout
    elastic: ElasticConfig
    stages: tuple[Stage, ...]
    tokenizer: Any
    documents: list[Documents]
    device: torch.device
    autocast: torch.dtype | None
    ranks: Ranks = ALONE

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know, though it stops nothing."""
        return self.targets.notes

    @property
    def load_device(self) -> torch.device:
        """Where weights are loaded: on the CPU where each process keeps a share of them only."""
        return self.device if self.ranks.size == 1 or self.recipe.shard == "off" else torch.device("cpu")

    @property
    def search_steps(self) -> int:
        """Planned steps of all search stages."""
        return sum(stage.steps for stage in self.stages if stage.phase == "search")


def prepare(recipe: Recipe, ranks: Ranks = ALONE) -> Plan:
    """Check a recipe against the parent, the machine and the data.

    Args:
        recipe: What to do.
        ranks: The processes that will do it.

    Raises:
        CheckpointError: the parent, its weights' headers or its tokenizer cannot be read, or disagree with its config.json.
        WidthError, UnknownNameError: a submodel that the parent cannot be cut to, or an unknown name.
        BudgetError: a budget that no candidates meet.
        RecipeError: rows longer than the model allows; a tokenizer with more tokens than the model; nothing left to train; rows
            that cannot be shared equally by the processes.
        ReservedNameError: a submodel ``full`` that is not the whole model.
        DeviceError: no such device here.
        DataError: data that cannot be read or is empty.
    """
    device = own_device(recipe.device, ranks)
    config, layout, elastic = open_elastic(recipe.parent)
    outline = outline_of(recipe, config, layout, elastic, ranks)
    locate(layout, Checkpoint.open(recipe.parent))
    tokenizer = load_tokenizer(recipe.parent)
    if len(tokenizer) > config["vocab_size"]:
        raise RecipeError(
            f"the tokenizer of {recipe.parent} has {len(tokenizer)} tokens, the model's vocab_size is {config['vocab_size']}"
        )
    return Plan(
        **vars(outline),
        recipe=recipe,
        layout=layout,
        elastic=elastic.model_copy(update={"submodels": outline.targets.submodels}),
        stages=recipe.schedule,
        tokenizer=tokenizer,
        documents=open_documents(recipe.data, tokenizer),
        device=device,
        autocast=_autocast(recipe, device),
        ranks=ranks,
    )


def outline_of(recipe: Recipe, config: Config, layout: Layout, elastic: ElasticConfig, ranks: Ranks) -> Outline:
    """Check a recipe against the parent's architecture and the number of processes, which needs no more than config.json.

    Raises:
        WidthError, UnknownNameError: a submodel that the parent cannot be cut to, or an unknown name.
        CheckpointError: a preset of other shapes.
        BudgetError: a budget that no candidates meet.
        RecipeError: rows longer than the model allows; nothing left to train; rows that the processes cannot share equally.
        ReservedNameError: a submodel ``full`` that is not the whole model.
    """
    known = elastic
    if recipe.preset is not None:
        known = ElasticConfig.of_preset(preset_of(recipe.preset, layout, recipe.parent))
    targets, stages = resolve_targets(recipe, layout, elastic, known), recipe.schedule
    check_shares(stages, ranks)
    check_group(ranks, recipe.shard, recipe.shard_group)
    if recipe.balance_experts is not None:
        bias_rows(layout)
    probabilities = tuple(stage_probabilities(recipe, number, targets.names) for number in range(len(stages)))
    frozen = frozen_parameters(layout, recipe.freeze)
    check_lengths(stages, config.get("max_position_embeddings"))
    return Outline(targets, probabilities, frozen)


def own_device(name: str, ranks: Ranks) -> torch.device:
    """The device of a name; of several processes on GPUs, each takes the one of its number.

    Raises:
        DeviceError: no such device on this machine.
        RecipeError: one GPU for several processes.
    """
    if ranks.size == 1:
        return choose_device(name)
    kind, _, number = name.partition(":")
    if number:
        raise RecipeError(f"device {name} is one device, but {ranks.size} processes train: give {kind}, or auto")
    if name == "auto":
        kind = choose_device(name).type
    return choose_device(kind if kind == "cpu" else f"{kind}:{ranks.local_rank}")


def check_shares(stages: tuple[Stage, ...], ranks: Ranks) -> None:
    """Raise RecipeError for batches that cannot be shared equally by the processes."""
    for number, stage in enumerate(stages):
        if stage.batch_size % ranks.size:
            where = f"stages.{number}: " if len(stages) > 1 else ""
            near = max(stage.batch_size // ranks.size, 1) * ranks.size
            raise RecipeError(
                f"{where}batch_size {stage.batch_size} cannot be shared equally by {ranks.size} processes: give a multiple, "
                f"such as {near}"
            )


def stage_probabilities(recipe: Recipe, number: int, names: tuple[str, ...]) -> dict[str, float]:
    """Chance of each nested model at a step of a stage, summing to 1.

    Raises:
        RecipeError: probabilities of other nested models than those that are trained, or more nested models per step than can be
            drawn. Where the recipe names them itself, it has been checked as it was read.
    """
    stage = recipe.schedule[number]
    if (wrong := stage.misfit(names)) is not None:
        where = "the run" if recipe.stages is None else f"stages.{number}"
        raise RecipeError(f"{where}: {wrong[0]}")
    if stage.probabilities is not None:
        shares = {name: stage.probabilities[name] for name in names}
    else:
        given = {name: entry.probability for name, entry in (recipe.budgets or recipe.submodels or {}).items()}
        shares = {name: given.get(name) or 1.0 for name in names}
    return {name: share / sum(shares.values()) for name, share in shares.items()}


def frozen_parameters(layout: Layout, patterns: tuple[str, ...]) -> frozenset[str]:
    """Names of the parameters that match any of the shell patterns.

    Raises:
        RecipeError: a pattern without a match, or patterns that leave nothing to train.
    """
    names = {unit.name(row) for unit, row in layout.tensors() if not row.buffer and row.alias is None}
    found: set[str] = set()
    for pattern in patterns:
        matched = set(fnmatch.filter(names, pattern))
        if not matched:
            raise RecipeError(f"freeze: no parameter matches {pattern!r}; {nearest(pattern, names)}")
        found |= matched
    if found == names:
        raise RecipeError(f"freeze: {', '.join(patterns)} match every parameter: nothing is left to train")
    return frozenset(found)


def check_lengths(stages: tuple[Stage, ...], longest: int | None) -> None:
    """Raise RecipeError for rows that are longer than the model allows."""
    for number, stage in enumerate(stages):
        if longest is not None and stage.sequence_length > longest:
            where = f"stages.{number}: " if len(stages) > 1 else ""
            raise RecipeError(
                f"{where}sequence_length = {stage.sequence_length}: the parent's max_position_embeddings is {longest}"
            )


def _autocast(recipe: Recipe, device: torch.device) -> torch.dtype | None:
    """bf16 where asked for; with ``auto`` where the hardware multiplies bf16."""
    if recipe.precision == "auto" and recipe.master_weights == "fp32":
        return fast_dtype(device)
    return None if recipe.precision == "fp32" else torch.bfloat16
