"""Published models: recognised by their shapes, and what the card of a slice then says of its parent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hub_server import HubServer, use
from quantized import quantized_folder
from tiny import tiny_folder

from star_elastic import Submodel, presets, slice_checkpoint
from star_elastic.card import split_card
from star_elastic.cli import main
from star_elastic.families import layout_of
from star_elastic.presets import NEMOTRON_3_NANO, Preset, recognise
from star_elastic.submodel import ElasticConfig, read_config

HUB = {"bf16": "lab/tiny-BF16", "fp8": "lab/tiny-FP8", "nvfp4": "lab/tiny-NVFP4"}
BY_SHAPES = "The parent was recognised by the shapes that its config.json describes: those of tiny (`lab/tiny-BF16`)"
TRAINED = "trained together with its family, then cut out of it"
LICENCE = "---\nlicense: other\nlicense_name: open-model\n---\n# Parent\n"


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without elastic.json whose shapes are those of a published model."""
    folder = tiny_folder(tmp_path / "local", pattern="ME*")
    (folder / "README.md").write_text(LICENCE)
    publish(folder, monkeypatch)
    return folder


def publish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = Preset("tiny", read_config(folder), {"big": {}, "half": {"hidden": 32}}, HUB)
    monkeypatch.setitem(presets.PRESETS, "tiny", preset)


def card(folder: Path) -> tuple[dict[str, object], str]:
    return split_card((folder / "README.md").read_text())


def test_the_names_of_the_published_checkpoints() -> None:
    stem = "nvidia/NVIDIA-Nemotron-Labs-3-Elastic-30B-A3B-"
    assert NEMOTRON_3_NANO.hub_name() == f"{stem}BF16"
    assert NEMOTRON_3_NANO.hub_name({"fp8"}) == f"{stem}FP8"
    assert NEMOTRON_3_NANO.hub_name({"nvfp4"}) == NEMOTRON_3_NANO.hub_name({"fp8", "nvfp4"}) == f"{stem}NVFP4"
    assert Preset("other", {}, {}).hub_name() is None


def test_one_other_width_is_another_model() -> None:
    config = NEMOTRON_3_NANO.config
    assert recognise(layout_of(config)) is NEMOTRON_3_NANO
    assert recognise(layout_of({**config, "moe_intermediate_size": 1840})) is None


def test_a_folder_is_recognised_by_its_shapes_and_the_card_says_so(parent: Path, tmp_path: Path) -> None:
    assert main(["slice", str(parent), str(tmp_path / "out"), "--to", "half"]) == 0
    fields, body = card(tmp_path / "out")
    assert (fields["base_model"], fields["license_name"]) == ("lab/tiny-BF16", "open-model")
    assert "A nested model `half` of `lab/tiny-BF16`, cut out of it by" in body
    assert BY_SHAPES in body and "`open-model`, inherited from `lab/tiny-BF16`" in body and "untrained" not in body


def test_widths_that_a_published_size_has_get_its_name_others_are_untrained(parent: Path, tmp_path: Path) -> None:
    slice_checkpoint(parent, tmp_path / "half", Submodel(widths={"hidden": 32}))
    slice_checkpoint(parent, tmp_path / "other", Submodel(widths={"hidden": 48}))
    assert "A nested model `half` of `lab/tiny-BF16`, cut out of it by" in card(tmp_path / "half")[1]
    assert "A nested model of `lab/tiny-BF16`, cut out of its weights untrained by" in card(tmp_path / "other")[1]


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_a_quantized_folder_names_the_checkpoint_of_its_format(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantized_folder(tmp_path / "local", form)
    publish(folder, monkeypatch)
    slice_checkpoint(folder, tmp_path / "out", Submodel(widths={"hidden": 32}))
    assert card(tmp_path / "out")[0]["base_model"] == HUB[form]


def test_the_published_checkpoint_itself_needs_no_reserve(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, trained in (("lab/tiny-BF16", True), ("other/tiny", False)):
        out = parent.parent / name.partition("/")[0]
        with HubServer(parent, name=name) as server:
            use(server, monkeypatch)
            slice_checkpoint(name, out, Submodel(widths={"hidden": 32}))
        fields, body = card(out)
        assert fields["base_model"] == name and (TRAINED in body, BY_SHAPES in body) == (trained, not trained)


def test_what_elastic_json_says_comes_first(parent: Path, tmp_path: Path) -> None:
    ElasticConfig(family="nemotron_h", provenance={"parent": "me/mine"}).save(parent)
    slice_checkpoint(parent, tmp_path / "out", Submodel(widths={"hidden": 32}))
    fields, body = card(tmp_path / "out")
    assert fields["base_model"] == "me/mine" and BY_SHAPES not in body and "untrained" in body


def test_the_name_of_the_preset_is_what_is_published(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    slice_checkpoint(parent, out, Submodel(widths={"hidden": 32}))
    assert main(["push", str(out), "me/out", "--dry-run"]) == 0
    assert "names no parent on the hub" not in capsys.readouterr().out


def test_sorted_folders_name_it_too(parent: Path, tmp_path: Path) -> None:
    from star_elastic.sort import sort_folder

    bare = shutil.copytree(parent, tmp_path / "bare")
    elastic = sort_folder(bare, tmp_path / "sorted", {"hidden": list(reversed(range(64)))})
    assert elastic.provenance["parent"] == "lab/tiny-BF16" == card(tmp_path / "sorted")[0]["base_model"]
