"""Models spread over processes: ten steps through every lens equal one process that knows nothing of sharding."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from processes import run
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_folder, tokens
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import NemotronHForCausalLM

from star_elastic.candidates import candidates, default_spec
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError, RecipeError
from star_elastic.router import Router
from star_elastic.submodel import Submodel
from star_elastic.train.gradients import distil
from star_elastic.train.models import Average
from star_elastic.train.ranks import Ranks, joined
from star_elastic.train.sharded_state import load_sharded, save_sharded
from star_elastic.train.sharding import check_group, clip_gradients, device_mesh, gather_into, local, shard
from star_elastic.train.state import optimizer_tensors
from star_elastic.train.teacher import Teacher

STEPS = 10
LENSES = ("masked", "narrow", "full", "shallow")
CLIP = 0.25  # well below the norms that occur


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
            mesh = device_mesh(torch.device("cpu"), ranks, options.pop("how", "full"), options.pop("group", None))
            shard(self.teacher, ranks, mesh)
            self.sharded = shard(self.student, ranks, mesh)
        self.student.checkpointing = self.checkpointing
        kinds = [[p for p in self.student.parameters() if isinstance(p, DTensor) == kind] for kind in (True, False)]
        self.optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=3e-3, eps=1e-4)
        self.router_optimizer = torch.optim.AdamW(self.router.parameters(), lr=3e-3, eps=1e-4)
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


def finished(run: Run, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Losses, norms and weights after some steps."""
    numbers = torch.tensor([run.step(number) for number in range(steps)])
    return {"numbers": numbers, **in_full(run.tensors())}


def in_each_process(folder: Path, jobs: list[tuple[str, str, dict]], steps: int = STEPS) -> None:
    with joined() as ranks:
        for name, family, options in jobs:
            result = finished(Run(family, ranks, **options), steps)
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


def assert_close(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_equal_one_over_ten_steps(sharded, name):
    wanted = one_process(JOBS[name][0])
    first, second = (load_file(sharded / f"{name}-{rank}") for rank in range(2))
    assert first.keys() == second.keys() == wanted.keys()
    for key in wanted:
        assert torch.equal(first[key], second[key]), key
        assert_close(key, first[key], wanted[key])
    losses, norms = wanted["numbers"].unbind(1)
    assert norms.min() > 2 * CLIP  # every step was clipped
    assert losses.unique().numel() == STEPS


def test_four_steps_of_a_tied_model_with_checkpointing(tmp_path):
    run(tmp_path / "log", 2, in_each_process, tmp_path, [("one", "llama", {"checkpointing": True})], 4)
    wanted = finished(Run("llama"), 4)
    for key, found in load_file(tmp_path / "one-0").items():
        assert_close(key, found, wanted[key])


# Several nested models on parts of the rows


def distilled(ranks: Ranks, how: str = "full", group: int | None = None) -> dict[str, torch.Tensor]:
    """Gradients and losses of two nested models on 8 rows in two parts; the second of them skips a layer."""
    student, teacher = (ElasticModel(FAMILIES["llama"](seed)) for seed in (0, 1))
    student.add("shallow", Submodel(layers=(0, 1, 3)))
    mesh = device_mesh(torch.device("cpu"), ranks, how, group)
    shard(teacher.requires_grad_(False), ranks, mesh)
    sharded = shard(student, ranks, mesh)
    rows = tokens(batch=8)
    mask = torch.ones_like(rows)
    mask[0, 5:] = mask[3, 9:] = mask[4:6] = 0  # so the second process's first part has no real token
    views = {name: functools.partial(student.at, name) for name in ("full", "shallow")}
    batch = {"input_ids": rows, "attention_mask": mask}
    losses = distil(student, Teacher(teacher, 16), batch, views, parts=2, sharded=sharded)
    gradients = {name: parameter.grad for name, parameter in student.model.named_parameters()}
    return {**losses, **in_full(gradients)}


def distil_in_each(folder: Path) -> None:
    with joined() as ranks:
        for number, (how, group) in enumerate((("full", None), ("hybrid", 1), ("off", None))):
            found = distilled(ranks, how, group)
            save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / f"{number}-{ranks.rank}")


def test_nested_models_on_parts_of_the_rows_give_the_gradients_of_one_process(tmp_path):
    run(tmp_path / "log", 2, distil_in_each, tmp_path)
    wanted = distilled(Ranks())
    for file in sorted(tmp_path.glob("*-*")):
        found = load_file(file)
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert_close(f"{file.name} {name}", found[name], wanted[name])


