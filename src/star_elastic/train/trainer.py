"""The stages of a run, its steps in order, its checkpoints and its numbers.

Each step draws submodels, runs the teacher in full and the student as those submodels, and pulls the student's distribution
towards the teacher's. Nothing else is trained on: no language-model loss, no labels.

In *search* stages a submodel is a budget, whose masks a router draws anew at each step; weights and router learn together. At the
end of the search the router's choice is frozen. In *settle* stages a submodel has fixed widths and computes as its slice does.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from star_elastic.checkpoint import target_folder
from star_elastic.errors import ElasticError
from star_elastic.progress import progress_bar
from star_elastic.router_freeze import BudgetMissed, Frozen
from star_elastic.train import state as saved
from star_elastic.train.batches import stage_loader
from star_elastic.train.curriculum import BudgetSampler
from star_elastic.train.data import Batch
from star_elastic.train.interrupt import StopRequest
from star_elastic.train.learner import Learner
from star_elastic.train.live import LiveTable
from star_elastic.train.metrics import Metrics
from star_elastic.train.output import write_family
from star_elastic.train.prepare import Plan
from star_elastic.train.report import Losses, TrainReport
from star_elastic.train.search import Sample, frozen_from_json, frozen_to_json
from star_elastic.train.stages import Position, Stage
from star_elastic.train.state import RunFolder
from star_elastic.train.summary import memory_bytes, summarise, with_choices


class TrainingStopped(ElasticError, RuntimeError):
    """A run that ended before its last step: by Ctrl-C, SIGTERM, a loss that is not a number, or a budget that is not met."""


class Trainer:
    """Everything that changes during a run, and the steps that change it.

    Args:
        plan: The checked run.
        run: Its folder.

    Attributes:
        learner: The models, and what a step changes in them.
        frozen: What the router has chosen, by budget; empty until the search is over.
        position: Stage and step of the next batch.
        step: Optimizer steps done.
        metrics: Gets the numbers of a step.
    """

    def __init__(self, plan: Plan, run: RunFolder) -> None:
        self.plan, self.run, self.ranks, recipe = plan, run, plan.ranks, plan.recipe
        self.learner = Learner(plan)
        self.student, self.search = self.learner.student, self.learner.search
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
        return self.plan.stages[self._stage_number]

    @property
    def _stage_number(self) -> int:
        return min(self.position.stage, len(self.plan.stages) - 1)

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
        student = self.learner.result()
        router = None if self.search is None else self.search.router
        with self.ranks.agreed():
            if student is not None:
                with target_folder(recipe.output, recipe.parent) as folder:
                    write_family(folder, student, report, parent=recipe.parent, metrics=self.run.metrics, router=router)
        return report

    def save(self) -> None:
        """Write a checkpoint of the run."""
        tensors = self.learner.tensors()
        tensors["random"]["sampler"] = self.sampler.state()
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
        self.sampler.restore(tensors["random"].pop("sampler"))
        self.learner.restore(tensors)
        self.loader.load_state_dict(state["data"])
        self._batches = iter(self.loader)
        self.losses = {name: Losses(**fields) for name, fields in state["losses"].items()}
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.run.truncate_metrics(self.step)

    def _step(self, batch: Batch) -> None:
        begin = time.perf_counter()
        names = self.sampler.draw_several(self.stage.budgets_per_step)
        rate = self.learner.set_rates(self.stage, self.position.step)
        samples = self._samples(names)
        losses = self.learner.learn(batch, names, samples, self.stage.accumulate)
        for name, loss in losses.items():
            self._refuse_infinite("loss", loss, name)
        norms = self.learner.clip(samples)
        for what, norm in norms.items():
            told = "gradient norm" if what == "grad_norm" else "gradient norm of the router"
            self._refuse_infinite(told, norm, " and ".join(names))
        self.learner.update(samples)
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
        stage = self.stage
        self.student.checkpointing = stage.recomputes(self.plan.recipe.activation_checkpointing)
        self.sampler.reweigh(self.plan.probabilities[self._stage_number])
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
