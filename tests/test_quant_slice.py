"""Slices of quantized folders: the numbers of the slice are the slice of the numbers, exactly, and all files agree."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized import E4M3, PUBLISHED, pack, plain_folder, quantized_folder, reference, scale
from safetensors.torch import load_file, save_file
from tiny import tiny_config

from star_elastic import Submodel, cost, slice_checkpoint
from star_elastic.checkpoint import Checkpoint
from star_elastic.cli import main
from star_elastic.families import layout_of
from star_elastic.presets import NEMOTRON_3_NANO
from star_elastic.quant import bound_layout, read_quantized
from star_elastic.quant.numbers import unpack_e2m1
from star_elastic.slice import plan_slice
from star_elastic.submodel import open_elastic

FIXTURES = Path(__file__).parent / "fixtures"
FORMS = ("fp8", "nvfp4")
CUTS: dict[str, Submodel] = {
    "hidden": Submodel(widths={"hidden": 32}),
    "expert width": Submodel(widths={"expert_ffn": 48}),
    "shared": Submodel(widths={"shared_ffn": 16}),
    "experts": Submodel(widths={"experts": 3}),
    "heads": Submodel(widths={"heads": 4}),
    "mamba heads": Submodel(widths={"mamba_heads": 6}),
    "depth": Submodel(layers=(0, 1, 3)),
    "all": Submodel(
        widths={"hidden": 48, "expert_ffn": 32, "shared_ffn": 80, "experts": 2, "heads": 6, "mamba_heads": 2},
        layers=(1, 2, 3, 4),
    ),
}


def mixed(name: str) -> str | None:
    """The two formats side by side, in one matrix each way, and attention in FP8 as in later releases."""
    if "o_proj" in name or "shared_experts.up" in name:
        return "fp8"
    return (
        ("fp8" if "in_proj" in name or ".4.mixer.experts.1." in name else "nvfp4")
        if PUBLISHED.fullmatch(name)
        else None
    )


@pytest.fixture(scope="module", params=[*FORMS, "mixed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized folder, and beside it ``plain``: its numbers, fp32, unquantized."""
    home = tmp_path_factory.mktemp(request.param)
    source = quantized_folder(home / "source", mixed if request.param == "mixed" else request.param)
    plain_folder(source, home / "plain")
    return source


def numbers(folder: Path) -> dict[str, np.ndarray]:
    """The numbers of a folder, told by the definitions of the formats."""
    return reference(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("cut", CUTS)
def test_the_numbers_of_a_slice_are_the_slice_of_the_numbers(folder: Path, cut: str, tmp_path: Path) -> None:
    slice_checkpoint(folder, tmp_path / "quantized", CUTS[cut])
    slice_checkpoint(folder.parent / "plain", tmp_path / "plain", CUTS[cut])
    found, wanted = numbers(tmp_path / "quantized"), load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=name)


