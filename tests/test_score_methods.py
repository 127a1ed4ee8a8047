"""What can be asked of scoring: methods by name, kept channels, widths of the curve; and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scoring import assert_close, padded, random_rows, score
from tiny import FAMILIES, tiny_config, tiny_model

from star_elastic.axes import Axis, Rule
from star_elastic.errors import ElasticError, UnknownNameError, WidthError
from star_elastic.families import layout_of
from star_elastic.layout import Layout, parse_dims
from star_elastic.score import ScoreOptions
from star_elastic.score.curve import curve_widths, kept_shares
from star_elastic.score.methods import methods_for, parse_curve_widths, parse_kept, parse_methods
from star_elastic.score.weights import owners
from star_elastic.selection import RequestError


@pytest.fixture(scope="module")
def layout() -> Layout:
    return layout_of(tiny_config().to_dict())


def by(method: str, layout: Layout) -> dict[str, str]:
    own = {"depth": "none", "experts": "random"}
    return {axis: own.get(axis, method) for axis in layout.axes}


def zeroed(model: Any, layout: Layout, axis: str, member: int, unit: int) -> dict[str, torch.Tensor]:
    """Parameters of one layer that change when a member of an axis leaves it, by the sliced tensors."""
    kept = {axis: [m for m in range(layout.axes[axis].size) if m != member]}
    found = {}
    for one, row in layout.tensors():
        if one.layer == unit and axis in row.axes and len(row.dims) > 1 and not row.buffer:
            weight = model.get_parameter(one.name(row)).detach().double()
            rest = weight
            for number, dim in enumerate(row.dims):
                index = dim.index(kept)
                rest = rest if index is None else rest.index_select(number, torch.tensor(index))
            found[row.name] = weight.square().sum() - rest.square().sum()
    return found


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_moe", "granitemoehybrid"])
def test_weight_norm_is_what_leaves_with_a_member(family: str) -> None:
    model = FAMILIES[family](3)
    layout = layout_of(model.config.to_dict())
    found = score(model, padded(random_rows((9,)), "left"), methods=by("weight_norm", layout)).tensors
    for key, scores in found.items():
        _, layer, *_, axis = ["", "-1", *key.split(".")][-3:] if key == "hidden" else key.split(".")
        if axis in ("hidden", "experts"):
            continue
        for member in (0, layout.axes[axis].size - 1):
            squares = sum(zeroed(model, layout, axis, member, int(layer)).values())
            assert float(scores[member]) ** 2 == pytest.approx(float(squares), rel=1e-4), key


def test_weight_norm_of_hidden_sums_over_the_network_and_counts_a_tied_head_once() -> None:
    model = FAMILIES["llama"](3)
    layout = layout_of(model.config.to_dict())
    found = score(model, padded(random_rows((9,)), "left"), methods=by("weight_norm", layout)).tensors["hidden"]
    squares = torch.zeros(64, dtype=torch.float64)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            reads = not name.endswith(("o_proj.weight", "down_proj.weight"))
            squares += weight.detach().double().square().sum(0 if reads else 1)
    assert torch.allclose(found.double().square(), squares, rtol=1e-5)


def test_owners_follow_segments_and_strides() -> None:
    axes = {"a": Axis("a", 2), "b": Axis("b", 3)}
    [dim] = parse_dims("a*b + 2 + b", axes, {})
    assert owners(dim, "a").tolist() == [0, 0, 0, 1, 1, 1, -1, -1, -1, -1, -1]
    assert owners(dim, "b").tolist() == [0, 1, 2, 0, 1, 2, -1, -1, 0, 1, 2]


def test_random_depends_on_seed_and_key_only(layout: Layout) -> None:
    everything = dict.fromkeys(layout.width_axes, "random") | {"depth": "none"}
    rows = random_rows((9, 5))
    first = score(tiny_model(1), padded(rows, "left"), methods=everything).tensors
    again = score(tiny_model(2), padded(rows, "right"), methods=everything).tensors
    other = score(tiny_model(1), padded(rows, "left"), methods=everything, seed=1).tensors
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)
    assert not torch.equal(first["layers.1.experts"], first["layers.4.experts"])
    assert first.keys() == score(tiny_model(1), padded(rows, "left")).tensors.keys()


def test_one_axis_otherwise_leaves_the_rest_as_it_was() -> None:
    rows = random_rows()
    usual = score(tiny_model(1), padded(rows, "left")).tensors
    mixed = score(tiny_model(1), padded(rows, "left"), methods={"depth": "none", "expert_ffn": "random"}).tensors
    differing = {key for key in usual if not torch.equal(usual[key], mixed[key])}
    assert differing == {"layers.1.expert_ffn", "layers.4.expert_ffn"}


def test_kept_channels_may_come_from_another_method() -> None:
    rows = random_rows()
    methods = {"depth": "none", "mamba_head_dim": "random"}
    full = score(tiny_model(1), padded(rows, "left"), methods=methods).tensors
    kept = score(tiny_model(1), padded(rows, "left"), methods=methods, kept={"mamba_head_dim": 4}).tensors
    assert torch.equal(full["layers.0.mamba_head_dim"], kept["layers.0.mamba_head_dim"])
    assert (kept["layers.0.mamba_heads"] < full["layers.0.mamba_heads"]).all()


@pytest.mark.parametrize("axis", ["hidden", "heads", "mamba_heads", "experts", "depth"])
def test_the_first_method_is_the_default(axis: str) -> None:
    assert ScoreOptions().method(axis) == next(iter(methods_for(axis)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"methods": {"experts": "reep"}}, UnknownNameError, "no method 'reep' for experts: did you mean 'reap'"),
        ({"methods": {"depth": "activation"}}, UnknownNameError, "no method 'activation' for depth.*cosine, kl, none, removal"),
        ({"methods": {"hidden": "reap"}}, UnknownNameError, "no method 'reap' for hidden"),
        ({"methods": {"hidden": "output"}}, UnknownNameError, "no method 'output' for hidden"),
        ({"methods": {"mamba_heads": "weighted"}}, UnknownNameError, "no method 'weighted' for mamba_heads"),
        ({"methods": {"expert": "reap"}}, UnknownNameError, "no axis 'expert': did you mean 'experts'"),
        ({"kept": {"mamba_heads": 4}}, WidthError, "only mamba_head_dim can be"),
        ({"kept": {"mamba_head_dim": 5}}, WidthError, "mamba_head_dim width 5 is illegal.*nearest legal: 4 and 8"),
        ({"per_expert": True, "methods": {"expert_ffn": "random"}}, RequestError, "ranks expert_ffn by activation"),
    ],
)
def test_what_does_not_fit_is_refused(
    layout: Layout, options: dict[str, Any], error: type[ElasticError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        ScoreOptions(**options).check(layout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [("llama", {"per_expert": True}, "no routed experts"), ("llama", {"kept": {"mamba_head_dim": 4}}, "has no such axis")],
)
def test_what_another_family_lacks_is_refused(family: str, options: dict[str, Any], message: str) -> None:
    layout = layout_of(FAMILIES[family](0).config.to_dict())
    with pytest.raises(ElasticError, match=message):
        ScoreOptions(**options).check(layout)


@pytest.mark.parametrize(
    ("read", "words", "message"),
    [
        (parse_methods, ["experts"], r"cannot read --method 'experts': want AXIS=NAME"),
        (parse_methods, ["experts=reap", "experts=random"], "--method names experts twice: reap and random"),
        (parse_kept, ["mamba_head_dim=x"], r"cannot read --kept 'mamba_head_dim=x': want AXIS=N"),
    ],
)
def test_malformed_words(read: Callable[[list[str]], object], words: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(words)


# The redundancy curve


def test_curve_widths_are_read_and_checked(layout: Layout) -> None:
    found = parse_curve_widths(["experts=4", "hidden=75%", "experts=50%", "hidden=64", "hidden=100%"], layout)
    assert found == {"experts": [4, 4], "hidden": [48, 64, 64]}
    for word, error, message in (
        ("experts=1", WidthError, "top-2"),  # fewer experts than top-k
        ("experts=9", WidthError, "the parent has only 8"),
        ("experts=10%", WidthError, "cuts nothing that can be cut; nearest legal: 2"),
        ("mamba_heads=3", WidthError, "SSM groups"),
        ("expert=4", UnknownNameError, "did you mean 'experts'"),
        ("experts=few", RequestError, "want AXIS=N or AXIS=P%"),
        ("hidden=101%", WidthError, "cuts nothing"),
    ):
        with pytest.raises(error, match=message):
            parse_curve_widths([word], layout)


def test_a_quarter_of_three_experts_is_an_error_and_no_success() -> None:
    three = layout_of(tiny_config(n_routed_experts=3).to_dict())
    assert parse_curve_widths(["experts=75%"], three) == {"experts": [2]}
    with pytest.raises(WidthError, match="cuts nothing that can be cut; nearest legal: 2"):
        parse_curve_widths(["experts=25%"], three)


def test_shares_keep_the_best_of_every_group(layout: Layout) -> None:
    heads = torch.tensor([1.0, 2, 3, 4, 50, 60, 70, 80])
    shares = kept_shares({"layers.2.heads": heads}, layout, {"heads": [4]})["layers.2.heads"]
    assert shares == {6: pytest.approx(219 / 270), 4: pytest.approx(157 / 270), 2: pytest.approx(84 / 270)}


def test_unmeasured_experts_count_as_nothing(layout: Layout) -> None:
    experts = torch.tensor([4.0, 3, -1, 2, 1, -2, -3, -4])
    shares = kept_shares({"layers.1.experts": experts}, layout)["layers.1.experts"]
    assert shares == {7: 1.0, 6: 1.0, 4: 1.0, 2: pytest.approx(0.7)}


def test_the_curve_is_monotone_for_every_axis_and_family() -> None:
    for build in FAMILIES.values():
        model = build(2)
        layout = layout_of(model.config.to_dict())
        scores = score(model, padded(random_rows(), "left")).tensors
        every = {name: axis.legal() for name, axis in layout.width_axes.items()}
        for shares in kept_shares(scores, layout, every).values():
            ascending = [shares[width] for width in sorted(shares)]
            assert ascending == sorted(ascending) and ascending[-1] == pytest.approx(1)


def test_widths_of_the_curve_are_legal() -> None:
    axis = Axis("heads", 16, 4, (Rule("", 4, 4),))
    assert curve_widths(axis) == [12, 8, 4]
    assert curve_widths(Axis("x", 1)) == []


def test_uniform_importance_keeps_its_width(layout: Layout) -> None:
    assert kept_shares({"hidden": torch.ones(64)}, layout)["hidden"] == {56: 0.875, 48: 0.75, 32: 0.5, 16: 0.25}
    assert kept_shares({"hidden": torch.zeros(64)}, layout)["hidden"][32] == 0.5


def test_alternatives_have_the_same_keys() -> None:
    rows = random_rows()
    usual = score(tiny_model(1), padded(rows, "left")).tensors
    for method in methods_for("experts"):
        found = score(tiny_model(1), padded(rows, "left"), methods={"depth": "none", "experts": method}).tensors
        assert found.keys() == usual.keys()
        others = [key for key in usual if "experts" not in key]
        assert_close({key: found[key] for key in others}, {key: usual[key] for key in others})
