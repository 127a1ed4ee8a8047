"""``train --dry-run``: what a recipe would do, and whether it can, without a weight.

With a parent whose weights are there, everything is checked that ``train`` checks before its first step, for as many processes
(``check.check_run``). A parent of which only config.json is there, or a published one named ``preset:NAME``, is planned: recipe,
widths, budgets, lengths and memory, and the report says what was not looked at. So a run on many GPUs can be planned on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from star_elastic import cost
from star_elastic.budget import Budget
from star_elastic.candidates import reachable
from star_elastic.combinations import Combinations
from star_elastic.families.base import Config, itemsize
from star_elastic.layout import Layout
from star_elastic.loading import MissingDevice, choose_device
from star_elastic.presets import get_preset
from star_elastic.submodel import ElasticConfig, open_elastic
from star_elastic.train.anneal import Anneal
from star_elastic.train.check import check_run
from star_elastic.train.memory import Setting, StageMemory, rows_per_pass, stage_memory
from star_elastic.train.prepare import Outline, outline_of, own_device
from star_elastic.train.ranks import Ranks
from star_elastic.train.recipe import Recipe, load_recipe
from star_elastic.train.stages import Stage
from star_elastic.train.state import RunFolder
from star_elastic.train.targets import Targets
from star_elastic.train.teacher_cache import cache_bytes
from star_elastic.units import format_bytes

PRESET_PREFIX = "preset:"
MACHINE = 8  # GPUs, usually
COLD = 0.05  # temperature below which a soft choice is as good as hard (method: tau 1.0 -> 0.05)


@dataclass(frozen=True)
class Parent:
    """What is known of the parent.

    Attributes:
        name: As the recipe gives it.
        config: Its config.json.
        layout: Its table.
        elastic: Its ``elastic.json``, or a preset's sizes.
        has_weights: Whether its weights are there to be checked.
    """

    name: str
    config: Config
    layout: Layout
    elastic: ElasticConfig
    has_weights: bool


@dataclass(frozen=True)
class BudgetPlan:
    """One budget: its target, what candidates reach, and the combination of one width per axis that comes nearest."""

    kind: str
    target: float
    fraction: float
    least: float
    most: float
    nearest: float
    widths: str

    @property
    def error(self) -> float:
        """How far the nearest combination is from the target, as a part of it."""
        return self.nearest / self.target - 1


@dataclass(frozen=True)
class SubmodelPlan:
    """One nested model of given widths, and what it costs."""

    params: int
    active_params: int


@dataclass(frozen=True)
class StagePlan:
    """One stage with everything spelled out.

    Attributes:
        tokens: Of the whole stage, padding included.
        rows_per_pass: Rows that a device runs at one time.
        checkpointing: Whether units are recomputed.
        probabilities: Of each nested model; they sum to 1.
        memory: On each device.
    """

    phase: str
    steps: int
    tokens: int
    sequence_length: int
    batch_size: int
    rows_per_pass: int
    checkpointing: bool
    probabilities: Mapping[str, float]
    memory: StageMemory


@dataclass(frozen=True)
class DryRun:
    """What a recipe would do.

    Attributes:
        parent: As the recipe gives it.
        world_size: Devices.
        assumed: How the numbers are held, in words.
        stages: In order.
        submodels: Nested models of given widths.
        budgets: Those whose widths a router will choose.
        candidates: What it chooses from.
        cache_bytes: What the teacher's stored answers take on disk; None without a cache, or where it was not looked at.
        cold_step: The first search step whose temperature is at most 0.05; None without a search, or where it never gets there.
        warnings: What the user should know before the run.
    """

    parent: str
    world_size: int
    assumed: str
    stages: tuple[StagePlan, ...]
    submodels: Mapping[str, SubmodelPlan]
    budgets: Mapping[str, BudgetPlan]
    candidates: Mapping[str, tuple[int, ...]]
    cache_bytes: int | None
    cold_step: int | None
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """One JSON object: exact numbers, memory in bytes."""
        content = asdict(self)
        for stage, planned in zip(content["stages"], self.stages, strict=True):
            stage["memory"] = planned.memory.as_json()
        for name, budget in self.budgets.items():
            content["budgets"][name]["error"] = budget.error
        content["tokens"] = sum(stage.tokens for stage in self.stages)
        content["steps"] = sum(stage.steps for stage in self.stages)
        return content


def dry_run(
    recipe: Path | str,
    overrides: Sequence[str] = (),
    *,
    world_size: int = 1,
    device_memory: int | None = None,
    resume: bool = False,
) -> DryRun:
    """Plan a run and check what can be checked without weights.

    Args:
        recipe: The recipe's file.
        overrides: ``key=value`` changes to it.
        world_size: Devices, and processes: one for each.
        device_memory: Bytes of one device; stages that need more are warned about.
        resume: Whether the run would go on from its last checkpoint.

    Raises:
        RecipeError, WidthError, UnknownNameError, BudgetError, CheckpointError, DataError, TargetError: as ``train`` would.

    Example:
        >>> dry_run("recipes/nano-v3.yaml", world_size=8).stages[0].steps
        7948
    """
    read = load_recipe(recipe, overrides)
    ranks = planned_ranks(world_size)
    parent = open_parent(read)
    outline, missing = _check_all(read, ranks, resume) if parent.has_weights else _check_config(read, parent, ranks)
    targets = outline.targets
    gpu = on_gpu(read, parent, world_size)
    setting = hold(read, parent, ranks, gpu, outline.frozen)
    stages = tuple(
        _plan_stage(parent.layout, stage, shares, setting)
        for stage, shares in zip(read.schedule, outline.probabilities, strict=True)
    )
    return DryRun(
        parent=parent.name,
        world_size=world_size,
        assumed=_assumed(setting, gpu),
        stages=stages,
        submodels=_submodels(parent.layout, targets),
        budgets={name: plan_budget(read, parent, targets, budget) for name, budget in targets.budgets.items()},
        candidates=targets.candidates,
        cache_bytes=cache_bytes(read.teacher_cache) if read.teacher_cache is not None and parent.has_weights else None,
        cold_step=_cold_step(read),
        warnings=(*missing, *targets.notes, *_warnings(read, stages, world_size, device_memory)),
    )


def open_parent(recipe: Recipe) -> Parent:
    """The parent of a recipe: a folder, of which config.json is enough, or ``preset:NAME``.

    Raises:
        CheckpointError, UnknownNameError: there is no such folder or preset, or its config.json cannot be read.
    """
    name = str(recipe.parent)
    if name.startswith(PRESET_PREFIX):
        preset = get_preset(name.removeprefix(PRESET_PREFIX))
        elastic = ElasticConfig.of_preset(preset)
        # A published family is sorted along everything that its sizes cut, and may be planned along any axis.
        elastic = elastic.model_copy(update={"sorted_axes": tuple(preset.layout.width_axes)})
        return Parent(name, preset.config, preset.layout, elastic, has_weights=False)
    config, layout, elastic = open_elastic(recipe.parent)
    return Parent(name, config, layout, elastic, has_weights=any(recipe.parent.glob("*.safetensors")))


def planned_ranks(world_size: int) -> Ranks:
    """The first of so many processes, on machines of up to eight that are all alike."""
    local = max(size for size in range(1, MACHINE + 1) if world_size % size == 0)
    return Ranks(0, world_size, 0, local)


def _check_all(recipe: Recipe, ranks: Ranks, resume: bool) -> tuple[Outline, tuple[str, ...]]:
    """Check whatever ``train`` checks; a device that is only elsewhere is no mistake here."""
    notes = []
    try:
        own_device(recipe.device, ranks)
    except MissingDevice as error:
        notes.append(f"not checked: {error}")
        recipe = recipe.model_copy(update={"device": "cpu"})
    return check_run(RunFolder(recipe, ranks), resume), tuple(notes)


def _check_config(recipe: Recipe, parent: Parent, ranks: Ranks) -> tuple[Outline, tuple[str, ...]]:
    """Check what a parent's configuration tells, and say what was left out."""
    what = "weights, tokenizer, data, teacher's cache, output folder and device"
    outline = outline_of(recipe, parent.config, parent.layout, parent.elastic, ranks)
    return outline, (f"only the configuration of {parent.name} was looked at: not checked: {what}",)


