"""The latency table: interpolation by hand, gradients by finite differences, files, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config

from star_elastic.errors import CheckpointError, TargetError, WidthError
from star_elastic.families import layout_of
from star_elastic.latency import LatencyTable
from star_elastic.layout import Layout

OVERHEAD = 0.5


def point(seconds: float, **widths: int) -> dict[str, Any]:
    return {"widths": widths, "seconds": seconds, "spread": 0.0}


def fixed(kind: str, *units: str, seconds: float) -> dict[str, Any]:
    return {"kind": kind, "units": units, "ladder": {"hidden": [64]}, "points": [point(seconds, hidden=64)]}


def table_for(layout: Layout) -> dict[str, Any]:
    """A table of ME*ME as it lies on disk: only expert layers and the head depend on widths."""
    return {
        "format_version": 1,
        "tool": "star-elastic 0",
        "machine": {"device": "cpu", "name": "abacus", "threads": 1, "torch": "2"},
        "conditions": {
            "phase": "decode", "batch": 1, "context": 8, "dtype": "float32", "warmup": 0, "repeats": 1,
        },
        "model": {"family": layout.family, "fingerprint": layout.fingerprint},
        "overhead": OVERHEAD,
        "units": [
            fixed("embedding", "model.embeddings", seconds=1.0),
            fixed("linear_attention", "model.layers.0", "model.layers.3", seconds=10.0),
            {
                "kind": "moe",
                "units": ["model.layers.1", "model.layers.4"],
                "ladder": {"hidden": [32, 64], "expert_ffn": [8, 16, 32]},
                "points": [
                    point(100.0, hidden=32, expert_ffn=8),
                    point(140.0, hidden=32, expert_ffn=16),
                    point(150.0, hidden=32, expert_ffn=32),
                    point(200.0, hidden=64, expert_ffn=8),
                    point(300.0, hidden=64, expert_ffn=16),
                    point(420.0, hidden=64, expert_ffn=32),
                ],
            },
            fixed("full_attention", "model.layers.2", seconds=20.0),
            fixed("final_norm", "model.norm_f", seconds=2.0),
            {
                "kind": "head", "units": ["lm_head"], "ladder": {"hidden": [32, 64]},
                "points": [point(3.0, hidden=32), point(7.0, hidden=64)],
            },
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def layout() -> Layout:
    return layout_of(tiny_config().to_dict())


@pytest.fixture
def raw(layout: Layout) -> dict[str, Any]:
    return table_for(layout)


@pytest.fixture
def varied(raw: dict[str, Any]) -> LatencyTable:
    """The same with every unit measured at hidden 32 too, at the same time, so that hidden may be cut."""
    for unit in raw["units"]:
        if unit["ladder"] == {"hidden": [64]}:
            unit["ladder"] = {"hidden": [32, 64]}
            unit["points"] = [point(unit["points"][0]["seconds"], hidden=width) for width in (32, 64)]
    return LatencyTable.model_validate(raw)


REST = OVERHEAD + 1 + 2 * 10 + 20 + 2  # what does not depend on widths here


def test_measured_points_are_returned_exactly(varied: LatencyTable, layout: Layout) -> None:
    assert varied.cost(layout, {}) == REST + 2 * 420 + 7
    assert varied.cost(layout, {"hidden": 32, "expert_ffn": 16}) == REST + 2 * 140 + 3
    assert varied.cost(layout, {"hidden": 64, "expert_ffn": 8}) == REST + 2 * 200 + 7


def test_between_points_it_is_bilinear(varied: LatencyTable, layout: Layout) -> None:
    # hidden 40 is 1/4 of the way from 32 to 64, expert_ffn 20 is 1/4 of the way from 16 to 32.
    expert = 0.75 * (0.75 * 140 + 0.25 * 150) + 0.25 * (0.75 * 300 + 0.25 * 420)
    assert varied.cost(layout, {"hidden": 40, "expert_ffn": 20}) == pytest.approx(REST + 2 * expert + 4.0)
    # Half way along one axis only: 16 -> 32 at hidden 32.
    assert varied.cost(layout, {"hidden": 32, "expert_ffn": 24}) == pytest.approx(REST + 2 * 145 + 3)


def test_layers_have_widths_and_weights_of_their_own(varied: LatencyTable, layout: Layout) -> None:
    own: dict[str | tuple[str, int], int] = {("expert_ffn", 4): 8}
    assert varied.cost(layout, own) == REST + 420 + 200 + 7
    assert varied.cost(layout, {"expert_ffn": 16, **own}) == REST + 300 + 200 + 7
    assert varied.cost(layout, {}, layers=(1, 2)) == OVERHEAD + 1 + 420 + 20 + 2 + 7
    assert varied.cost(layout, {}, layers={0: 0.5, 1: 0, 2: 1.0}) == OVERHEAD + 1 + 5 + 20 + 2 + 7


def test_gradients_are_those_of_finite_differences(varied: LatencyTable, layout: Layout) -> None:
    widths = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (41.0, 20.0, 9.5)]

    def cost(hidden: torch.Tensor, shared: torch.Tensor, own: torch.Tensor) -> Any:
        gates = dict.fromkeys(range(5), 1.0)
        keyed: dict[str | tuple[str, int], torch.Tensor] = {
            "hidden": hidden,
            "expert_ffn": shared,
            ("expert_ffn", 4): own,
        }
        return varied.cost(layout, keyed, gates)

    cost(*widths).backward()
    for number, width in enumerate(widths):
        moved = [[w.detach().clone() for w in widths] for _ in range(2)]
        moved[0][number] += 1e-3
        moved[1][number] -= 1e-3
        slope = (cost(*moved[0]) - cost(*moved[1])) / 2e-3
        assert width.grad is not None and abs(float(slope)) > 0.1
        assert float(width.grad) == pytest.approx(float(slope), rel=1e-6)


def test_the_ends_of_the_range_have_a_gradient_and_bear_rounding(varied: LatencyTable, layout: Layout) -> None:
    for value, slope in ((64.0, (420 - 150) / 32 * 2 + 4 / 32), (32.0, (420 - 150) / 32 * 2 + 4 / 32)):
        hidden = torch.tensor(value, requires_grad=True)
        varied.cost(layout, {"hidden": hidden}).backward()
        assert hidden.grad is not None and float(hidden.grad) == pytest.approx(slope)
    assert varied.cost(layout, {"hidden": 64.00001}) == pytest.approx(REST + 2 * 420 + 7, rel=1e-5)


@pytest.mark.parametrize(
    ("widths", "said"),
    [
        (
            {"hidden": 24},
            "hidden width 24 lies outside the latency table, which was measured from 32 to 64: profile it there",
        ),
        ({"expert_ffn": 40}, "expert_ffn width 40 lies outside the latency table, which was measured from 8 to 32"),
        ({("expert_ffn", 1): 4}, "expert_ffn width 4 lies outside"),
    ],
)
def test_widths_outside_are_refused(varied: LatencyTable, layout: Layout, widths: dict[Any, int], said: str) -> None:
    with pytest.raises(WidthError) as caught:
        varied.cost(layout, widths)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_an_axis_that_was_not_varied_may_not_move(raw: dict[str, Any], layout: Layout) -> None:
    with pytest.raises(WidthError, match="hidden width 32 lies outside .* measured only at 64"):
        LatencyTable.model_validate(raw).cost(layout, {"hidden": 32})


def test_a_table_of_another_model_is_refused(raw: dict[str, Any]) -> None:
    other = layout_of(tiny_config(moe_intermediate_size=64).to_dict())
    with pytest.raises(CheckpointError, match="^the latency table was measured on another model .*: profile this one$"):
        LatencyTable.model_validate(raw).cost(other, {})


def test_files_come_back_as_they_were(varied: LatencyTable, tmp_path: Path) -> None:
    varied.save(tmp_path / "t.json")
    assert LatencyTable.load(tmp_path / "t.json") == varied
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]
    before = (tmp_path / "t.json").read_bytes()
    with pytest.raises(TargetError, match=r"t\.json exists"):
        varied.save(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_bytes() == before
    with pytest.raises(TargetError, match="does not exist"):
        varied.save(tmp_path / "nowhere" / "t.json")


def drop_point(raw: dict[str, Any]) -> None:
    raw["units"][2]["points"].pop()


def double_point(raw: dict[str, Any]) -> None:
    raw["units"][2]["points"][0] = raw["units"][2]["points"][1]


def descend(raw: dict[str, Any]) -> None:
    raw["units"][5]["ladder"]["hidden"] = [64, 32]


def not_finite(raw: dict[str, Any]) -> None:
    raw["units"][0]["points"][0]["seconds"] = float("nan")


def new_field(raw: dict[str, Any]) -> None:
    raw["speed"] = 1


def new_version(raw: dict[str, Any]) -> None:
    raw["format_version"] = 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop_point, "moe: 5 points for a grid of 6"),
        (double_point, "moe: the points are not those of the ladder"),
        (descend, r"head: widths of hidden must ascend, not \[64, 32\]"),
        (not_finite, "units.0.points.0.seconds: .*finite"),
        (new_field, "speed: Extra inputs"),
        (new_version, "format_version 2; this version of star-elastic reads 1"),
    ],
)
def test_damaged_files_are_refused(raw: dict[str, Any], tmp_path: Path, damage: Any, said: str) -> None:
    damage(raw)
    (tmp_path / "t.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=said) as caught:
        LatencyTable.load(tmp_path / "t.json")
    assert "\n" not in str(caught.value)


def test_reading_a_table_needs_no_torch() -> None:
    code = "import sys, star_elastic.latency; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
