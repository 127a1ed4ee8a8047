"""A latency budget from the first command to the slice: profile, train, freeze within the tolerance, cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from search_runs import search_content, search_parent, write_recipe

from star_elastic import profile
from star_elastic.cli import main
from star_elastic.layout import Layout, Unit
from star_elastic.submodel import ElasticConfig, read_config
from star_elastic.train import train_family
from star_elastic.unit_timer import Timing


class Counted:
    """A timer whose unit takes a nanosecond for each number in its tensors at the given widths, and a call 2 us more."""

    def __init__(self, config: Any, layout: Layout, *_: Any, **__: Any) -> None:
        self._layout = layout

    def __call__(self, unit: Unit, widths: Mapping[str, int]) -> Timing:
        seconds = 1e-9 * sum(row.numel(self._layout.complete(widths)) for row in unit.rows)
        return Timing([seconds] * 3, [2e-6] * 3)


def seconds_by_hand(table: dict[str, Any], widths: dict[str, int]) -> float:
    """What a measured table says about a model of measured widths, from its JSON."""
    total = table["overhead"]
    for unit in table["units"]:
        at = {axis: widths[axis] for axis in unit["ladder"]}
        (point,) = (point for point in unit["points"] if point["widths"] == at)
        total += point["seconds"] * len(unit["units"])
    return total


@pytest.mark.parametrize("share", [0.75, 0.6])
def test_profile_train_slice(tmp_path, monkeypatch, capsys, share):
    monkeypatch.setattr(profile, "UnitTimer", Counted)
    parent, table = search_parent(tmp_path / "parent"), tmp_path / "table.json"
    words = ["--width", "hidden=32,48", "--width", "expert_ffn=16,24", "--width", "shared_ffn=24,36", "--repeats", "3"]
    assert main(["profile", str(parent), str(table), *words, "--context", "16", "--warmup", "0"]) == 0
    content = search_content(parent, tmp_path)
    content["budgets"] = {name: {"latency": part, "table": str(table)} for name, part in (("full", 1.0), ("fast", share))}
    content["router"] = {"axes": {axis: [1, 0.75, 0.5] for axis in ("hidden", "expert_ffn", "shared_ffn")}}
    content["stages"] = [
        {"phase": "search", "steps": 40, "budgets_per_step": 2},
        {"phase": "settle", "steps": 2},
    ]
    content["optimizer"]["lr"] = 3e-3
    report = train_family(write_recipe(content, tmp_path), progress=False)

    elastic, measured = ElasticConfig.load(tmp_path / "out"), json.loads(table.read_text())
    config = read_config(parent)
    fields = {"hidden": "hidden_size", "expert_ffn": "moe_intermediate_size"}
    fields |= {"shared_ffn": "moe_shared_expert_intermediate_size", "heads": "num_attention_heads"}
    sizes = {axis: config[name] for axis, name in fields.items()} | {"experts": config["n_routed_experts"]}
    full = seconds_by_hand(measured, sizes)
    fast = seconds_by_hand(measured, {**sizes, **elastic.get("fast").widths})
    assert abs(fast / (share * full) - 1) <= 0.05
    assert report.submodels["fast"].choice.cost == pytest.approx(fast)
    assert seconds_by_hand(measured, {**sizes, **elastic.get("full").widths}) == pytest.approx(full)

    assert main(["slice", str(tmp_path / "out"), str(tmp_path / "fast"), "--to", "fast"]) == 0
    cut = read_config(tmp_path / "fast")
    assert {axis: cut[name] for axis, name in fields.items()} == {axis: elastic.get("fast").widths[axis] for axis in fields}
    capsys.readouterr()
    assert main(["slice", str(tmp_path / "out"), str(tmp_path / "no"), "--params", "100k", "--learned"]) == 2
    assert "the router knows no budget of params, only fast of latency" in capsys.readouterr().err


def test_a_latency_that_no_widths_have_ends_before_weights_are_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profile, "UnitTimer", Counted)
    parent, table = search_parent(tmp_path / "parent"), tmp_path / "table.json"
    assert main(["profile", str(parent), str(table), "--width", "hidden=32", "--context", "16", "--warmup", "0"]) == 0
    content = search_content(parent, tmp_path) | {"budgets": {"fast": {"latency": 0.05, "table": str(table)}}}
    content["router"] = {"axes": {"hidden": [1, 0.5]}}
    content["stages"][1].pop("probabilities")
    content["stages"][0]["budgets_per_step"] = 1
    capsys.readouterr()
    assert main(["train", str(write_recipe(content, tmp_path))]) == 2
    error = capsys.readouterr().err
    assert "budget 'fast': no candidates come within 5%" in error and error.count("\n") == 1
    assert not (tmp_path / "out.run").exists()