def on_gpu(recipe: Recipe, parent: Parent, world_size: int) -> bool:
    """Whether the run is meant for GPUs: it says so, has several devices or a parent elsewhere, or there is one here."""
    if recipe.device != "auto":
        return not recipe.device.startswith("cpu")
    return world_size > 1 or not parent.has_weights or choose_device("auto").type != "cpu"


def hold(recipe: Recipe, parent: Parent, ranks: Ranks, gpu: bool, frozen: frozenset[str]) -> Setting:
    """How a run holds its numbers; ``precision: auto`` is bf16 on a GPU and fp32 on a CPU, where bf16 is rarely faster."""
    teacher: Literal["fp32", "bf16"] | None
    low = recipe.master_weights == "bf16" or recipe.precision == "bf16" or (recipe.precision == "auto" and gpu)
    teacher = None if recipe.teacher_cache is not None else "bf16" if low and itemsize(parent.config) == 2 else "fp32"
    return Setting(
        world_size=ranks.size,
        shares=shares_of(recipe, ranks),
        master=2 if recipe.master_weights == "bf16" else 4,
        compute=2 if low else 4,
        teacher=teacher,
        fused=gpu,
        checkpointing=recipe.activation_checkpointing,
        average=recipe.ema is not None,
        frozen=frozen,
        kl_chunk_tokens=recipe.kl_chunk_tokens,
    )


