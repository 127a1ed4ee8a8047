"""The router: probabilities, masks, expected costs and their gradients, noise, and files."""

from __future__ import annotations

import itertools

import pytest
import torch
from hand_cut import batch
from tiny import FAMILIES, tiny_config, tiny_model
from transformers import NemotronHForCausalLM

from star_elastic.budget import Budget, interpolate
from star_elastic.candidates import candidates, default_spec
from star_elastic.elastic import ElasticModel
from star_elastic.errors import CheckpointError, ElasticError, UnknownNameError, WidthError
from star_elastic.families import layout_of
from star_elastic.router import Router
from star_elastic.submodel import Submodel
from star_elastic.train.anneal import Anneal

ORDER = (2, 4, 0, 1, 3)
SPEC = {"hidden": (0.75, 0.5), "mamba_heads": (4,), "experts": (4,), "expert_ffn": (0.75, 0.5), "depth": (3, 4)}
PER_LAYER = ("experts", "expert_ffn")


@pytest.fixture(scope="module")
def layout():
    return layout_of(tiny_model().config.to_dict())


def budgets(layout, kind="params"):
    # A short context: at a long one, keys and values alone are more than half of such a small model.
    return [
        Budget.resolve(layout, *one, context=64)
        for one in (("full", kind, 1.0), ("mid", kind, 0.75), ("small", kind, 0.5))
    ]


def make(layout, spec=None, kind="params", **options):
    spec = SPEC if spec is None else spec
    order = ORDER if "depth" in spec else None
    return Router(
        layout, candidates(layout, spec, depth_order=order), budgets(layout, kind), depth_order=order, **options
    )


def points(router, **choices):
    """Probabilities that are certain: key -> number of the candidate; 0 where none is given."""
    found = router.probabilities("full")
    number = {key: choices.get(key if isinstance(key, str) else key[0], 0) for key in found}
    return {key: torch.nn.functional.one_hot(torch.tensor(number[key]), len(row)).float() for key, row in found.items()}


def test_probabilities_are_the_two_layer_network_of_the_method_written_out(layout):
    router = make(layout, hidden=16)
    for place, name in enumerate(("full", "mid", "small")):
        found = router.probabilities(name, tau=0.5, scale=3.0)
        assert list(found) == ["hidden", "mamba_heads", "experts", "expert_ffn", "depth"]
        for axis, row in found.items():
            net = router.axes[axis]
            entry = net.first[:, place]
            logits = net.second @ torch.where(entry > 0, entry, 0.1 * entry)
            torch.testing.assert_close(row, torch.softmax(6 * logits, dim=0))
    assert all("bias" not in name for name, _ in router.named_parameters())
    assert {parameter.dtype for parameter in router.parameters()} == {torch.float32}


def test_weights_start_with_the_given_spread_from_the_given_seed(layout):
    router = make(layout, seed=3)
    weights = torch.cat([parameter.flatten() for parameter in router.parameters()])
    assert abs(weights.std().item() - 0.1) < 0.01 and abs(weights.mean().item()) < 0.01
    before = torch.random.get_rng_state()
    assert all(
        torch.equal(one, two) for one, two in zip(router.parameters(), make(layout, seed=3).parameters(), strict=True)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(next(router.parameters()), next(make(layout, seed=4).parameters()))


def test_probabilities_stay_in_full_precision_under_autocast(layout):
    router = make(layout)
    wanted = router.probabilities("mid")
    with torch.autocast("cpu", torch.bfloat16):
        seen = router.probabilities("mid")
    assert all(torch.equal(seen[key], wanted[key]) for key in wanted)


def test_the_scale_of_the_logits_reaches_every_axis(layout):
    """Fault 4: on the log of the odds between two candidates, a scale of 7 is a factor of 7, on each axis."""
    router = make(layout, per_layer=PER_LAYER)
    plain, scaled = router.probabilities("mid"), router.probabilities("mid", scale=7.0)
    for key in plain:
        odds, more = ((row[0] / row[1]).log() for row in (plain[key], scaled[key]))
        assert abs(odds) > 1e-4
        torch.testing.assert_close(more, 7 * odds, rtol=1e-3, atol=1e-5)


def test_noise_is_independent_between_axes_and_layers(layout):
    """Fault 3, case 3: 1,000 draws of equally long axes."""
    router = make(layout, per_layer=PER_LAYER)
    generator = torch.Generator().manual_seed(0)
    draws = [router.sample("mid", tau=1.0, scale=1.0, generator=generator) for _ in range(1000)]
    threes = [key for key, row in draws[0].items() if len(row) == 3]
    assert threes == ["hidden", ("expert_ffn", 1), ("expert_ffn", 4), "depth"]
    first = torch.tensor([[draw[key][0].item() for key in threes] for draw in draws])  # (draws, keys)
    correlation = torch.corrcoef(first.T) - torch.eye(len(threes))
    assert correlation.abs().max() < 0.1


def test_the_same_state_of_the_generator_is_the_same_draw(layout):
    router = make(layout)
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()

    def draw(name="mid", hard=False):
        return router.sample(name, tau=0.7, scale=2.0, generator=generator, hard=hard)

    one, other = draw(), draw()
    generator.set_state(state)
    again = draw()
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in one)
    after = generator.get_state()
    generator.set_state(state)
    draw("full", hard=True)
    assert torch.equal(generator.get_state(), after), "all budgets take as many numbers"


