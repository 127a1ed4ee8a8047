"""What nested training is worth: learned widths, one run against many, and the curriculum, on the demo's parents.

    python benchmarks/importance_parents.py PARENTS --kinds demo --seeds 0 1 2
    python benchmarks/training.py PARENTS RESULTS --seeds 0 1 2 [--arms learned chosen ...] [--steps 240]
    python benchmarks/training_tables.py RESULTS

Each *arm* is one run. Its result is one JSON file in RESULTS, and a rerun goes on with those that are missing:

- ``learned``: search, then settle; the router finds the widths of ``mid`` and ``small``. All other arms need its widths.
- ``chosen``: the same widths from the sorted parent, fixed from the first step.
- ``random-0`` to ``random-4``, ``uniform``: the same with random legal widths of equal cost, and all axes cut by one factor.
- ``alone-share-SIZE``, ``alone-all-SIZE``: one size alone, with a third of the tokens and with all of them.
- ``scratch-share-SIZE``, ``scratch-all-SIZE``: the same widths from random weights, by next-token prediction on the same data.
- ``skewed``: sizes drawn at .5, .3, .2. ``two-stage``: the last 40% of the tokens in rows four times as long.
  ``two-stage-skewed``: both, as published.

Every arm sees rows in an order drawn from its seed. Held-out numbers: divergence from the parent (KD) and next-token
cross-entropy (CE), nats per token, in rows of the training length and in rows four times as long. Matrix products are in bf16
where the CPU has them, else in fp32; each result says which.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from star_elastic.budget import Budget
from star_elastic.candidates import candidates
from star_elastic.combinations import Combinations
from star_elastic.demo.pretrain import mixture, parent_config, pretrain, random_model
from star_elastic.demo.settings import FULL
from star_elastic.demo.task import HELD_OUT_ROWS, HELD_OUT_TEXT
from star_elastic.elastic import ElasticModel
from star_elastic.evaluate import held_out_kd, held_out_loss
from star_elastic.families import family_of
from star_elastic.layout import Layout
from star_elastic.loading import no_bars
from star_elastic.score import score_parent
from star_elastic.sort import sort_parent
from star_elastic.submodel import ElasticConfig, Submodel
from star_elastic.train import train_family
from star_elastic.train.data import Batch, calibration_batches
from star_elastic.train.documents import load_tokenizer
from star_elastic.train.precision import fast_dtype
from star_elastic.train.recipe import Recipe

BUDGETS = {"full": 1.0, "mid": 0.75, "small": 0.5}  # shares of all parameters
NESTED = ("mid", "small")
CANDIDATES = {
    "hidden": (1, 0.875, 0.75, 0.625, 0.5),
    "expert_ffn": (1, 0.75, 0.5),
    "shared_ffn": (1, 0.75, 0.5),
    "mamba_heads": (1, 0.75, 0.5),
    "heads": (1, 0.5),
}
TOLERANCE = 0.05
SKEWED = {"full": 0.5, "mid": 0.3, "small": 0.2}
LONG = 4  # times the row length
ELASTIC_LR = 1e-3
HELD_OUT_ROWS_READ = 120


@dataclass(frozen=True)
class Job:
    """One seed: the parent it starts from, where results go, and how long a run is."""

    parents: Path
    results: Path
    seed: int
    steps: int

    @property
    def data(self) -> Path:
        """The demo's data."""
        return self.parents / "data"

    @property
    def parent(self) -> Path:
        """The parent, sorted; made on first use."""
        folder = self.results / f"sorted-{self.seed}"
        if not folder.exists():
            scores = self.results / f"scores-{self.seed}"
            source = self.parents / f"demo-{self.seed}"
            if not scores.exists():
                score_parent(source, scores, mixture(self.data), samples=256, seq_len=FULL.length, batch_size=32)
            sort_parent(source, folder, scores)
        return folder

    @cached_property
    def teacher(self) -> ElasticModel:
        """The parent, to be compared with."""
        return ElasticModel.from_pretrained(self.parent, dtype=torch.float32)

    @property
    def layout(self) -> Layout:
        """The parent's table."""
        return self.teacher.layout

    def file(self, arm: str) -> Path:
        """The result of an arm."""
        return self.results / f"{arm}-seed{self.seed}.json"

    def read(self, arm: str) -> dict[str, Any]:
        """A finished arm."""
        content: dict[str, Any] = json.loads(self.file(arm).read_text(encoding="utf-8"))
        return content

    def chosen(self) -> dict[str, Submodel]:
        """The widths that the router found."""
        return {name: Submodel(widths=size["widths"]) for name, size in self.read("learned")["sizes"].items()}

    def held_out(self, length: int) -> list[Batch]:
        """Held-out rows."""
        tokenizer = load_tokenizer(self.parent)
        recipe = mixture(self.data, reasoning=HELD_OUT_ROWS, text=HELD_OUT_TEXT)
        samples = 2 * HELD_OUT_ROWS_READ * FULL.length // length
        return calibration_batches(recipe, tokenizer, samples=samples, seq_len=length, batch_size=32).batches


