"""Eight faults of public code for nested training. Ours does the right thing, and the naive version, written here, does not.

Each test asserts both, so that it is seen to tell them apart. The full tests of each property are named in the docstrings.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import child_of, rearranged
from tiny import tiny_config, tiny_model, tokens
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import NemotronHConfig, NemotronHForCausalLM

from star_elastic import cost
from star_elastic.budget import Budget
from star_elastic.candidates import candidates
from star_elastic.elastic import ElasticModel
from star_elastic.families import layout_of
from star_elastic.masks import hard_masks, prefix_mask
from star_elastic.router import Router
from star_elastic.submodel import Submodel
from star_elastic.train.anneal import Anneal

SMALL = {"hidden": 32, "expert_ffn": 16}


@pytest.fixture(scope="module")
def parent() -> NemotronHForCausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def router(parent: NemotronHForCausalLM) -> Router:
    """Two axes of three candidates each."""
    layout = layout_of(parent.config.to_dict())
    return Router(layout, candidates(layout, {"hidden": (0.75, 0.5), "expert_ffn": (0.75, 0.5)}), ["small"])


def masked_logits(model: NemotronHForCausalLM, widths: dict[str, int], layers: tuple[int, ...] | None = None) -> Tensor:
    elastic = ElasticModel(model)
    with torch.no_grad(), elastic.masked(hard_masks(elastic.layout, Submodel(widths=widths, layers=layers))):
        return elastic(tokens()).logits


def error(seen: Tensor, wanted: Tensor) -> float:
    return ((seen - wanted).abs().max() / wanted.abs().max()).item()


# 1. Counts


def closed_formula(config: NemotronHConfig) -> int:
    """Active parameters by matrices alone: norms, convolutions, heads' own numbers and router rows are forgotten."""
    hidden, inner = config.hidden_size, config.mamba_num_heads * config.mamba_head_dim
    per_layer = {
        "linear_attention": 3 * hidden * inner,
        "full_attention": 2 * hidden * config.head_dim * (config.num_attention_heads + config.num_key_value_heads),
        "moe": 2 * hidden * config.num_experts_per_tok * config.moe_intermediate_size
        + 2 * hidden * config.moe_shared_expert_intermediate_size,
    }
    return 2 * config.vocab_size * hidden + sum(per_layer[kind] for kind in config.layers_block_type)


@pytest.mark.parametrize("hidden", [32, 64])
def test_fault_1_counts_are_those_of_real_tensors(hidden: int) -> None:
    """Fault 1: a closed formula that its own test copies. In full: ``test_cost.test_counts_equal_real_tensors``."""
    layout = layout_of(tiny_config().to_dict())
    config = tiny_config(hidden_size=hidden)
    with torch.device("meta"):
        model = NemotronHForCausalLM(config)
    unused = config.n_routed_experts - config.num_experts_per_tok
    active = sum(p[unused:].numel() if ".experts." in name else p.numel() for name, p in model.named_parameters())
    assert cost.active_params(layout, {"hidden": hidden}) == active
    assert abs(closed_formula(config) / active - 1) > 0.03


# 2. Memory


def test_fault_2_memory_holds_every_expert() -> None:
    """Fault 2: bytes of the active parameters, so that experts which are not used cost nothing. In full:
    ``test_cost.test_memory_counts_every_expert_resident``, and against files and caches in ``test_budget``."""
    layout = layout_of(tiny_config().to_dict())
    budget = Budget.resolve(layout, "small", "memory", 0.5, context=64)
    models = {count: NemotronHForCausalLM(tiny_config(n_routed_experts=count)) for count in (8, 4)}

    def resident(model: torch.nn.Module) -> int:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return sum(t.numel() * (4 if "mixer.gate." in name else 2) for name, t in tensors.items())  # bf16, fp32 gates

    saved = budget.cost(layout, {}) - budget.cost(layout, {"experts": 4})
    naive = 2 * (cost.active_params(layout, {}) - cost.active_params(layout, {"experts": 4}))
    wanted = resident(models[8]) - resident(models[4])
    assert saved == wanted
    assert naive < 0.05 * wanted  # router rows alone


# 3. and 4. The router's draw


