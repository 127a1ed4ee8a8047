"""What a training step costs: masked against plain, sliced against exported, the loss's memory, and two processes.

    python benchmarks/train_step.py [--quick] [--only search settle loss scaling] [--rounds 9] [--limit 80]

- ``search``: a step under a router's masks (sampling, masked lens, the router's own backward and update) against a plain step of
  the full model (aim: at most 1.15), both keeping activations, both recomputing them, and as the trainer does by default: the
  search recomputes, a plain step keeps.
- ``settle``: a step of each nested size, on slices of the parent's weights, against the step of the exported slice as a model of
  its own (aim: at most 1.05); and against the full model's: time of the step, time of the student's part of it (the frozen
  teacher always runs whole), and arithmetic of that part (matrix products, counted).
- ``loss``: peak bytes of the chunked divergence against the plain one, forward and backward, and its time.
- ``scaling``: tokens per second of ``star-elastic train`` in one process and in two, each on one thread, and in one process on
  two threads, which is the better use of two cores of one machine. Processes on a CPU show that sharing works and what it
  costs; they have no memory and no links of their own, so this says nothing about GPUs.

A step is the trainer's own: its gradient, clipping and optimizer. The sides of a ratio run in turn in one process; the median of
the rounds' ratios is reported with its quartiles. Runs of ``scaling`` follow each other; they are compared step by step. At most
about six minutes on two cores. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lens import config_of, submodels
from rich.console import Console
from rich.table import Table
from side_by_side import CLOCKS, interleaved, ratio_row
from torch.utils.flop_counter import FlopCounterMode
from train_step_loss import compare_losses
from train_step_scaling import compare_processes
from transformers import NemotronHForCausalLM

from star_elastic import ElasticModel, slice_checkpoint
from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.loading import load_model
from star_elastic.train import models
from star_elastic.train.gradients import View, distil
from star_elastic.train.prepare import Plan, prepare
from star_elastic.train.recipe import Recipe
from star_elastic.train.search import Search
from star_elastic.train.sharding import clip_gradients
from star_elastic.train.teacher import Teacher, autocast

MASKED_AIM, SLICED_AIM = 1.15, 1.05
QUICK = {"hidden": 64, "expert_width": 64, "vocab": 320, "tokens": 128, "rounds": 3, "loss_vocab": 2048, "steps": 3}
PARTS = ("search", "settle", "loss", "scaling")
PLANNED = 1000  # search steps; the masks are those of its middle
CHECKPOINTING = {
    "activations kept": (False, False),
    "recomputed": (True, True),
    "the trainer's default": (True, False),
}


def main() -> None:
    """Run the wanted parts, print."""
    options = read_options()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place), options)
        parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "search": bench.search,
            "settle": bench.settle,
            "loss": functools.partial(compare_losses, options),
            "scaling": functools.partial(compare_processes, Path(place), bench.content, options.steps),
        }
        for name in options.only:
            rows += [{"part": name, **row} for row in parts[name]()]
    setting = {
        "parameters": bench.parameters,
        "tokens": options.tokens,
        "threads": torch.get_num_threads(),
        "autocast": str(bench.plan.autocast).removeprefix("torch."),
        "clock": options.clock,
    }
    show(rows, ", ".join(f"{name} {value}" for name, value in setting.items()))
    print(json.dumps({"benchmark": "train_step", **setting, "rows": rows}))


def read_options() -> argparse.Namespace:
    """Sizes of the parent and of the batch, and how long to measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: see that it runs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--pattern", default="MEM*EME", help="kinds of layer: M Mamba-2, E experts, * attention, - MLP")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--expert-width", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of one step")
    parser.add_argument("--batch", type=int, default=4, help="rows of one step; even, for two processes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=80.0, help="seconds after which search and settle end, each")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--loss-vocab", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=6, help="steps of each phase of a run of ``scaling``")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


