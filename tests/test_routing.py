"""Softmax routers under masks, against gates worked out by hand and against a router that never had the other experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny import FAMILIES, tokens

from star_elastic.elastic import ElasticModel
from star_elastic.routing import ROUTES

PROBABILITIES = torch.tensor([0.4, 0.3, 0.2, 0.1])
MASK = torch.tensor([0.5, 1.0, 0.25, 1.0])  # probability times mask: 0.2, 0.3, 0.05, 0.1, of which the first two are chosen
SOFTMAX = ["softmax_topk", "softmax_topk_fp32", "topk_softmax"]


def router(**edits: object) -> SimpleNamespace:
    """A router of four experts whose logits are the logarithms of PROBABILITIES, whatever the token's one channel says."""
    return SimpleNamespace(weight=PROBABILITIES.log()[:, None], top_k=2, **edits)


@pytest.mark.parametrize(
    ("kind", "edits", "gates"),
    [
        ("softmax_topk", {"norm_topk_prob": False}, [0.3 / 0.65, 0.2 / 0.65]),
        ("softmax_topk", {"norm_topk_prob": True}, [0.6, 0.4]),
        ("softmax_topk_fp32", {}, [0.6, 0.4]),
        ("topk_softmax", {}, [0.6, 0.4]),
    ],
)
def test_a_soft_mask_multiplies_the_probability_before_it_is_renormalised(
    kind: str, edits: dict[str, bool], gates: list[float]
) -> None:
    _, seen, experts = ROUTES[kind](router(**edits), torch.ones(1, 3, 1), MASK)
    assert torch.equal(experts, torch.tensor([[1, 0]]).expand(3, 2))
    torch.testing.assert_close(seen, torch.tensor([gates]).expand(3, 2))


@pytest.mark.parametrize("kind", SOFTMAX)
def test_a_masked_expert_is_one_that_never_was(kind: str) -> None:
    """The likeliest expert is out: selection, gates and logits are those of a router of the other three."""
    kept = SimpleNamespace(weight=router().weight[1:], top_k=2)
    logits, gates, experts = ROUTES[kind](router(), torch.ones(1, 3, 1), torch.tensor([0.0, 1, 1, 1]))
    wanted_logits, wanted_gates, wanted_experts = ROUTES[kind](kept, torch.ones(1, 3, 1), torch.ones(3))
    assert torch.equal(experts, wanted_experts + 1)
    torch.testing.assert_close(gates, wanted_gates)
    assert torch.equal(logits[:, 1:], wanted_logits)
    assert logits[:, 0].isneginf().all()


@pytest.mark.parametrize("kind", SOFTMAX)
def test_gradients_of_masks_are_finite_also_at_zero(kind: str) -> None:
    mask = torch.tensor([0.5, 1.0, 0.0, 1.0], requires_grad=True)
    _, gates, _ = ROUTES[kind](router(), torch.ones(1, 3, 1), mask)
    gates[:, 0].sum().backward()
    assert mask.grad is not None and mask.grad.isfinite().all()
    assert mask.grad[0] < 0 < mask.grad[1], "more of one expert is less of the other"


@pytest.mark.parametrize(("kind", "dtype"), [("softmax_topk", torch.bfloat16), ("softmax_topk_fp32", torch.float32)])
def test_gates_have_the_dtype_that_the_models_own_have(kind: str, dtype: torch.dtype) -> None:
    low = SimpleNamespace(weight=router().weight.bfloat16(), top_k=2)
    _, gates, _ = ROUTES[kind](low, torch.ones(1, 3, 1, dtype=torch.bfloat16), MASK)
    assert gates.dtype == dtype


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoehybrid"])
def test_auxiliary_loss_under_a_mask_sees_no_masked_expert(family: str) -> None:
    """Router logits of masked experts are -inf, so that the balance loss gives them no probability."""
    elastic = ElasticModel(FAMILIES[family]())
    mask = torch.tensor([1.0] * 5 + [0.0] * 3)
    with torch.no_grad(), elastic.masked({"experts": mask}):
        output = elastic(tokens(), output_router_logits=True)
    assert output.aux_loss.isfinite()
    for logits in output.router_logits:
        assert torch.equal(logits.isneginf(), (mask == 0).expand_as(logits))