def test_choices_have_the_gumbel_max_frequencies(layout):
    """The most probable candidate of a noisy draw is candidate c with probability softmax(scale x logits)."""
    router = make(layout, {"hidden": (0.75, 0.5)}, std=0.5)
    generator = torch.Generator().manual_seed(0)
    chosen = [
        router.sample("mid", tau=0.3, scale=0.5, generator=generator, hard=True)["hidden"].argmax().item()
        for _ in range(4000)
    ]
    share = torch.bincount(torch.tensor(chosen), minlength=3) / 4000
    torch.testing.assert_close(share, router.probabilities("mid", scale=0.5)["hidden"].detach(), atol=0.03, rtol=0)


def test_straight_through_choices_are_exact_and_pass_the_soft_gradient(layout):
    router = make(layout)

    def gradient(hard):
        sampled = router.sample("mid", tau=0.7, scale=2.0, generator=torch.Generator().manual_seed(1), hard=hard)
        value = sum((row * torch.arange(1.0, len(row) + 1)).sum() for row in sampled.values())
        return sampled, torch.autograd.grad(value, list(router.parameters()))

    sampled, hard = gradient(True)
    assert all(sorted(row.tolist()) == [0.0] * (len(row) - 1) + [1.0] for row in sampled.values())
    assert {value for mask in router.masks(sampled).values() for value in mask.tolist()} <= {0.0, 1.0}
    for one, two in zip(hard, gradient(False)[1], strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("hard", [True, False])
def test_the_gradient_of_a_choice_is_that_of_its_soft_probabilities_by_hand(layout, hard):
    """With p = softmax((s x + noise) / tau) and upstream gradient g: d/dx = s / tau (p g - p <p, g>), whatever was chosen.

    g comes from the masks: the loss is a weighted sum over members, so that of a candidate is the weight that it keeps.
    """
    router, tau, scale = make(layout, {"hidden": (0.75, 0.5)}), 0.7, 3.0
    weights = torch.randn(64, generator=torch.Generator().manual_seed(5))
    noise = -torch.empty(1, 3).exponential_(generator=torch.Generator().manual_seed(1)).log()
    first, second = (parameter.detach().clone() for parameter in router.axes["hidden"].parameters())
    mid = torch.tensor([0.0, 1.0, 0.0])
    inner = torch.nn.functional.leaky_relu(first @ mid, 0.1)
    soft = ((scale * (second @ inner) + noise[0]) / tau).softmax(0)
    upstream = torch.stack([weights[:width].sum() for width in (64, 48, 32)])
    logits = scale / tau * (soft * upstream - soft * (soft @ upstream))

    sampled = router.sample("mid", tau=tau, scale=scale, generator=torch.Generator().manual_seed(1), hard=hard)
    masks = router.masks(sampled)
    (masks["hidden"] * weights).sum().backward()
    torch.testing.assert_close(router.axes["hidden"].second.grad, torch.outer(logits, inner))
    slope = torch.where(first @ mid > 0, 1.0, 0.1)
    torch.testing.assert_close(router.axes["hidden"].first.grad, torch.outer((second.T @ logits) * slope, mid))
    kept = (64, 48, 32)[int(soft.argmax())]
    assert masks["hidden"].tolist() == [1.0] * kept + [0.0] * (64 - kept) or not hard


def test_masks_of_even_odds_by_hand(layout):
    """Fault 5: heads go inside each of two groups. Fault 6: depth goes by the order of layers."""
    router = make(layout)
    even = {key: torch.full_like(row, 1 / len(row)) for key, row in router.probabilities("mid").items()}
    masks = router.masks(even)
    thirds = [1.0] * 32 + [2 / 3] * 16 + [1 / 3] * 16
    torch.testing.assert_close(masks["hidden"], torch.tensor(thirds))
    torch.testing.assert_close(masks["mamba_heads"], torch.tensor([1, 1, 0.5, 0.5] * 2))
    torch.testing.assert_close(masks["depth"], torch.tensor([1, 2 / 3, 1, 1 / 3, 1]))  # 2, 4, 0 always, then 1, then 3
    widths, gates = router.expected(even)
    assert {key: round(width.item(), 4) for key, width in widths.items()} == {
        "hidden": 48.0,
        "mamba_heads": 6.0,
        "experts": 6.0,
        "expert_ffn": 24.0,
    }
    torch.testing.assert_close(torch.stack([gates[layer] for layer in range(5)]), masks["depth"])


@pytest.mark.parametrize("kind", ["params", "active_params", "memory"])
def test_cost_of_expected_widths_is_the_expected_cost(layout, kind):
    """Against every combination with its probability, counted one by one with whole numbers."""
    router = make(
        layout, {"hidden": (48, 32), "mamba_heads": (4,), "experts": (4,), "expert_ffn": (16,), "depth": (4, 3)}, kind
    )
    budget = router.budgets["mid"]
    odds = {key: row.detach().double() for key, row in router.probabilities("mid", scale=4.0).items()}
    odds = {key: row / row.sum() for key, row in odds.items()}
    total = 0.0
    for picks in itertools.product(*(range(len(row)) for row in odds.values())):
        probability = torch.stack([row[n] for row, n in zip(odds.values(), picks, strict=True)]).prod().item()
        widths = {axis: router.candidates[axis][n] for axis, n in zip(odds, picks, strict=True)}
        depth = widths.pop("depth")
        total += probability * budget.cost(layout, widths, tuple(sorted(ORDER[:depth])))
    assert float(budget.cost(layout, *router.expected(odds))) == pytest.approx(total, rel=1e-9)


def test_layers_that_choose_for_themselves_have_blocks_of_their_own(layout):
    router = make(layout, per_layer=PER_LAYER)
    found = router.probabilities("mid")
    assert list(found) == [
        "hidden", "mamba_heads", ("experts", 1), ("experts", 4), ("expert_ffn", 1), ("expert_ffn", 4), "depth",
    ]  # fmt: skip
    assert not torch.equal(found["expert_ffn", 1], found["expert_ffn", 4])
    assert {key: tuple(mask.shape) for key, mask in router.masks(found).items()}["expert_ffn", 4] == (32,)
    widths, _ = router.expected(points(router, expert_ffn=2))
    assert widths["expert_ffn", 1] == widths["expert_ffn", 4] == 16
    budget = router.budgets["mid"]
    apart = points(router) | {("expert_ffn", 4): torch.tensor([0.0, 0, 1])}
    saved = budget.cost(layout, {}) - float(budget.cost(layout, *router.expected(apart)))
    assert saved == pytest.approx(
        8 * 2 * 64 * 16, rel=1e-2
    )  # 8 experts, up and down, hidden 64, 16 of 32 channels, one layer


def config_of(submodel):
    """The tiny hybrid's config at a nested model's widths; layers as they are."""
    names = {"hidden": "hidden_size", "mamba_heads": "mamba_num_heads", "experts": "n_routed_experts"}
    names |= {"expert_ffn": "moe_intermediate_size"}
    kept = range(5) if submodel.layers is None else submodel.layers
    return tiny_config(
        "".join("ME*ME"[layer] for layer in kept), **{names[axis]: w for axis, w in submodel.widths.items()}
    )


@pytest.mark.parametrize("name", ["mid", "small"])
def test_cost_at_frozen_widths_is_what_a_real_model_of_these_widths_has(layout, name):
    """Faults 1 and 2."""
    router = make(layout)
    budget = router.budgets[name]
    frozen = router.freeze(budget)
    with torch.device("meta"):
        model = NemotronHForCausalLM(config_of(frozen.submodel))
    assert frozen.cost == sum(parameter.numel() for parameter in model.parameters())
    assert frozen.error == frozen.cost / budget.target - 1
    assert abs(frozen.error) <= 0.05


def test_budget_loss_by_hand(layout):
    router = make(layout, {"hidden": (48, 32)})
    full, mid, _ = budgets(layout)
    costs = [mid.cost(layout, {"hidden": width}) for width in (64, 48, 32)]
    for number in (0, 1, 2):
        error = abs(costs[number] / mid.target - 1)
        loss = router.budget_loss(mid, points(router, hidden=number))
        assert loss.item() == pytest.approx(error if error > 0.05 else 0.0, rel=1e-4)
    assert router.budget_loss(mid, points(router, hidden=1), tolerance=1e-6) > 0
    assert router.budget_loss(full, points(router)) == 0
    half = {"hidden": torch.tensor([0.5, 0.5, 0.0])}
    wanted = abs((costs[0] + costs[1]) / 2 / full.target - 1) + 10 * (0.25 + 0.25) / 3
    assert router.budget_loss(full, half).item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["params", "active_params", "memory"])