def naive_sample(router: Router, tau: float, scale: float, generator: torch.Generator) -> dict[str, Tensor]:
    """One tensor of noise per length of list, and the scale forgotten on ``hidden``."""
    noises: dict[int, Tensor] = {}
    drawn = {}
    for axis, row in router.probabilities("small").items():
        logits = row.log()
        if len(row) not in noises:
            noises[len(row)] = -torch.empty(len(row)).exponential_(generator=generator).log()
        drawn[axis] = (((1.0 if axis == "hidden" else scale) * logits + noises[len(row)]) / tau).softmax(dim=0)
    return drawn


def ours(router: Router, tau: float, scale: float, generator: torch.Generator) -> dict[str, Tensor]:
    return router.sample("small", tau=tau, scale=scale, generator=generator)


Sampler = Callable[[Router, float, float, torch.Generator], dict[str, Tensor]]


@torch.no_grad()
def test_fault_3_noise_is_each_axis_own(router: Router) -> None:
    """Fault 3, case 3: axes with equally long lists drew the same noise. Between layers: ``test_router``."""

    def correlation(sample: Sampler) -> float:
        generator = torch.Generator().manual_seed(0)
        draws = [sample(router, 1.0, 1.0, generator) for _ in range(1000)]
        pairs = torch.stack([torch.stack([draw[axis][0] for axis in ("hidden", "expert_ffn")]) for draw in draws])
        return torch.corrcoef(pairs.T)[0, 1].item()

    assert abs(correlation(ours)) < 0.1
    assert correlation(naive_sample) > 0.9


@torch.no_grad()
def test_fault_4_the_scale_of_logits_reaches_every_axis(router: Router) -> None:
    """Fault 4: an option of the logits was ignored on ``hidden``. The noise is the same at both scales, so that the log of the
    odds between two candidates moves by what the scale adds."""

    def follows(sample: Sampler, axis: str) -> bool:
        one, ten = (sample(router, 1.0, scale, torch.Generator().manual_seed(1))[axis] for scale in (1.0, 10.0))
        plain = router.probabilities("small")[axis]
        moved = (ten[0] / ten[1]).log() - (one[0] / one[1]).log()
        wanted = 9 * (plain[0] / plain[1]).log()
        assert abs(wanted) > 1e-3
        return bool(torch.isclose(moved, wanted, rtol=1e-2, atol=1e-4))

    assert [follows(ours, axis) for axis in ("hidden", "expert_ffn")] == [True, True]
    assert [follows(naive_sample, axis) for axis in ("hidden", "expert_ffn")] == [False, True]


# 5. Mamba heads


@torch.no_grad()
def test_fault_5_mamba_heads_are_cut_inside_their_groups(parent: NemotronHForCausalLM) -> None:
    """Fault 5, case 5: a flat prefix of heads empties whole groups. Every width: ``test_families``."""
    heads = [0, 1, 4, 5]  # two of each of two groups
    child = child_of(parent.config, rearranged(parent, {"mamba_heads": heads}), mamba_num_heads=4)
    wanted = child(tokens()).logits
    flat = (torch.arange(8) < 4).float()
    naive = tiny_model()
    for block in naive.model.layers:
        if hasattr(
            block.mixer, "conv1d"
        ):  # x is rows 64 to 127 of the projection, and the first 64 lanes of the convolution
            block.mixer.in_proj.weight[64:128] *= flat.repeat_interleave(8)[:, None]
            block.mixer.conv1d.bias[:64] *= flat.repeat_interleave(8)

    def alive(mask: Tensor) -> list[int]:
        """Heads left in each group."""
        return mask.view(2, 4).sum(dim=1).int().tolist()

    assert alive(prefix_mask(layout_of(parent.config.to_dict()).axes["mamba_heads"], 4)) == [2, 2]
    assert error(masked_logits(tiny_model(), {"mamba_heads": 4}), wanted) < 1e-5
    assert alive(flat) == [4, 0]
    assert error(naive(tokens()).logits, wanted) > 1e-2


# 6. Masks that must reach everything


@torch.no_grad()
def test_fault_6_the_final_norm_sees_kept_channels_alone(parent: NemotronHForCausalLM) -> None:
    """Fault 6, first part. Naive: channels of embedding and writers are masked, norms still divide by all 64 channels."""
    child = child_of(parent.config, rearranged(parent, {"hidden": range(32)}), hidden_size=32)
    wanted = child(tokens()).logits
    elastic = ElasticModel(tiny_model())
    stream = elastic.model.model
    with elastic.masked(hard_masks(elastic.layout, Submodel(widths={"hidden": 32}))):
        seen = elastic(tokens()).logits
        inside = []
        hook = stream.norm_f.register_forward_pre_hook(lambda module, args: inside.append(args[0]))
        elastic(tokens())
        hook.remove()
    naive = elastic.model.lm_head(stream.norm_f(inside[0]))  # the plain norm on the masked stream
    assert error(seen, wanted) < 1e-5
    assert error(naive, wanted) > 1e-2


