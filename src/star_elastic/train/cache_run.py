"""``cache-teacher``: run the frozen parent once over a recipe's rows, and keep its top-K answers on disk.

Shards are written one by one, each whole or not at all, into ``OUT.run``; at the end that folder becomes ``OUT``. An interrupted
run goes on behind its last shard: rows are read again up to there, which is cheap, and the parent is not asked about them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from star_elastic.checkpoint import check_target
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError, ElasticError, RecipeError, TargetError
from star_elastic.progress import progress_bar
from star_elastic.submodel import read_json
from star_elastic.train import models
from star_elastic.train.batches import planned_batches
from star_elastic.train.data import Batch
from star_elastic.train.distill import real_tokens
from star_elastic.train.gradients import split
from star_elastic.train.interrupt import StopRequest
from star_elastic.train.prepare import Plan, prepare
from star_elastic.train.ranks import check_alone
from star_elastic.train.recipe import Recipe, load_recipe, override
from star_elastic.train.teacher import autocast, inputs
from star_elastic.train.teacher_cache import (
    FIELDS,
    FILE_NAME,
    FORMAT_VERSION,
    cache_bytes,
    check_no_extension,
    identity,
    real_rows,
    row_hash,
    write_identity,
)
from star_elastic.train.topk_loss import TopK, top_k
from star_elastic.units import format_bytes

STORED = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHARD_BYTES = 1 << 28


class CachingStopped(ElasticError, RuntimeError):
    """A run that was interrupted, by Ctrl-C or SIGTERM, and can go on."""


@dataclass(frozen=True)
class CacheReport:
    """A finished cache.

    Attributes:
        output: The folder.
        rows: In all stages.
        tokens: Real tokens.
        nbytes: On disk.
    """

    output: Path
    rows: int
    tokens: int
    nbytes: int

    def print(self) -> None:
        """Tell what was written."""
        print(f"{self.rows:,} rows, {self.tokens:,} tokens, {format_bytes(self.nbytes)}")
        print(f"wrote {self.output}; train with teacher_cache={self.output}")


def cache_teacher(
    recipe: Recipe | Path | str,
    out: Path | str,
    k: int,
    *,
    dtype: str = "fp16",
    overrides: Sequence[str] = (),
    resume: bool = False,
    progress: bool = True,
) -> CacheReport:
    """Write what the parent of a recipe says about each row that a run of it will read, in the order of the run.

    Args:
        recipe: A recipe, or the YAML file of one. Stages of different row length get a folder each.
        out: Folder to write; it appears when everything is in it.
        k: Tokens to keep of each distribution.
        dtype: Of log-probabilities: fp16, bf16 or fp32. Token ids are int32.
        overrides: ``key=value`` changes to the recipe.
        resume: Continue in ``OUT.run``; the result is that of an unbroken run.
        progress: Show the expected size and a progress bar.

    Raises:
        ElasticError: one of several processes that ``torchrun`` has started.
        RecipeError: as for ``train_family``; K beyond the vocabulary; a search that may be extended.
        TargetError: ``out`` is not empty, or ``OUT.run`` exists and ``resume`` is not wanted, or the reverse.
        CheckpointError: not enough space; ``OUT.run`` is of another recipe.
        CachingStopped: on Ctrl-C or SIGTERM.
    """
    check_alone("cache-teacher")
    recipe = override(recipe, overrides) if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    plan = prepare(recipe.model_copy(update={"teacher_cache": None}))
    check_no_extension(plan)
    vocabulary = next(unit for unit in plan.layout.units if unit.kind == "head").rows[0].shape[0]
    if not 1 <= k <= vocabulary:
        raise RecipeError(f"top-k {k}: the parent has {vocabulary} tokens; give a number from 1 to that")
    target = check_target(out, recipe.parent)
    folder = target.with_name(f"{target.name}.run")
    how = {"top_k": k, "dtype": dtype, "precision": "fp32" if plan.autocast is None else "bf16"}
    made_from = identity(plan)
    with StopRequest() as stop:  # before the folder is there: Ctrl-C then always says how to go on in it
        _begin(folder, made_from, how, resume)
        writer = _Writer(plan, folder, k, dtype)
        writer.check_space(progress)
        writer.write(stop, progress)
    folder.rename(target)
    return writer.report(target)


def _begin(folder: Path, made_from: Mapping[str, Any], how: Mapping[str, Any], resume: bool) -> None:
    """Make ``OUT.run``, or see that it is of this recipe."""
    if not folder.exists():
        if resume:
            raise TargetError(f"nothing to resume: there is no {folder}; run without --resume")
    elif not resume:
        raise TargetError(f"{folder} holds an unfinished cache: continue it with --resume, or remove it")
    elif (folder / FILE_NAME).exists():
        before = read_json(folder / FILE_NAME)
        for name, now in {"format_version": FORMAT_VERSION, "made_from": made_from, "how": how}.items():
            if before.get(name) != now:
                raise CheckpointError(
                    f"{folder} is of another recipe, parent or top-k: give the same again, or remove it"
                )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_identity(folder, made_from, how)


class _Writer:
    """Runs the parent over the rows of a plan, shard by shard."""

    def __init__(self, plan: Plan, folder: Path, k: int, dtype: str) -> None:
        self._plan, self._folder, self._k, self._dtype = plan, folder, k, STORED[dtype]
        self._token_bytes = k * (4 + self._dtype.itemsize) + 8
        self._rows, self._tokens = 0, 0

    def check_space(self, shown: bool) -> None:
        """Tell how large the cache will be, and refuse where the disk has no room for what is missing."""
        size = sum(stage.steps * stage.tokens_per_step for stage in self._plan.stages) * self._token_bytes
        have = cache_bytes(self._folder)
        free = shutil.disk_usage(self._folder).free
        if size - have > free:
            if not have:
                shutil.rmtree(self._folder)
            raise CheckpointError(
                f"not enough space for the cache: needs {format_bytes(size - have)}, {format_bytes(free)} are free; "
                "a smaller --top-k takes less"
            )
        if shown:
            print(f"the answers will take up to {format_bytes(size)}")

    def write(self, stop: StopRequest, shown: bool) -> None:
        """Write the shards that are missing.

        Raises:
            CachingStopped: asked to stop.
        """
        teacher: ElasticModel | None = None
        total = sum(stage.steps * stage.tokens_per_step for stage in self._plan.stages)
        with progress_bar("caching the teacher", total, "tokens", shown=shown) as advance:
            for number, index, batches in self._shards():
                file = self._folder / f"stage-{number}" / f"{index:05d}.safetensors"
                if file.exists():
                    for batch in batches:
                        advance(self._count(batch, number))
                        self._heed(stop)
                    continue
                teacher = teacher or models.load_teacher(self._plan)
                _save(self._answers(teacher, number, batches, stop, advance), file)

    def _count(self, batch: Batch, stage: int) -> int:
        """Note a batch that is done; its tokens, padding included."""
        self._rows += len(batch["input_ids"])
        self._tokens += int(batch["attention_mask"].sum())
        return self._plan.stages[stage].tokens_per_step

    def _shards(self) -> Iterator[tuple[int, int, list[Batch]]]:
        """The batches of each shard: number of its stage, its own number there, and at least one batch."""
        number, index, batches = 0, 0, list[Batch]()
        for at, batch in planned_batches(self._plan):
            most = max(SHARD_BYTES // (self._plan.stages[number].tokens_per_step * self._token_bytes), 1)
            if batches and (at != number or len(batches) == most):
                yield number, index, batches
                index, batches = (0 if at != number else index + 1), []
            number = at
            batches.append(batch)
        yield number, index, batches

    def _answers(
        self,
        teacher: ElasticModel,
        stage: int,
        batches: list[Batch],
        stop: StopRequest,
        advance: Callable[[int], None],
    ) -> dict[str, Tensor]:
        """What a shard holds. The rows run in the parts in which training would run them."""
        answers, rows = list[TopK](), list[Tensor]()
        for batch in batches:
            for part in split(batch, self._plan.stages[stage].accumulate):
                answers.append(self._ask(teacher, part))
            rows += real_rows(batch)
            advance(self._count(batch, stage))
            self._heed(stop)
        fields = {name: torch.cat([getattr(answer, name) for answer in answers]) for name in FIELDS}
        fields["log_p"] = fields["log_p"].to(self._dtype)
        return fields | {
            "row_tokens": torch.tensor([len(row) for row in rows]),
            "row_hash": torch.tensor([row_hash(row) for row in rows]),
        }

    def _heed(self, stop: StopRequest) -> None:
        if stop.signal is not None:
            raise CachingStopped(f"stopped; what is done is in {self._folder}: the same with --resume continues")

    @torch.no_grad()
    def _ask(self, teacher: ElasticModel, part: Batch) -> TopK:
        ids, padding = inputs(part, teacher.model.device)
        with autocast(ids.device, self._plan.autocast):
            states = real_tokens(teacher.features(ids, padding), padding)
            answer = top_k(states, teacher.head_weight(), self._k, self._plan.recipe.kl_chunk_tokens)
        return TopK(*(getattr(answer, name).cpu() for name in FIELDS))

    def report(self, output: Path) -> CacheReport:
        """The numbers of the finished cache."""
        return CacheReport(output, self._rows, self._tokens, cache_bytes(output))


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a shard whole or not at all."""
    file.parent.mkdir(exist_ok=True)
    partial = file.with_suffix(".partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from None
    partial.replace(file)
