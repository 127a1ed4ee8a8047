"""The run: a frozen parent teaches its own nested models, a few of them per step.

Teacher and student begin as the same weights. Each step draws submodels, runs the teacher in full and the student as those
submodels, and pulls the student's distribution towards the teacher's. Nothing else is trained on: no language-model loss, no
labels.

In *search* stages a submodel is a budget, whose masks a router draws anew at each step; weights and router learn together. At the
end of the search the router's choice is frozen. In *settle* stages a submodel has fixed widths and computes as its slice does.
"""

from __future__ import annotations

import functools
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchdata.stateful_dataloader import StatefulDataLoader

from star_elastic.checkpoint import target_folder
from star_elastic.elastic import ElasticModel
from star_elastic.errors import ElasticError
from star_elastic.progress import progress_bar
from star_elastic.router_freeze import BudgetMissed, Frozen
from star_elastic.train import models
from star_elastic.train import state as saved
from star_elastic.train.balance import ExpertBalance
from star_elastic.train.batches import stage_loader
from star_elastic.train.check import check_run
from star_elastic.train.curriculum import BudgetSampler
from star_elastic.train.data import Batch
from star_elastic.train.gradients import View, distil
from star_elastic.train.interrupt import StopRequest
from star_elastic.train.live import LiveTable
from star_elastic.train.metrics import Metrics
from star_elastic.train.output import write_family
from star_elastic.train.prepare import Plan
from star_elastic.train.ranks import joined
from star_elastic.train.recipe import Recipe, load_recipe, override
from star_elastic.train.report import Losses, TrainReport
from star_elastic.train.schedule import learning_rate
from star_elastic.train.search import Sample, Search, frozen_from_json, frozen_to_json
from star_elastic.train.sharding import clip_gradients, device_mesh, gather_into, shard
from star_elastic.train.stages import Position, Stage
from star_elastic.train.state import RunFolder
from star_elastic.train.summary import memory_bytes, summarise, with_choices
from star_elastic.train.teacher import Teacher, Teaches
from star_elastic.train.teacher_cache import CachedTeacher


class TrainingStopped(ElasticError, RuntimeError):
    """A run that ended before its last step: by Ctrl-C, SIGTERM, a loss that is not a number, or a budget that is not met."""


def train_family(
    recipe: Recipe | Path | str, overrides: Sequence[str] = (), resume: bool = False, progress: bool = True
) -> TrainReport:
    """Distil all submodels of a family from the frozen parent in one run, and write an elastic checkpoint.

    Started by ``torchrun``, its processes share the run: each runs its part of every batch, and the numbers are those of one
    process, to rounding. The main process reports, writes, and tells mistakes.

    Args:
        recipe: A recipe, or the YAML file of one.
        overrides: ``key=value`` changes to it, such as ``optimizer.lr=3e-4``.
        resume: Continue the unfinished run of this recipe from its last checkpoint; the result is the same, bit for bit on
            CPU, as without the interruption.
        progress: Show a progress bar and, at the end, a table.

    Returns:
        The numbers that are also in ``training.json`` of the output folder.

    Raises:
        RecipeError, WidthError, UnknownNameError, BudgetError, DataError, CheckpointError, TargetError: before any weight is
            loaded, for whatever in the recipe, the parent or the data is not right.
        TrainingStopped: on Ctrl-C or SIGTERM, or when the search ends off its budgets, after saving a checkpoint; or when the
            loss or gradient is not finite.
        StoppedElsewhere: on all but the main process, instead of any of these.

    Example:
        >>> train_family("recipes/demo.yaml", ["seed=1"]).submodels["small"].kd_recent
    """
    with joined() as ranks:
        with ranks.agreed():
            recipe = override(recipe, overrides) if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
            run = RunFolder(recipe, ranks)
        shown = progress and ranks.is_main
        with _told_what_is_kept(run):
            report = _run(run, resume, shown)
        run.remove()
    if shown:
        report.print()
    return report


