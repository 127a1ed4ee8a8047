"""Routed experts: REAP and its alternatives, each against loops; experts without tokens; the written-out forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scoring import padded, random_rows, score
from slow_scores import hear_all, slow_scores
from tiny import tiny_model, tokens

from star_elastic.families import layout_of
from star_elastic.score.experts import FusedExperts

EXPERTS = "model.layers.{}.mixer.experts"


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_out_experts_equal_the_fused_ones(implementation: str, dtype: torch.dtype) -> None:
    model = tiny_model(5).to(dtype)
    model.set_experts_implementation(implementation)
    unit = next(unit for unit in layout_of(model.config.to_dict()).units if unit.layer == 1)
    module = model.get_submodule(EXPERTS.format(1))
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    choice = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:2] for i in range(20)])
    weight = torch.rand(20, 2, generator=torch.Generator().manual_seed(1))
    found = FusedExperts.of(unit, "mixer.experts", module).run(hidden, choice, weight, lambda *heard: None)
    wanted = module(hidden, choice, weight)
    assert found.dtype == wanted.dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_choice_outside_the_experts_means_no_expert() -> None:
    model = tiny_model(5)
    model.set_experts_implementation("eager")
    unit = next(unit for unit in layout_of(model.config.to_dict()).units if unit.layer == 1)
    experts = FusedExperts.of(unit, "mixer.experts", model.get_submodule(EXPERTS.format(1)))
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([[0.7, 0.3], [0.7, 0.0], [0.0, 0.0]])
    heard: list[tuple[int, list[tuple[int, float]]]] = []

    def hear(expert: int, token: torch.Tensor, gate: torch.Tensor, *_: torch.Tensor) -> None:
        heard.append((expert, list(zip(token.tolist(), gate.tolist(), strict=True))))

    output = experts.run(hidden, torch.tensor([[1, 4], [4, 8], [-1, 8]]), weight, hear)
    third, seventh = float(torch.tensor(0.3)), float(torch.tensor(0.7))
    assert heard == [(1, [(0, seventh)]), (4, [(0, third), (1, seventh)])]
    alone = experts.run(hidden[1:2], torch.tensor([[4]]), weight[1:2, :1], lambda *heard: None)
    assert torch.allclose(output[1], alone[0]) and not output[2].any()


def with_idle_experts(seed: int = 4) -> Any:
    """A model whose first MoE layer sends every token to experts 0 and 1: a selection bias decides, and never weighs."""
    model = tiny_model(seed)
    model.model.layers[1].mixer.gate.e_score_correction_bias[:] = torch.tensor([9.0, 9.0, 0, 0, 0, 0, 0, 0])
    return model


def test_the_selection_bias_never_enters_a_score() -> None:
    model = with_idle_experts()
    rows = random_rows()
    found, wanted = (
        score(model, padded(rows, "right")).tensors["layers.1.experts"],
        slow_scores(model, rows)["layers.1.experts"],
    )
    assert torch.allclose(found[:2].double(), wanted[:2], rtol=1e-4)
    model.model.layers[1].mixer.gate.e_score_correction_bias[:2] = 90.0
    assert torch.equal(score(model, padded(rows, "right")).tensors["layers.1.experts"], found)


def test_idle_experts_rank_last_by_their_router_rows_and_never_carry_zero() -> None:
    model = with_idle_experts()
    for method in ("reap", "reap_sum", "activation", "frequency"):
        found = score(model, padded(random_rows(), "left"), methods={"depth": "none", "experts": method})
        assert found.idle_experts[1] == [2, 3, 4, 5, 6, 7]
        scores = found.tensors["layers.1.experts"].tolist()
        rows = model.model.layers[1].mixer.gate.weight.norm(dim=1).tolist()
        by_router = sorted(range(2, 8), key=lambda expert: -rows[expert])
        assert [scores[expert] for expert in by_router] == [-1, -2, -3, -4, -5, -6]
        assert min(scores[:2]) > 0


def test_gates_of_a_token_sum_to_the_routing_factor() -> None:
    model = tiny_model(3)
    heard: list[torch.Tensor] = []
    unit = next(unit for unit in layout_of(model.config.to_dict()).units if unit.layer == 1)
    module = model.get_submodule(EXPERTS.format(1))
    experts = FusedExperts.of(unit, "mixer.experts", module)
    sums = torch.zeros(48)
    module.register_forward_hook(lambda m, i, o: heard.append(o))
    module.forward = lambda *inputs: experts.run(*inputs, lambda e, token, gate, *_: sums.index_add_(0, token, gate))
    with torch.no_grad():
        model(tokens())
    assert torch.allclose(sums, torch.full((48,), 2.5))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", ["reap_sum", "activation", "frequency", "router_weight"])
def test_alternatives_equal_loops(method: str, side: str) -> None:
    model = tiny_model(6)
    rows = random_rows()
    found = score(model, padded(rows, side), methods={"depth": "none", "experts": method})
    _, routed = hear_all(model, rows)
    for layer in (1, 4):
        seen, _ = routed[f"layers.{layer}"]
        gate = model.model.layers[layer].mixer.gate.weight.tolist()
        wanted = {
            "reap_sum": [sum(gate * norm for e, gate, norm in seen if e == expert) for expert in range(8)],
            "activation": [sum(norm for e, _, norm in seen if e == expert) for expert in range(8)],
            "frequency": [sum(e == expert for e, _, _ in seen) for expert in range(8)],
            "router_weight": [sum(w**2 for w in gate[expert]) ** 0.5 for expert in range(8)],
        }[method]
        reached = torch.tensor([expert not in found.idle_experts.get(layer, []) for expert in range(8)])
        reached |= torch.tensor(method == "router_weight")
        assert torch.allclose(
            found.tensors[f"layers.{layer}.experts"][reached], torch.tensor(wanted)[reached].float(), rtol=1e-4
        )


def test_routed_tokens_alone_or_all_tokens_give_the_same_scores() -> None:
    # Every expert run on every token, then the routed ones taken out, in fp64.
    model = tiny_model(3)
    layer = model.model.layers[1]
    inputs: list[tuple[torch.Tensor, ...]] = []
    with torch.no_grad():
        hook = layer.mixer.experts.register_forward_hook(lambda m, i, o: inputs.append(i))
        model(tokens())
        hook.remove()
        hidden, choice, gates = inputs[0]
        inner = torch.einsum("efd,nd->enf", layer.mixer.experts.up_proj.double(), hidden.double()).relu() ** 2
        norms = torch.einsum("edf,enf->end", layer.mixer.experts.down_proj.double(), inner).norm(dim=2)  # (E, N)
    chosen = torch.zeros(len(hidden), 8, dtype=torch.float64).scatter_(1, choice, gates.double()).T  # (E, N)
    wanted = (chosen * norms).sum(1) / (chosen > 0).sum(1)
    found = score(model, [{"input_ids": tokens()}]).tensors["layers.1.experts"].double()
    reached = (chosen > 0).any(1)
    assert torch.allclose(found[reached], wanted[reached], rtol=1e-6)