def main() -> None:
    """Run the arms that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parents", type=Path, help="folder that importance_parents.py wrote")
    parser.add_argument("results", type=Path, help="folder of JSON files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=200, help="steps of a run")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        job = Job(options.parents, options.results, seed, options.steps)
        for arm in ("learned", *(arm for arm in options.arms if arm != "learned")):
            if not job.file(arm).exists():
                begin = time.perf_counter()
                products = "fp32" if fast_dtype(torch.device("cpu")) is None else "bf16"
                result = ARMS[arm](job) | {"arm": arm, "seed": seed, "products": products}
                result["seconds"] = time.perf_counter() - begin
                job.file(arm).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(job.file(arm).name, json.dumps(result["sizes"]), f"{result['seconds']:.0f} s", flush=True)


def learned(job: Job) -> dict[str, Any]:
    """Search for half of the steps, settle for the other half."""
    stages = [stage(job, "search", 0.5), stage(job, "settle", 0.5)]
    router = {"axes": CANDIDATES, "tolerance": TOLERANCE}
    budgets = {name: {"params": share} for name, share in BUDGETS.items()}
    return distilled(job, {"budgets": budgets, "router": router, "stages": stages})


def fixed(job: Job, submodels: Mapping[str, Submodel], stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Distil fixed widths."""
    entries = {name: {"widths": submodel.widths} for name, submodel in submodels.items()}
    return distilled(job, {"submodels": entries, "stages": stages})


def chosen(job: Job) -> dict[str, Any]:
    """The router's widths from the first step."""
    return fixed(job, job.chosen(), [stage(job, "settle", 1.0)])


def at_random(job: Job, number: int) -> dict[str, Any]:
    """Random legal widths of equal cost; every fifth of the combinations inside the tolerance has its turn."""
    space = Combinations(job.layout, candidates(job.layout, CANDIDATES))
    picks, learnt = space.even(), job.chosen()
    widths = {"full": Submodel()}
    for name in NESTED:
        budget = Budget.resolve(job.layout, name, "params", BUDGETS[name])
        inside = picks[abs(space.price(budget, picks) / budget.target - 1) <= TOLERANCE]
        others = [found for pick in inside if (found := space.submodel(pick)) != learnt[name]]
        widths[name] = random.Random(f"{job.seed} {name}").sample(others, 5)[number]
    return fixed(job, widths, [stage(job, "settle", 1.0)])


def uniform(job: Job) -> dict[str, Any]:
    """Every axis cut by one factor, as near to the budget as legal widths allow."""
    widths = {"full": Submodel()}
    for name in NESTED:
        budget = Budget.resolve(job.layout, name, "params", BUDGETS[name])
        ladder = [shrunk(job.layout, step / 400) for step in range(100, 401)]
        widths[name] = min(ladder, key=lambda one: abs(budget.error(job.layout, one.widths)))
    return fixed(job, widths, [stage(job, "settle", 1.0)])


def shrunk(layout: Layout, share: float) -> Submodel:
    """All candidate axes at the legal width nearest to a share of the parent's."""
    return Submodel(
        widths={
            name: min(axis.legal(), key=lambda w: abs(w - share * axis.size))
            for name in CANDIDATES
            for axis in [layout.axes[name]]
        }
    )


def alone(job: Job, name: str, share: float) -> dict[str, Any]:
    """One size by itself, from the same slice."""
    return fixed(job, {name: job.chosen()[name]}, [stage(job, "settle", share)])


def skewed(job: Job) -> dict[str, Any]:
    """The second stage's probabilities all the time."""
    return fixed(job, job.chosen(), [stage(job, "settle", 1.0, probabilities=SKEWED)])