@pytest.mark.parametrize("name", ["full", "mid", "small"])
def test_gradient_of_the_budget_loss_equals_finite_differences(layout, kind, name):
    router = make(layout, kind=kind, per_layer=PER_LAYER, hidden=8).double()
    budget = router.budgets[name]

    def loss():
        return router.budget_loss(budget, router.probabilities(name, tau=0.7, scale=2.0), tolerance=1e-4)

    parameters = list(router.parameters())
    slopes = torch.autograd.grad(loss(), parameters)
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    values = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter += step * direction
            values.append(loss().item())
    measured = (values[0] - values[1]) / 2e-5
    slope = sum((one * two).sum().item() for one, two in zip(slopes, directions, strict=True))
    assert abs(measured) > 1e-4
    assert slope == pytest.approx(measured, rel=1e-5)


@pytest.mark.parametrize("kind", ["params", "active_params", "memory"])
def test_a_router_that_sees_only_budgets_meets_them(layout, kind):
    """Lambda 5 and 10 x the model's rate; the expected cost is inside the tolerance, and the full model stays whole."""
    router = make(layout, default_spec(layout), kind)
    optimiser = torch.optim.AdamW(router.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0)
    schedule, names = Anneal(150), itertools.cycle(router.budgets)
    for step in range(150):
        name = next(names)
        loss = router.budget_loss(router.budgets[name], router.probabilities(name, scale=schedule.scale(step)))
        optimiser.zero_grad()
        (5 * loss).backward()
        optimiser.step()
    for name, budget in router.budgets.items():
        found = {key: row.detach() for key, row in router.probabilities(name, scale=10).items()}
        assert abs(float(budget.cost(layout, *router.expected(found))) / budget.target - 1) < 0.055
        frozen = router.freeze(budget, scale=10)
        assert abs(frozen.error) <= 0.05
        assert budget.is_full == frozen.submodel.is_full(layout)
        if budget.is_full:
            assert frozen.is_argmax and frozen.probability > 0.9


