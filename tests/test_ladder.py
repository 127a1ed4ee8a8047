"""Budgets: the largest member at or under a number, against models built by transformers and searched by brute force."""

from functools import cache
from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_granitemoehybrid
from transformers import NemotronHForCausalLM

from star_elastic.errors import UnknownNameError, WidthError
from star_elastic.families import layout_of
from star_elastic.inspect import describe
from star_elastic.ladder import Budget, choose, uniform_ladder
from star_elastic.selection import RequestError, Selection, SizeRequest, select
from star_elastic.submodel import ElasticConfig, Submodel

CONFIG = tiny_config().to_dict()
LAYOUT = layout_of(CONFIG)


@cache
def real_params(hidden: int) -> int:
    """Parameters of the uniform ladder's member, of transformers' model: widths are multiples of 4 (16 bytes in fp32)."""
    widths = {
        "hidden_size": hidden,
        "moe_intermediate_size": max(4, 32 * hidden // 64 // 4 * 4),
        "moe_shared_expert_intermediate_size": max(4, 48 * hidden // 64 // 4 * 4),
    }
    with torch.device("meta"):
        return sum(p.numel() for p in NemotronHForCausalLM(tiny_config(**widths)).parameters())


HIDDEN = range(4, 65, 4)


@pytest.mark.parametrize("hidden", [4, 20, 44, 64])
@pytest.mark.parametrize("slack", [0, 1, -1])
def test_params_takes_the_largest_at_or_under(hidden: int, slack: int) -> None:
    limit = real_params(hidden) + slack
    fitting = [width for width in HIDDEN if real_params(width) <= limit]
    if not fitting:
        with pytest.raises(WidthError, match=f"{real_params(4):,}"):
            choose(LAYOUT, {}, Budget("params", limit))
        return
    chosen = choose(LAYOUT, {}, Budget("params", limit))
    assert chosen.submodel.widths["hidden"] == max(fitting)
    assert chosen.cost == real_params(max(fitting)) <= limit


def test_uniform_ladder_keeps_the_fraction_and_only_legal_widths() -> None:
    members, text = uniform_ladder(LAYOUT)
    assert [m.widths["hidden"] for m in members.values()] == list(HIDDEN)
    assert members["hidden 40"].widths == {"hidden": 40, "expert_ffn": 20, "shared_ffn": 28}  # 30 is no multiple of 4
    assert members["hidden 64"].is_full(LAYOUT)
    for member in members.values():
        member.check(LAYOUT)
    assert "16 hidden widths with expert_ffn, shared_ffn at the same fraction" in text


def test_active_params_and_memory_measure_different_things() -> None:
    active = choose(LAYOUT, {}, Budget("active_params", 30_000))
    total = choose(LAYOUT, {}, Budget("params", 30_000))
    assert active.submodel.widths["hidden"] > total.submodel.widths["hidden"]
    short = choose(LAYOUT, {}, Budget("memory", 200_000, "fp32", context=16))
    long = choose(LAYOUT, {}, Budget("memory", 200_000, "fp32", context=400))
    assert short.submodel.widths["hidden"] > long.submodel.widths["hidden"]


def test_memory_counts_weights_and_caches_by_hand() -> None:
    context, batch = 100, 3
    kv = context * 2 * 2 * 8 * 4
    states = 2 * ((64 + 2 * 16) * 4 * 4 + 8 * 8 * 8 * 4)
    biases = 2 * 8 * 4  # the selection biases are buffers
    expected = 4 * real_params(64) + biases + batch * (kv + states)
    assert Budget("memory", 1, "fp32", context, batch).cost(LAYOUT, Submodel()) == expected


def test_named_submodels_are_the_ladder() -> None:
    published = describe(preset="nemotron-3-nano-30b-a3b")
    layout, submodels = published.layout, published.elastic.submodels
    for limit, name in ((32e9, "30b"), (31e9, "23b"), (12.5e9, "12b")):
        assert choose(layout, submodels, Budget("params", int(limit))).name == name
    with pytest.raises(WidthError, match=r"named submodels 30b, 23b, 12b is 12b with 12\.427B"):
        choose(layout, submodels, Budget("params", 12_000_000_000))


def test_named_ladder_is_put_in_order_of_the_budgets_own_cost() -> None:
    # "thin" has fewer parameters in all, "few" has fewer active ones: experts are free per token.
    submodels = {"few": Submodel(widths={"expert_ffn": 16}), "thin": Submodel(widths={"experts": 2})}
    largest = {kind: choose(LAYOUT, submodels, Budget(kind, 10**9)).name for kind in ("params", "active_params")}
    assert largest == {"params": "few", "active_params": "thin"}


def select_words(elastic: ElasticConfig | None = None, **words: Any) -> Selection:
    return select(SizeRequest.parse(**words), CONFIG, LAYOUT, elastic or ElasticConfig(family="nemotron_h"))


def test_select_by_name_widths_layers_and_budget() -> None:
    elastic = ElasticConfig(family="nemotron_h", submodels={"small": Submodel(widths={"hidden": 32})})
    assert select_words(elastic, to="small").submodel.widths == {"hidden": 32}
    assert select_words(elastic, to="full").submodel == Submodel()
    assert select_words(widths=["hidden=48", "heads=4"]).submodel.widths == {"hidden": 48, "heads": 4}
    assert select_words(layers="0, 2,3").submodel.layers == (0, 2, 3)
    assert select_words(elastic, params="1e9").name == "full"  # the whole model is a member, listed or not
    assert select_words(elastic, memory="300kB", context=1).name == "small"


def test_below_every_named_size_the_uniform_ladder_is_taken_and_said() -> None:
    """Case 27: a number always gets the largest legal widths at or under it."""
    elastic = ElasticConfig(family="nemotron_h", submodels={"mid": Submodel(widths={"hidden": 48})})
    found = select_words(elastic, params=str(real_params(24) + 1))
    assert found.name is None and found.submodel.widths["hidden"] == 24
    assert "the smallest of the 2 named submodels" in found.lines[0] and "not trained" in found.lines[0]
    assert found.lines[1].startswith("ladder: the uniform ladder")


def test_a_width_of_depth_keeps_the_best_ranked_layers_or_says_that_none_are_ranked() -> None:
    ranked = ElasticConfig(family="nemotron_h", depth_order=(2, 4, 0, 1, 3))
    assert select_words(ranked, widths=["depth=3", "hidden=48"]).submodel == Submodel(
        widths={"hidden": 48}, layers=(0, 2, 4)
    )
    unranked = select_words(widths=["depth=3"])
    assert unranked.submodel.layers == (0, 1, 2) and "depth is not ranked" in unranked.lines[0]
    with pytest.raises(WidthError, match="no full_attention layer"):
        select_words(widths=["depth=2"])
    with pytest.raises(WidthError, match="depth width 6 is illegal: the parent has only 5"):
        select_words(widths=["depth=6"])
    with pytest.raises(RequestError, match="exclude each other"):
        select_words(widths=["depth=3"], layers="0,1,2")


def test_a_parent_that_names_only_itself_has_the_uniform_ladder() -> None:
    elastic = ElasticConfig(family="nemotron_h", submodels={"full": Submodel().completed(LAYOUT)})
    found = select_words(elastic, params=str(real_params(40)))
    assert found.submodel.widths["hidden"] == 40 and found.name is None


def test_memory_follows_the_dtype_of_the_model() -> None:
    bf16 = {**CONFIG, "dtype": "bfloat16"}
    request = SizeRequest.parse(memory="150kB", context=1)
    elastic = ElasticConfig(family="nemotron_h")
    half = select(request, bf16, layout_of(bf16), elastic).submodel
    assert half.widths["hidden"] > select(request, CONFIG, LAYOUT, elastic).submodel.widths["hidden"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "no size is given: say exactly one of"),
        ({"to": "a", "params": "3"}, "--to and --params exclude each other"),
        ({"layers": "0", "memory": "3"}, "--width/--layers and --memory exclude each other"),
        ({"widths": ["hidden"]}, "cannot read --width 'hidden'"),
        ({"widths": ["hidden=x"]}, "want AXIS=N"),
        ({"widths": ["hidden=-4"]}, "want AXIS=N"),
        ({"widths": ["hidden=4", "hidden=8"]}, "names hidden twice: 4 and 8"),
        ({"layers": "0,x"}, "cannot read --layers '0,x'"),
        ({"layers": ""}, "cannot read --layers ''"),
        ({"to": "small", "context": 4096}, "--context 4096 means nothing without --memory"),
        ({"params": "1e9", "batch": 1}, "--batch 1 means nothing without --memory"),
    ],
)
def test_requests_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SizeRequest.parse(**words)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_impossible_cuts_refused() -> None:
    with pytest.raises(WidthError, match="heads width 5 is illegal"):
        select_words(widths=["heads=5"])
    with pytest.raises(UnknownNameError, match="did you mean 'hidden'"):
        select_words(widths=["hiden=32"])
    with pytest.raises(WidthError, match="no full_attention layer"):
        select_words(layers="0,1")
    with pytest.raises(UnknownNameError, match="no submodel 'tiny'"):
        select_words(to="tiny")


def test_the_uniform_ladder_leaves_out_what_does_not_fit_together() -> None:
    """Mamba's 8 x 16 channels must be a whole multiple of hidden."""
    members, text = uniform_ladder(layout_of(tiny_granitemoehybrid().config.to_dict()))
    assert [member.widths["hidden"] for member in members.values()] == [4, 8, 16, 32, 64]
    assert "ladder of 5 hidden widths" in text