# Mixed precision


def in_bf16(folder: Path, master: torch.dtype) -> ElasticModel:
    """A hybrid as transformers loads it: with gates in fp32, whatever the dtype."""
    return ElasticModel(NemotronHForCausalLM.from_pretrained(folder, dtype=master))


def one_pass(model: ElasticModel, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients by name, as functions to read them later."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.features(rows) @ model.head_weight().T
    logits.float().square().mean().backward()
    return {name: parameter.grad for name, parameter in model.model.named_parameters()}


def bf16_forward(folder: Path, master: torch.dtype) -> None:
    """Check the dtypes of all tensors while the model runs, and keep the gradients of one pass."""
    with joined() as ranks:
        model = in_bf16(folder / "model", master)
        seen: dict[str, torch.dtype] = {}
        for path, module in model.model.named_modules():
            module.register_forward_hook(functools.partial(note_dtypes, seen, path))
        sharded = shard(model, ranks, device_mesh(torch.device("cpu"), ranks, "full"), torch.bfloat16)
        gradients = one_pass(model, tokens(4).chunk(2)[ranks.rank])
        sharded.average_gradients()
        shapes = {name: parameter.shape for name, parameter in model.model.named_parameters()}
        gates = {name for name in shapes if name.endswith("gate.weight")}
        small = {name for name in shapes if len(shapes[name]) == 1}
        root = {"model.embeddings.weight", "lm_head.weight"}
        assert len(gates) == 2
        assert {
            "model.layers.0.mixer.A_log",
            "model.layers.0.norm.weight",
            "model.norm_f.weight",
        } <= small & seen.keys()
        assert {seen[name] for name in gates} == {torch.float32}
        assert {seen[name] for name in (small | root) & seen.keys()} == {master}
        assert {seen[name] for name in seen.keys() - gates - small - root} == {torch.bfloat16}
        for name, parameter in model.model.named_parameters():
            assert parameter.dtype == (torch.float32 if name in gates else master)
            assert isinstance(parameter, DTensor) == (name not in gates | small)
        save_file(in_full(gradients), folder / f"gradients-{ranks.rank}")


def note_dtypes(seen: dict[str, torch.dtype], path: str, module: nn.Module, *_: object) -> None:
    seen |= {f"{path}.{leaf}": tensor.dtype for leaf, tensor in module._parameters.items() if tensor is not None}


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_gates_and_norms_keep_their_dtype_beside_bf16_matrices(tmp_path, master):
    # Every token goes to all experts: a sharded model rounds more of a layer to bf16, and would choose others.
    tiny_folder(tmp_path / "model", pattern="ME*E", num_experts_per_tok=8)
    run(tmp_path / "log", 2, bf16_forward, tmp_path, master)
    wanted = one_pass(in_bf16(tmp_path / "model", master), tokens(4))
    found, other = (load_file(tmp_path / f"gradients-{rank}") for rank in range(2))
    for name, gradient in wanted.items():
        assert torch.equal(found[name], other[name]), name
        assert found[name].dtype == gradient.dtype, name
        assert (found[name] - gradient).float().norm() < 0.1 * gradient.float().norm(), name


def softmax_gates(folder: Path) -> None:
    """A family whose gates transformers stores like any matrix: they are whole, and bf16 neither gathers nor multiplies them."""
    with joined() as ranks:
        model, plain = (ElasticModel(FAMILIES["mixtral"](0, num_experts_per_tok=8)) for _ in range(2))
        sharded = shard(model, ranks, device_mesh(torch.device("cpu"), ranks, "full"), torch.bfloat16)
        seen: list[torch.dtype] = []
        for one in model.routers():
            one.module.register_forward_hook(lambda gate, args, output: seen.extend((gate.weight.dtype, output[0].dtype)))
        rows = tokens(4)
        found = one_pass(model, rows.chunk(2)[ranks.rank])
        sharded.average_gradients()
        wanted = one_pass(plain, rows)
        gates = [name for name in wanted if name.endswith("gate.weight")]
        assert len(gates) == 4 and seen == [torch.float32] * 2 * len(gates)
        for name in gates:
            assert not isinstance(found[name], DTensor)
            assert (found[name] - wanted[name]).norm() < 0.05 * wanted[name].norm(), name


def test_gates_of_every_family_stay_fp32_in_a_sharded_model(tmp_path):
    run(tmp_path / "log", 2, softmax_gates, tmp_path)


# Checkpoints


def save_after_steps(folder: Path) -> None:
    """Three steps, their state as a checkpoint, and again in full."""
    with joined() as ranks:
        (folder / "state").mkdir(exist_ok=True)
        one = Run("nemotron_h", ranks if ranks.size > 1 else None)
        for number in range(3):
            one.step(number)
        save_sharded(folder / "state", one.tensors())
        if ranks.is_main:
            save_file(in_full_contiguous(one), folder / "full")
        else:
            in_full_contiguous(one)


def in_full_contiguous(one: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in in_full(one.tensors()).items()}


def load_anew(folder: Path) -> None:
    """A fresh run takes the checkpoint over."""
    with joined() as ranks:
        one = Run("nemotron_h", ranks if ranks.size > 1 else None)
        kinds = ("model", "optimizer", "average")
        parameters = dict(one.student.model.named_parameters())
        places = {f"{kind}/{name}": parameter for kind in kinds for name, parameter in parameters.items()}
        found = load_sharded(folder / "state", places)
        for name, tensor in found.items():
            place = places.get(name, places.get(name.rpartition(".")[0]))
            spread = ranks.size > 1 and isinstance(place, DTensor) and tensor.shape == place.shape
            assert isinstance(tensor, DTensor) == spread, name
            assert not tensor.requires_grad
        wanted = load_file(folder / "full")
        assert found.keys() == wanted.keys()
        for name, tensor in in_full(found).items():
            assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_checkpoints_resume_on_another_number_of_processes_bit_for_bit(tmp_path, before, after):
    for size, function in ((before, save_after_steps), (after, load_anew)):
        run(tmp_path / "log", size, function, tmp_path)
    files = {file.name for file in (tmp_path / "state").iterdir()}
    assert len(files) == before and all(name.endswith(".safetensors") for name in files)  # so there is no pickle
    names = load_file(tmp_path / "full").keys()
    assert {name.split("/")[0] for name in names} == {"model", "optimizer", "average", "router"}
    assert any(name.endswith(".step") for name in names) and any(name.endswith("correction_bias") for name in names)


def test_a_damaged_or_missing_part_is_one_line(tmp_path):
    save_sharded(tmp_path, {"a": torch.arange(6.0)})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"^\S+ cannot be read: [^\n]*$"):
        load_sharded(tmp_path, {})
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_sharded(tmp_path / "nowhere", {})
    with pytest.raises(CheckpointError, match=r"^cannot write \S+: [^\n]*$"):
        save_sharded(file / "in_a_file", {"a": torch.ones(1)})


