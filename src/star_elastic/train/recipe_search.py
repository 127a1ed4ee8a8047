"""The parts of a recipe that speak of learned widths: budgets, the router, and the stages of the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from star_elastic.budget import BudgetError, read_value
from star_elastic.train.recipe_types import (
    Folder,
    NaturalInt,
    NotNegative,
    Positive,
    PositiveInt,
    RowLength,
    Section,
    Share,
    Tokens,
    mistake,
)

BUDGET_KINDS = ("params", "active_params", "memory", "latency")


class BudgetRecipe(Section):
    """What one nested model may cost; the router finds its widths. Exactly one kind.

    A number up to 1, or ``50%``, is a share of the full model; anything else is absolute, such as ``12B``, ``24GiB``, ``35ms``.

    Attributes:
        params: All parameters.
        active_params: Parameters that one token uses.
        memory: All resident weights and the caches of ``batch`` sequences of ``context`` tokens.
        latency: Seconds, by a table of measured times.
        context: Tokens per sequence, for ``memory``.
        batch: Sequences at once, for ``memory``.
        dtype: Format of the weights, for ``memory``.
        table: File that ``star-elastic profile`` wrote, for ``latency``.
        probability: Chance of being trained by a step. Give it for all budgets or for none (then all are equal).
    """

    params: float | str | None = None
    active_params: float | str | None = None
    memory: float | str | None = None
    latency: float | str | None = None
    context: PositiveInt = 8192
    batch: PositiveInt = 1
    dtype: Literal["fp32", "bf16", "fp8", "nvfp4"] = "bf16"
    table: Folder | None = None
    probability: Positive | None = None

    @field_validator(*BUDGET_KINDS, mode="before")
    @classmethod
    def _readable(cls, value: Any, info: Any) -> Any:
        try:
            if value is not None:
                read_value("", info.field_name, value)
        except BudgetError as error:
            raise ValueError(str(error).rpartition(": ")[2]) from None
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> BudgetRecipe:
        given = [kind for kind in BUDGET_KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a budget needs exactly one of {', '.join(BUDGET_KINDS)}, not {' and '.join(given) or 'none'}"
            )
        if (self.table is None) == (given == ["latency"]):
            raise ValueError(
                "a latency budget needs 'table', the file that `star-elastic profile` wrote; others take none"
            )
        for key in ("context", "batch", "dtype"):
            if key in self.model_fields_set and given != ["memory"]:
                raise mistake(f"{key!r} belongs to a memory budget; this one is of kind {given[0]}", key)
        return self

    @property
    def kind(self) -> str:
        """What is counted."""
        return next(kind for kind in BUDGET_KINDS if getattr(self, kind) is not None)

    @property
    def value(self) -> float | str:
        """The target as it was written."""
        value: float | str = getattr(self, self.kind)
        return value


class RouterRecipe(Section):
    """How widths are learned.

    The published run has ``weight`` 1 and ``lr_factor`` 100 over tens of thousands of steps. On short runs such a router
    saturates off its budget before the loss can turn it, so the defaults here are a heavier loss and slower steps.

    Attributes:
        axes: Axis -> candidates: numbers up to 1 are shares of the parent's width (snapped to legal ones), larger ones are
            widths, null takes the published shares. None: the published shares on every axis that can be cut so.
        per_layer: Axes on which every layer chooses for itself; transformers alone cannot load the slices of such models.
        weight: Of the budget's loss beside the distillation loss (lambda).
        lr_factor: The router's learning rate over the model's.
        tolerance: How far from its target a budget may end, as a part of it.
        tau: Temperature of the first and of the last search step.
        scale: Of the logits, at the first and at the last search step.
        loss: What must be inside the budget: every choice that has probability (``choices``), or the expected widths, as
            published (``expected``), which an undecided router meets without any choice that does. Layers that choose for
            themselves have too many choices to list: they take ``expected``.
        mode: ``soft`` masks, or hard ones with the soft ones' gradient (``straight_through``).
        hidden: Width of the router's MLPs.
        max_extension: How much longer the search may go on, as a share of its steps, if a budget is not met at its end. It is
            heated again for that: at its last temperature a router no longer moves.
    """

    axes: dict[str, Annotated[tuple[Positive, ...], Field(min_length=1)] | None] | None = Field(
        default=None, min_length=1
    )
    per_layer: tuple[str, ...] = ()
    weight: Positive = 5.0
    lr_factor: Positive = 10.0
    tolerance: Share = 0.05
    tau: tuple[Positive, Positive] = (1.0, 0.05)
    scale: tuple[Positive, Positive] = (1.0, 10.0)
    loss: Literal["choices", "expected"] = "choices"
    mode: Literal["soft", "straight_through"] = "soft"
    hidden: PositiveInt = 256
    max_extension: NotNegative = 0.5

    @field_validator("tau")
    @classmethod
    def _cools(cls, tau: tuple[float, float]) -> tuple[float, float]:
        if tau[1] > tau[0]:
            raise ValueError("router.tau should not rise: its second number is the temperature at the end")
        return tau

    @model_validator(mode="after")
    def _layers_choose_among_candidates(self) -> RouterRecipe:
        for number, axis in enumerate(self.per_layer):
            if self.axes is not None and axis not in self.axes:
                raise mistake(
                    f"router.per_layer names {axis!r}, which has no candidates: add it to router.axes",
                    "per_layer",
                    number,
                )
        return self


class StageRecipe(Section):
    """One stage of the curriculum; what it does not say it takes from the recipe around it.

    Attributes:
        phase: ``search``: the router learns along with the weights, under masks. ``settle``: widths are fixed, and a step costs
            what the nested size costs.
        steps: Optimizer steps.
        tokens: Instead of ``steps``: tokens, rounded up to whole steps.
        sequence_length: Tokens per row.
        batch_size: Rows per step.
        accumulate: Parts that a step's rows are run in.
        budgets_per_step: How many nested models learn from a step's rows.
        probabilities: Chance of each nested model at a step; the sum need not be 1, and 0 leaves one out.
        lr: Peak learning rate.
        min_lr: Where the cosine ends.
        warmup_steps: Steps of linear warm-up.
    """

    phase: Literal["search", "settle"]
    steps: PositiveInt | None = None
    tokens: Tokens | None = None
    sequence_length: RowLength | None = None
    batch_size: PositiveInt | None = None
    accumulate: PositiveInt | None = None
    budgets_per_step: PositiveInt | None = None
    probabilities: dict[str, NotNegative] | None = Field(default=None, min_length=1)
    lr: Positive | None = None
    min_lr: NotNegative | None = None
    warmup_steps: NaturalInt | None = None

    @model_validator(mode="after")
    def _consistent(self) -> StageRecipe:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("a stage needs exactly one of 'steps' and 'tokens'")
        if self.probabilities is not None and not any(self.probabilities.values()):
            raise mistake("probabilities of a stage should not all be 0", "probabilities")
        return self
