"""Which widths keep blocks of 16 whole: rules against every cut tried out, and what a user hears."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized import quantized_folder

from star_elastic import Submodel, describe, slice_checkpoint
from star_elastic.axes import Axis
from star_elastic.cli import main
from star_elastic.errors import WidthError
from star_elastic.layout import Dim, parse_dims, runs
from star_elastic.quant.bound import bound_axes
from star_elastic.quant.formats import BLOCK, Packed

COLUMNS = (
    "hidden",
    "heads*head_dim",
    "mamba_heads*mamba_head_dim",
    "experts*expert_ffn",
    "16 + hidden",
)


def whole_blocks(dim: Dim, members: dict[str, list[int]]) -> bool:
    """Whether every run of kept columns starts and ends on a multiple of 16: the definition, column by column."""
    index = dim.index(members)
    return index is None or all(start % BLOCK == 0 and length % BLOCK == 0 for start, length in runs(index))


@settings(max_examples=150, deadline=None)
@given(
    text=st.sampled_from(COLUMNS),
    heads=st.sampled_from([(4, 1), (4, 2), (6, 3), (8, 2), (16, 4)]),
    inner=st.sampled_from([4, 8, 12, 16, 24, 32, 48]),
    hidden=st.sampled_from([32, 64, 80]),
)
def test_a_width_is_legal_exactly_where_no_block_is_split(
    text: str, heads: tuple[int, int], inner: int, hidden: int
) -> None:
    size, groups = heads
    axes = {
        "hidden": Axis("hidden", hidden),
        "heads": Axis("heads", size, groups),
        "mamba_heads": Axis("mamba_heads", size, groups),
        "mamba_head_dim": Axis("mamba_head_dim", inner),
        "experts": Axis("experts", size),
        "expert_ffn": Axis("expert_ffn", inner),
    }
    (dim,) = parse_dims(text, axes, {"head_dim": inner})
    bound = bound_axes(axes, [dim])
    for name in dim.axes:
        axis = axes[name]
        for width in range(axis.groups, axis.size, axis.groups):
            members = {name: axis.members(width)}
            assert bound[name].is_legal(width) == whole_blocks(dim, members), (text, name, width)
    # Any legal widths of several axes fit together.
    names = sorted(dim.axes)
    for first in bound[names[0]].legal():
        for second in bound[names[-1]].legal():
            members = {names[0]: axes[names[0]].members(first), names[-1]: axes[names[-1]].members(second)}
            cut = {name: kept for name, kept in members.items() if len(kept) < axes[name].size}
            assert whole_blocks(dim, cut), (text, first, second)


def test_packed_dimensions_by_hand() -> None:
    """32 columns of which 16 to 31 stay: the second of two scales, bytes 8 to 15 of 16."""
    (dim,) = parse_dims("channels", {"channels": Axis("channels", 32)}, {})
    kept = {"channels": list(range(16, 32))}
    assert (Packed(dim.segments, 16).size, Packed(dim.segments, 16).index(kept)) == (2, [1])
    assert (Packed(dim.segments, 2).size, Packed(dim.segments, 2).index(kept)) == (16, list(range(8, 16)))
    assert Packed(dim.segments, 16).width({"channels": 16}) == 1
    assert Packed(dim.segments, 2).index({"other": [0]}) is None


def test_a_split_block_is_refused_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = quantized_folder(tmp_path / "source", "nvfp4")
    for words, message in (
        (["hidden=24"], "hidden width 24 is illegal: NVFP4 blocks of 16 must stay whole; nearest legal: 16 and 32"),
        (["expert_ffn=40"], "expert_ffn width 40 is illegal"),
        (["mamba_head_dim=8"], "mamba_head_dim width 8 is illegal"),
    ):
        assert main(["slice", str(source), str(tmp_path / "out"), "--width", *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(WidthError, match="nearest legal: 16 and 32"):
        slice_checkpoint(source, tmp_path / "out", Submodel(widths={"hidden": 24}))
    assert not (tmp_path / "out").exists()


def test_runs_inside_groups_may_split_blocks_where_the_total_does_not(tmp_path: Path) -> None:
    """Eight heads of 8 channels in 2 groups: 4 heads are two runs of 16, but 2 heads two runs of 8, of 16 columns in all."""
    source = quantized_folder(tmp_path / "source", "nvfp4", mamba_head_dim=8)
    slice_checkpoint(source, tmp_path / "four", Submodel(widths={"mamba_heads": 4}))
    with pytest.raises(
        WidthError, match="mamba_heads width 2 is illegal: NVFP4 blocks of 16 must stay whole; nearest legal: 4"
    ):
        slice_checkpoint(source, tmp_path / "two", Submodel(widths={"mamba_heads": 2}))


def test_fp8_has_no_blocks(tmp_path: Path) -> None:
    source = quantized_folder(tmp_path / "source", "fp8")
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={"hidden": 24, "expert_ffn": 40}))


@pytest.mark.parametrize("weights", [True, False])
def test_inspect_shows_the_widths_of_this_folder(weights: bool, tmp_path: Path) -> None:
    """With the weights, what is stored in NVFP4 binds; without them, what the recipe would have stored so."""
    source = quantized_folder(tmp_path / "source", "nvfp4")
    if not weights:
        (source / "model.safetensors").unlink()
    axes = describe(source).layout.axes
    assert axes["hidden"].legal() == [16, 32, 48, 64]
    assert axes["expert_ffn"].legal() == [16, 32, 48, 64]
    assert axes["mamba_head_dim"].legal() == [16]
    assert axes["heads"].legal() == [2, 4, 6, 8]  # attention is not quantized in this recipe
    assert "stored" in describe(source).submodels["full"].bytes


def test_what_is_stored_decides_not_the_recipe(tmp_path: Path) -> None:
    """Only one matrix is quantized: the axes of the others keep their finer steps."""
    up = "backbone.layers.1.mixer.shared_experts.up_proj.weight"
    source = quantized_folder(tmp_path / "source", lambda name: "nvfp4" if name == up else None)
    axes = describe(source).layout.axes
    assert all(after - before == 16 for before, after in pairwise(axes["hidden"].legal()))
    assert 24 in axes["expert_ffn"].legal() and 24 in axes["shared_ffn"].legal()  # its rows, not its columns


def test_a_memory_budget_counts_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = quantized_folder(tmp_path / "source", "nvfp4")
    assert main(["slice", str(source), str(tmp_path / "out"), "--memory", "110KiB", "--context", "1", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "weights: " in told and "as stored" in told
    hidden = int(told.split("hidden 64 -> ")[1].split(",")[0].split("\n")[0])
    assert hidden % 16 == 0