@torch.no_grad()
def test_fault_6_removed_experts_are_out_of_the_selection() -> None:
    """Fault 6, second part. Naive: the biased score is multiplied by the mask, so a removed expert stands at 0, which is above
    every kept one whose biased score is negative. Other routers: ``test_routing``."""
    elastic = ElasticModel(tiny_model())
    model, seen = elastic.model, []
    for block in model.model.layers:
        if hasattr(block.mixer, "gate"):
            block.mixer.gate.e_score_correction_bias.sub_(2.0)  # below 0 for every expert, in the same order
            block.mixer.gate.register_forward_hook(
                lambda module, args, output: seen.append((module, args[0], output[2]))
            )
    child = child_of(model.config, rearranged(model, {"experts": range(4)}), n_routed_experts=4)
    wanted = child(tokens()).logits
    masks = hard_masks(elastic.layout, Submodel(widths={"experts": 4}))
    with elastic.masked(masks):
        assert error(elastic(tokens()).logits, wanted) < 1e-5
    assert len(seen) == 2
    for gate, states, chosen in seen:
        naive = (torch.sigmoid(states.flatten(0, -2) @ gate.weight.T) + gate.e_score_correction_bias) * masks["experts"]
        assert chosen.max() < 4
        assert naive.topk(2).indices.min() >= 4


@torch.no_grad()
def test_fault_6_depth_is_applied_as_well_as_counted(parent: NemotronHForCausalLM) -> None:
    """Fault 6, third part. Naive: the budget counts three layers, the model runs all five."""
    layout, layers = layout_of(parent.config.to_dict()), (0, 1, 2)
    child = child_of(
        parent.config,
        rearranged(parent, {}, layers),
        layers_block_type=[parent.config.layers_block_type[layer] for layer in layers],
    )
    wanted = child(tokens()).logits
    assert cost.params(layout, {}, layers) == sum(p.numel() for p in child.parameters())
    assert error(masked_logits(tiny_model(), {}, layers), wanted) < 1e-5
    assert error(parent(tokens()).logits, wanted) > 1e-2


# 7. Schedules


def test_fault_7_schedules_may_be_asked_past_their_end() -> None:
    """Fault 7, case 6: a table of scales that ends at the planned last step. In full: ``test_anneal``."""
    anneal = Anneal(10)
    table = [1 + 9 * step / 9 for step in range(10)]
    assert [anneal.scale(step) for step in range(10)] == pytest.approx(table)
    assert [(anneal.tau(step), anneal.scale(step)) for step in (10, 25)] == [(0.05, 10.0)] * 2
    with pytest.raises(IndexError):
        table[10]


# 8. Arithmetic


def grouped(left: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    """A product per expert, which torch's counter leaves out: each row meets one expert."""
    return 2 * left.numel() * right[-1]


def step_flops(run: Callable[[], Tensor]) -> int:
    """Matrix products of a forward and a backward."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}) as counter:
        run().square().sum().backward()
    return counter.get_total_flops()


def test_fault_8_a_nested_step_costs_what_the_nested_model_costs(parent: NemotronHForCausalLM) -> None:
    """Fault 8: every nested step ran at full width under masks. In full, with a whole run:
    ``test_train_search.test_settle_steps_cost_what_the_nested_size_costs``."""
    elastic = ElasticModel(tiny_model())
    elastic.add("small", Submodel(widths=SMALL))
    child = child_of(
        parent.config,
        rearranged(parent, {"hidden": range(32), "expert_ffn": range(16)}),
        hidden_size=32,
        moe_intermediate_size=16,
    )
    full = step_flops(lambda: elastic(tokens()).logits)
    sliced = step_flops(lambda: elastic(tokens(), submodel="small").logits)
    with elastic.masked(hard_masks(elastic.layout, Submodel(widths=SMALL))):
        naive = step_flops(lambda: elastic(tokens()).logits)
    assert sliced == step_flops(lambda: child(tokens()).logits)
    assert sliced < 0.7 * full
    assert naive >= full
