"""Router gates under bf16 autocast: fp32 in every lens, for every family with experts, whatever dtype the weights have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from tiny import tiny_granitemoehybrid, tiny_mixtral, tiny_model, tiny_qwen3_moe, tokens

from star_elastic.elastic import ElasticModel
from star_elastic.submodel import Submodel

FAMILIES = {
    "nemotron_h": tiny_model,
    "qwen3_moe": tiny_qwen3_moe,
    "mixtral": tiny_mixtral,
    "granitemoehybrid": tiny_granitemoehybrid,
}
LENSES = ("parent", "masked", "soft", "sliced", "view")
AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}


def elastic_of(family: str, dtype: torch.dtype = torch.float32) -> ElasticModel:
    elastic = ElasticModel(FAMILIES[family]().to(dtype))
    elastic.add("small", Submodel(widths={"hidden": 32, "experts": 6}))
    return elastic


def through(elastic: ElasticModel, lens: str):
    """Opens a lens; a view is a model of its own."""
    sizes = {name: axis.size for name, axis in elastic.layout.axes.items()}
    if lens == "masked":
        return elastic.masked({name: torch.ones(size) for name, size in sizes.items()})
    if lens == "soft":
        return elastic.masked({"experts": torch.linspace(1, 0.5, sizes["experts"])})
    return elastic.at("small") if lens == "sliced" else nullcontext()


def routers_of(elastic: ElasticModel, lens: str) -> list[torch.nn.Module]:
    if lens == "view":
        return [module for module in elastic.submodel("small").modules() if "Router" in type(module).__name__]
    return [active.module for active in elastic.routers()]


@contextmanager
def heard(routers: list[torch.nn.Module]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """What each router reads, its weight at that time, and the logits that it puts out."""
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def hear(module, args, output) -> None:
        calls.append((args[0].detach(), module.weight.detach().clone(), output[0].detach()))

    hooks = [router.register_forward_hook(hear) for router in routers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lens", LENSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gates_compute_in_fp32(family: str, lens: str, dtype: torch.dtype) -> None:
    """bf16 weights are those of a teacher as it is stored."""
    elastic = elastic_of(family, dtype)
    with torch.no_grad(), torch.autocast(**AUTOCAST), through(elastic, lens):
        routers = routers_of(elastic, lens)
        with heard(routers) as calls:
            (elastic.submodel("small") if lens == "view" else elastic)(tokens())
    assert len(calls) == len(routers) > 0
    for states, weight, logits in calls:
        assert weight.dtype == dtype
        exact = states.flatten(0, -2).double() @ weight.double().T
        if lens == "soft" and family != "nemotron_h":  # whose mask acts after the sigmoid
            exact = exact + torch.linspace(1, 0.5, 8).double().log()
        assert logits.dtype == torch.float32
        # One rounding of fp32 is 6e-8; bf16's is 4e-3.
        assert (logits - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_autocast_the_models_own_code_decides(family: str) -> None:
    model = FAMILIES[family]().to(torch.bfloat16)
    ids = tokens()
    wanted = model(ids).logits
    assert torch.equal(ElasticModel(model)(ids).logits, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_sliced_lens_equals_a_child_whose_gates_are_fp32(family: str) -> None:
    """The nested model as a model of its own, through its own lens, under the same autocast."""
    elastic = elastic_of(family)
    child = ElasticModel(FAMILIES[family]().__class__(elastic.submodel("small").config).eval())
    child.model.load_state_dict(elastic.submodel("small").state_dict())
    with torch.no_grad(), torch.autocast(**AUTOCAST):
        assert torch.equal(elastic(tokens(), submodel="small").logits, child(tokens()).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gates_are_trained_under_autocast(family: str, checkpointing: bool) -> None:
    """Gradients pass the casts, in recomputed units too, and arrive in the part of each gate that the nested model has."""
    elastic = elastic_of(family)
    elastic.checkpointing = checkpointing
    ids = tokens()
    with torch.autocast(**AUTOCAST):
        elastic(ids, labels=ids, submodel="small", use_cache=False).loss.backward()
    grads = [active.module.weight.grad for active in elastic.routers()]
    assert len(grads) > 0
    assert all(grad.dtype == torch.float32 and grad.abs().max() > 0 for grad in grads)
    assert all(grad[6:].abs().max() == 0 and grad[:, 32:].abs().max() == 0 for grad in grads)
