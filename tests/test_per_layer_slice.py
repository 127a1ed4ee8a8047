"""Widths per layer beside everything else that slicing does: several sizes at once, the hub, dropped and quantized tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_server import HubServer
from quantized import plain_folder, quantized_folder, reference
from safetensors.torch import load_file, save_file
from test_remote import use
from tiny import tiny_folder, tokens

from star_elastic import ElasticModel, Submodel, cost, slice_checkpoint
from star_elastic.cli import main
from star_elastic.errors import CheckpointError, WidthError
from star_elastic.loading import load_model
from star_elastic.slice import Size, slice_sizes
from star_elastic.submodel import ElasticConfig, open_elastic

CPU = torch.device("cpu")
OWN = Submodel(widths={"hidden": 32, "experts": 3}, layers=(0, 1, 2, 4), layer_widths={"expert_ffn": {1: 16, 4: 24}})
PLAIN = Submodel(widths={"hidden": 48})
BLOCKS = Submodel(
    widths={"hidden": 48, "experts": 3}, layer_widths={"expert_ffn": {1: 16, 4: 48}, "mamba_heads": {0: 6, 2: 4}}
)
"""Per-layer widths that keep blocks of 16 whole."""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp("per_layer") / "tiny", sharded=True)
    ElasticConfig(family="nemotron_h", submodels={"own": OWN, "plain": PLAIN}).save(folder)
    return folder


@pytest.fixture(scope="module", params=["fp8", "nvfp4"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized folder, and beside it ``plain``: its numbers, fp32, unquantized."""
    source = quantized_folder(tmp_path_factory.mktemp(request.param) / "source", request.param)
    plain_folder(source, source.with_name("plain"))
    return source


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_several_sizes_are_each_as_if_alone(parent: Path, tmp_path: Path) -> None:
    for name, submodel in (("own", OWN), ("plain", PLAIN)):
        slice_checkpoint(parent, tmp_path / "alone" / name, submodel, name=name)
    slice_sizes(parent, [Size(tmp_path / "out" / "own", OWN), Size(tmp_path / "out" / "plain", PLAIN)], threads=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    own = json.loads((tmp_path / "out" / "own" / "elastic.json").read_text())
    assert own["own_widths"] == {"expert_ffn": {"1": 16, "3": 24}}, "by the layers of the slice"
    assert own["format_version"] == 2 and own["provenance"] == {"parent": "tiny", "submodel": "own"}
    assert not (tmp_path / "out" / "plain" / "elastic.json").exists()


def test_the_hub_gives_what_the_folder_gives(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(parent) as server:
        use(server, monkeypatch)
        assert main(["slice", server.name, str(tmp_path / "a" / "own"), "--to", "own"]) == 0
    slice_checkpoint(parent, tmp_path / "b" / "own", OWN)
    remote, local = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert {name: text.replace(b"org/tiny", b"tiny") for name, text in remote.items()} == local


def test_the_hub_gives_no_slice_that_could_be_cut_again(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slice_checkpoint(parent, tmp_path / "own", OWN)
    with HubServer(tmp_path / "own") as server:
        use(server, monkeypatch)
        with pytest.raises(CheckpointError, match=f"^{server.name} is a slice whose layers differ in expert_ffn"):
            slice_checkpoint(server.name, tmp_path / "out", Submodel())
    assert not (tmp_path / "out").exists()


def test_dropped_tensors_and_own_widths_are_both_on_the_card(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.norm.weight": torch.ones(64)}, folder / "model.safetensors", {"format": "pt"})
    assert slice_checkpoint(folder, tmp_path / "out", OWN, drop=["mtp.*"]).dropped == ("mtp.norm.weight",)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "`mtp.norm.weight`" in card and "expert_ffn: 16 in layer 1; 24 in layer 4" in card
    assert ElasticModel.from_pretrained(tmp_path / "out").layout.own_widths == {"expert_ffn": {1: 16, 3: 24}}


def test_a_quantized_slice_holds_the_slice_of_the_numbers(quantized: Path, tmp_path: Path) -> None:
    report = slice_checkpoint(quantized, tmp_path / "out", BLOCKS)
    slice_checkpoint(quantized.with_name("plain"), tmp_path / "plain", BLOCKS)
    found = reference(load_file(tmp_path / "out" / "model.safetensors"))
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=name)
    # The counts, of the cut in its parent and of the slice by itself, are what the file holds.
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    cache_scales = 2 * 4
    _, layout, _ = open_elastic(quantized)
    assert report.nbytes == stored == cost.weight_bytes(layout, BLOCKS.keyed_widths, dtype="stored") + cache_scales
    _, own, _ = open_elastic(tmp_path / "out", per_layer=True)
    assert cost.weight_bytes(own, {}, dtype="stored") + cache_scales == stored


def test_a_quantized_slice_loads_as_the_submodel_of_its_parent(quantized: Path, tmp_path: Path) -> None:
    slice_checkpoint(quantized, tmp_path / "out", BLOCKS)
    slice_checkpoint(quantized.with_name("plain"), tmp_path / "plain", BLOCKS)
    wanted = ElasticModel.from_pretrained(tmp_path / "plain").model
    for small in (
        load_model(tmp_path / "out", device=CPU, dtype=torch.float32),
        ElasticModel.from_pretrained(tmp_path / "out", dtype="float32").model,
    ):
        assert torch.equal(small(tokens()).logits, wanted(tokens()).logits)
        assert small.config.to_dict().get("quantization_config") is None
    parent = ElasticModel.from_pretrained(quantized, dtype=torch.float32, submodels={"small": BLOCKS})
    torch.testing.assert_close(parent.submodel("small")(tokens()).logits, wanted(tokens()).logits)
    assert load_model(tmp_path / "out", device=CPU).dtype == torch.bfloat16


def test_blocks_stay_whole_in_every_layer(tmp_path: Path) -> None:
    torn = Submodel(layer_widths={"expert_ffn": {1: 40, 4: 48}})
    with pytest.raises(WidthError, match="layer 1: expert_ffn width 40 is illegal: NVFP4 .*nearest legal: 32 and 48"):
        slice_checkpoint(quantized_folder(tmp_path / "nvfp4", "nvfp4"), tmp_path / "out", torn)
    assert not (tmp_path / "out").exists()
    slice_checkpoint(quantized_folder(tmp_path / "fp8", "fp8"), tmp_path / "out", torn)


def test_verify_knows_widths_per_layer(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slice_checkpoint(parent, tmp_path / "own", OWN)
    assert main(["verify", str(tmp_path / "own"), "--against", str(parent), "--forward"]) == 0
    said = json.loads((tmp_path / "own" / "elastic.json").read_text())
    said["own_widths"]["expert_ffn"]["3"] = 28
    (tmp_path / "own" / "elastic.json").write_text(json.dumps(said))
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "own")]) == 1
    assert "width of expert_ffn in layer 3" in capsys.readouterr().out


def test_no_gguf_file_has_widths_per_layer(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slice_checkpoint(parent, tmp_path / "own", OWN)
    (tmp_path / "convert_hf_to_gguf.py").write_text("raise SystemExit(1)")
    words = ["export", str(tmp_path / "own"), "--gguf", str(tmp_path / "own.gguf"), "--converter", str(tmp_path)]
    assert main(words) == 2
    assert "is a slice whose layers differ in expert_ffn: no GGUF" in capsys.readouterr().err


def test_people_are_told_who_loads_quantized_slices(
    quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ElasticConfig(family="nemotron_h", submodels={"own": BLOCKS, "plain": PLAIN}).save(quantized)
    assert main(["slice", str(quantized), str(tmp_path / "out"), "--to", "own"]) == 0
    said = capsys.readouterr().out
    assert "only ElasticModel.from_pretrained can load it" in said and "vLLM" not in said
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "by ModelOpt" in card
        and "vllm" not in card
        and "Other engines" not in card
        and "expert_ffn: 16 in layer 1; 48 in layer 4" in card
    )
    assert main(["inspect", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "expert_ffn: 16 in layer 1; 48 in layer 4" in shown and "weights as stored" in shown
    assert main(["slice", str(quantized), str(tmp_path / "two"), "--to", "own", "--to", "plain", "--dry-run"]) == 0
    assert "transformers cannot load slices whose layers agree; vLLM" in capsys.readouterr().out
