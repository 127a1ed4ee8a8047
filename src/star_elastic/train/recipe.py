"""The training recipe: what it may say, and its defaults. ``yaml_text`` reads it and finds the line of a mistake.

Defaults are those of the published run (arXiv 2511.16664 and 2605.07182): AdamW with betas (0.9, 0.98), no weight decay, clipping
at 1.0, learning rate 1e-4 falling to 1e-5 along a cosine after 60 steps of warm-up, forward KL at temperature 1 over all tokens,
70% reasoning data and 30% text. Everything that is not given here comes from the model: its dtype, its vocabulary, its limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from star_elastic.train.yaml_text import Overrides, YamlText, explain
from star_elastic.units import parse_count


def _count(value: Any) -> Any:
    """``60B`` and ``1.5e9``, which YAML reads as text, and ``1.5e+9``, which it reads as a float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return parse_count(value) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # Python's True is 1
        raise ValueError("should be a number")
    return value


def _filled(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():  # as a path it would mean the current folder
        raise ValueError("should not be empty")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("should not contain a NUL character")
    return value


# Whole numbers are strict: neither true nor '32' nor 32.0. Other numbers may be text, since YAML reads 1e-4 as text.
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NaturalInt = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
Beta = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number)]
Folder = Annotated[Path, BeforeValidator(_filled)]
Name = Annotated[str, BeforeValidator(_filled)]

KIND_SHARES = {"reasoning": 0.7, "text": 0.3}


class Section(BaseModel):
    """Base of the recipe and its parts: no unknown key passes, nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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

    path: Name | None = None
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
    def _weights_for_all_or_none(cls, sources: tuple[SourceRecipe, ...]) -> tuple[SourceRecipe, ...]:
        _all_or_none("weight", {source.name: source.weight for source in sources})
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
        submodels: The nested models to train, by name. Default: all of the preset or of ``elastic.json``.
        data: What to learn from.
        sequence_length: Tokens per row.
        batch_size: Rows per step.
        steps: Optimizer steps of the run.
        tokens: Instead of ``steps``: tokens of the run, such as ``60B`` or ``1.5e9``, rounded up to whole steps of
            ``batch_size * sequence_length``.
        optimizer: AdamW and its learning rate.
        precision: ``bf16`` runs matrix products under autocast, ``fp32`` does not; ``auto`` takes bf16 where the hardware has it.
            The student's weights and AdamW's moments stay fp32 either way.
        kl_chunk_tokens: Tokens whose logits exist at one time in the loss.
        activation_checkpointing: Recompute each layer in the backward pass: less memory, about a third more time.
        checkpoint_every: Steps between checkpoints of the run.
        keep_checkpoints: How many of the latest to keep.
        log_every: Steps between lines of ``metrics.jsonl``.
        seed: Seed of the data order, of the choice of submodels and of torch.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
    """

    parent: Folder
    output: Folder
    preset: str | None = None
    submodels: dict[str, SubmodelRecipe] | None = Field(default=None, min_length=1)
    data: DataRecipe
    sequence_length: Annotated[int, Field(ge=2, strict=True)] = 8192
    batch_size: PositiveInt = 8
    steps: PositiveInt | None = None
    tokens: Annotated[PositiveInt, BeforeValidator(_count)] | None = None
    optimizer: OptimizerRecipe = OptimizerRecipe()
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    kl_chunk_tokens: PositiveInt = 1024
    activation_checkpointing: Annotated[bool, Field(strict=True)] = False
    checkpoint_every: PositiveInt = 500
    keep_checkpoints: PositiveInt = 2
    log_every: PositiveInt = 1
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    device: str = "auto"

    @field_validator("submodels")
    @classmethod
    def _probabilities_for_all_or_none(
        cls, submodels: dict[str, SubmodelRecipe] | None
    ) -> dict[str, SubmodelRecipe] | None:
        _all_or_none("probability", {name: submodel.probability for name, submodel in (submodels or {}).items()})
        return submodels

    @model_validator(mode="after")
    def _length_of_the_run(self) -> Recipe:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("a recipe needs exactly one of 'steps' and 'tokens'")
        if self.optimizer.warmup_steps >= self.total_steps:
            raise ValueError(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} must be below the run's {self.total_steps} steps"
            )
        return self

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps or math.ceil((self.tokens or 0) / (self.batch_size * self.sequence_length))


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


def _all_or_none(key: str, values: Mapping[str, float | None]) -> None:
    missing = [name for name, value in values.items() if value is None]
    if missing and len(missing) < len(values):
        raise ValueError(f"give {key!r} for all or for none; it is missing for {', '.join(missing)}")
