"""Names of modules in the two config files, for slices in which layers and experts get new numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quantized import EXCLUDED, quantized_folder

from star_elastic import Submodel, slice_checkpoint
from star_elastic.quant.rename import Renaming

LAYERS = {
    "backbone.layers.1": None,
    "backbone.layers.2": "backbone.layers.1",
    "backbone.layers.11": "backbone.layers.2",
}


def renaming(**moved: str | None) -> Renaming:
    """Modules with one tensor each, and where they go."""
    return Renaming({f"{old}.weight": new and f"{new}.weight" for old, new in moved.items()})


def stack() -> Renaming:
    """Twelve layers of two matrices, of which layer 1 is left out, and a head."""
    moved: dict[str, str | None] = {"lm_head": "lm_head"}
    for old in range(12):
        new = old - (old > 1)
        for leaf in ("in", "out"):
            moved[f"b.layers.{old}.{leaf}"] = None if old == 1 else f"b.layers.{new}.{leaf}"
    return renaming(**moved)


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("lm_head", ["lm_head"]),
        ("b.layers.0.in", ["b.layers.0.in"]),
        ("b.layers.1.in", []),
        ("b.layers.2.in", ["b.layers.1.in"]),
        ("b.layers.11.out", ["b.layers.10.out"]),
        ("b.layers.3", ["b.layers.2"]),
        ("b.layers.3.act", ["b.layers.2.act"]),  # below a known module
        ("b.layers.1.act", []),
        ("b.layers.3.in*", ["b.layers.2.in*"]),
        ("b.layers.3*", ["b.layers.2*"]),
        ("b.layers.1.*", []),
        # layer 1 is gone; 10 and 11 are 9 and 10 now, and no pattern says just them
        (
            "b.layers.1*",
            ["b.layers.10", "b.layers.10.in", "b.layers.10.out", "b.layers.9", "b.layers.9.in", "b.layers.9.out"],
        ),
        ("*.in", ["*.in"]),
        ("b.layers.*.out", ["b.layers.*.out"]),
        ("lm_head*", ["lm_head*"]),
        ("mtp*", ["mtp*"]),  # nothing here
        ("vision_tower", ["vision_tower"]),
        ("b.layers.3.\0odd*", ["b.layers.2.\0odd*"]),  # matches nothing, but lies in a layer that moves
        ("b.layers.1.\0odd*", []),
    ],
)
def test_what_a_name_becomes(pattern: str, wanted: list[str]) -> None:
    assert sorted(stack()(pattern)) == wanted


def test_dropped_experts_and_their_parent() -> None:
    moved = renaming(**{f"m.experts.{old}.up": f"m.experts.{old}.up" if old < 2 else None for old in range(4)})
    assert moved("m.experts.3.up") == [] and moved("m.experts.1.up") == ["m.experts.1.up"]
    assert moved("m.experts") == ["m.experts"] and moved("m.experts*") == ["m.experts*"]
    assert not moved.is_identity
    assert renaming(**{"m.a": "m.a"}).is_identity


def files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    return section, json.loads((folder / "hf_quant_config.json").read_text())


def test_a_cut_of_widths_changes_no_word(tmp_path: Path) -> None:
    source = quantized_folder(tmp_path / "source", "nvfp4")
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={"hidden": 32, "expert_ffn": 32, "heads": 4}))
    assert files(tmp_path / "out") == files(source)


def test_a_cut_of_layers_renumbers_both_files(tmp_path: Path) -> None:
    source = quantized_folder(tmp_path / "source", "fp8")
    slice_checkpoint(source, tmp_path / "out", Submodel(layers=(0, 1, 3)))
    section, sidecar = files(tmp_path / "out")
    wanted = ["lm_head", *(f"backbone.layers.2.mixer.{name}_proj" for name in "qkvo"), "backbone.layers.0.mixer.conv1d"]
    assert section["ignore"] == sidecar["quantization"]["exclude_modules"] == wanted
    before = files(source)[0]
    assert {**section, "ignore": EXCLUDED} == before


def test_mixed_precision_lists_follow(tmp_path: Path) -> None:
    """Per-layer recipes and the targets of groups name modules too; experts that go leave no entry."""
    source = quantized_folder(tmp_path / "source", lambda name: "nvfp4" if ".experts." in name else None)
    layers = {
        f"backbone.layers.{layer}.mixer.experts.{expert}.{leaf}_proj": {"quant_algo": "NVFP4", "group_size": 16}
        for layer in (1, 4)
        for expert in range(4)
        for leaf in ("up", "down")
    }
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["quantized_layers"] = layers
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = list(layers)
    (source / "config.json").write_text(json.dumps(config))
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={"experts": 2}, layers=(2, 3, 4)))
    section, _ = files(tmp_path / "out")
    wanted = [f"backbone.layers.2.mixer.experts.{expert}.{leaf}_proj" for expert in (0, 1) for leaf in ("up", "down")]
    assert list(section["quantized_layers"]) == wanted == section["config_groups"]["group_0"]["targets"]
