"""What one-shot cuts cost: sorted in memory equals the sorted folder, and each probed loss is that of an exported slice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_out import TEXT, family_folder, reference_loss
from tiny import FAMILIES, tokens
from transformers import AutoModelForCausalLM

from star_elastic.cli import main
from star_elastic.errors import CheckpointError, DataError, WidthError
from star_elastic.families import layout_of
from star_elastic.orders import axis_keys, member_keys
from star_elastic.reorder import sort_model
from star_elastic.score import ProbeOptions, score_parent
from star_elastic.score.probe import probed_cuts
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_folder, sort_parent
from star_elastic.submodel import Submodel
from star_elastic.train.data import calibration_batches, held_out_batches
from star_elastic.train.documents import load_tokenizer


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def random_orders(layout: Any, own: bool) -> dict[str, list[int]]:
    """Any order inside groups, for every axis and layer; with ``own`` for every second expert as well."""
    rng = np.random.default_rng(3)

    def shuffled(axis: Any) -> list[int]:
        per_group = axis.size // axis.groups
        return [int(g * per_group + i) for g in range(axis.groups) for i in rng.permutation(per_group)]

    orders = {key: shuffled(axis) for key, axis in axis_keys(layout).items()}
    if own:
        keys = list(member_keys(layout))[::2]
        orders |= {key: shuffled(layout.axes[key.rsplit(".", 1)[-1]]) for key in keys}
    return orders


@pytest.mark.parametrize("own", [False, True], ids=["", "own"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sorting_in_memory_is_sorting_the_folder(family: str, own: bool, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "parent")
    layout = layout_of(model.config.to_dict())
    orders = random_orders(layout, own)
    before = model(tokens()).logits
    sort_model(model, layout, orders)
    sort_folder(tmp_path / "parent", tmp_path / "sorted", orders)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "sorted").state_dict()
    assert wanted.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(tokens()).logits, before, rtol=1e-4, atol=1e-4)


def test_sorting_in_memory_refuses_what_changes_the_model() -> None:
    model = FAMILIES["llama"]()
    layout = layout_of(model.config.to_dict())
    with pytest.raises(CheckpointError, match="out of its group"):
        sort_model(model, layout, {"layers.0.heads": [4, *range(1, 4), 0, *range(5, 8)]})


@pytest.mark.parametrize("family", ["nemotron_h", "llama", "mixtral"])
def test_each_probed_loss_is_that_of_the_exported_slice(family: str, data: Path, tmp_path: Path) -> None:
    parent = family_folder(tmp_path / "parent", family)
    options = {"per_expert": True} if family == "mixtral" else {}
    probe = ProbeOptions(tokens=100)
    report = score_parent(
        parent, tmp_path / "scores", data, samples=3, seq_len=32, batch_size=2, probe=probe, progress=False, **options
    )
    found = json.loads((tmp_path / "scores" / "probe.json").read_text())
    assert report.probe is not None and found["tokens"] == 100
    # Rows 3 to 6 of the same rows, the last one cut.
    rows = list(calibration_batches(data, load_tokenizer(parent), samples=7, seq_len=32))[3:]
    rows[-1] = {name: tensor[:, :4] for name, tensor in rows[-1].items()}
    assert found["full"] == pytest.approx(reference_loss(parent, rows), rel=1e-5)
    elastic = sort_parent(parent, tmp_path / "sorted", tmp_path / "scores")
    assert elastic.depth_order is not None
    for number, point in enumerate(found["points"]):
        if point["axis"] == "depth":
            cut = Submodel(layers=tuple(sorted(elastic.depth_order[: point["width"]])))
        else:
            cut = Submodel(widths={point["axis"]: point["width"]})
        sliced = slice_checkpoint(tmp_path / "sorted", tmp_path / str(number), cut, progress=False)
        assert point["loss"] == pytest.approx(reference_loss(sliced.folder, rows), rel=1e-5), point
        assert (point["params"], point["active_params"]) == (sliced.params, sliced.active_params)
    layout = layout_of(json.loads((parent / "config.json").read_text()))
    assert {point["axis"] for point in found["points"]} == set(layout.axes)
    assert len({point["loss"] for point in found["points"]}) == len(found["points"])


def test_widths_at_or_under_the_fractions_without_repeats_and_only_those_that_fit() -> None:
    nemotron = layout_of(FAMILIES["nemotron_h"]().config.to_dict())
    cuts = probed_cuts(nemotron, (2, 0, 1, 3, 4), ProbeOptions(widths={"heads": [2]}))
    widths = {axis: [width for name, width, _ in cuts if name == axis] for axis in nemotron.axes}
    assert widths["hidden"] == [56, 48, 32]  # 57.6: multiples of 4
    assert widths["heads"] == [6, 4, 2]  # 7.2 and 6 are both 6; 2 was asked for
    assert widths["experts"] == [7, 6, 4]
    assert widths["depth"] == [4, 3, 2]  # 4.5, 3.75, 2.5
    assert [cut.layers for name, _, cut in cuts if name == "depth"] == [(0, 1, 2, 3), (0, 1, 2), (0, 2)]
    assert not [name for name, _, _ in probed_cuts(nemotron, None, ProbeOptions()) if name == "depth"]
    llama = layout_of(FAMILIES["llama"]().config.to_dict())
    cuts = probed_cuts(llama, None, ProbeOptions())
    assert [width for name, width, _ in cuts if name == "heads"] == [4]  # 64 is no multiple of 6
    assert [width for name, width, _ in cuts if name == "hidden"] == [56, 48, 32]


def test_held_out_rows_follow_those_that_were_used(data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(family_folder(tmp_path / "parent", "llama"))
    for packing in ("cross", "apart"):
        shape = {"seq_len": 16, "packing": packing, "seed": 5}
        every = calibration_batches(data, tokenizer, samples=10**6, **shape)
        rows = [batch["input_ids"][batch["attention_mask"].bool()].tolist() for batch in every]
        behind = held_out_batches(data, tokenizer, skip=4, tokens=10**6, batch_size=3, **shape)
        found = [
            ids[mask.bool()].tolist()
            for batch in behind
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        assert found == rows[4:] and behind.tokens == sum(map(len, rows[4:]))
        assert held_out_batches(data, tokenizer, skip=4, tokens=41, **shape).tokens == 41
        with pytest.raises(DataError, match=f"behind the {len(rows)} samples"):
            held_out_batches(data, tokenizer, skip=len(rows), tokens=10, **shape)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_command_prints_the_table_and_says_what_is_missing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = family_folder(tmp_path / "parent", "llama")
    monkeypatch.setattr("star_elastic.score.probe_report.can_plot", lambda: False)
    words = ["score", str(parent), str(tmp_path / "scores"), "--data", str(data), "--samples", "3", "--seq-len", "32"]
    assert main([*words, "--probe-tokens", "64", "--width", "ffn=8"]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "scores" / "probe.json").read_text())
    assert found["tokens"] == 64 and f"{found['full']:.4f}" in out
    assert [point["width"] for point in found["points"] if point["axis"] == "ffn"] == [40, 36, 24, 8]
    for point in found["points"]:
        assert f"{point['loss']:.4f}" in out and f"{point['loss'] - found['full']:+.4f}" in out
    assert "no probe.png: it needs matplotlib, which is in the extra 'report'" in out
    assert sorted(path.name for path in (tmp_path / "scores").iterdir()) == [
        "probe.json",
        "scores.json",
        "scores.safetensors",
    ]


def test_other_data_to_probe_on(data: Path, tmp_path: Path) -> None:
    parent = family_folder(tmp_path / "parent", "llama")
    other = tmp_path / "other.txt"
    other.write_text("something else, " * 20)
    report = score_parent(parent, tmp_path / "scores", data, seq_len=32, probe=ProbeOptions(50, other), progress=False)
    rows = held_out_batches(other, load_tokenizer(parent), tokens=50, seq_len=32)
    assert report.probe is not None
    assert report.probe.data_sha256 == rows.sha256 != report.facts["data_sha256"]
    assert report.probe.full == pytest.approx(reference_loss(parent, rows), rel=1e-5)


def test_in_a_narrower_dtype_only_widths_that_are_legal_there_are_probed(data: Path, tmp_path: Path) -> None:
    """An fp32 parent in bf16: rows of whole 16 bytes are multiples of 8 then, also where fp32 would allow 60 of 64."""
    parent = family_folder(tmp_path / "parent", "nemotron_h")
    probe = ProbeOptions(50)
    options = {"samples": 2, "seq_len": 32, "probe": probe, "dtype": "bfloat16", "progress": False}
    report = score_parent(parent, tmp_path / "scores", data, **options)
    assert report.probe is not None
    assert {p.width for p in report.probe.points if p.axis == "hidden"} == {56, 48, 32}
    with pytest.raises(WidthError, match="multiples of 8 at 2 bytes"):
        options["probe"] = ProbeOptions(50, widths={"hidden": [60]})
        score_parent(parent, tmp_path / "other", data, **options)
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_probed_is_refused_before_the_model_is_loaded(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = family_folder(tmp_path / "parent", "llama")
    capsys.readouterr()
    monkeypatch.setattr("star_elastic.score.run.load_model", lambda *a, **k: pytest.fail("the model was loaded"))
    words = ["score", str(parent), str(tmp_path / "scores"), "--data", str(data), "--seq-len", "32", "--probe"]
    assert "nothing to measure loss on behind the" in refused(words, capsys)
    assert "none.txt" in refused([*words, "--probe-data", "none.txt"], capsys)
    assert "no multiple of heads 6" in refused([*words, "--samples", "2", "--width", "heads=6"], capsys)
    assert not (tmp_path / "scores").exists()
    with pytest.raises(WidthError):
        score_parent(parent, tmp_path / "s", data, samples=2, seq_len=32, probe=ProbeOptions(widths={"heads": [3]}))


def test_the_plot_is_drawn(data: Path, tmp_path: Path) -> None:
    parent = family_folder(tmp_path / "parent", "llama")
    score_parent(
        parent, tmp_path / "scores", data, samples=3, seq_len=32, probe=ProbeOptions(tokens=64), progress=False
    )
    assert (tmp_path / "scores" / "probe.png").read_bytes().startswith(b"\x89PNG")
