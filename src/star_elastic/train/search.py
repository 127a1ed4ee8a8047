"""The search: a router learns which widths to give each budget, while the weights learn under its masks.

Once per step and budget the router is sampled. The masks are cut from its graph, so that any number of forward and backward
passes can add to their gradients, which then go through the router once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from star_elastic.budget import Budget
from star_elastic.combinations import Key, axis_of
from star_elastic.router import Probabilities, Router
from star_elastic.router_freeze import BudgetMissed, Frozen
from star_elastic.submodel import Submodel
from star_elastic.train.anneal import Anneal
from star_elastic.train.budget_loss import ChoiceLoss, can_list
from star_elastic.train.prepare import Plan
from star_elastic.train.state import (
    model_tensors,
    optimizer_tensors,
    prefixed,
    restore_model,
    restore_optimizer,
    unprefixed,
)

NEARLY = 0.1  # of the most probable choice's probability


@dataclass(frozen=True)
class Sample:
    """The masks of one budget at one step.

    Attributes:
        masks: With the router's graph behind them.
        leaves: The same numbers without it; they collect gradients.
        step: Search steps that were done then.
    """

    masks: dict[Key, Tensor]
    leaves: dict[Key, Tensor]
    step: int


class Search:
    """The router of a run, and everything that changes with it.

    Args:
        plan: A checked run with budgets.

    Attributes:
        router: What learns.
        optimizer: Its own AdamW: weights and router differ in learning rate and clipping.
        planned: Search steps of the recipe's stages.
        most_extra: Steps by which the search may be extended.
    """

    def __init__(self, plan: Plan) -> None:
        self.options, recipe = plan.recipe.router, plan.recipe
        self.layout, self.budgets = plan.layout, plan.targets.budgets
        self.router = Router(
            plan.layout,
            plan.targets.candidates,
            list(self.budgets.values()),
            per_layer=self.options.per_layer,
            hidden=self.options.hidden,
            depth_order=plan.elastic.depth_order,
            seed=derived_seed(recipe.seed, "router"),
        ).to(plan.device)
        optimizer = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            self.router.parameters(), lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=0.0
        )
        (tau_start, tau_end), (scale_start, scale_end) = self.options.tau, self.options.scale
        self.planned, self.most_extra = plan.search_steps, int(self.options.max_extension * plan.search_steps)
        self._anneals = [
            Anneal(max(steps, 1), tau_start, tau_end, scale_start, scale_end)
            for steps in (self.planned, self.most_extra)
        ]
        self.losses: dict[str, ChoiceLoss] = {}
        if self.options.loss == "choices" and can_list(self.router.combinations):
            self.losses = {
                name: ChoiceLoss(self.router.combinations, budget, self.options.tolerance)
                for name, budget in self.budgets.items()
                if not budget.is_full
            }
        self.noise = torch.Generator().manual_seed(derived_seed(recipe.seed, "noise"))

    def sharpness(self, step: int) -> tuple[float, float]:
        """Temperature and scale after ``step`` search steps; an extension of the search anneals a second time."""
        extra = step - self.planned
        anneal, at = (self._anneals[0], step) if extra < 0 else (self._anneals[1], extra)
        return anneal.tau(at), anneal.scale(at)

    def sample(self, name: str, step: int) -> Sample:
        """Draw the masks of a budget.

        Args:
            name: The budget.
            step: Search steps done.
        """
        tau, scale = self.sharpness(step)
        hard = self.options.mode == "straight_through"
        drawn = self.router.sample(name, tau=tau, scale=scale, generator=self.noise, hard=hard)
        masks = self.router.masks(drawn)
        leaves = {key: mask.detach().requires_grad_() for key, mask in masks.items()}
        return Sample(masks, leaves, step)

    def budget_loss(self, name: str, step: int) -> Tensor:
        """How far the noise-free choice for a budget is from it, differentiable."""
        probabilities = self.probabilities(name, step)
        if name in self.losses:
            return self.losses[name](probabilities)
        return self.router.budget_loss(self.budgets[name], probabilities, self.options.tolerance)

    def backward(self, samples: Mapping[str, Sample]) -> None:
        """Carry the gradients that the leaves have collected into the router, and those of all budgets' losses.

        The budget's loss needs no model, so that of *every* budget is taken at each step, its mean. With those of the drawn
        budgets alone a budget that is not drawn for a while is carried away by the optimizer's momentum and the shared weights.
        """
        for sample in samples.values():
            reached = [key for key, leaf in sample.leaves.items() if leaf.grad is not None]
            torch.autograd.backward(
                [sample.masks[key] for key in reached], [sample.leaves[key].grad for key in reached]
            )
        step = max(sample.step for sample in samples.values())
        losses = [self.budget_loss(name, step) for name in self.budgets]
        (self.options.weight * torch.stack(losses).mean()).backward()

    def probabilities(self, name: str, step: int) -> Probabilities:
        """Noise-free, at the temperature and scale of a step."""
        tau, scale = self.sharpness(step)
        return self.router.probabilities(name, tau=tau, scale=scale)

    @torch.no_grad()
    def error(self, name: str, step: int) -> float:
        """Expected cost of a budget's choice over its target, less 1."""
        widths, layers = self.router.expected(self.probabilities(name, step))
        return float(self.budgets[name].cost(self.layout, widths, layers)) / self.budgets[name].target - 1

    @torch.no_grad()
    def freeze(self) -> dict[str, Frozen]:
        """The widths chosen for each budget, as a router at its last temperature and scale chooses.

        A choice counts where it is the most probable one, or nearly: others would be picked by chance among those that the
        router does not want.

        Raises:
            BudgetMissed: by how much each budget that is not met is missed.
        """
        tau, scale = self.options.tau[1], self.options.scale[1]
        frozen, missed = {}, []
        for name, budget in self.budgets.items():
            frozen[name] = self.router.freeze(budget, self.options.tolerance, tau=tau, scale=scale)
            if budget.is_full or frozen[name].is_argmax:
                continue
            rows = self.router.probabilities(name, tau=tau, scale=scale).values()
            if frozen[name].probability < NEARLY * math.prod(float(row.max()) for row in rows):
                missed.append(self._missed(budget, [int(row.argmax()) for row in rows]))
        if missed:
            raise BudgetMissed(f"{'; '.join(missed)}; the tolerance is {self.options.tolerance:.0%}")
        return frozen

    def _missed(self, budget: Budget, pick: list[int]) -> str:
        """By how much the router's most probable choice misses a budget."""
        space = self.router.combinations
        cost = float(space.price(budget, np.array([pick]))[0])
        return (
            f"budget {budget.name!r} would get {space.text(pick)}, which costs {budget.text(cost)}, "
            f"{cost / budget.target - 1:+.1%} of its {budget.text(budget.target)}"
        )

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments, for a checkpoint."""
        weights, moments = model_tensors(self.router), optimizer_tensors(self.router, self.optimizer)
        return prefixed("weights", weights) | prefixed("moments", moments)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        restore_model(self.router, unprefixed("weights", tensors))
        restore_optimizer(self.router, self.optimizer, unprefixed("moments", tensors))

    @torch.no_grad()
    def describe(self, names: list[str], step: int) -> dict[str, Any]:
        """What a line of metrics says about the router: JSON-ready, by budget and axis."""
        found = {name: self.probabilities(name, step) for name in names}
        tau, scale = self.sharpness(step)
        return {
            "tau": tau,
            "scale": scale,
            "budget_error": {name: self.error(name, step) for name in names},
            "inside": {name: self.losses[name].inside(found[name]) for name in names if name in self.losses},
            "widths": {
                name: {
                    key_text(key): self.router.candidates[axis_of(key)][int(row.argmax())] for key, row in rows.items()
                }
                for name, rows in found.items()
            },
            "width_probabilities": {
                name: {key_text(key): row.tolist() for key, row in rows.items()} for name, rows in found.items()
            },
        }


def key_text(key: Key) -> str:
    """A key as JSON can have it: ``hidden``, or ``expert_ffn.3`` in layer 3."""
    return key if isinstance(key, str) else f"{key[0]}.{key[1]}"


def derived_seed(seed: int, purpose: str) -> int:
    """A seed of its own for each purpose: generators with one seed would draw the same numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "little") >> 1


def frozen_to_json(frozen: Mapping[str, Frozen]) -> dict[str, Any]:
    """Choices, for a checkpoint of the run."""
    return {
        name: {**asdict(choice), "submodel": choice.submodel.model_dump(mode="json")} for name, choice in frozen.items()
    }


def frozen_from_json(content: Mapping[str, Any]) -> dict[str, Frozen]:
    """Choices, from a checkpoint of the run."""
    return {
        name: Frozen(**{**fields, "submodel": Submodel.model_validate(fields["submodel"])})
        for name, fields in content.items()
    }
