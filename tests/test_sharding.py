"""Models spread over processes: ten steps through every lens equal one process that knows nothing of sharding."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from processes import run
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tokens
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from star_elastic.candidates import candidates, default_spec
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError, RecipeError
from star_elastic.router import Router
from star_elastic.submodel import Submodel
from star_elastic.train.models import Average
from star_elastic.train.ranks import Ranks, joined
from star_elastic.train.sharded_state import load_sharded, save_sharded
from star_elastic.train.sharding import clip_gradients, device_mesh, gather_into, local, shard, small_parameters
from star_elastic.train.state import optimizer_tensors

STEPS = 10
LENSES = ("masked", "narrow", "full", "shallow")
CLIP = 0.5  # well below the norms that occur


class Run:
    """A student, its teacher and a width router, ready to take steps; ``ranks`` None never touches the code under test."""

    def __init__(self, family: str, ranks: Ranks | None = None, **options):
        self.checkpointing = options.pop("checkpointing", False)
        self.parts, self.sync = options.pop("parts", 1), options.pop("sync", True)
        self.ranks = ranks
        self.student, self.teacher = (ElasticModel(FAMILIES[family](seed)) for seed in (0, 1))
        self.teacher.requires_grad_(False)
        layout = self.student.layout
        found = candidates(layout, default_spec(layout))
        narrow = {axis: widths[-1] for axis, widths in found.items()}
        self.student.add("narrow", Submodel(widths=narrow))
        last = layout.num_layers - 1
        self.student.add("shallow", Submodel(layers=tuple(range(last)), widths={"hidden": narrow["hidden"]}))
        self.router = Router(layout, found, ["small"], seed=3)
        self.noise = torch.Generator().manual_seed(7)
        self.sharded = None
        if ranks is not None:
            shard(self.teacher, ranks, **options)
            self.sharded = shard(self.student, ranks, **options)
        self.student.checkpointing = self.checkpointing
        kinds = [[p for p in self.student.parameters() if isinstance(p, DTensor) == kind] for kind in (True, False)]
        self.optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=3e-3, eps=1e-6)
        self.router_optimizer = torch.optim.AdamW(self.router.parameters(), lr=3e-3, eps=1e-6)
        self.average = Average(self.student.model, 0.9)

    def step(self, number: int) -> tuple[float, float]:
        """Loss and gradient norm of one step on 4 rows."""
        rows = tokens(batch=4, seed=number)
        lens, own = LENSES[number % len(LENSES)], rows
        if self.ranks is not None:
            own = rows.chunk(self.ranks.size)[self.ranks.rank]
        view, sample = functools.partial(self.student.at, lens), None
        if lens == "masked":
            sample = self.router.masks(self.router.sample("small", tau=2.0, scale=1.0, generator=self.noise))
            leaves = {key: mask.detach().requires_grad_() for key, mask in sample.items()}
            view = functools.partial(self.student.masked, leaves)
        total = torch.zeros(())
        for number, part in enumerate(parts := own.chunk(self.parts)):
            if self.sharded is not None:
                self.sharded.begin_backward(number + 1 == len(parts))
                if not self.sync:
                    self.student.set_requires_gradient_sync(number + 1 == len(parts))
            with torch.no_grad():
                wanted = (self.teacher.features(part) @ self.teacher.head_weight().T).log_softmax(-1)
            with view():
                found = (self.student.features(part) @ self.student.head_weight().T).log_softmax(-1)
            loss = (wanted.exp() * (wanted - found)).sum(-1).mean() * (len(part) / len(own))
            loss.backward()
            total += loss.detach()
        if sample is not None:
            torch.autograd.backward([sample[key] for key in leaves], [leaf.grad for leaf in leaves.values()])
        return self.update(total)

    def update(self, loss: torch.Tensor) -> tuple[float, float]:
        if self.ranks is None:
            norm = nn.utils.clip_grad_norm_(self.student.parameters(), CLIP)
        else:
            self.sharded.average_gradients()
            self.ranks.average([loss, *(p.grad for p in self.router.parameters() if p.grad is not None)])
            norm = clip_gradients(self.student.parameters(), CLIP)
        for optimizer in (self.optimizer, self.router_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.average.update(self.student.model)
        return loss.item(), norm.item()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint of a run holds."""
        kinds = {
            "model": {**dict(self.student.model.named_parameters()), **dict(self.student.model.named_buffers())},
            "optimizer": optimizer_tensors(self.student.model, self.optimizer),
            "average": self.average.tensors,
            "router": self.router.state_dict(),
        }
        return {f"{kind}/{name}": value.detach() for kind, tensors in kinds.items() for name, value in tensors.items()}


def in_full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in tensors.items()}


def finished(run: Run) -> dict[str, torch.Tensor]:
    """Losses, norms and weights after ten steps."""
    numbers = torch.tensor([run.step(number) for number in range(STEPS)])
    return {"numbers": numbers, **in_full(run.tensors())}


def in_each_process(folder: Path, jobs: list[tuple[str, str, dict]]) -> None:
    with joined() as ranks:
        for name, family, options in jobs:
            result = finished(Run(family, ranks, **options))
            save_file({key: tensor.contiguous() for key, tensor in result.items()}, folder / f"{name}-{ranks.rank}")


# Every family meets every way of sharding at least once.
JOBS = {
    "nemotron": ("nemotron_h", {}),
    "nemotron-checkpointing": ("nemotron_h", {"checkpointing": True, "parts": 2}),
    "mixtral": ("mixtral", {"parts": 2, "sync": False}),
    "mixtral-hybrid": ("mixtral", {"how": "hybrid", "group": 1, "parts": 2, "checkpointing": True}),
    "llama-tied": ("llama", {}),
    "llama-tied-checkpointing": ("llama", {"checkpointing": True, "parts": 2, "sync": False}),
    "llama-whole": ("llama", {"how": "off"}),
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    run(folder / "log", 2, in_each_process, folder, [(name, *job) for name, job in JOBS.items()])
    return folder


@functools.cache
def one_process(family: str) -> dict[str, torch.Tensor]:
    return finished(Run(family))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_equal_one_over_ten_steps(sharded, name):
    wanted = one_process(JOBS[name][0])
    first, second = (load_file(sharded / f"{name}-{rank}") for rank in range(2))
    assert first.keys() == second.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=0)
        torch.testing.assert_close(first[key], wanted[key], rtol=1e-5, atol=1e-5, msg=lambda text: f"{key}: {text}")
    losses, norms = wanted["numbers"].unbind(1)
    assert norms.min() > 2 * CLIP  # every step was clipped
    assert losses.unique().numel() == STEPS