class Bench:
    """A random parent in a folder, a checked run on it, and one batch."""

    def __init__(self, place: Path, options: argparse.Namespace) -> None:
        self.place, self.options = place, options
        parent = NemotronHForCausalLM(config_of(options))
        self.parameters = sum(parameter.numel() for parameter in parent.parameters())
        parent.save_pretrained(place / "parent")
        write_tokenizer(place / "parent")
        (place / "text.txt").write_text("Steps take time. " * (options.tokens * (options.steps + 1)))
        self.content = content(place, options)
        self.plan: Plan = prepare(Recipe.model_validate(self.content))
        self.teacher = Teacher(models.load_teacher(self.plan), self.plan.recipe.kl_chunk_tokens)
        ids = torch.randint(3, options.vocab, (options.batch, options.tokens // options.batch))
        self.batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def search(self) -> list[dict[str, Any]]:
        """Masked against plain steps."""
        sides: dict[str, Callable[[], None]] = {}
        for masked, plain in CHECKPOINTING.values():
            sides[f"masked {masked}"] = Stepper(self, self.student(masked), Search(self.plan)).step
            sides[f"plain {plain}"] = Stepper(self, self.student(plain)).step
        taken = interleaved(sides, self.options.rounds, self.options.limit, self.options.clock)
        return [
            ratio_row(
                taken[f"masked {masked}"],
                taken[f"plain {plain}"],
                what=f"masked step, {what}",
                against="plain step",
                aim=MASKED_AIM if masked == plain else None,
            )
            for what, (masked, plain) in CHECKPOINTING.items()
        ]

    def settle(self) -> list[dict[str, Any]]:
        """Sliced steps against those of the exported slices and of the full model."""
        names = submodels(self.options)
        student = self.student(checkpointing=False)
        steppers = {"full": Stepper(self, student)}
        for name, submodel in names.items():
            student.add(name, submodel)
            slice_checkpoint(self.place / "parent", self.place / name, submodel)
            exported = ElasticModel(load_model(self.place / name, device=self.plan.device, dtype=torch.float32).train())
            steppers[f"{name} sliced"] = Stepper(self, student, name=name)
            steppers[f"{name} exported"] = Stepper(self, exported)
        work = {side: stepper.products() for side, stepper in steppers.items()}
        sides = {side: stepper.step for side, stepper in steppers.items()}
        taken = interleaved({**sides, "teacher": self.ask}, self.options.rounds, self.options.limit, self.options.clock)

        def own(side: str) -> list[float]:
            """Seconds of the student's part."""
            return [whole - teacher for whole, teacher in zip(taken[side], taken["teacher"], strict=True)]

        rows = []
        for name in names:
            ours, exported_side = f"{name} sliced", f"{name} exported"
            rows += [
                ratio_row(
                    taken[ours], taken[exported_side], what=f"{name}: step", against="exported slice", aim=SLICED_AIM
                ),
                ratio_row(taken[ours], taken["full"], what=f"{name}: step", against="full size"),
                ratio_row(own(ours), own("full"), what=f"{name}: student's part", against="full size"),
                {
                    "what": f"{name}: student's arithmetic",
                    "against": "full size",
                    "ratio": round(work[ours] / work["full"], 3),
                    "ours": round(work[ours] / 1e9, 2),
                    "other": round(work["full"] / 1e9, 2),
                    "unit": "GFLOP",
                },
            ]
        return rows

    def student(self, checkpointing: bool) -> ElasticModel:
        """A model that learns, as the trainer loads it."""
        student = models.load_student(self.plan)
        student.checkpointing = checkpointing
        return student

    def ask(self) -> torch.Tensor:
        """The teacher's part of a step."""
        with autocast(self.plan.device, self.plan.autocast):
            return self.teacher.answer(self.batch)


class Stepper:
    """Takes the trainer's steps with one student: as the nested model ``name``, or under a router's masks."""

    def __init__(self, bench: Bench, student: ElasticModel, search: Search | None = None, name: str = "full") -> None:
        self.bench, self.student, self.searching, self.name = bench, student, search, name
        self.optimizer = models.build_optimizer(student.model, bench.plan.recipe)
        self.taken = PLANNED // 2

    def step(self) -> None:
        """Gradients of weights and router, clipping, and both updates."""
        recipe = self.bench.plan.recipe
        view: View = functools.partial(self.student.at, self.name)
        samples = {}
        if self.searching is not None:
            samples = {"mid": self.searching.sample("mid", self.taken)}
            view = functools.partial(self.student.masked, samples["mid"].leaves)
        self.gradients(view)
        clip_gradients(self.student.parameters(), recipe.optimizer.clip)
        optimizers: list[torch.optim.Optimizer] = [self.optimizer]
        if self.searching is not None:
            self.searching.backward(samples)
            clip_gradients(self.searching.router.parameters(), recipe.optimizer.clip)
            optimizers.append(self.searching.optimizer)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.taken += 1

    def gradients(self, view: View) -> None:
        """The gradient of the distillation loss through a view."""
        plan = self.bench.plan
        distil(self.student, self.bench.teacher, self.bench.batch, {self.name: view}, dtype=plan.autocast)

    def products(self) -> int:
        """Floating-point operations of the matrix products of one gradient, the teacher's left out."""
        with FlopCounterMode(display=False, custom_mapping=EXPERT_PRODUCTS) as whole:
            self.gradients(functools.partial(self.student.at, self.name))
        with FlopCounterMode(display=False, custom_mapping=EXPERT_PRODUCTS) as teacher:
            self.bench.ask()
        self.optimizer.zero_grad(set_to_none=True)
        return whole.get_total_flops() - teacher.get_total_flops()


def grouped_flops(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    """Operations of a product per expert, which torch's counter leaves out: each row of ``left`` [N, K] meets one expert of
    ``right`` [E, K, M]; or, for the gradient of the weights, [K, N] meets [N, M] in runs of N."""
    return 2 * left.numel() * right[-1]


EXPERT_PRODUCTS = {torch.ops.aten._grouped_mm: grouped_flops}


def content(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A recipe: search, then settle. A router that has hardly learned must do, so every choice counts as inside."""
    return {
        "parent": str(place / "parent"),
        "output": str(place / "out"),
        "budgets": {"full": {"params": 1.0}, "mid": {"params": 0.7}},
        "router": {
            "axes": {"hidden": [1, 0.75, 0.5], "expert_ffn": [1, 0.5], "heads": [1, 0.5], "mamba_heads": [1, 0.75]},
            "tolerance": 0.9,
        },
        "stages": [{"phase": "search", "steps": PLANNED}, {"phase": "settle", "steps": options.steps}],
        "data": {"sources": [{"path": str(place / "text.txt")}]},
        "sequence_length": options.tokens // options.batch,
        "batch_size": options.batch,
        "optimizer": {"lr": 1e-4, "warmup_steps": 1},
        "precision": options.precision,
        "device": "cpu",
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The table."""
    table = Table("part", "what", "against", "ratio", "quartiles", "ours", "other", "unit", "aim", title=title)
    for row in rows:
        aim, quartiles = row.get("aim"), row.get("quartiles")
        missed = " missed" if aim is not None and row["ratio"] > aim else ""
        spread = "" if quartiles is None else f"{quartiles[0]:.3f} - {quartiles[1]:.3f}"
        numbers = (f"{row['ratio']:.3f}", spread, f"{row['ours']:,}", f"{row['other']:,}", row["unit"])
        table.add_row(row["part"], row["what"], row["against"], *numbers, "" if aim is None else f"{aim}{missed}")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