def two_stage(job: Job, **late: Any) -> dict[str, Any]:
    """60% of the tokens in short rows, 40% in long ones; as many rows a step fewer as they are longer."""
    long = {"sequence_length": LONG * FULL.length, "batch_size": FULL.batch_size // LONG, **late}
    return fixed(job, job.chosen(), [stage(job, "settle", 0.6), stage(job, "settle", 0.4, **long)])


def stage(job: Job, phase: str, share: float, **more: Any) -> dict[str, Any]:
    """A stage of a share of the run's steps."""
    steps = round(share * job.steps)
    return {"phase": phase, "steps": steps, "warmup_steps": steps // 20, **more}


def distilled(job: Job, recipe: dict[str, Any]) -> dict[str, Any]:
    """Run a recipe from the sorted parent; measure every size."""
    with tempfile.TemporaryDirectory() as scratch, no_bars():
        out = Path(scratch) / "family"
        report = train_family(
            Recipe.model_validate(
                {
                    "parent": str(job.parent),
                    "output": str(out),
                    "data": mixture(job.data).model_dump(mode="json", exclude_unset=True),
                    "sequence_length": FULL.length,
                    "batch_size": FULL.batch_size,
                    "optimizer": {"lr": ELASTIC_LR, "min_lr": ELASTIC_LR / 20},
                    "seed": job.seed,
                    **recipe,
                }
            ),
            progress=False,
        )
        model = ElasticModel.from_pretrained(out, dtype=torch.float32)
        names = ElasticConfig.load(out).submodels
        return {"sizes": {name: measure(job, model, name) for name in names}, "tokens": report.tokens}


def measure(job: Job, model: ElasticModel, name: str) -> dict[str, Any]:
    """Held-out numbers of one size, and what it costs."""
    submodel = model.config.get(name).completed(model.layout)
    budget = Budget.resolve(job.layout, name, "params", BUDGETS[name])
    result: dict[str, Any] = {
        "widths": {axis: width for axis, width in submodel.widths.items() if axis in CANDIDATES},
        "budget_error": budget.error(job.layout, submodel.widths),
    }
    for key, length in (("", FULL.length), ("_long", LONG * FULL.length)):
        batches = job.held_out(length)
        result[f"kd{key}"] = held_out_kd(model, job.teacher, batches, submodel=name)
        result[f"ce{key}"] = held_out_loss(model, batches, submodel=name)
    return result


def parent(job: Job) -> dict[str, Any]:
    """The parent itself, and the sorted parent's one-shot slices at the learned widths."""
    model = ElasticModel.from_pretrained(job.parent, submodels=job.chosen(), dtype=torch.float32)
    return {"sizes": {name: measure(job, model, name) for name in BUDGETS}, "tokens": 0}


def scratch(job: Job, name: str, share: float) -> dict[str, Any]:
    """The same widths from random weights, trained as the demo's parent is."""
    tokenizer = load_tokenizer(job.data / "tokenizer")
    model = random_model(child_of(job, job.chosen()[name], len(tokenizer)), job.seed)
    settings = replace(FULL, seed=job.seed, parent_steps=round(share * job.steps))
    tokens = pretrain(model, job.data, tokenizer, settings, progress=False)
    elastic = ElasticModel(model.eval())
    sizes = {name: {}}
    for key, length in (("", FULL.length), ("_long", LONG * FULL.length)):
        batches = job.held_out(length)
        sizes[name][f"kd{key}"] = held_out_kd(elastic, job.teacher, batches)
        sizes[name][f"ce{key}"] = held_out_loss(elastic, batches)
    return {"sizes": sizes, "tokens": tokens}


def child_of(job: Job, submodel: Submodel, vocabulary: int) -> Any:
    """The config of a size."""
    config = parent_config(replace(FULL, seed=job.seed), vocabulary)
    edits = family_of(config.to_dict()).config_edits(config.to_dict(), job.layout.complete(submodel.widths), None)
    for field, value in edits.items():
        setattr(config, field, value)
    return config


def _arms() -> dict[str, Callable[[Job], dict[str, Any]]]:
    arms: dict[str, Callable[[Job], dict[str, Any]]] = {
        "learned": learned,
        "parent": parent,
        "chosen": chosen,
        "uniform": uniform,
        **{f"random-{number}": lambda job, number=number: at_random(job, number) for number in range(5)},
    }
    for name in NESTED:
        arms[f"alone-share-{name}"] = lambda job, name=name: alone(job, name, 1 / 3)
        arms[f"alone-all-{name}"] = lambda job, name=name: alone(job, name, 1.0)
    for name in BUDGETS:
        arms[f"scratch-share-{name}"] = lambda job, name=name: scratch(job, name, 1 / 3)
        arms[f"scratch-all-{name}"] = lambda job, name=name: scratch(job, name, 1.0)
    arms["skewed"] = skewed
    arms["two-stage"] = two_stage
    arms["two-stage-skewed"] = lambda job: two_stage(job, probabilities=SKEWED)
    return arms


ARMS = _arms()

if __name__ == "__main__":
    main()