def shares_of(recipe: Recipe, ranks: Ranks) -> int:
    """Devices that share one copy of the models; a group of ``hybrid`` is a machine unless it is given."""
    if recipe.shard == "off":
        return 1
    return ranks.size if recipe.shard == "full" else recipe.shard_group or ranks.local_size


def _plan_stage(layout: Layout, stage: Stage, probabilities: Mapping[str, float], setting: Setting) -> StagePlan:
    return StagePlan(
        phase=stage.phase,
        steps=stage.steps,
        tokens=stage.steps * stage.tokens_per_step,
        sequence_length=stage.sequence_length,
        batch_size=stage.batch_size,
        rows_per_pass=rows_per_pass(stage, setting.world_size),
        checkpointing=setting.checkpoints(stage),
        probabilities=probabilities,
        memory=stage_memory(layout, stage, setting),
    )


def plan_budget(recipe: Recipe, parent: Parent, targets: Targets, budget: Budget) -> BudgetPlan:
    """What the candidates reach of one budget, and the nearest combination in which all layers agree."""
    layout, order = parent.layout, parent.elastic.depth_order
    space = Combinations(layout, targets.candidates, recipe.router.per_layer, order)
    least, most = reachable(layout, targets.candidates, budget, per_layer=recipe.router.per_layer, depth_order=order)
    # A tolerance of 0 walks on as long as a single change comes nearer, also where layers choose for themselves.
    pick = space.approach(budget, space.nearest_even(budget), 0.0)
    nearest = float(space.price(budget, pick[None])[0])
    return BudgetPlan(budget.kind, budget.target, budget.fraction, least, most, nearest, _cut_text(space, pick))


def _cut_text(space: Combinations, pick: np.ndarray) -> str:
    """What a combination cuts, for people."""
    whole = {name: f"{name} {axis.size}" for name, axis in space.layout.axes.items()}
    return ", ".join(part for part in space.text(pick).split(", ") if part not in whole.values()) or "the whole model"


def _submodels(layout: Layout, targets: Targets) -> dict[str, SubmodelPlan]:
    return {
        name: SubmodelPlan(
            int(cost.params(layout, submodel.widths, submodel.layers)),
            int(cost.active_params(layout, submodel.widths, submodel.layers)),
        )
        for name, submodel in targets.submodels.items()
    }


def _cold_step(recipe: Recipe) -> int | None:
    steps = sum(stage.steps for stage in recipe.schedule if stage.phase == "search")
    return Anneal(steps, *recipe.router.tau, *recipe.router.scale).steps_to(COLD) if steps else None


def _assumed(setting: Setting, gpu: bool) -> str:
    names = {2: "bf16", 4: "fp32"}
    kernels = "fused attention and Mamba kernels" if setting.fused else "no fused Mamba kernels"
    teacher = "the teacher's answers on disk" if setting.teacher is None else f"teacher in {setting.teacher}"
    copies = (
        f", {setting.world_size // setting.shares} copies of {setting.shares} shares" if setting.world_size > 1 else ""
    )
    return (
        f"{'GPUs' if gpu else 'CPUs'}, weights and moments in {names[setting.master]}, matrix products in "
        f"{names[setting.compute]}, {teacher}, {kernels}{copies}"
    )


def _warnings(
    recipe: Recipe, stages: Sequence[StagePlan], world_size: int, device_memory: int | None
) -> tuple[str, ...]:
    found = []
    for number, stage in enumerate(stages):
        where = f"stage {number + 1} ({stage.phase})"
        if device_memory is not None and stage.memory.total > device_memory:
            needed, there = format_bytes(stage.memory.total), format_bytes(device_memory)
            advice = _advice(recipe, stage, world_size)
            found.append(f"{where} needs about {needed} on each device, which has {there}: {advice}")
    if any(stage.phase == "search" for stage in stages) and _cold_step(recipe) is None:
        found.append(f"tau ends at {recipe.router.tau[1]:g}, above {COLD:g}: choices stay soft until they are frozen")
    return tuple(found)


def _advice(recipe: Recipe, stage: StagePlan, world_size: int) -> str:
    """What takes less memory, nearest first."""
    options = []
    if stage.rows_per_pass > 1:
        options.append("a larger accumulate")
    if not stage.checkpointing:
        options.append("activation_checkpointing: true")
    if recipe.master_weights == "fp32":
        options.append("master_weights: bf16")
    return ", ".join([*options, f"more devices than {world_size}"])