def test_a_budget_between_two_mixes_their_one_hots(layout):
    router = make(layout)
    between = interpolate(
        list(router.budgets.values()), 0.25 * router.budgets["mid"].target + 0.75 * router.budgets["small"].target
    )
    found = router.probabilities(between)["hidden"]
    net = router.axes["hidden"]
    entry = 0.25 * net.first[:, 1] + 0.75 * net.first[:, 2]
    torch.testing.assert_close(found, torch.softmax(net.second @ torch.where(entry > 0, entry, 0.1 * entry), dim=0))
    assert torch.equal(router.probabilities({"mid": 1.0})["hidden"], router.probabilities("mid")["hidden"])


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        ("smal", UnknownNameError, "did you mean 'small'"),
        ({"smal": 1.0}, UnknownNameError, "did you mean 'small'"),
        ({"small": 0.7}, ElasticError, "sum to 1"),
        ({"small": 1.5, "mid": -0.5}, ElasticError, "none is negative"),
        ({}, ElasticError, "sum to 1"),
    ],
)
def test_unknown_budgets_and_odd_mixtures_are_refused(layout, wanted, error, words):
    with pytest.raises(error, match=words):
        make(layout).probabilities(wanted)


def test_routers_that_cannot_be(layout):
    with pytest.raises(ElasticError, match="each of its own name, not a, a"):
        Router(layout, {"hidden": (64, 32)}, ["a", "a"])
    with pytest.raises(ElasticError, match="not none"):
        Router(layout, {"hidden": (64, 32)}, [])
    with pytest.raises(WidthError, match="multiples"):
        Router(layout, {"hidden": (64, 30)}, ["a"])
    with pytest.raises(WidthError, match="order of layers"):
        Router(layout, {"depth": (5, 3)}, ["a"])


