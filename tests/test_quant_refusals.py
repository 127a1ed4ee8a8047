"""Quantized folders that are not what they should be, or that a verb cannot take: one line, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import declare, quantized_folder
from safetensors.torch import load_file, save_file
from tiny import tiny_folder

from star_elastic.checkpoint import Checkpoint
from star_elastic.cli import main
from star_elastic.errors import CheckpointError
from star_elastic.families import layout_of
from star_elastic.quant import read_quantized
from star_elastic.sort import sort_folder

UP = "backbone.layers.1.mixer.experts.0.up_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def nvfp4(tmp_path: Path) -> Path:
    return quantized_folder(tmp_path / "nvfp4", "nvfp4")


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    return quantized_folder(tmp_path / "fp8", "fp8")


def refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What ``slice`` says when it refuses; nothing is written."""
    out = tmp_path / "out"
    capsys.readouterr()  # bars of the making of the folder
    assert main(["slice", str(folder), str(out), *(words or ("--width", "hidden=32"))]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and not out.exists()
    return told


def change(folder: Path, edit: Callable[[Tensors], Any]) -> Path:
    """Edit a folder's tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "is quantized (gptq)"),
        ({"quant_method": "awq"}, "is quantized (awq)"),
        ({"quant_method": "compressed-tensors"}, "is quantized (compressed-tensors)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "is quantized (bitsandbytes)"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "is quantized (fp8)"),
        ({"quant_method": "mxfp4"}, "is quantized (mxfp4)"),
        ("odd", "quantization_config must be an object, not 'odd'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "is quantized as NVFP4_AWQ of ModelOpt"),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "is quantized as FP8_PB_WO of ModelOpt"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "is quantized as MXFP8 of ModelOpt"),
        ({"quant_method": "modelopt"}, "neither config.json nor hf_quant_config.json gives a quant_algo"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {UP: {"quant_algo": "W4A8_AWQ"}},
            },
            f"{UP} is quantized as W4A8_AWQ",
        ),
    ],
)
def test_what_config_json_says(section: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path / "parent")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    assert message in refused(folder, tmp_path, capsys)


@pytest.mark.parametrize(
    ("suffix", "tensor", "told"),
    [
        ("qweight", torch.zeros(4, 4, dtype=torch.int32), "GPTQ and AWQ"),
        ("weight_packed", torch.zeros(4, 4, dtype=torch.uint8), "compressed-tensors"),
        ("weight_scale_inv", torch.ones(1, 1), "block-wise FP8 models"),
        ("weight.absmax", torch.ones(4), "bitsandbytes"),
        ("up_proj_blocks", torch.zeros(4, dtype=torch.uint8), "MXFP4"),
        ("pre_quant_scale", torch.ones(64), "AWQ and SmoothQuant in ModelOpt"),
    ],
)
def test_layouts_are_known_by_their_tensors_where_nothing_is_said(
    suffix: str, tensor: torch.Tensor, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = change(tiny_folder(tmp_path / "parent"), lambda tensors: tensors.update({f"{UP}.{suffix}": tensor}))
    assert f"{UP}.{suffix} is stored as {told}" in refused(folder, tmp_path, capsys)


def test_block_wise_fp8_is_named(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def block_wise(tensors: Tensors) -> None:
        tensors[f"{UP}.weight_scale_inv"] = torch.ones(1, 1)
        del tensors[f"{UP}.weight_scale"]

    assert "as block-wise FP8 models store it" in refused(change(fp8, block_wise), tmp_path, capsys)


def test_per_channel_fp8_is_named(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(fp8, lambda tensors: tensors.update({f"{UP}.weight_scale": torch.ones(64, 1)}))
    assert "has shape [64, 1], that is per-channel or block-wise scales" in refused(fp8, tmp_path, capsys)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_2"])
def test_a_missing_scale(suffix: str, nvfp4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(nvfp4, lambda tensors: tensors.pop(f"{UP}.{suffix}"))
    assert f"needs {UP}.{suffix}, and that is missing" in refused(nvfp4, tmp_path, capsys)


def test_a_missing_activation_scale_is_no_fault(nvfp4: Path, tmp_path: Path) -> None:
    """Weight-only recipes have none."""
    change(nvfp4, lambda tensors: tensors.pop(f"{UP}.input_scale"))
    declare(nvfp4, "W4A16_NVFP4", group_size=16)
    assert main(["slice", str(nvfp4), str(tmp_path / "out"), "--width", "hidden=32"]) == 0


def test_a_scale_beside_an_unquantized_matrix(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(fp8, lambda tensors: tensors.update({"lm_head.weight_scale": torch.ones(())}))
    assert "lm_head.weight_scale is a scale beside lm_head.weight" in refused(fp8, tmp_path, capsys)


def test_shapes_and_dtypes(nvfp4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = load_file(nvfp4 / "model.safetensors")
    for name, tensor, message in (
        (
            f"{UP}.weight",
            torch.zeros(64, 64, dtype=torch.uint8),
            "has shape [64, 64]; config.json and nvfp4 say [64, 32]",
        ),
        (f"{UP}.weight_scale", torch.ones(64, 4), "is F32; it should be F8_E4M3"),
        (f"{UP}.weight_scale_2", torch.ones((), dtype=torch.int32), "is I32; it should be BF16 or F16 or F32 or F64"),
        (f"{UP}.weight_scale", whole[f"{UP}.weight_scale"][:, :2].contiguous(), "has shape [64, 2]"),
    ):
        save_file({**whole, name: tensor}, nvfp4 / "model.safetensors")
        assert message in refused(nvfp4, tmp_path, capsys)


def test_an_fp8_norm_is_no_matrix(fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "backbone.norm_f.weight"
    change(fp8, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert f"{name} is F8_E4M3 [64], which is no layout known here" in refused(fp8, tmp_path, capsys)


def test_files_and_tensors_disagree(fp8: Path, nvfp4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declare(fp8, "NVFP4")
    assert "quantized (NVFP4 by ModelOpt), but backbone.layers" in refused(fp8, tmp_path, capsys)
    declare(nvfp4, "FP8", sidecar=False)
    assert "say FP8 and NVFP4: keep the right one" in refused(nvfp4, tmp_path, capsys)
    declare(nvfp4, "NVFP4", group_size=32)
    assert "group_size of 32: NVFP4 has blocks of 16" in refused(nvfp4, tmp_path, capsys)
    plain = tiny_folder(tmp_path / "plain")
    declare(plain, "FP8")
    assert "but none of its matrices is" in refused(plain, tmp_path, capsys)


def test_quantized_weights_that_nobody_speaks_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = quantized_folder(tmp_path / "silent", "fp8", section=False, sidecar=False)
    assert "but neither config.json nor hf_quant_config.json says so" in refused(folder, tmp_path, capsys)


@pytest.mark.parametrize("place", ["section", "sidecar"])
def test_one_file_is_enough(place: str, tmp_path: Path) -> None:
    """The published Nano NVFP4 has the sidecar only, newer exports have both."""
    places = {"section": False, "sidecar": False, place: True}
    folder = quantized_folder(tmp_path / "one", "nvfp4", **places)
    assert main(["slice", str(folder), str(tmp_path / "out"), "--width", "hidden=32"]) == 0
    assert (tmp_path / "out" / "hf_quant_config.json").exists() == (place == "sidecar")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in said) == (place == "section")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert read_quantized(layout_of(checkpoint.config), checkpoint).formats == {"nvfp4"}


def test_a_sidecar_that_is_something_else(nvfp4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (nvfp4 / "hf_quant_config.json").write_text('{"a": 1}')
    assert "has no quantization: it is not ModelOpt's file" in refused(nvfp4, tmp_path, capsys)


@pytest.mark.parametrize("verb", ["score", "search"])
def test_verbs_that_take_unquantized_weights_only(
    verb: str, fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.txt"
    data.write_text("some text\n" * 200)
    words = {
        "score": [str(tmp_path / "out"), "--data", str(data)],
        "search": ["--data", str(data), "--params", "60000"],
    }
    assert main([verb, str(fp8), *words[verb]]) == 2
    told = capsys.readouterr().err
    assert "is quantized (FP8 by ModelOpt), and this takes unquantized weights" in told and told.count("\n") == 1


def test_sorting_would_tear_blocks_apart(nvfp4: Path, fp8: Path, tmp_path: Path) -> None:
    """One scale for a whole matrix allows any order; blocks of NVFP4 do not."""
    order = {"hidden": list(range(63, -1, -1))}
    with pytest.raises(CheckpointError, match=r"is quantized \(NVFP4 by ModelOpt\), and this takes unquantized or fp8"):
        sort_folder(nvfp4, tmp_path / "no", order)
    assert not (tmp_path / "no").exists()
    sort_folder(fp8, tmp_path / "sorted", order)
    before, after = (load_file(path / "model.safetensors") for path in (fp8, tmp_path / "sorted"))
    bytes_before, bytes_after = (tensors[f"{UP}.weight"].view(torch.uint8) for tensors in (before, after))
    assert torch.equal(bytes_after, bytes_before.flip(1))
    assert torch.equal(before[f"{UP}.weight_scale"], after[f"{UP}.weight_scale"])


def test_the_user_is_told_what_can_load_a_slice(
    nvfp4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slice", str(nvfp4), str(tmp_path / "out"), "--width", "hidden=32"]) == 0
    assert "transformers cannot load the slice; vLLM, SGLang and TensorRT-LLM can" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "vllm serve out" in card and "AutoModelForCausalLM" not in card