# One process, and what else there is to say


def test_one_process_is_not_sharded():
    model = ElasticModel(FAMILIES["llama"](0))
    sharded = shard(model, Ranks(), device_mesh(torch.device("cpu"), Ranks(), "full"))
    assert not isinstance(model, FSDPModule) and sharded.whole == ()
    sharded.begin_backward(is_last=False)
    model(tokens(), labels=tokens()).loss.backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    sharded.average_gradients()
    reference = [parameter.grad.clone() for parameter in model.parameters()]
    for parameter, gradient in zip(
        holders := [nn.Parameter(torch.empty_like(g)) for g in reference], reference, strict=True
    ):
        parameter.grad = gradient
    assert all(torch.equal(before[name], parameter.grad) for name, parameter in model.named_parameters())
    assert torch.equal(clip_gradients(model.parameters(), 0.5), nn.utils.clip_grad_norm_(holders, 0.5))
    for parameter, holder in zip(model.parameters(), holders, strict=True):
        assert torch.equal(parameter.grad, holder.grad)


def gather_and_group(folder: Path) -> None:
    with joined() as ranks:
        model, plain = ElasticModel(FAMILIES["mixtral"](0)), FAMILIES["mixtral"](0)
        shard(model, ranks, device_mesh(torch.device("cpu"), ranks, "full"))
        target = FAMILIES["mixtral"](1) if ranks.is_main else None
        gather_into(target, model.model)
        for name, parameter in () if target is None else target.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name)), name
        assert any(local(p).numel() < p.numel() for p in model.parameters())
        mesh = device_mesh(torch.device("cpu"), ranks, "hybrid", 1)
        assert mesh.shape == (2, 1) and mesh.mesh_dim_names == ("copies", "shares")
        check_group(ranks, "hybrid", None)
        with pytest.raises(RecipeError, match="3 processes in a group, which do not divide 2 processes"):
            check_group(ranks, "hybrid", 3)


def test_a_sharded_model_is_gathered_and_groups_must_fit(tmp_path):
    run(tmp_path, 2, gather_and_group, tmp_path)
