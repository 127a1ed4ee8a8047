"""Legal widths, why others are illegal, and which members a width keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny import tiny_config, tiny_granitemoehybrid, tiny_llama

import star_elastic
from star_elastic.axes import Axis, Coupling, Rule
from star_elastic.errors import CheckpointError, UnknownNameError, WidthError
from star_elastic.families import layout_of
from star_elastic.layout import Layout


def layout(pattern: str = "ME*-E", **edits: object) -> Layout:
    return layout_of(tiny_config(pattern, **edits).to_dict())


def test_a_cut_keeps_the_first_members_of_every_group() -> None:
    """Case 5: 8 Mamba heads in 2 groups, keep 4: heads 0, 1 of each group."""
    assert layout().axes["mamba_heads"].members(4) == [0, 1, 4, 5]


def test_query_heads_are_cut_inside_kv_groups() -> None:
    """Case 15: 16 query heads over 4 KV heads: 6 is refused, 8 keeps two per group."""
    heads = layout(num_attention_heads=16, num_key_value_heads=4).axes["heads"]
    assert heads.members(8) == [0, 1, 4, 5, 8, 9, 12, 13]
    with pytest.raises(WidthError, match=r"heads width 6 is illegal: .*4 KV groups; nearest legal: 4 and 8"):
        heads.check(6)


@pytest.mark.parametrize(
    ("axis", "width", "why"),
    [
        ("hidden", 50, "multiples of 4 at 4 bytes a number; nearest legal: 48 and 52"),
        ("hidden", 65, "the parent has only 64; nearest legal: 64"),
        ("hidden", 0, "at least 1; nearest legal: 4"),
        ("mamba_heads", 3, "inside each of 2 SSM groups; nearest legal: 2 and 4"),
        ("experts", 1, "a token uses its top-2; nearest legal: 2"),
        ("expert_ffn", 30, "nearest legal: 28 and 32"),
    ],
)
def test_an_illegal_width_says_why_and_names_its_neighbours(axis: str, width: int, why: str) -> None:
    with pytest.raises(WidthError) as error:
        layout().axes[axis].check(width)
    assert str(error.value).startswith(f"{axis} width {width} is illegal: ")
    assert str(error.value).endswith(why)
    assert "\n" not in str(error.value)


def test_rows_are_whole_16_byte_units_at_the_models_dtype() -> None:
    assert layout(dtype="bfloat16").axes["hidden"].legal()[:3] == [8, 16, 24]
    assert layout(dtype="float32").axes["hidden"].legal()[:3] == [4, 8, 12]


def test_experts_are_cut_inside_expert_groups_and_keep_top_k_reachable() -> None:
    """8 experts in 2 groups, one open, top-3: each group needs 3 experts."""
    experts = layout(n_group=2, topk_group=1, num_experts_per_tok=3).axes["experts"]
    assert experts.legal() == [6, 8]
    assert experts.members(6) == [0, 1, 2, 4, 5, 6]


def test_the_parents_own_width_is_legal_whatever_the_rules() -> None:
    axis = Axis("hidden", 50, rules=(Rule("rows", 4, 4),))
    axis.check(50)
    assert axis.legal() == [*range(4, 50, 4), 50]
    assert axis.at_most(49) == 48 and axis.at_most(50) == 50 and axis.at_most(1) == 4


@pytest.mark.parametrize("width", [True, 2.0, "4"])
def test_a_width_is_a_whole_number(width: object) -> None:
    with pytest.raises(WidthError, match="not a whole number"):
        layout().axes["heads"].check(width)  # type: ignore[arg-type]


def test_an_unknown_axis_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'hidden'"):
        layout().check({"hiden": 32})


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ([0, 1, 3], "hold no full_attention layer: keep at least one of \\[2\\]"),
        ([2, 1], "must be ascending"),
        ([2, 2], "without repeats"),
        ([2, 9], "from 0 to 4"),
        ([], "must be ascending"),
    ],
)
def test_kept_layers_are_checked(layers: list[int], why: str) -> None:
    with pytest.raises(WidthError, match=why):
        layout().check({}, layers)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("hidden_size", 0, "hidden_size must be a positive whole number, not 0"),
        ("hidden_size", "64", "hidden_size must be a positive whole number, not '64'"),
        ("n_groups", 3, "n_groups 3 does not divide mamba_num_heads 8"),
        ("num_key_value_heads", 3, "num_key_value_heads 3 does not divide num_attention_heads 8"),
        ("layers_block_type", ["moe", "lstm"], "layer 1 is 'lstm'"),
        ("layers_block_type", [], "non-empty list"),
        ("dtype", "int4", "dtype 'int4' is not one of"),
    ],
)
def test_an_impossible_config_is_refused_in_one_line(field: str, value: object, why: str) -> None:
    config = tiny_config("ME*-E").to_dict() | {field: value}
    with pytest.raises(CheckpointError, match=why) as error:
        layout_of(config)
    assert "\n" not in str(error.value)


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"model_type 'gpt2'.*nemotron_h"):
        layout_of({"model_type": "gpt2"})


def test_granite_hidden_and_mamba_widths_fit_together() -> None:
    """8 heads x 16 channels = 128 = mamba_expand x hidden: 64 x 2, 32 x 4, but 48 x 2.67."""
    table = layout_of(tiny_granitemoehybrid().config.to_dict())
    with pytest.raises(WidthError) as error:
        table.check({"hidden": 48})
    assert str(error.value) == (
        "mamba_heads 8 x mamba_head_dim 16 is no multiple of hidden 48: the config writes the width of the Mamba mixer as a "
        "whole multiple of hidden (mamba_expand); nearest legal: hidden 32 and 64, or mamba_heads 6, or mamba_head_dim 12"
    )
    for widths in ({"hidden": 32}, {"hidden": 48, "mamba_heads": 6}, {"hidden": 48, "mamba_head_dim": 12}):
        table.check(widths)
        assert table.fits(widths)
    assert not table.fits({"hidden": 48})


def test_llama_heads_divide_hidden() -> None:
    table = layout_of(tiny_llama().config.to_dict())
    with pytest.raises(WidthError, match=r"hidden 40 is no multiple of heads 6: .*: heads 4 and 8, or hidden 36 and 48"):
        table.check({"hidden": 40, "heads": 6})
    table.check({"hidden": 48, "heads": 6})


def test_an_axis_cut_where_nothing_beside_it_can_move() -> None:
    """Three widths that fit only as they are: the message claims no alternative."""
    coupling = Coupling(("a",), ("b",), "so it is")
    axes = {"a": Axis("a", 5, rules=(Rule("whole", 5, 5),)), "b": Axis("b", 2, rules=(Rule("whole", 2, 2),))}
    with pytest.raises(WidthError, match="^a 5 is no multiple of b 2: so it is$"):
        coupling.check(axes, {"a": 5, "b": 2})


def test_names_of_axes_have_one_home() -> None:
    source = Path(star_elastic.__file__).parent
    homes = {path.name for path in source.rglob("*.py") if re.search(r"^DEPTH\b.*= *\"", path.read_text(), re.MULTILINE)}
    assert homes == {"axes.py"}