def _run(run: RunFolder, resume: bool, shown: bool) -> TrainReport:
    """Check everything, train, and write the result."""
    recipe, ranks = run.recipe, run.ranks
    with ranks.agreed():
        plan = check_run(run, resume)
    if shown:  # the report has them again, but a long run is worth a warning before it
        for note in plan.notes:
            print(f"note: {note}", flush=True)
    with run.open(), _own_randomness(plan.device):
        trainer = Trainer(plan, run)
        if resume:
            trainer.restore()
        with StopRequest() as stop, closing(trainer.metrics):
            trainer.train(stop, shown)
        report = trainer.finish()
        trainer.metrics.keep_events(recipe.output)
    return report


@contextmanager
def _told_what_is_kept(run: RunFolder) -> Iterator[None]:
    """Say where a run can go on that Ctrl-C ended outside its steps: while loading, say, or the second of two.

    Raises:
        TrainingStopped: for KeyboardInterrupt, where there is a checkpoint.
    """
    try:
        yield
    except KeyboardInterrupt:
        if (latest := run.latest()) is None:
            raise
        raise TrainingStopped(
            f"interrupted; the last checkpoint is {latest}: continue with the same command and --resume"
        ) from None


class Trainer:
    """Everything that changes during a run, and the steps that change it.

    Args:
        plan: The checked run.
        run: Its folder.

    Attributes:
        search: The router; None where widths are fixed.
        frozen: What the router has chosen, by budget; empty until the search is over.
        position: Stage and step of the next batch.
        step: Optimizer steps done.
        metrics: Gets the numbers of a step.
    """

    def __init__(self, plan: Plan, run: RunFolder) -> None:
        self.plan, self.run, self.ranks, recipe = plan, run, plan.ranks, plan.recipe
        mesh = device_mesh(plan.device, plan.ranks, recipe.shard, recipe.shard_group)
        with plan.ranks.agreed(), plan.ranks.in_turn():
            self.teacher, self.stored = _teacher(plan, mesh)
            self.student = models.load_student(plan)
            self.sharded = shard(self.student, plan.ranks, mesh, plan.autocast)
        balance = recipe.balance_experts
        self.balance = None if balance is None else ExpertBalance(self.student, balance.step, plan.ranks)
        self.optimizer = models.build_optimizer(self.student.model, recipe)
        self.average = None if recipe.ema is None else models.Average(self.student.model, recipe.ema)
        self.search = Search(plan) if plan.targets.budgets else None
        self.frozen: dict[str, Frozen] = {}
        self.sampler = BudgetSampler(plan.probabilities[0], recipe.seed)
        self.losses = {name: Losses() for name in plan.targets.names}
        self.position = Position()
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.metrics = Metrics(run, recipe.track, self.student.config.provenance["training"]["recipe"])
        self.loader: StatefulDataLoader
        self._batches: Iterator[Batch]
        self._enter_stage(None)
        torch.manual_seed(recipe.seed)

    @property
    def stage(self) -> Stage:
        """The stage of the next step; the last one when the run is done."""
        return self.plan.stages[min(self.position.stage, len(self.plan.stages) - 1)]

    @property
    def done(self) -> bool:
        """Whether all stages are behind."""
        return self.position.stage == len(self.plan.stages)

    @property
    def search_step(self) -> int:
        """Steps of search stages that are behind, those of an extension included."""
        before = self.plan.stages[: self.position.stage]
        return sum(stage.steps for stage in before if stage.phase == "search") + self.position.step

    def train(self, stop: StopRequest, progress: bool) -> None:
        """Take the steps that are left.

        Raises:
            TrainingStopped: asked to stop, not a finite loss, or a search that ended off its budgets.
        """
        recipe = self.plan.recipe
        self._close_stage()  # of a run that stopped because its budgets were missed
        table = LiveTable(self.plan.targets.names)
        self.metrics.listeners.append(table.add)
        with progress_bar("training", self._tokens_left(), "tokens", shown=progress, above=table) as advance:
            while not self.done:
                tokens = self.stage.tokens_per_step
                self._step(next(self._batches))
                advance(tokens)
                self._close_stage()
                asked = self.ranks.largest(stop.signal or 0)  # a signal may reach the processes in different steps
                # Also after the last step: should the disk be full now, the result can still be written later.
                if self.step % recipe.checkpoint_every == 0 or self.done or asked:
                    self.save()
                if asked:
                    raise TrainingStopped(
                        f"stopped by {signal.Signals(asked).name} after step {self.step} of {recipe.total_steps}, "
                        f"saved in {self.run.path}; continue with the same command and --resume"
                    )

    def finish(self) -> TrainReport:
        """Write the elastic checkpoint: an ordinary model folder in the parent's dtypes, elastic.json, training.json."""
        recipe = self.plan.recipe
        report = summarise(
            self.plan, self.student.config, self.frozen, self.losses, self.step, self.tokens, self.seconds
        )
        self.student.config = with_choices(self.student.config, report)
        if self.average is not None:
            self.average.copy_to(self.student.model)
        student = self._whole_student()
        router = None if self.search is None else self.search.router
        with self.ranks.agreed():
            if student is not None:
                models.cast(student.model, self.stored)
                with target_folder(recipe.output, recipe.parent) as folder:
                    write_family(folder, student, report, parent=recipe.parent, metrics=self.run.metrics, router=router)
        return report

    def _whole_student(self) -> ElasticModel | None:
        """The student with all its weights, on the main process only."""
        if self.ranks.size == 1:
            return self.student
        student = None
        with self.ranks.agreed():
            if self.ranks.is_main:
                student = models.load_student(self.plan)
                student.config = self.student.config
        gather_into(None if student is None else student.model, self.student.model)
        return student

    def save(self) -> None:
        """Write a checkpoint of the run."""
        learning = () if self.search is None else self.search.router.parameters()
        self.ranks.same("weights", [*self.sharded.whole, *learning])
        random = {**saved.random_states(), "sampler": self.sampler.state()}
        tensors = {
            "model": saved.model_tensors(self.student.model),
            "optimizer": saved.optimizer_tensors(self.student.model, self.optimizer),
            "random": random,
        }
        if self.search is not None:
            tensors["router"] = self.search.tensors()
            random["noise"] = self.search.noise.get_state()
        if self.average is not None:
            tensors["average"] = self.average.tensors
        state = {
            "step": self.step,
            "position": vars(self.position),
            "frozen": frozen_to_json(self.frozen),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "losses": {name: vars(losses) for name, losses in self.losses.items()},
            "data": self.loader.state_dict(),
        }
        self.run.save(self.step, tensors, state)

    def restore(self) -> None:
        """Go back to the newest checkpoint; without one the run begins at step 0."""
        latest = self.ranks.from_main(None if (newest := self.run.latest()) is None else str(newest))
        if latest is None:
            return
        places = dict(self.student.model.named_parameters())
        tensors, state = self.run.load(Path(latest), dict.fromkeys(saved.SPREAD, places))
        self.position = Position(**state["position"])
        self._freeze(frozen_from_json(state["frozen"]))
        self._enter_stage(None)
        saved.restore_model(self.student.model, tensors["model"])
        saved.restore_optimizer(self.student.model, self.optimizer, tensors["optimizer"])
        if self.search is not None:
            self.search.restore(tensors["router"])
            self.search.noise.set_state(tensors["random"].pop("noise"))
        if self.average is not None:
            self.average.restore(tensors["average"])
        self.sampler.restore(tensors["random"].pop("sampler"))
        saved.restore_random_states(tensors["random"])
        self.loader.load_state_dict(state["data"])
        self._batches = iter(self.loader)
        self.losses = {name: Losses(**fields) for name, fields in state["losses"].items()}
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.run.truncate_metrics(self.step)

    def _step(self, batch: Batch) -> None:
        begin = time.perf_counter()
        names = self.sampler.draw_several(self.stage.budgets_per_step)
        rate = self._set_rates()
        samples = self._samples(names)
        losses = distil(
            self.student,
            self.teacher,
            batch,
            self._views(names, samples),
            parts=self.stage.accumulate,
            dtype=self.plan.autocast,
            sharded=self.sharded,
        )
        for name, loss in losses.items():
            self._refuse_infinite("loss", loss, name)
        norms = self._update(names, samples)
        tokens, seconds = int(batch["attention_mask"].sum()), time.perf_counter() - begin
        line = self._line(losses, norms, rate) | {"tokens": self.tokens + tokens, "tokens_per_second": tokens / seconds}
        self.step, self.tokens, self.seconds = self.step + 1, self.tokens + tokens, self.seconds + seconds
        self.position.step += 1
        for name, loss in losses.items():
            self.losses[name].add(loss.item())
        if self.step % self.plan.recipe.log_every == 0 or self.step == self.plan.recipe.total_steps:
            self.metrics.log(line)

    def _samples(self, names: list[str]) -> dict[str, Sample]:
        """Masks of this step's budgets; none once widths are fixed."""
        if self.stage.phase == "settle":
            return {}
        assert self.search is not None
        return {name: self.search.sample(name, self.search_step) for name in names}

    def _views(self, names: list[str], samples: dict[str, Sample]) -> dict[str, View]:
        views: dict[str, View] = {name: functools.partial(self.student.at, name) for name in names}
        for name, sample in samples.items():
            views[name] = functools.partial(self.student.masked, sample.leaves)
        return views if self.balance is None else {name: self.balance.around(view) for name, view in views.items()}

    def _update(self, names: list[str], samples: dict[str, Sample]) -> dict[str, Tensor]:
        """Step weights, and the router while it learns, along the gradients; return their norms before clipping."""
        clip, told = self.plan.recipe.optimizer.clip, " and ".join(names)
        norms = {"grad_norm": clip_gradients(self.student.parameters(), clip)}
        if samples:
            assert self.search is not None
            self.search.backward(samples)
            learning = list(self.search.router.parameters())
            self.ranks.average(weight.grad for weight in learning if weight.grad is not None)
            norms["router_grad_norm"] = clip_gradients(learning, clip)
        for what, norm in norms.items():
            self._refuse_infinite("gradient norm" if what == "grad_norm" else "gradient norm of the router", norm, told)
        for optimizer in (self.optimizer, *([self.search.optimizer] if samples and self.search else [])):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.student.model)
        if self.balance is not None:
            self.balance.update()
        return norms

    def _set_rates(self) -> float:
        """The learning rate of this step, for weights and router; the router of an extended search learns at the peak."""
        stage, step = self.stage, self.position.step
        rate = learning_rate(step, stage.steps, peak=stage.lr, floor=stage.min_lr, warmup=stage.warmup_steps)
        models.set_rate(self.optimizer, rate)
        if self.search is not None:
            factor = self.plan.recipe.router.lr_factor
            models.set_rate(self.search.optimizer, factor * (rate if step < stage.steps else stage.lr))
        return rate

    def _line(self, losses: dict[str, Tensor], norms: dict[str, Tensor], rate: float) -> dict[str, Any]:
        """What a line of metrics says about the step that is being taken."""
        kd = {name: loss.item() for name, loss in losses.items()}
        line = {
            "step": self.step + 1,
            "stage": self.position.stage,
            "phase": self.stage.phase,
            "submodel": ", ".join(kd),
            "kd_loss": sum(kd.values()) / len(kd),
            "kd": kd,
            **{what: norm.item() for what, norm in norms.items()},
            "lr": rate,
            "memory_bytes": memory_bytes(self.plan.device),
        }
        if self.stage.phase == "search" and self.search is not None:
            line |= self.search.describe(list(kd), self.search_step)
        return line

    def _close_stage(self) -> None:
        """Go on to the next stage where this one is done; at the end of the search, freeze what the router has chosen.

        Raises:
            TrainingStopped: the search was extended as far as the recipe allows, and a budget is still not met.
        """
        if self.done or self.position.step < self.stage.steps:
            return
        stages, at = self.plan.stages, self.position.stage
        if self.stage.phase == "search" and (at + 1 == len(stages) or stages[at + 1].phase == "settle"):
            assert self.search is not None
            try:
                self._freeze(self.search.freeze())
            except BudgetMissed as missed:
                if self.position.step < self.stage.steps + self.search.most_extra:
                    return
                if not self.run.has(self.step):  # a resumed run may fail where it did before
                    self.save()
                raise TrainingStopped(
                    f"the search ended off its budgets after step {self.step}: {missed}; saved in {self.run.path}: search on "
                    "with --resume and a larger router.max_extension, or begin anew with more search steps or router.weight"
                ) from None
        before = self.stage
        self.position = Position(at + 1)
        if not self.done:
            self._enter_stage(before)

    def _enter_stage(self, before: Stage | None) -> None:
        """Set up what differs between stages; documents go on where the stage before has stopped."""
        stage, recipe = self.stage, self.plan.recipe
        wanted = recipe.activation_checkpointing
        self.student.checkpointing = stage.phase == "search" if wanted == "auto" else bool(wanted)
        self.sampler.reweigh(self.plan.probabilities[min(self.position.stage, len(self.plan.stages) - 1)])
        if before is not None and stage.reads_like(before):
            return
        self.loader = stage_loader(self.plan, stage, None if before is None else self.loader)
        self._batches = iter(self.loader)

    def _freeze(self, frozen: dict[str, Frozen]) -> None:
        """Take the router's choices as submodels."""
        self.frozen = frozen
        for name, choice in frozen.items():
            self.student.add(name, choice.submodel.completed(self.plan.layout))

    def _tokens_left(self) -> int:
        left = sum(stage.steps * stage.tokens_per_step for stage in self.plan.stages[self.position.stage :])
        return left - (0 if self.done else min(self.position.step, self.stage.steps) * self.stage.tokens_per_step)

    def _refuse_infinite(self, what: str, value: Tensor, submodel: str) -> None:
        if math.isfinite(value.item()):
            return
        latest = self.run.latest()
        kept = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
        first = self.position.step * self.stage.batch_size
        rows = f"rows {first} to {first + self.stage.batch_size - 1} of stage {self.position.stage}"
        advice = "begin a new run with a lower optimizer.lr, or precision=fp32"
        if self.step == 0:  # so it is no learning rate's fault
            advice = (
                "nothing was learned yet: look for numbers that are not finite in the parent, or use precision=fp32"
            )
        raise TrainingStopped(
            f"{what} is {value.item()} at step {self.step + 1}, submodel {submodel!r}, {rows}; {kept}; {advice}"
        )


def _teacher(plan: Plan, mesh: DeviceMesh | None) -> tuple[Teaches, dict[str, torch.dtype]]:
    """Whom the student learns from, and in which dtypes the parent is stored."""
    chunk, cache = plan.recipe.kl_chunk_tokens, plan.recipe.teacher_cache
    if cache is not None:
        return CachedTeacher(cache, chunk), models.parent_dtypes(plan)
    model = models.load_teacher(plan)
    stored = models.stored_dtypes(model.model)
    shard(model, plan.ranks, mesh, plan.autocast)
    return Teacher(model, chunk), stored


def _own_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Give the caller its random state back at the end."""
    gpu = [] if device.type == "cpu" else [device.index or 0]
    return torch.random.fork_rng(gpu, device_type=device.type if gpu else "cuda")
