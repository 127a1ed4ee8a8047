"""The training recipe: what it may say, and its defaults. ``yaml_text`` reads it and finds the line of a mistake.

Defaults are those of the published run (arXiv 2511.16664 and 2605.07182): AdamW with betas (0.9, 0.98), no weight decay, clipping
at 1.0, learning rate 1e-4 falling to 1e-5 along a cosine after 60 steps of warm-up, forward KL at temperature 1 over all tokens,
70% reasoning data and 30% text. Everything that is not given here comes from the model: its dtype, its vocabulary, its limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from star_elastic.train.recipe_options import BalanceRecipe, Tracker
from star_elastic.train.recipe_search import BudgetRecipe, RouterRecipe, StageRecipe
from star_elastic.train.recipe_types import (
    Beta,
    Decay,
    Folder,
    Name,
    NaturalInt,
    NotNegative,
    PathText,
    Positive,
    PositiveInt,
    RowLength,
    Section,
    Sharding,
    Switch,
    Tokens,
    all_or_none,
    mistake,
)
from star_elastic.train.stages import Stage, resolve_stages
from star_elastic.train.yaml_text import Overrides, YamlText, explain

KIND_SHARES = {"reasoning": 0.7, "text": 0.3}


class SubmodelRecipe(Section):
    """One nested model to train.

    Attributes:
        widths: Width per axis; axes left out keep the parent's, so ``{}`` is the full model. None (and no ``layers``) takes the
            submodel of this name from the preset or from the parent's ``elastic.json``; ``full`` is always known.
        layers: Decoder layers that stay, ascending, by the parent's numbers. None keeps all.
        probability: Chance of being the submodel of a step. Give it for all submodels or for none (then all are equal); the sum
            need not be 1.
    """

    widths: dict[str, PositiveInt] | None = None
    layers: tuple[NaturalInt, ...] | None = None
    probability: Positive | None = None


class SourceRecipe(Section):
    """One source of training data. Exactly one of ``path`` and ``hub``.

    Attributes:
        path: A text, JSON-lines or parquet file, a glob such as ``books/**/*.txt``, a directory of text files, or a folder
            written by ``datasets`` (``save_to_disk``). Relative to where the command runs.
        hub: Name of a dataset on the Hugging Face hub.
        subset: Configuration of the hub dataset.
        split: Split of a hub dataset, or of a folder that holds several.
        revision: Git revision of the hub dataset.
        kind: ``reasoning`` or ``text``: decides the default weight.
        weight: Share of the training tokens, relative to the other sources. Give it for all sources or for none.
        field: Column to read. Default: ``messages`` (chat) where there is one, else ``text``.
        format: How to read ``path``; ``auto`` goes by the file's ending.
        sample_by: What one document of a text file is: the whole file (``document``), a ``paragraph`` (blank lines between),
            or a ``line``.
    """

    path: PathText | None = None
    hub: Name | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    kind: Literal["reasoning", "text"] = "text"
    weight: Positive | None = None
    field: str | None = None
    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = "auto"
    sample_by: Literal["document", "paragraph", "line"] = "document"

    @model_validator(mode="after")
    def _one_place(self) -> SourceRecipe:
        if (self.path is None) == (self.hub is None):
            raise ValueError("a source needs exactly one of 'path' and 'hub'")
        return self

    @property
    def name(self) -> str:
        """How messages call this source."""
        return self.path if self.path is not None else f"hub:{self.hub}"


class DataRecipe(Section):
    """The mixture of sources, and how documents become rows.

    Attributes:
        sources: At least one.
        packing: ``cross`` fills every row to the brim with documents, an end-of-sequence token after each; attention and SSM
            state run across them. ``apart`` puts one document (or one window of a long one) in a row and pads the rest.
        shuffle_tokens: Rows of a source are shuffled in blocks of about this many tokens, on top of the shuffle of its
            documents, so that windows of one long document do not follow each other. 1 turns it off.
    """

    sources: tuple[SourceRecipe, ...] = Field(min_length=1)
    packing: Literal["cross", "apart"] = "cross"
    shuffle_tokens: PositiveInt = 1 << 20

    @field_validator("sources")
    @classmethod
    def _weights_forall_or_none(cls, sources: tuple[SourceRecipe, ...]) -> tuple[SourceRecipe, ...]:
        all_or_none("weight", {source.name: source.weight for source in sources})
        return sources

    def weights(self) -> tuple[float, ...]:
        """Share of the tokens per source, summing to 1.

        Without given weights the reasoning sources share 0.7 and the text sources 0.3, equally within a kind; where only one
        kind is present it gets everything.
        """
        kinds = [source.kind for source in self.sources]
        shares = [source.weight or KIND_SHARES[source.kind] / kinds.count(source.kind) for source in self.sources]
        return tuple(share / sum(shares) for share in shares)


class OptimizerRecipe(Section):
    """AdamW and its learning rate.

    Attributes:
        lr: Peak learning rate.
        min_lr: Where the cosine ends; not above ``lr``.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        clip: Largest norm of the whole gradient; larger ones are scaled down to it.
        warmup_steps: Steps of linear warm-up; fewer than the run's steps.
    """

    lr: Positive = 1e-4
    min_lr: NotNegative = 1e-5
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip: Positive = 1.0
    warmup_steps: NaturalInt = 60

    @model_validator(mode="after")
    def _floor_below_peak(self) -> OptimizerRecipe:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} must not be above lr {self.lr:g}")
        return self


class Recipe(Section):
    """A whole training run.

    Attributes:
        parent: Folder of the sorted parent: the frozen teacher, and where the student starts.
        output: Folder of the elastic checkpoint to write; must not exist or be empty. Until it is done the run lives beside it,
            in ``OUTPUT.run``.
        preset: Nested sizes of a published family. Default: those of the parent's ``elastic.json``.
        submodels: The nested models to train, by name, with fixed widths. Default: all of the preset or of ``elastic.json``.
        budgets: Instead of ``submodels`` and ``preset``: what each nested model may cost; a router learns the widths.
        router: How it learns them.
        stages: The curriculum, in order: search stages, then settle stages. Default: ``steps`` or ``tokens`` as one settle stage;
            with budgets 5/8 of them as a search stage and the rest as a settle stage.
        data: What to learn from.
        sequence_length: Tokens per row.
        batch_size: Rows per step.
        accumulate: Parts that a step's rows are run in, one after the other: less memory, the same step.
        budgets_per_step: How many nested models learn from a step's rows; the teacher reads them once.
        steps: Optimizer steps of the run, where there are no ``stages``.
        tokens: Instead of ``steps``: tokens of the run, such as ``60B`` or ``1.5e9``, rounded up to whole steps of
            ``batch_size * sequence_length``.
        optimizer: AdamW and its learning rate, of every stage that does not say otherwise.
        precision: ``bf16`` runs matrix products under autocast, ``fp32`` does not; ``auto`` takes bf16 where the hardware has it.
        master_weights: Dtype of the student's weights, gradients and AdamW's moments. ``bf16`` takes half the memory, but drops
            updates below 1/256 of a weight: at the end of a cosine that is most of them.
        ema: Decay of a running average of the weights, which is then what is written; None for none.
        freeze: Shell patterns of parameter names that are not trained.
        kl_chunk_tokens: Tokens whose logits exist at one time in the loss.
        teacher_cache: What ``cache-teacher`` wrote for this recipe; the teacher is then not loaded.
        balance_experts: Move the experts' selection bias towards even loads; None leaves it as it is.
        shard: How several processes share the models: ``full`` gives each a share of every large tensor; ``hybrid`` keeps a copy
            in each group of processes, for less traffic between machines; ``off`` gives each a copy.
        shard_group: Processes that share one copy in ``hybrid``; those of a machine by default.
        activation_checkpointing: Recompute each layer in the backward pass: less memory, about a third more time. ``auto`` does
            it in search stages, where masked copies of all layers would live until then.
        checkpoint_every: Steps between checkpoints of the run.
        keep_checkpoints: How many of the latest to keep.
        log_every: Steps between lines of ``metrics.jsonl``.
        track: Where metrics go besides: ``tensorboard``, ``wandb``, or both.
        seed: Seed of the data order, of the choice of submodels, of the router and of torch.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
    """

    parent: Folder
    output: Folder
    preset: str | None = None
    submodels: dict[str, SubmodelRecipe] | None = Field(default=None, min_length=1)
    budgets: dict[Name, BudgetRecipe] | None = Field(default=None, min_length=1)
    router: RouterRecipe = RouterRecipe()
    stages: tuple[StageRecipe, ...] | None = Field(default=None, min_length=1)
    data: DataRecipe
    sequence_length: RowLength = 8192
    batch_size: PositiveInt = 8
    accumulate: PositiveInt = 1
    budgets_per_step: PositiveInt = 1
    steps: PositiveInt | None = None
    tokens: Tokens | None = None
    optimizer: OptimizerRecipe = OptimizerRecipe()
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    master_weights: Literal["fp32", "bf16"] = "fp32"
    ema: Decay = None
    freeze: tuple[Name, ...] = ()
    kl_chunk_tokens: PositiveInt = 1024
    teacher_cache: Folder | None = None
    balance_experts: BalanceRecipe | None = None
    shard: Sharding = "full"
    shard_group: PositiveInt | None = None
    activation_checkpointing: Switch = "auto"
    checkpoint_every: PositiveInt = 500
    keep_checkpoints: PositiveInt = 2
    log_every: PositiveInt = 1
    track: tuple[Tracker, ...] = ()
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    device: str = "auto"

    @field_validator("submodels", "budgets")
    @classmethod
    def _probabilities_for_all_or_none(cls, entries: dict[str, Any] | None) -> dict[str, Any] | None:
        all_or_none("probability", {name: entry.probability for name, entry in (entries or {}).items()})
        return entries

    @model_validator(mode="after")
    def _keys_that_fit_together(self) -> Recipe:
        if self.budgets is None:
            if "router" in self.model_fields_set:
                raise mistake("a router needs 'budgets' to learn widths for; 'submodels' have fixed ones", "router")
        elif self.submodels is not None or self.preset is not None:
            other = "submodels" if self.submodels is not None else "preset"
            raise mistake(f"give either 'budgets' (widths are learned) or {other!r} (widths are fixed)", other)
        if self.precision == "fp32" and self.master_weights == "bf16":
            raise mistake("master_weights bf16 computes in bf16: precision fp32 contradicts it", "master_weights")
        if self.stages is None and (self.steps is None) == (self.tokens is None):
            raise ValueError("a recipe needs exactly one of 'steps' and 'tokens', or 'stages'")
        if self.stages is not None and (self.steps is not None or self.tokens is not None):
            given = "steps" if self.steps is not None else "tokens"
            raise mistake(f"with 'stages', each stage says its own length: remove {given!r}", given)
        return self

    @model_validator(mode="after")
    def _stages_that_can_run(self) -> Recipe:
        _check_order(self)
        names = list(self.budgets or self.submodels or ())
        for number, stage in enumerate(self.schedule):
            at = () if self.stages is None else ("stages", number)
            where = "the run" if self.stages is None else f"stages.{number}"
            prefix = "optimizer.warmup_steps" if self.stages is None else f"{where}: warmup_steps"
            length = f"the run's {stage.steps} steps" if self.stages is None else f"its {stage.steps} steps"
            if self.stages is None and self.budgets is not None:
                length = f"the {stage.phase} stage's {stage.steps} steps"
            if stage.warmup_steps >= stage.steps:
                raise mistake(f"{prefix} {stage.warmup_steps} must be below {length}", *at)
            if stage.min_lr > stage.lr:
                raise mistake(f"{where}: min_lr {stage.min_lr:g} must not be above lr {stage.lr:g}", *at)
            if stage.accumulate > stage.batch_size:
                raise mistake(f"{where}: accumulate {stage.accumulate} is above batch_size {stage.batch_size}", *at)
            if names and (wrong := stage.misfit(names)) is not None:
                raise mistake(f"{where}: {wrong[0]}", *at, *wrong[1])
        return self

    @property
    def schedule(self) -> tuple[Stage, ...]:
        """The stages with every value spelled out."""
        return resolve_stages(self)

    @property
    def total_steps(self) -> int:
        """Planned optimizer steps of the run."""
        return sum(stage.steps for stage in self.schedule)


def _check_order(recipe: Recipe) -> None:
    """Search needs budgets, budgets need search, and search comes before settling."""
    phases = [stage.phase for stage in recipe.stages or ()]
    if "search" in phases and recipe.budgets is None:
        raise mistake("a search stage needs 'budgets' to learn widths for", "stages", phases.index("search"))
    if phases and recipe.budgets is not None and phases[0] != "search":
        raise mistake("the first stage of a recipe with budgets must be a search stage", "stages", 0)
    for number in range(1, len(phases)):
        if (phases[number - 1], phases[number]) == ("settle", "search"):
            raise mistake(f"stages.{number} is a search stage after a settle stage: search first", "stages", number)


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file.

    Args:
        path: The YAML file.
        overrides: ``key=value`` with dots into sections and numbers into lists, such as ``optimizer.lr=3e-4`` or
            ``data.sources.0.weight=2``; the value is read as YAML.

    Raises:
        RecipeError: unreadable file, broken YAML, a key given twice, an unknown key, or an impossible value; one line that names
            the line of the file (or the override) and what would be right.
    """
    text = YamlText.read(Path(path))
    changes = Overrides(overrides)
    try:
        return Recipe.model_validate(changes.apply(text.content))
    except ValidationError as error:
        raise explain(error, Recipe, text, changes) from None


def override(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The same recipe with ``key=value`` changes, checked again.

    Raises:
        RecipeError: as for ``load_recipe``.
    """
    changes = Overrides(overrides)
    given: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    try:
        return Recipe.model_validate(changes.apply(given))
    except ValidationError as error:
        raise explain(error, Recipe, None, changes) from None