@pytest.mark.parametrize("per_layer", [(), PER_LAYER])
def test_a_saved_router_comes_back_whole(layout, tmp_path, per_layer):
    router = make(layout, per_layer=per_layer, hidden=24, seed=7)
    router.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["router.safetensors"]
    again = Router.load(tmp_path, layout)
    assert (again.names, again.budgets, again.candidates) == (router.names, router.budgets, router.candidates)
    assert (again.per_layer, again.depth_order, again.hidden) == (router.per_layer, router.depth_order, 24)
    for name in router.names:
        one, two = router.probabilities(name), again.probabilities(name)
        assert list(one) == list(two) and all(torch.equal(one[key], two[key]) for key in one)


def test_names_alone_make_a_router_and_are_saved(layout, tmp_path):
    Router(layout, {"hidden": (64, 32)}, ["big", "little"]).save(tmp_path)
    again = Router.load(tmp_path, layout)
    assert (again.names, again.budgets) == (("big", "little"), {})


def test_damaged_or_foreign_files_are_refused_in_one_line(layout, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        Router.load(tmp_path, layout)
    make(layout).save(tmp_path)
    other = layout_of(tiny_model(hidden_size=48).config.to_dict())
    with pytest.raises(CheckpointError, match="of another model"):
        Router.load(tmp_path, other)
    path = tmp_path / "router.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file") as caught:
        Router.load(tmp_path, layout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_hard_masks_of_the_router_compute_the_sliced_model(family):
    """Every candidate list at its far end, and with depth: masked by the router == sliced lens."""
    model = FAMILIES[family]()
    elastic = ElasticModel(model)
    layout = elastic.layout
    spec = default_spec(layout)
    if layout.couplings and "mamba_heads" in spec:
        spec = {axis: fractions for axis, fractions in spec.items() if not axis.startswith("mamba")}
        spec["hidden"] = (32,)
    order = tuple(reversed(range(layout.num_layers)))
    spec["depth"] = (layout.num_layers - 1,)
    router = Router(layout, candidates(layout, spec, depth_order=order), ["small"], depth_order=order)
    ends = {
        key: torch.nn.functional.one_hot(torch.tensor(len(row) - 1), len(row)).float()
        for key, row in router.probabilities("small").items()
    }
    widths, gates = router.expected(ends)
    kept = tuple(layer for layer, gate in gates.items() if gate == 1)
    assert kept == tuple(range(1, layout.num_layers))
    elastic.add("small", Submodel(widths={axis: int(width) for axis, width in widths.items()}, layers=kept))
    with torch.no_grad():
        wanted = elastic(batch(), submodel="small").logits
        with elastic.masked(router.masks(ends)):
            seen = elastic(batch()).logits
        whole = {key: torch.nn.functional.one_hot(torch.tensor(0), len(row)).float() for key, row in ends.items()}
        with elastic.masked(router.masks(whole)):
            untouched = elastic(batch()).logits
    assert (seen - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert torch.equal(untouched, model(batch()).logits)
