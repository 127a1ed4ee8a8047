"""What a frozen teacher says, read from disk instead of computed: ``teacher_cache: FOLDER`` in a recipe.

::

    cache/
      cache.json                what it was made from, and how
      stage-0/00000.safetensors, 00001.safetensors, ...       one folder per stage, since stages differ in row length

A shard holds whole rows, one after the other, N real tokens in all: ``ids`` [N, K] int32, ``log_p`` [N, K], ``log_rest`` and
``log_sum_exp`` [N] (see ``topk_loss.TopK``); ``row_tokens`` [R] counts those of each row, ``row_hash`` [R] tells which row it is.

A row is found by its tokens, not by its number. So it does not matter in which parts, by which processes or after which
interruption it is asked for, and an answer never goes to other tokens than its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from star_elastic.checkpoint import Checkpoint, weights_sample_sha256
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError, RecipeError
from star_elastic.submodel import read_json
from star_elastic.train.batches import planned_batches
from star_elastic.train.data import Batch
from star_elastic.train.prepare import Plan
from star_elastic.train.teacher import inputs
from star_elastic.train.topk_loss import TopK, topk_kl

FORMAT_VERSION = 1
FILE_NAME = "cache.json"
FIELDS = ("ids", "log_p", "log_rest", "log_sum_exp")


@dataclass(frozen=True)
class Place:
    """Where the answer to a row lies: a shard, and the tokens ``start`` to ``end`` in it."""

    shard: Path
    start: int
    end: int


class CachedTeacher:
    """A teacher that has answered already; stands in the place of ``teacher.Teacher``.

    Args:
        folder: What ``cache-teacher`` wrote.
        chunk_tokens: Tokens whose logits exist at one time in the loss.

    Raises:
        CheckpointError: a shard cannot be read.
    """

    def __init__(self, folder: Path, chunk_tokens: int) -> None:
        self._folder, self._chunk_tokens = folder, chunk_tokens
        self._places: dict[int, Place] = {}
        self._open: dict[Path, Any] = {}
        for shard in sorted(folder.glob("stage-*/*.safetensors")):
            self._places |= read_places(shard)

    def answer(self, batch: Batch) -> TopK:
        """The answers to a batch's real tokens, in the order of the rows.

        Raises:
            RecipeError: a row that the cache does not have.
        """
        rows = [self._row(tokens) for tokens in real_rows(batch)]
        return TopK(*(torch.cat(pieces) for pieces in zip(*rows, strict=True)))

    def distance(self, answer: TopK, student: ElasticModel, batch: Batch) -> Tensor:
        """KL of the student, through the lens in force, the tokens beyond the top K as one; a scalar, nats per real token."""
        device = student.model.device
        ids, padding = inputs(batch, device)
        here = TopK(*(getattr(answer, name).to(device) for name in FIELDS))
        return topk_kl(student.features(ids, padding), student.head_weight(), here, padding, self._chunk_tokens)

    def _row(self, tokens: Tensor) -> list[Tensor]:
        place = self._places.get(row_hash(tokens))
        if place is None or place.end - place.start != len(tokens):
            raise RecipeError(
                f"teacher_cache: {self._folder} has no answer to a row that this run reads: the data is no longer what it was "
                "made from, or a shard is gone; run cache-teacher again"
            )
        if place.shard not in self._open:
            self._open[place.shard] = safe_open(place.shard, framework="pt")
        shard = self._open[place.shard]
        return [shard.get_slice(name)[place.start : place.end] for name in FIELDS]


def read_places(shard: Path) -> dict[int, Place]:
    """The rows of a shard, by hash.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with safe_open(shard, framework="pt") as file:
            lengths, hashes = file.get_tensor("row_tokens").tolist(), file.get_tensor("row_hash").tolist()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shard} cannot be read ({error}); make the cache again") from None
    places, end = {}, 0
    for number, length in zip(hashes, lengths, strict=True):
        places[number] = Place(shard, end, end + length)
        end += length
    return places