def test_what_is_one_number_stays_as_it_was(folder: Path, tmp_path: Path) -> None:
    slice_checkpoint(folder, tmp_path / "out", CUTS["all"])
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    # Layers 1 2 3 4 are 0 1 2 3 now.
    for name in ("mixer.k_proj.k_scale", "mixer.v_proj.v_scale"):
        assert torch.equal(before[f"backbone.layers.3.{name}"], after[f"backbone.layers.2.{name}"])
    scales = [name for name, tensor in after.items() if tensor.shape == ()]
    assert len(scales) > 20 and {after[name].dtype for name in scales} == {torch.float32}
    for name in scales:
        old = name.replace("layers.3", "layers.4").replace("layers.2", "layers.3").replace("layers.0", "layers.1")
        assert torch.equal(before[old], after[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_layouts_after_a_cut_by_hand(form: str, tmp_path: Path) -> None:
    source = quantized_folder(tmp_path / "source", form)
    slice_checkpoint(source, tmp_path / "out", Submodel(widths={"hidden": 32, "expert_ffn": 48}))
    after = {name: (one.dtype, tuple(one.shape)) for name, one in load_file(tmp_path / "out/model.safetensors").items()}
    down, up = (f"backbone.layers.1.mixer.experts.2.{name}_proj" for name in ("down", "up"))
    e4m3, f32, u8 = torch.float8_e4m3fn, torch.float32, torch.uint8
    if form == "fp8":
        assert after[f"{down}.weight"] == (e4m3, (32, 48)) and after[f"{up}.weight"] == (e4m3, (48, 32))
        assert after[f"{down}.weight_scale"] == (f32, ())
    else:
        assert after[f"{down}.weight"] == (u8, (32, 24)) and after[f"{up}.weight"] == (u8, (48, 16))
        assert after[f"{down}.weight_scale"] == (e4m3, (32, 3)) and after[f"{up}.weight_scale"] == (e4m3, (48, 2))
        assert after[f"{down}.weight_scale_2"] == (f32, ())
    assert not [name for name in after if "gate_proj" in name]  # Nemotron's experts have no gate matrix


def test_a_slice_of_a_slice_is_the_slice(folder: Path, tmp_path: Path) -> None:
    slice_checkpoint(folder, tmp_path / "mid", Submodel(widths={"hidden": 48}))
    slice_checkpoint(tmp_path / "mid", tmp_path / "small", Submodel(widths={"hidden": 32}))
    slice_checkpoint(folder, tmp_path / "once", Submodel(widths={"hidden": 32}))
    small, once = (load_file(tmp_path / name / "model.safetensors") for name in ("small", "once"))
    assert small.keys() == once.keys()
    assert all(
        torch.equal(small[name].view(torch.uint8), once[name].view(torch.uint8)) for name in small if small[name].dim()
    )


@pytest.mark.parametrize("form", FORMS)
def test_what_model_optimizer_exports_is_read_as_model_optimizer_reads_it(form: str) -> None:
    """The folder, and the hashes of the numbers, were made by NVIDIA's Model Optimizer (fixtures/make_modelopt.py)."""
    folder = FIXTURES / f"modelopt-{form}"
    hashes = json.loads((folder / "dequantized.json").read_text())["sha256"]
    found = numbers(folder)
    assert len(hashes) == 22
    for name, wanted in hashes.items():
        assert hashlib.sha256((found[name] + np.float32(0)).tobytes()).hexdigest() == wanted, name  # no minus zero


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [Submodel(widths={"hidden": 32, "expert_ffn": 32}), Submodel(layers=(0, 1, 3))])
def test_what_model_optimizer_exports_is_sliced(form: str, cut: Submodel, tmp_path: Path) -> None:
    folder = FIXTURES / f"modelopt-{form}"
    slice_checkpoint(folder, tmp_path / "out", cut)
    slice_checkpoint(plain_folder(folder, tmp_path / "plain"), tmp_path / "wanted", cut)
    found, wanted = numbers(tmp_path / "out"), load_file(tmp_path / "wanted" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name].numpy()) for name in wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", [{}, {"hidden": 32, "expert_ffn": 32, "experts": 3}])
def test_bytes_are_counted_as_they_are_written(form: str, widths: dict[str, int], tmp_path: Path) -> None:
    source = quantized_folder(tmp_path / "source", form)
    report = slice_checkpoint(source, tmp_path / "out", Submodel(widths=widths))
    checkpoint = Checkpoint.open(source)
    layout = layout_of(checkpoint.config)
    cache_scales = 2 * 4
    bound = bound_layout(layout, read_quantized(layout, checkpoint).parts)
    assert cost.weight_bytes(bound, widths, dtype="stored") + cache_scales == report.nbytes
    assert cost.weight_bytes(layout, widths, dtype=form) + cache_scales == report.nbytes  # the table's own expectation


def test_bytes_of_the_published_checkpoint() -> None:
    """Tensor bytes in the headers of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4, as its users have counted them."""
    assert cost.weight_bytes(NEMOTRON_3_NANO.layout, {}, dtype="nvfp4") == 19_339_781_632


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_real_widths_end_to_end(form: str, tmp_path: Path) -> None:
    """Matrices of the published sizes, one layer of each kind: hidden 2688 to 1920, expert width 1856 to 960."""
    sizes: dict[str, Any] = {
        "pattern": "ME*",
        "vocab_size": 64,
        "hidden_size": 2688,
        "num_attention_heads": 32,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "n_routed_experts": 2,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
    }
    source = real_size_folder(tmp_path / "source", form, sizes)
    cut = Submodel(widths={"hidden": 1920, "expert_ffn": 960})
    slice_checkpoint(source, tmp_path / "out", cut)
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    for name, rows, columns in (
        ("backbone.layers.0.mixer.in_proj", 10304, 1920),
        ("backbone.layers.0.mixer.out_proj", 1920, 4096),
        ("backbone.layers.1.mixer.experts.1.up_proj", 960, 1920),
        ("backbone.layers.1.mixer.experts.1.down_proj", 1920, 960),
        ("backbone.layers.1.mixer.shared_experts.down_proj", 1920, 3712),
    ):
        mine = {key: one for key, one in after.items() if key.startswith(f"{name}.")}
        theirs = {key: one for key, one in before.items() if key.startswith(f"{name}.")}
        found, whole = reference(mine)[f"{name}.weight"], reference(theirs)[f"{name}.weight"]
        assert found.shape == (rows, columns)
        np.testing.assert_array_equal(found, whole[:rows, :columns], err_msg=name)


