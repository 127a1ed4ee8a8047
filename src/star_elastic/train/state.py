"""The folder of an unfinished run, ``OUTPUT.run``: its recipe, its metrics and its checkpoints.

::

    family.run/
      recipe.json
      metrics.jsonl
      checkpoints/step-000500/   model.safetensors  optimizer.safetensors  random.safetensors  state.json  sums.json

A checkpoint appears whole or not at all, and is bit-exact: what follows it does not depend on whether the run was interrupted.

Where several processes train, what is spread over them lies in ``shards/``, a file per process (``sharded_state``), instead of
model, optimizer and average; any number of processes can go on from either form. The main process does the rest.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from star_elastic.checkpoint import check_target, target_folder
from star_elastic.checkpoint.target import remove_empty
from star_elastic.errors import CheckpointError, RecipeError, TargetError
from star_elastic.submodel import read_json
from star_elastic.train.checkpoint_files import read_files, write_files
from star_elastic.train.ranks import ALONE, Ranks
from star_elastic.train.recipe import Recipe
from star_elastic.train.sharded_state import load_sharded, save_sharded, spread

# What may differ between a run and its resumption: it does not touch a single number of the result.
FREE_KEYS = frozenset(
    {"checkpoint_every", "keep_checkpoints", "log_every", "track", "output", "device", "shard", "shard_group"}
)
SHARDS = "shards"  # folder in a checkpoint
SPREAD = ("model", "optimizer", "average")  # what lies there, instead of in files of these names


class RunFolder:
    """``OUTPUT.run``.

    Args:
        recipe: The recipe of the run.
        ranks: The processes that train; only the main one writes, but for shards.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks = ALONE) -> None:
        self.recipe, self.ranks = recipe, ranks
        self.path = Path(f"{recipe.output}.run")
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self._recipe_file = self.path / "recipe.json"

    def check(self, resume: bool) -> None:
        """Refuse what would overwrite or mix runs; writes nothing.

        Raises:
            TargetError: the output exists, or an unfinished run does and ``resume`` was not asked for.
            RecipeError: ``resume`` without a run, or with another recipe.
        """
        check_target(self.recipe.output, self.recipe.parent)
        check_target(self.path / "new", self.recipe.parent)
        if not resume:
            if self.latest() is not None:
                raise TargetError(f"{self.path} holds an unfinished run: continue it with --resume, or remove it")
        elif not self.path.exists():
            raise RecipeError(f"nothing to resume: there is no {self.path}; run without --resume")
        elif self._recipe_file.exists() or self.latest() is not None:
            self._check_same_recipe()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make and lock the folder while the block runs; without a checkpoint in it, a new run begins.

        If the block fails before the first checkpoint, the folders that were made for it go again.

        Raises:
            TargetError: another process trains in it, or it cannot be made.
        """
        with ExitStack() as stack:
            with self.ranks.agreed():
                if self.ranks.is_main:
                    stack.enter_context(self._opened())
            yield

    @contextmanager
    def _opened(self) -> Iterator[None]:
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with self._locked():
            try:
                if self.latest() is None:
                    self._recipe_file.write_text(self.recipe.model_dump_json(indent=2) + "\n", encoding="utf-8")
                    self.metrics.unlink(missing_ok=True)
                yield
            except (Exception, KeyboardInterrupt):
                if self.path in made and self.latest() is None:
                    shutil.rmtree(self.path)
                    remove_empty(made[1:])
                raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise TargetError(f"cannot make {self.path}, where the run lives: {error.strerror}") from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TargetError(
                    f"another process is training in {self.path}: wait for it, or choose another output"
                ) from None
            yield
        finally:
            os.close(lock)

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        return max(self._all(), default=None)

    def _all(self) -> list[Path]:
        """All whole checkpoints, oldest first; folders of other names are the user's own, such as a copy."""
        return sorted(self.checkpoints.glob("step-" + 8 * "[0-9]"))

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint after ``step`` steps."""
        return self._of(step).exists()

    def _of(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def save(self, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Write a checkpoint and drop the oldest beyond ``keep_checkpoints``.

        Args:
            step: Steps done.
            tensors: File name without ending -> tensors.
            state: The rest, JSON-ready.

        Raises:
            CheckpointError: the disk is full; earlier checkpoints stay, and the message names the last.
        """
        size = sum(tensor.nbytes for file in tensors.values() for tensor in file.values())
        with self._target(step, size) as folder:
            if self.ranks.size > 1:
                shared = {f"{name}/{key}": value for name in SPREAD for key, value in tensors.pop(name, {}).items()}
                save_sharded(folder / SHARDS, shared)
            with self.ranks.agreed():
                if self.ranks.is_main:
                    write_files(folder, tensors, state)
        if not self.ranks.is_main:
            return
        for old in self._all()[: -self.recipe.keep_checkpoints]:
            shutil.rmtree(old)

    @contextmanager
    def _target(self, step: int, size: int) -> Iterator[Path]:
        """The folder of a new checkpoint for all processes; the main one makes it, and renames it when all are done."""
        with ExitStack() as stack:
            folder = None
            with self.ranks.agreed():
                if self.ranks.is_main:
                    stack.enter_context(self._last_is_told())
                    folder = stack.enter_context(target_folder(self._of(step), size=size))
            yield Path(self.ranks.from_main(str(folder)))

    @contextmanager
    def _last_is_told(self) -> Iterator[None]:
        """Add to the reason why a checkpoint cannot be written how to go on from the one before."""
        try:
            yield
        except CheckpointError as error:
            if (latest := self.latest()) is None:
                raise
            raise CheckpointError(f"{error}; {latest} stays: make room, and continue with --resume") from None

    def load(
        self, folder: Path, places: Mapping[str, Mapping[str, Tensor]]
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Read what ``save`` wrote, on whatever number of processes.

        Args:
            folder: The checkpoint.
            places: By file and name, tensors whose distribution over the processes those that are read take over.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        with self.ranks.agreed():
            tensors, state = read_files(folder)
        flat = {f"{file}/{name}": place for file, content in places.items() for name, place in content.items()}
        if (folder / SHARDS).exists():
            for path, tensor in load_sharded(folder / SHARDS, flat).items():
                file, _, name = path.partition("/")
                tensors.setdefault(file, {})[name] = tensor
        else:
            for file in (name for name in SPREAD if name in tensors):
                tensors[file] = spread(tensors[file], places.get(file, {}))
        return tensors, state

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``."""
        if not self.ranks.is_main:
            return
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines of steps after ``step``: they will be taken again."""
        if not self.ranks.is_main or not self.metrics.exists():  # no step was due for a line yet
            return
        try:
            lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{self.metrics} has lines that no run wrote ({error}); remove them, or the file, to resume"
            ) from None
        swap = self.metrics.with_suffix(".partial")
        swap.write_text("".join(kept), encoding="utf-8")
        swap.replace(self.metrics)

    def remove(self) -> None:
        """Forget the run: its result is written."""
        if self.ranks.is_main:
            shutil.rmtree(self.path)

    def _check_same_recipe(self) -> None:
        before = read_json(self._recipe_file)
        now = json.loads(self.recipe.model_dump_json())
        for recipe in (before, now):  # a search that missed its budgets may go on longer
            recipe.get("router", {}).pop("max_extension", None)
        for key in sorted({*before, *now} - FREE_KEYS):
            if before.get(key) != now.get(key):
                where, old, new = _difference(key, before.get(key), now.get(key))
                raise RecipeError(
                    f"the recipe changed since {self.path} began: {where} was {old!r}, now {new!r}; put it back"
                )


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once (tied ones under their first name) and every buffer that is saved with a model."""
    saved = model.state_dict().keys()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under ``prefix.name``."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that ``prefixed`` named."""
    return {
        name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")
    }


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments and step counts by parameter name, independent of parameter order."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy saved tensors into the model."""
    places = model_tensors(model)
    if places.keys() != tensors.keys():
        raise CheckpointError(
            f"checkpoint and model differ in tensors, among them {sorted(places.keys() ^ tensors.keys())[0]}"
        )
    for name, place in places.items():
        place.copy_(tensors[name])


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put saved moments back; a parameter that had no step yet has none."""
    for name, parameter in model.named_parameters():
        entry = {
            key: tensors[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in tensors
        }
        if entry:
            # AdamW counts steps on the CPU and keeps moments beside the parameter.
            optimizer.state[parameter] = {k: v if k == "step" else v.to(parameter.device) for k, v in entry.items()}


def random_states() -> dict[str, Tensor]:
    """States of torch's global generators; nothing here draws from Python's or numpy's."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_states(states: dict[str, Tensor]) -> None:
    """Put saved generator states back, those of GPUs that are not here excepted."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)


def _difference(key: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """The first place at which two values differ, as a dotted key, and both values there."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                return _difference(f"{key}.{name}", before.get(name), now.get(name))
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        index = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
        return _difference(f"{key}.{index}", before[index], now[index])
    return key, before, now
