"""The account of memory against real runs: what lives throughout exactly, what lives during a step within a stated factor."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, tiny_folder, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from star_elastic.elastic import ElasticModel
from star_elastic.families import layout_of
from star_elastic.layout import Layout
from star_elastic.loading import load_model
from star_elastic.presets import get_preset
from star_elastic.train.distill import chunked_kl
from star_elastic.train.memory import Setting, StageMemory, rows_per_pass, stage_memory, unit_activations
from star_elastic.train.stages import Stage

ROWS, LENGTH, CHUNK = 4, 128, 128
LEAST, MOST = 0.65, 1.15  # what a step really held, as a part of the estimate; docs/how-to/plan-a-run.md says so

SIZES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "pattern": "ME*-ME",
        "moe_intermediate_size": 192,
        "intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 128,
    },
    "mixtral": {"intermediate_size": 192},
    "granitemoehybrid": {"intermediate_size": 96, "shared_intermediate_size": 128, "mamba_n_heads": 16},
}


def stage(**changes: Any) -> Stage:
    one = Stage("settle", 1, LENGTH, ROWS, 1, 1, None, 1e-4, 1e-5, 0)
    return replace(one, **changes)


def model_of(family: str) -> Any:
    """A model wide enough that matrices outweigh what is one number per token."""
    return FAMILIES[family](**{"hidden_size": 128, "intermediate_size": 256, **SIZES.get(family, {})})


class Live(TorchDispatchMode):
    """Follows the bytes of all storages that are made while it is on; those of ``known`` models do not count."""

    def __init__(self, *known: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._kept = [tensor.untyped_storage() for model in known for tensor in (*model.parameters(), *model.buffers())]
        self._sizes = {storage._cdata: 0 for storage in self._kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


@contextmanager
def lens(student: ElasticModel, layout: Layout, search: bool) -> Iterator[None]:
    masks: dict[Any, torch.Tensor] = {name: torch.full((axis.size,), 0.9) for name, axis in layout.width_axes.items()}
    block: AbstractContextManager[Any] = student.masked(masks) if search else nullcontext()
    with block:
        yield


def step(student: ElasticModel, teacher: ElasticModel, layout: Layout, *, search: bool, bf16: bool) -> None:
    ids = tokens(ROWS, LENGTH)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        with torch.no_grad():
            taught = teacher.features(ids)
        with lens(student, layout, search):
            head = student.head_weight()
            loss = chunked_kl(student.features(ids), head, taught, teacher.head_weight(), None, CHUNK)
    loss.backward()


USUAL = {(False, False, False), (True, True, True)}
CASES = [
    pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow)
    for case in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize(("search", "recomputed", "bf16"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_of_a_real_step_is_near_the_estimate(family: str, search: bool, recomputed: bool, bf16: bool) -> None:
    student, teacher = ElasticModel(model_of(family)), ElasticModel(model_of(family))
    if bf16:
        teacher.model.to(torch.bfloat16)
    student.train()
    student.checkpointing = recomputed
    layout = student.layout
    with Live(student, teacher) as live:
        step(student, teacher, layout, search=search, bf16=bf16)
    setting = Setting(
        compute=2 if bf16 else 4,
        teacher="bf16" if bf16 else "fp32",
        fused=False,
        checkpointing=recomputed,
        kl_chunk_tokens=CHUNK,
    )
    told = stage_memory(layout, stage(phase="search" if search else "settle"), setting)
    estimate = told.gradients + told.copies + told.activations + told.loss
    assert LEAST <= live.peak / estimate <= MOST, (live.peak, told)


def held(model: nn.Module) -> int:
    """Bytes of a model's parameters and saved buffers, tied ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    rotary = {id(module._buffers[name]) for module in model.modules() for name in module._non_persistent_buffers_set}
    return sum(tensor.nbytes for tensor in tensors if id(tensor) not in rotary)