def cache_bytes(folder: Path) -> int:
    """What the answers in a cache take on disk."""
    return sum(shard.stat().st_size for shard in folder.glob("stage-*/*.safetensors"))


def real_rows(batch: Batch) -> list[Tensor]:
    """The rows of a batch without padding."""
    return [ids[mask != 0] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def row_hash(tokens: Tensor) -> int:
    """63 bits of the SHA-256 of a row's tokens."""
    return int.from_bytes(hashlib.sha256(tokens.cpu().numpy().tobytes()).digest()[:8], "little") >> 1


def identity(plan: Plan) -> dict[str, Any]:
    """Everything that decides which rows a run reads and what the parent says about them, JSON-ready, without paths."""
    data = plan.recipe.data.model_dump(mode="json")
    for source, documents in zip(data["sources"], plan.documents, strict=True):
        source["documents"] = len(documents)
        if source["path"] is not None:
            source["path"] = Path(source["path"]).resolve().name
    _, first = next(planned_batches(plan))
    stages = [
        {"sequence_length": stage.sequence_length, "rows": stage.steps * stage.batch_size} for stage in plan.stages
    ]
    return {
        "parent": weights_sample_sha256(Checkpoint.open(plan.recipe.parent)),
        "data": data,
        "seed": plan.recipe.seed,
        "stages": stages,
        "first_rows": [row_hash(tokens) for tokens in real_rows(first)][:1],
    }


def check_cache(folder: Path, plan: Plan) -> None:
    """Refuse, before any weight is loaded, a cache of something else than a run will ask it.

    Raises:
        CheckpointError: no cache there.
        RecipeError: it belongs to another parent, data, row length or seed, or is too short.
    """
    check_no_extension(plan)
    if not (folder / FILE_NAME).exists():
        raise CheckpointError(f"teacher_cache: {folder} holds no {FILE_NAME}: make it with cache-teacher")
    theirs, ours = read_json(folder / FILE_NAME).get("made_from", {}), identity(plan)
    _refuse_other(folder, theirs, ours, ("parent", "seed", "data"))
    _check_stages(folder, theirs.get("stages", []), ours["stages"])
    _refuse_other(folder, theirs, ours, ("first_rows",))  # these are others, too, where rows are of another length


def _refuse_other(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], names: Sequence[str]) -> None:
    wrong = next((name for name in names if theirs.get(name) != ours[name]), None)
    if wrong is not None:
        what = {"parent": "another parent", "seed": f"seed {theirs.get('seed')}, not {ours['seed']}"}
        raise RecipeError(
            f"teacher_cache: {folder} belongs to {what.get(wrong, 'other data')}: run cache-teacher again with this recipe"
        )


def _check_stages(folder: Path, theirs: list[Mapping[str, int]], ours: list[Mapping[str, int]]) -> None:
    """Rows of a stage begin where those of the one before end: only the last stage may be shorter than the cached one."""
    for number, stage in enumerate(ours):
        cached = theirs[number] if number < len(theirs) else {"sequence_length": 0, "rows": 0}
        enough = cached["rows"] >= stage["rows"] if number == len(ours) - 1 else cached["rows"] == stage["rows"]
        if cached["sequence_length"] != stage["sequence_length"] or not enough:
            raise RecipeError(
                f"teacher_cache: {folder} has {cached['rows']} rows of {cached['sequence_length']} tokens for stage {number}, "
                f"the recipe reads {stage['rows']} of {stage['sequence_length']}: run cache-teacher again with this recipe"
            )


def check_no_extension(plan: Plan) -> None:
    """Raise RecipeError where a search may be extended: it would read on, and no cache has the rows from there."""
    if plan.targets.budgets and int(plan.recipe.router.max_extension * plan.search_steps):
        raise RecipeError(
            "teacher_cache: an extended search reads rows that no cache has: set router.max_extension to 0"
        )


def write_identity(folder: Path, made_from: Mapping[str, Any], how: Mapping[str, Any]) -> None:
    """Write ``cache.json``."""
    content = {"format_version": FORMAT_VERSION, "made_from": made_from, "how": how}
    (folder / FILE_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
