"""Which nested models a search chooses from: against brute force over transformers' own models; and the order of trying."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tiny import TRANSFORMER, tiny_config, tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM, NemotronHForCausalLM

from star_elastic.errors import WidthError
from star_elastic.families import layout_of
from star_elastic.ladder import Budget
from star_elastic.search.grid import Grid, make_grid
from star_elastic.search.walk import next_member
from star_elastic.submodel import Submodel

NEMOTRON = layout_of(tiny_config().to_dict())
LLAMA = layout_of(tiny_llama().config.to_dict())
EVERY_4 = range(4, 65, 4)  # legal hidden widths: 16-byte rows in fp32

Combination = dict[str, int]


@cache
def nemotron_params(hidden: int, heads: int, expert_ffn: int) -> int:
    widths = {"hidden_size": hidden, "num_attention_heads": heads, "moe_intermediate_size": expert_ffn}
    with torch.device("meta"):
        return sum(p.numel() for p in NemotronHForCausalLM(tiny_config(**widths)).parameters())


@cache
def llama_params(hidden: int, heads: int, ffn: int, depth: int) -> int:
    """Parameters; endless where transformers refuses the config."""
    edits = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": ffn, "num_hidden_layers": depth}
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**{**TRANSFORMER, "tie_word_embeddings": True, **edits}))
    except Exception as error:
        assert "multiple of the number of attention heads" in str(error)
        return 10**12
    return sum(p.numel() for p in model.parameters())


def brute_force(count: Callable[..., int], others: dict[str, list[int]], limit: int) -> Iterator[Combination]:
    """For every combination of the others, the largest hidden width within the limit."""
    for widths in itertools.product(*others.values()):
        rest = dict(zip(others, widths, strict=True))
        fitting = [hidden for hidden in EVERY_4 if count(hidden=hidden, **rest) <= limit]
        if fitting:
            yield {"hidden": fitting[-1], **rest}


def undominated(combinations: list[Combination]) -> list[Combination]:
    def beaten(one: Combination, other: Combination) -> bool:
        return one != other and all(other[axis] >= one[axis] for axis in one)

    return [one for one in combinations if not any(beaten(one, other) for other in combinations)]


def as_sets(combinations: list[Combination]) -> set[tuple[tuple[str, int], ...]]:
    return {tuple(sorted(one.items())) for one in combinations}


def of_grid(grid: Grid) -> list[Combination]:
    return [dict(zip(grid.space.legal, row, strict=True)) for row in grid.widths.tolist()]


@pytest.mark.parametrize("share", [0.95, 0.6, 0.3])
def test_members_are_those_of_brute_force(share: float) -> None:
    limit = int(share * nemotron_params(64, 8, 32))
    others = {"heads": [8, 6, 4], "expert_ffn": [32, 28, 24, 20, 16]}  # at 1, 7/8, 3/4, 5/8, 1/2
    wanted = undominated(list(brute_force(nemotron_params, others, limit)))
    grid = make_grid(NEMOTRON, Budget("params", limit), ["hidden", "heads", "expert_ffn"])
    assert len(wanted) > 1 and as_sets(of_grid(grid)) == as_sets(wanted)
    for number, widths in enumerate(of_grid(grid)):
        assert grid.member(number).widths == widths
        assert Budget("params", limit).cost(NEMOTRON, grid.member(number)) == nemotron_params(**widths) <= limit
    np.testing.assert_allclose(grid.shares, grid.widths / [64, 8, 32])
    assert "heads, expert_ffn at 1, 0.875, 0.75, 0.625, 0.5 of the parent's; hidden as large as fits" in grid.text


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_depth_and_widths_that_must_fit_together(share: float) -> None:
    limit = int(share * llama_params(64, 8, 48, 4))
    others = {"heads": [8, 6, 4], "ffn": [48, 36, 24], "depth": [4, 3, 2]}
    wanted = undominated(list(brute_force(llama_params, others, limit)))
    grid = make_grid(LLAMA, Budget("params", limit), list(LLAMA.axes), (3, 0, 2, 1), (1.0, 0.75, 0.5))
    assert len(wanted) > 3 and as_sets(of_grid(grid)) == as_sets(wanted)
    for number, widths in enumerate(of_grid(grid)):
        kept = {4: None, 3: (0, 2, 3), 2: (0, 3)}
        assert grid.member(number).layers == kept[widths["depth"]]


def test_the_axis_that_moves_the_cost_most_takes_what_is_left() -> None:
    layout = layout_of(tiny_config(num_experts_per_tok=1).to_dict())
    axes = ["expert_ffn", "shared_ffn"]
    # A token uses one expert of 32 channels, and a shared one of 48; in memory are eight and one.
    for kind, lead in (("params", "expert_ffn"), ("active_params", "shared_ffn")):
        full = Budget(kind, 1).cost(layout, Submodel())
        assert f"; {lead} as large as fits" in make_grid(layout, Budget(kind, int(0.97 * full)), axes).text


def test_memory_is_led_by_what_caches_and_states_depend_on_where_they_are_most_of_it() -> None:
    for context, lead in ((1, "hidden"), (4096, "depth")):
        budget = Budget("memory", 1, "fp32", context=context)
        budget = replace(budget, limit=int(0.8 * budget.cost(LLAMA, Submodel())))
        assert f"; {lead} as large as fits" in make_grid(LLAMA, budget, ["hidden", "depth"], (3, 0, 2, 1)).text
    for batch, lead in ((1, "hidden"), (512, "mamba_heads")):
        budget = Budget("memory", 1, "fp32", context=1, batch=batch)
        budget = replace(budget, limit=int(0.9 * budget.cost(NEMOTRON, Submodel())))
        assert f"; {lead} as large as fits" in make_grid(NEMOTRON, budget, ["hidden", "mamba_heads"]).text


def test_a_budget_above_the_model_leaves_it_whole() -> None:
    grid = make_grid(NEMOTRON, Budget("params", 10**9), list(NEMOTRON.axes), (0, 1, 2, 3, 4))
    assert len(grid.widths) == 1 and grid.member(0).is_full(NEMOTRON)


def test_one_axis_alone() -> None:
    limit = nemotron_params(40, 8, 32)
    grid = make_grid(NEMOTRON, Budget("params", limit), ["hidden"])
    assert grid.widths.tolist() == [[40]] and grid.text.startswith("hidden as large as fits: 1 that")
    depth = make_grid(LLAMA, Budget("params", llama_params(64, 8, 48, 3)), ["depth"], (3, 0, 2, 1))
    assert [depth.member(0).layers, len(depth.widths)] == [(0, 2, 3), 1]


def test_a_depth_that_lacks_a_needed_layer_is_left_out() -> None:
    # Layer 2, the only attention layer, is third in the order: a depth of 2 cannot run.
    grid = make_grid(NEMOTRON, Budget("params", 10**5), ["hidden", "depth"], (0, 1, 2, 3, 4))
    assert set(grid.space.legal["depth"].tolist()) == {3, 4, 5}


def test_a_budget_out_of_reach_names_what_can_be_reached() -> None:
    with pytest.raises(WidthError) as caught:
        make_grid(NEMOTRON, Budget("params", 100), ["hidden", "heads", "expert_ffn"])
    least, full = nemotron_params(4, 4, 16), nemotron_params(64, 8, 32)
    message = str(caught.value)
    assert f"({least:,})" in message and f"({full:,})" in message and "\n" not in message
    assert "heads, expert_ffn down to 0.5 and hidden down to 4" in message
    # Where only an axis that hardly counts may be cut, that is what is said.
    with pytest.raises(WidthError, match=f"heads down to 2 reach from .*{nemotron_params(64, 2, 32):,}"):
        make_grid(NEMOTRON, Budget("params", full // 2), ["heads"])


def walk(shares: np.ndarray, loss: Callable[[Any], float], count: int) -> list[int]:
    tried: list[int] = []
    while len(tried) < count and (number := next_member(shares, tried, [loss(shares[n]) for n in tried])) is not None:
        tried.append(number)
    return tried


def test_the_most_even_first_then_far_from_all_and_near_the_best_in_turn() -> None:
    shares = np.array([[1.0, 0.5], [0.95, 0.55], [0.75, 0.75], [0.7, 0.8], [0.5, 1.0]])
    # 2 is even; 0 is as far from it as 4, and earlier. Then the neighbour of the better of both; then 4 is farthest from all.
    assert walk(shares, lambda share: 1 - share[0], 9) == [2, 0, 1, 4, 3]
    assert walk(shares, lambda share: 1 - share[1], 9) == [2, 0, 3, 4, 1]


def test_a_longer_walk_begins_with_the_shorter_and_finds_the_best_of_a_bowl_early() -> None:
    grid = make_grid(NEMOTRON, Budget("params", 90_000), ["hidden", "heads", "experts", "expert_ffn", "shared_ffn"])

    def bowl(share: Any) -> float:
        return float(np.square(share - [0.9, 1.0, 0.6, 0.6, 0.9]).sum())

    walks = [walk(grid.shares, bowl, count) for count in (8, 30)]
    assert walks[1][:8] == walks[0] and len(set(walks[1])) == 30
    losses = np.array([bowl(share) for share in grid.shares])
    rank = int((losses < min(losses[walks[1]])).sum())
    assert len(losses) > 80 and rank < 3
