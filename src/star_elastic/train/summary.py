"""A run's numbers, gathered for its report."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict

import torch

from star_elastic import cost
from star_elastic.axes import DEPTH
from star_elastic.combinations import axis_of
from star_elastic.router_freeze import Frozen
from star_elastic.submodel import ElasticConfig
from star_elastic.train.prepare import Plan
from star_elastic.train.report import Choice, Losses, SubmodelReport, TrainReport
from star_elastic.train.search import key_text


def summarise(
    plan: Plan,
    elastic: ElasticConfig,
    frozen: Mapping[str, Frozen],
    losses: Mapping[str, Losses],
    steps: int,
    tokens: int,
    seconds: float,
) -> TrainReport:
    """The report of a finished run."""
    entries = {}
    for name in plan.targets.names:
        submodel = elastic.get(name)
        params = int(cost.params(plan.layout, submodel.keyed_widths, submodel.layers))
        entries[name] = SubmodelReport.of(
            params, mean_probability(plan, name), losses[name], choice(plan, frozen.get(name))
        )
    unlikely = [
        name for name, chosen in frozen.items() if not chosen.is_argmax and not plan.targets.budgets[name].is_full
    ]
    notes = plan.notes
    if unlikely:
        notes += (
            f"the router's most probable widths miss the budget of {', '.join(unlikely)}: the nearest inside were taken",
        )
    return TrainReport(plan.recipe.output, steps, tokens, seconds, entries, notes)


def with_choices(elastic: ElasticConfig, report: TrainReport) -> ElasticConfig:
    """The same nested models, the record of their training completed by what was learned for each budget."""
    learned = {name: asdict(entry.choice) for name, entry in report.submodels.items() if entry.choice is not None}
    if not learned:
        return elastic
    training = {**elastic.provenance["training"], "budgets": learned}
    return elastic.model_copy(update={"provenance": {**elastic.provenance, "training": training}})


def mean_probability(plan: Plan, name: str) -> float:
    """Chance of a step to train a nested model, over all planned steps."""
    steps = sum(stage.steps for stage in plan.stages)
    return (
        sum(chances[name] * stage.steps for stage, chances in zip(plan.stages, plan.probabilities, strict=True)) / steps
    )


def choice(plan: Plan, frozen: Frozen | None) -> Choice | None:
    """What was learned for one budget."""
    if frozen is None:
        return None
    budget = plan.targets.budgets[frozen.budget]
    chosen = frozen.submodel.completed(plan.layout)
    cut = {
        key_text(key): width
        for key, width in chosen.keyed_widths.items()
        if axis_of(key) in plan.targets.candidates and key not in chosen.layer_widths
    }
    if DEPTH in plan.targets.candidates:
        cut[DEPTH] = chosen.depth(plan.layout)
    return Choice(
        kind=budget.kind,
        target=budget.target,
        cost=frozen.cost,
        error=frozen.error,
        choice_probability=frozen.probability,
        is_most_probable=frozen.is_argmax,
        cut=cut,
        text=f"{budget.text(frozen.cost)} of {budget.text(budget.target)}",
    )


def memory_bytes(device: torch.device) -> int:
    """The most memory held so far: of the GPU where training runs on one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
