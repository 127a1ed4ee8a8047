"""What a run trains, and one step of it: teacher and student, their optimizer, the router, the running average.

Teacher and student begin as the same weights. A step draws nothing here and decides nothing: it is told which submodels learn
from which rows, and at which rate. ``trainer`` tells it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from star_elastic.elastic import ElasticModel
from star_elastic.train import models
from star_elastic.train import state as saved
from star_elastic.train.balance import ExpertBalance
from star_elastic.train.data import Batch
from star_elastic.train.gradients import View, distil
from star_elastic.train.prepare import Plan
from star_elastic.train.schedule import learning_rate
from star_elastic.train.search import Sample, Search
from star_elastic.train.sharding import clip_gradients, device_mesh, gather_into, shard
from star_elastic.train.stages import Stage
from star_elastic.train.teacher import Teacher, Teaches
from star_elastic.train.teacher_cache import CachedTeacher


class Learner:
    """The models of a run and everything that a step changes in them.

    Args:
        plan: The checked run.

    Attributes:
        teacher: Whom the student learns from.
        stored: In which dtypes the parent is stored.
        student: What learns.
        average: Its running average; None without one.
        search: The router; None where widths are fixed.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._ranks, recipe = plan, plan.ranks, plan.recipe
        mesh = device_mesh(plan.device, plan.ranks, recipe.shard, recipe.shard_group)
        with plan.ranks.agreed(), plan.ranks.in_turn():
            self.teacher, self.stored = _teacher(plan, mesh)
            self.student = models.load_student(plan)
            self._sharded = shard(self.student, plan.ranks, mesh, plan.autocast)
        balance = recipe.balance_experts
        self._balance = None if balance is None else ExpertBalance(self.student, balance.step, plan.ranks)
        self._optimizer = models.build_optimizer(self.student.model, recipe)
        self.average = None if recipe.ema is None else models.Average(self.student.model, recipe.ema)
        self.search = Search(plan) if plan.targets.budgets else None

    def set_rates(self, stage: Stage, step: int) -> float:
        """The learning rate of a stage's step, for weights and router; the router of an extended search learns at the peak."""
        rate = learning_rate(step, stage.steps, peak=stage.lr, floor=stage.min_lr, warmup=stage.warmup_steps)
        models.set_rate(self._optimizer, rate)
        if self.search is not None:
            factor = self._plan.recipe.router.lr_factor
            models.set_rate(self.search.optimizer, factor * (rate if step < stage.steps else stage.lr))
        return rate

    def views(self, names: list[str], samples: dict[str, Sample]) -> dict[str, View]:
        """How the student computes as each submodel: under the masks of its sample, or sliced where it has none."""
        views: dict[str, View] = {name: functools.partial(self.student.at, name) for name in names}
        for name, sample in samples.items():
            views[name] = functools.partial(self.student.masked, sample.leaves)
        return views if self._balance is None else {name: self._balance.around(view) for name, view in views.items()}

    def learn(self, batch: Batch, names: list[str], samples: dict[str, Sample], parts: int) -> dict[str, Tensor]:
        """Add to the gradients of weights and masks; the loss of each submodel."""
        return distil(
            self.student,
            self.teacher,
            batch,
            self.views(names, samples),
            parts=parts,
            dtype=self._plan.autocast,
            sharded=self._sharded,
        )

    def clip(self, samples: dict[str, Sample]) -> dict[str, Tensor]:
        """Carry the masks' gradients into the router, and clip weights and router apart; their norms before, by name."""
        largest = self._plan.recipe.optimizer.clip
        norms = {"grad_norm": clip_gradients(self.student.parameters(), largest)}
        if samples:
            assert self.search is not None
            self.search.backward(samples)
            learning = list(self.search.router.parameters())
            self._ranks.average(weight.grad for weight in learning if weight.grad is not None)
            norms["router_grad_norm"] = clip_gradients(learning, largest)
        return norms

    def update(self, samples: dict[str, Sample]) -> None:
        """Step along the gradients: weights, the router while it learns, and what follows them."""
        for optimizer in (self._optimizer, *([self.search.optimizer] if samples and self.search else [])):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.student.model)
        if self._balance is not None:
            self._balance.update()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint: file name without ending -> tensors."""
        learning = () if self.search is None else self.search.router.parameters()
        self._ranks.same("weights", [*self._sharded.whole, *learning])
        tensors = {
            "model": saved.model_tensors(self.student.model),
            "optimizer": saved.optimizer_tensors(self.student.model, self._optimizer),
            "random": saved.random_states(),
        }
        if self.search is not None:
            tensors["router"] = self.search.tensors()
            tensors["random"]["noise"] = self.search.noise.get_state()
        if self.average is not None:
            tensors["average"] = self.average.tensors
        return tensors

    def restore(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Take over what ``tensors`` gave."""
        saved.restore_model(self.student.model, tensors["model"])
        saved.restore_optimizer(self.student.model, self._optimizer, tensors["optimizer"])
        if self.search is not None:
            self.search.restore(tensors["router"])
            self.search.noise.set_state(tensors["random"]["noise"])
        if self.average is not None:
            self.average.restore(tensors["average"])
        saved.restore_random_states(tensors["random"])

    def result(self) -> ElasticModel | None:
        """The student as it is written: averaged where asked for, whole, in the parent's dtypes; on the main process only."""
        if self.average is not None:
            self.average.copy_to(self.student.model)
        student = self._whole_student()
        with self._ranks.agreed():
            if student is not None:
                models.cast(student.model, self.stored)
        return student

    def _whole_student(self) -> ElasticModel | None:
        if self._ranks.size == 1:
            return self.student
        student = None
        with self._ranks.agreed():
            if self._ranks.is_main:
                student = models.load_student(self._plan)
                student.config = self.student.config
        gather_into(None if student is None else student.model, self.student.model)
        return student


def _teacher(plan: Plan, mesh: DeviceMesh | None) -> tuple[Teaches, dict[str, torch.dtype]]:
    """Whom the student learns from, and in which dtypes the parent is stored."""
    chunk, cache = plan.recipe.kl_chunk_tokens, plan.recipe.teacher_cache
    if cache is not None:
        return CachedTeacher(cache, chunk), models.parent_dtypes(plan)
    model = models.load_teacher(plan)
    stored = models.stored_dtypes(model.model)
    shard(model, plan.ranks, mesh, plan.autocast)
    return Teacher(model, chunk), stored