def state_of(model: Any, layout: Layout) -> tuple[int, int, int]:
    """Bytes of weights, gradients and moments after one real step of AdamW."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    model(input_ids=tokens()).logits.float().square().mean().backward()
    optimizer.step()
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return held(model), gradients, sum(moment.nbytes for moment in moments)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_gradients_and_moments_are_exact(family: str) -> None:
    model = FAMILIES[family]().train()
    layout = layout_of(model.config.to_dict())
    told = stage_memory(layout, stage(), Setting())
    assert state_of(model, layout) == (told.weights, told.gradients, told.moments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("memory") / "parent", dtype="bfloat16")


def test_bf16_masters_keep_what_transformers_keeps_in_fp32(folder: Path) -> None:
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.bfloat16).train()
    layout = layout_of(model.config.to_dict())
    assert any(parameter.dtype == torch.float32 for parameter in model.parameters())
    told = stage_memory(layout, stage(), Setting(master=2))
    assert state_of(model, layout) == (told.weights, told.gradients, told.moments)
    assert told.teacher == held(model) < stage_memory(layout, stage(), Setting(teacher="fp32")).teacher


def test_what_is_frozen_has_no_gradient_and_no_average() -> None:
    model = FAMILIES["nemotron_h"]().train()
    layout = layout_of(model.config.to_dict())
    frozen = {name for name, _ in model.named_parameters() if "mixer.experts" in name}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    told = stage_memory(layout, stage(), Setting(frozen=frozen, average=True))
    assert state_of(model, layout) == (told.weights, told.gradients, told.moments)
    assert told.average == told.gradients < told.weights


NANO = get_preset("nemotron-3-nano-30b-a3b").layout


def nano(world: int, **changes: Any) -> StageMemory:
    one = stage(sequence_length=8192, batch_size=1536, accumulate=192 * 8 // world)
    return stage_memory(NANO, one, Setting(world, world, **changes))


def test_devices_share_the_state_and_nothing_else() -> None:
    eight, sixteen = nano(8, checkpointing=True), nano(16, checkpointing=True)
    assert eight.state == pytest.approx(2 * sixteen.state, rel=0.01)  # vectors and routers stay whole
    assert (eight.activations, eight.gathered, eight.loss) == (sixteen.activations, sixteen.gathered, sixteen.loss)
    parameters = 31_577_937_344  # 16 bytes each for the student; the teacher's 2; and buffers
    assert eight.state * 8 == pytest.approx(18 * parameters, rel=0.01)


def test_recomputing_and_smaller_parts_take_less() -> None:
    assert nano(8, checkpointing=True).activations < 0.15 * nano(8, checkpointing=False).activations
    assert rows_per_pass(stage(batch_size=10, accumulate=2), 2) == 3  # 10 rows in 4 parts: one of them has 3
    assert rows_per_pass(stage(batch_size=4), 8) == 1
    # auto: in a search, where masked copies of all layers would live
    assert Setting().checkpoints(stage(phase="search")) and not Setting().checkpoints(stage())


def test_the_optimizers_step_counts_only_where_it_is_the_peak() -> None:
    told = nano(8, checkpointing=True)
    passes = told.gathered + told.copies + told.activations + told.loss
    assert told.total == told.state + max(passes, told.optimizer_step)
    lean = replace(told, gathered=0, copies=0, activations=0, loss=1)
    assert lean.total == told.state + told.optimizer_step
    assert list(told.as_json())[-1] == "total" and all(isinstance(value, int) for value in told.as_json().values())


def test_an_expert_layer_keeps_what_a_token_visits() -> None:
    unit = next(unit for unit in NANO.units if unit.kind == "moe")
    norm, router = 2 * 4 * 2688, 2 * (2688 + 128)
    experts = 6 * 2 * 2 * (2688 + 1856)  # six of 128, up and down, input and output in bf16
    shared = 2 * 2 * (2688 + 3712)
    assert unit_activations(NANO, unit, Setting(fused=True)) == norm + router + experts + shared
    assert unit_activations(NANO, unit, Setting(fused=False)) == norm + router + experts + shared  # no scan in it


def test_one_device_holds_nothing_gathered_and_many_hold_two_units() -> None:
    layer = 128 * 2 * 2688 * 1856 + 2 * 2688 * 3712 + 128 * 2688 + 2688  # the largest unit is an expert layer
    assert nano(1, checkpointing=True).gathered == 0
    around = 2 * 131072 * 2688 + 2688  # fp32 weights and gradients of the student, bf16 of the teacher
    assert nano(8, checkpointing=True).gathered == layer * (2 * 2 + 4) + around * (4 + 4 + 2)
    # masked copies: in the dtype of the gathered weights, of one unit where it is computed again
    search = stage_memory(NANO, stage(phase="search"), Setting(8, 8, checkpointing=True))
    assert search.copies == 2 * layer and nano(8, checkpointing=True).copies == 0