def real_size_folder(path: Path, form: str, sizes: dict[str, Any]) -> Path:
    """As ``quantized_folder``, without first building a model of that size: only its config is tiny's."""
    config = tiny_config(**sizes).to_dict() | {"dtype": "bfloat16"}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    layout = layout_of(config)
    for unit, row in layout.tensors():
        for name, (member, _) in zip(unit.disk_names(row), row.pieces, strict=True):
            shape = row.shape if member is None else row.shape[1:]
            quantized = form in row.formats or ("mixer.in_proj" in name or "mixer.out_proj" in name)
            tensors |= (
                pack(name, shape, form, generator) if quantized else {name: torch.ones(shape, dtype=torch.bfloat16)}
            )
    tensors["backbone.layers.2.mixer.k_proj.k_scale"] = scale(generator)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    said = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": form.upper(), "exclude_modules": ["lm_head"]},
    }
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_published_shape_is_planned_to_12b_without_its_bytes(form: str, tmp_path: Path) -> None:
    """All tensors of the 30B, as a sparse file behind a real header; recognised without being told, and counted."""
    folder, tensors = published_header(tmp_path / "published", form)
    assert form == "fp8" or tensors == 24_147  # as in the published NVFP4 checkpoint
    assert main(["slice", str(folder), str(tmp_path / "12b"), "--to", "12b", "--dry-run"]) == 0
    _, layout, elastic = open_elastic(folder)
    for name in ("12b", "23b", "30b"):
        submodel = elastic.get(name).completed(layout)
        planned = sum(cut.nbytes for cut in plan_slice(layout, Checkpoint.open(folder), submodel))
        assert planned == cost.weight_bytes(layout, submodel.widths, dtype="stored")
        assert planned == cost.weight_bytes(NEMOTRON_3_NANO.layout, submodel.widths, dtype=form)


def published_header(path: Path, form: str) -> tuple[Path, int]:
    """A folder with every tensor of the published checkpoint, whose bytes are a hole."""
    sizes = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
    header: dict[str, Any] = {}
    offset = 0

    def add(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal offset
        end = offset + sizes[dtype] * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end

    for unit, row in NEMOTRON_3_NANO.layout.tensors():
        for name, (member, _) in zip(unit.disk_names(row), row.pieces, strict=True):
            shape = row.shape if member is None else row.shape[1:]
            if form not in row.formats:
                add(name, "F32" if row.fp32 else "BF16", shape)
            elif form == "fp8":
                add(name, "F8_E4M3", shape)
            else:
                add(name, "U8", (shape[0], shape[1] // 2))
                add(f"{name}_scale", "F8_E4M3", (shape[0], shape[1] // 16))
            if form in row.formats:
                scales = ("weight_scale", "input_scale") if form == "fp8" else ("weight_scale_2", "input_scale")
                for suffix in scales:
                    add(name.removesuffix("weight") + suffix, "F32", ())
    path.mkdir()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    (path / "config.json").write_text(json.dumps(NEMOTRON_3_NANO.config))
    said = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": form.upper(), "exclude_modules": ["lm_head"]},
    }
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    return path, len(header)


def test_unpacking_by_hand() -> None:
    """Low four bits first; 0x8 is minus zero, 0x7 and 0xF are the largest numbers."""
    found = unpack_e2m1(torch.tensor([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8))
    assert found.tolist() == [[0, 0.5, 1, 1.5, 2, 3, 4, 6], [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6]]
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(every, E4M3)
