"""The two models of a run, and the optimizer of the one that learns."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from star_elastic.elastic import ElasticModel
from star_elastic.loading import load_model
from star_elastic.submodel import ElasticConfig
from star_elastic.train.prepare import Plan
from star_elastic.train.recipe import Recipe
from star_elastic.train.state import model_tensors
from star_elastic.version import VERSION

MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_teacher(plan: Plan) -> ElasticModel:
    """The frozen parent. With autocast it stays as stored; without, it computes in fp32 as the student does."""
    model = load_model(plan.recipe.parent, device=plan.load_device)
    if plan.autocast is None:
        model.float()
    return ElasticModel(model.requires_grad_(False))


def load_student(plan: Plan) -> ElasticModel:
    """The model that learns, with what the recipe freezes frozen."""
    dtype = MASTER_DTYPES[plan.recipe.master_weights]
    student = ElasticModel(load_model(plan.recipe.parent, device=plan.load_device, dtype=dtype), provenance(plan))
    student.train()
    for name, parameter in student.model.named_parameters():
        parameter.requires_grad_(name not in plan.frozen)
    return student


def stored_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """In which dtype each tensor of a model as it was loaded is stored."""
    return {name: tensor.dtype for name, tensor in model_tensors(model).items()}


def parent_dtypes(plan: Plan) -> dict[str, torch.dtype]:
    """The same for a run that keeps no teacher: the parent is loaded, looked at, and let go."""
    return stored_dtypes(load_model(plan.recipe.parent, device=torch.device("meta")))


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over what is trained; parameters that are spread over processes are a group of their own, as torch requires."""
    options = recipe.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[one for one in trained if isinstance(one, DTensor) == spread] for spread in (True, False)]
    return torch.optim.AdamW(
        [{"params": group} for group in groups if group],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all groups one learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def provenance(plan: Plan) -> ElasticConfig:
    """The parent's elastic.json with a record of this training: names only, since paths tell about the user's machine."""
    recipe = plan.recipe.model_dump(mode="json", exclude={"parent", "output", "device"})
    for source in recipe["data"]["sources"]:
        if source["path"] is not None:
            source["path"] = Path(source["path"]).resolve().name
    if recipe["teacher_cache"] is not None:
        recipe["teacher_cache"] = Path(recipe["teacher_cache"]).resolve().name
    for budget in (recipe["budgets"] or {}).values():
        if budget["table"] is not None:
            budget["table"] = Path(budget["table"]).name
    training = {
        "tool": f"star-elastic {VERSION}",
        "parent": plan.recipe.parent.resolve().name,
        "recipe": recipe,
    }
    return plan.elastic.model_copy(update={"provenance": {**plan.elastic.provenance, "training": training}})


class Average:
    """A running average of the trained weights, in fp32: average <- decay x average + (1 - decay) x weight.

    Args:
        model: Whose weights.
        decay: How much of the average stays at each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().float().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        for name, parameter in model.named_parameters():
            if name in self.tensors:
                self.tensors[name].lerp_(parameter.detach().float(), 1 - self.decay)

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over saved averages."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Put the averages in the place of the weights."""
        for name, parameter in model.named_parameters():
            if name in self.tensors:
                parameter.copy_(self.tensors[name])


@torch.no_grad()
def cast(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Give every tensor the dtype that the parent stores it in."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in dtypes:
            tensor.data = tensor.data.to(dtypes[name])
