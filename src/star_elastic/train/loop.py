"""The run: a frozen parent teaches its own nested models, one of them per step.

Teacher and student begin as the same weights. Each step draws a submodel, runs the teacher in full and the student as that
submodel, and pulls the student's distribution towards the teacher's; the gradient reaches the part of the student's weights that
the submodel uses. Nothing else is trained on: no language-model loss, no labels.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from star_elastic import cost
from star_elastic.checkpoint import copy_companions, target_folder
from star_elastic.elastic import ElasticModel
from star_elastic.errors import ElasticError
from star_elastic.families import family_of
from star_elastic.loading import load_model, no_bars
from star_elastic.progress import progress_bar
from star_elastic.submodel import ElasticConfig, read_config
from star_elastic.train import state as saved
from star_elastic.train.card import family_card
from star_elastic.train.curriculum import BudgetSampler
from star_elastic.train.data import Batch, pad_token, training_loader
from star_elastic.train.distill import chunked_kl
from star_elastic.train.interrupt import StopRequest
from star_elastic.train.prepare import Plan, prepare
from star_elastic.train.recipe import Recipe, load_recipe, override
from star_elastic.train.report import Losses, SubmodelReport, TrainReport
from star_elastic.train.schedule import learning_rate
from star_elastic.train.state import RunFolder
from star_elastic.version import VERSION


class TrainingStopped(ElasticError, RuntimeError):
    """A run that ended before its last step: by Ctrl-C, SIGTERM, or a loss that is not a number."""


def train_family(
    recipe: Recipe | Path | str, overrides: Sequence[str] = (), resume: bool = False, progress: bool = True
) -> TrainReport:
    """Distil all submodels of a family from the frozen parent in one run, and write an elastic checkpoint.

    Args:
        recipe: A recipe, or the YAML file of one.
        overrides: ``key=value`` changes to it, such as ``optimizer.lr=3e-4``.
        resume: Continue the unfinished run of this recipe from its last checkpoint; the result is the same, bit for bit on
            CPU, as without the interruption.
        progress: Show a progress bar and, at the end, a table.

    Returns:
        The numbers that are also in ``training.json`` of the output folder.

    Raises:
        RecipeError, WidthError, UnknownNameError, DataError, CheckpointError, TargetError: before any weight is loaded, for
            whatever in the recipe, the parent or the data is not right.
        TrainingStopped: on Ctrl-C or SIGTERM, after saving a checkpoint; or when the loss or gradient is not finite.

    Example:
        >>> train_family("recipes/demo.yaml", ["steps=200"]).submodels["small"].kd_recent
    """
    recipe = override(recipe, overrides) if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    run = RunFolder(recipe)
    run.check(resume)
    plan = prepare(recipe)
    with run.open(), _own_randomness(plan.device):
        trainer = Trainer(plan, run)
        if resume:
            trainer.restore()
        with StopRequest() as stop:
            trainer.train(stop, progress)
        report = trainer.finish()
    run.remove()
    if progress:
        report.print()
    return report


class Trainer:
    """Everything that changes during a run, and the steps that change it.

    Args:
        plan: The checked run.
        run: Its folder.
    """

    def __init__(self, plan: Plan, run: RunFolder) -> None:
        self.plan, self.run, recipe = plan, run, plan.recipe
        self.teacher, self.student, self.stored = _load_pair(plan)
        self.optimizer = torch.optim.AdamW(
            self.student.parameters(),
            lr=recipe.optimizer.lr,
            betas=recipe.optimizer.betas,
            eps=recipe.optimizer.eps,
            weight_decay=recipe.optimizer.weight_decay,
        )
        self.sampler = BudgetSampler(plan.probabilities, recipe.seed)
        self.loader = training_loader(
            plan.documents,
            recipe.data,
            length=recipe.sequence_length,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            pad=pad_token(plan.tokenizer),
        )
        self.losses = {name: Losses() for name in plan.elastic.submodels}
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        torch.manual_seed(recipe.seed)

    def train(self, stop: StopRequest, progress: bool) -> None:
        """Take the steps that are left.

        Raises:
            TrainingStopped: asked to stop, or not a finite loss.
        """
        recipe, per_step = self.plan.recipe, self.plan.recipe.batch_size * self.plan.recipe.sequence_length
        batches = iter(self.loader)
        left = recipe.total_steps - self.step
        with progress_bar("training", left * per_step, "tokens", shown=progress) as advance:
            while self.step < recipe.total_steps:
                self._step(next(batches))
                advance(per_step)
                # Also after the last step: should the disk be full now, the result can still be written later.
                due = self.step % recipe.checkpoint_every == 0 or self.step == recipe.total_steps
                if due or stop.signal is not None:
                    self.save()
                if stop.signal is not None:
                    raise TrainingStopped(
                        f"stopped by {stop.signal.name} after step {self.step} of {recipe.total_steps}, "
                        f"saved in {self.run.path}; continue with the same command and --resume"
                    )

    def finish(self) -> TrainReport:
        """Write the elastic checkpoint: an ordinary model folder in the parent's dtypes, elastic.json, training.json."""
        recipe, plan = self.plan.recipe, self.plan
        report = TrainReport(
            output=recipe.output,
            steps=self.step,
            tokens=self.tokens,
            seconds=self.seconds,
            submodels={
                name: SubmodelReport.of(
                    int(cost.params(plan.layout, submodel.widths, submodel.layers)),
                    plan.probabilities[name],
                    self.losses[name],
                )
                for name, submodel in plan.elastic.submodels.items()
            },
            notes=plan.notes,
        )
        _cast(self.student.model, self.stored)
        with target_folder(recipe.output, recipe.parent) as folder:
            self._write(folder, report)
        return report

    def _write(self, folder: Path, report: TrainReport) -> None:
        parent, elastic = self.plan.recipe.parent, self.student.config
        with no_bars():
            self.student.model.save_pretrained(folder)
        # The architecture is the parent's; transformers would write its config without a few fields that others read.
        config = read_config(parent)
        config = family_of(config).child_config(config, {}, None)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        elastic.save(folder)
        copy_companions(parent, folder)
        card = family_card(report, self.plan.layout, elastic, parent=parent)
        (folder / "README.md").write_text(card, encoding="utf-8")
        report.write(folder)
        if self.run.metrics.exists():
            shutil.copyfile(self.run.metrics, folder / "metrics.jsonl")

    def save(self) -> None:
        """Write a checkpoint of the run."""
        tensors = {
            "model": saved.model_tensors(self.student.model),
            "optimizer": saved.optimizer_tensors(self.student.model, self.optimizer),
            "random": {**saved.random_states(), "sampler": self.sampler.state()},
        }
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "losses": {name: vars(losses) for name, losses in self.losses.items()},
            "data": self.loader.state_dict(),
        }
        self.run.save(self.step, tensors, state)

    def restore(self) -> None:
        """Go back to the newest checkpoint; without one the run begins at step 0."""
        folder = self.run.latest()
        if folder is None:
            return
        tensors, state = self.run.load(folder)
        saved.restore_model(self.student.model, tensors["model"])
        saved.restore_optimizer(self.student.model, self.optimizer, tensors["optimizer"])
        self.sampler.restore(tensors["random"].pop("sampler"))
        saved.restore_random_states(tensors["random"])
        self.loader.load_state_dict(state["data"])
        self.losses = {name: Losses(**fields) for name, fields in state["losses"].items()}
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.run.truncate_metrics(self.step)

    def _step(self, batch: Batch) -> None:
        begin = time.perf_counter()
        options = self.plan.recipe.optimizer
        name = self.sampler.draw()
        rate = learning_rate(
            self.step, self.plan.recipe.total_steps, peak=options.lr, floor=options.min_lr, warmup=options.warmup_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._loss(batch, name)
        self._refuse_infinite("loss", loss, name)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.student.parameters(), options.clip)
        self._refuse_infinite("gradient norm", norm, name)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        tokens, seconds = int(batch["attention_mask"].sum()), time.perf_counter() - begin
        self.step, self.tokens, self.seconds = self.step + 1, self.tokens + tokens, self.seconds + seconds
        self.losses[name].add(loss.item())
        if self.step % self.plan.recipe.log_every == 0 or self.step == self.plan.recipe.total_steps:
            self.run.log(
                {
                    "step": self.step,
                    "tokens": self.tokens,
                    "submodel": name,
                    "kd_loss": loss.item(),
                    "grad_norm": norm.item(),
                    "lr": rate,
                    "tokens_per_second": tokens / seconds,
                }
            )

    def _loss(self, batch: Batch, name: str) -> Tensor:
        """KD loss of a batch for one submodel."""
        ids = batch["input_ids"].to(self.plan.device)
        mask = batch["attention_mask"].to(self.plan.device)
        padding = None if bool(batch["attention_mask"].all()) else mask
        with self._autocast():
            with torch.no_grad():
                taught = self.teacher.features(ids, padding)
            learnt = self.student.features(ids, padding, submodel=name)
            return chunked_kl(
                learnt,
                self.student.head_weight(submodel=name),
                taught,
                self.teacher.head_weight(),
                padding,
                self.plan.recipe.kl_chunk_tokens,
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.plan.autocast is None:
            return nullcontext()
        return torch.autocast(self.plan.device.type, dtype=self.plan.autocast)

    def _refuse_infinite(self, what: str, value: Tensor, submodel: str) -> None:
        if math.isfinite(value.item()):
            return
        latest = self.run.latest()
        kept = f"the last good checkpoint is {latest}" if latest else "there is no checkpoint yet"
        raise TrainingStopped(
            f"{what} is {value.item()} at step {self.step + 1}, submodel {submodel!r}; {kept}; "
            "begin a new run with a lower optimizer.lr, or precision=fp32"
        )


def _own_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Give the caller its random state back at the end."""
    gpu = [] if device.type == "cpu" else [device.index or 0]
    return torch.random.fork_rng(gpu, device_type=device.type if gpu else "cuda")


def _load_pair(plan: Plan) -> tuple[ElasticModel, ElasticModel, dict[str, torch.dtype]]:
    """The frozen teacher, the student in fp32, and the dtype in which the parent stores each tensor.

    With autocast the teacher stays as stored; without, it too computes in fp32.
    """
    parent = plan.recipe.parent
    teacher = load_model(parent, device=plan.device)
    stored = {name: tensor.dtype for name, tensor in saved.model_tensors(teacher).items()}
    if plan.autocast is None:
        teacher.float()
    student = load_model(parent, device=plan.device, dtype=torch.float32)
    elastic = ElasticModel(student, _provenance(plan))
    elastic.train()
    elastic.checkpointing = plan.recipe.activation_checkpointing
    return ElasticModel(teacher.requires_grad_(False)), elastic, stored


def _provenance(plan: Plan) -> ElasticConfig:
    """The parent's elastic.json with a record of this training: names only, since paths tell about the user's machine."""
    recipe = plan.recipe.model_dump(mode="json", exclude={"parent", "output", "device"})
    for source in recipe["data"]["sources"]:
        if source["path"] is not None:
            source["path"] = Path(source["path"]).resolve().name
    training = {
        "tool": f"star-elastic {VERSION}",
        "parent": plan.recipe.parent.resolve().name,
        "recipe": recipe,
    }
    return plan.elastic.model_copy(update={"provenance": {**plan.elastic.provenance, "training": training}})


@torch.no_grad()
def _cast(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Give every tensor the dtype that the parent stores it in."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])
