"""The demo's recipe in bf16 under ``fully_shard``: sharded against whole steps, masked and sliced. What NCCL and a GPU can show.

    star-elastic demo --out demo-out
    torchrun --standalone --nproc-per-node 1 benchmarks/gpu_train.py [--demo demo-out] [--steps 12]

Takes the same steps twice, on the same rows, masks and starting weights: with student and teacher spread by ``fully_shard`` over
all processes (also over one, which ``star-elastic train`` would not do), and whole in each process. Every second step runs under
the router's masks, the others in a slice, the sizes in turn. Gradients are reduced in fp32 and weights gathered in bf16, as in
training, so both losses should agree to bf16's rounding. The backend is NCCL on GPUs and gloo on a CPU, where this only shows
that it runs. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from star_elastic import Submodel
from star_elastic.train import models
from star_elastic.train.data import Batch, calibration_batches
from star_elastic.train.documents import load_tokenizer
from star_elastic.train.gradients import View, distil
from star_elastic.train.prepare import Plan, prepare
from star_elastic.train.ranks import ALONE, Ranks
from star_elastic.train.recipe import load_recipe
from star_elastic.train.search import Search
from star_elastic.train.sharding import clip_gradients, shard
from star_elastic.train.teacher import Teacher

RECIPE = Path(__file__).parent.parent / "recipes" / "demo.yaml"
SIZES = {"full": 0, "mid": 1, "small": -1}  # which of the recipe's candidates, on every axis


def main() -> None:
    """Take the steps in both ways, print from the first process."""
    options = read_options()
    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    ranks = Ranks.here()
    if on_gpu:
        torch.cuda.set_device(ranks.local_rank)
    plan = prepare(recipe_of(options), ranks)
    mesh = init_device_mesh(plan.device.type, (ranks.size,))
    sides = {"sharded": Side(plan, mesh), "whole": Side(replace(plan, ranks=ALONE), None)}
    rows = [step(sides, number, batch) for number, batch in enumerate(batches(plan, options.steps))]
    if ranks.is_main:
        facts = {"device": str(plan.device), "processes": ranks.size, "backend": dist.get_backend()}
        show(rows, ", ".join(f"{name} {value}" for name, value in facts.items()))
        print(json.dumps({"benchmark": "gpu_train", **facts, "rows": rows}))
    dist.destroy_process_group()


def read_options() -> argparse.Namespace:
    """Where the demo is, and how far to go."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, default=Path("demo-out"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def recipe_of(options: argparse.Namespace) -> Any:
    """The demo's recipe on a demo's folder."""
    return load_recipe(
        RECIPE,
        [
            f"parent={options.demo / 'sorted'}",
            f"output={options.demo / 'gpu-train'}",
            f"data.sources.0.path={options.demo / 'data' / 'reasoning.jsonl'}",
            f"data.sources.1.path={options.demo / 'data' / 'text.txt'}",
            f"device={options.device}",
            "precision=bf16",
        ],
    )


def batches(plan: Plan, steps: int) -> list[Batch]:
    """Rows of every step, for all processes together."""
    recipe = plan.recipe
    rows = steps * recipe.batch_size
    tokenizer = load_tokenizer(recipe.parent)
    found = calibration_batches(
        recipe.data, tokenizer, samples=rows, seq_len=recipe.sequence_length, batch_size=recipe.batch_size
    )
    return found.batches


class Side:
    """Student, teacher and router of one way to hold them; the router and its noise are the same in both."""

    def __init__(self, plan: Plan, mesh: DeviceMesh | None) -> None:
        self.plan = plan
        teacher = models.load_teacher(plan)
        shard(teacher, plan.ranks, mesh, plan.autocast)
        self.teacher = Teacher(teacher, plan.recipe.kl_chunk_tokens)
        self.student = models.load_student(plan)
        widths = plan.targets.candidates
        for name, place in SIZES.items():
            self.student.add(name, Submodel(widths={axis: found[place] for axis, found in widths.items()}))
        self.sharded = shard(self.student, plan.ranks, mesh, plan.autocast)
        self.optimizer = models.build_optimizer(self.student.model, plan.recipe)
        self.search = Search(plan)

    def step(self, number: int, batch: Batch) -> tuple[float, float]:
        """Loss and gradient norm of one step: masked at even numbers, else the next size's slice."""
        recipe, samples = self.plan.recipe, {}
        name = list(SIZES)[number // 2 % len(SIZES)]
        view: View = functools.partial(self.student.at, name)
        if number % 2 == 0:
            samples = {name: self.search.sample(name, number)}
            view = functools.partial(self.student.masked, samples[name].leaves)
        losses = distil(self.student, self.teacher, batch, {name: view}, dtype=self.plan.autocast, sharded=self.sharded)
        norm = clip_gradients(self.student.parameters(), recipe.optimizer.clip)
        if samples:
            self.search.backward(samples)
            learning = list(self.search.router.parameters())
            self.plan.ranks.average(weight.grad for weight in learning if weight.grad is not None)
            self.search.optimizer.step()
            self.search.optimizer.zero_grad(set_to_none=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses[name].item(), norm.item()


def step(sides: dict[str, Side], number: int, batch: Batch) -> dict[str, Any]:
    """The same step in both ways."""
    row: dict[str, Any] = {"step": number + 1, "lens": "sliced" if number % 2 else "masked"}
    row["size"] = list(SIZES)[number // 2 % len(SIZES)]
    for name, side in sides.items():
        begin = time.perf_counter()
        row[f"{name}_loss"], row[f"{name}_norm"] = side.step(number, batch)  # reading them waits for the GPU
        row[f"{name}_ms"] = 1e3 * (time.perf_counter() - begin)
    row["difference"] = abs(row["sharded_loss"] - row["whole_loss"])
    return row


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The table."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
