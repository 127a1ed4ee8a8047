"""What slicing promises, in every family: quantized numbers are exact, work goes on after a kill, budgets are met."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from family_cut import FIELDS
from killed import kill_in_mid_write, tensors_in, written_again
from quantized import plain_folder, quantized_family, reference
from safetensors.torch import load_file
from tiny import FAMILIES, tokens
from transformers import AutoModelForCausalLM

from star_elastic import ElasticModel, Submodel, slice_checkpoint
from star_elastic.cli import main

# --- quantized ----------------------------------------------------------------------------------------------------

BLOCKS = {"hidden": 32, "heads": 4, "ffn": 32, "experts": 5, "expert_ffn": 16, "shared_ffn": 32, "mamba_heads": 4}
"""Widths of the tiny models that keep blocks of 16 whole. A Mamba head has 16 channels, so it can have no fewer."""

AXES = {
    "nemotron_h": ["hidden", "heads", "experts", "expert_ffn", "shared_ffn", "mamba_heads"],
    **{family: [axis for axis in fields if axis != "mamba_head_dim"] for family, fields in FIELDS.items()},
}


@pytest.fixture(scope="module", params=[(family, form) for family in FAMILIES for form in ("fp8", "nvfp4")], ids="-".join)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family, and a quantized folder of it beside ``plain``: its numbers, fp32, unquantized."""
    family, form = request.param
    source = quantized_family(tmp_path_factory.mktemp(f"{family}-{form}") / "source", family, form)
    plain_folder(source, source.with_name("plain"))
    return family, source


def cuts_of(family: str) -> dict[str, Submodel]:
    """Every axis alone, depth, all together. NemotronH here has 4 experts, and a MoE in its last layer."""
    widths = {axis: BLOCKS[axis] for axis in AXES[family]} | ({"experts": 3} if family == "nemotron_h" else {})
    layers = (0, 3, 4) if family == "nemotron_h" else (0, 1, 3)
    alone = {axis: Submodel(widths={axis: width}) for axis, width in widths.items()}
    return {**alone, "depth": Submodel(layers=layers), "all": Submodel(widths=widths, layers=layers)}


def test_the_numbers_of_a_slice_are_the_slice_of_the_numbers(quantized: tuple[str, Path], tmp_path: Path) -> None:
    family, source = quantized
    stored = load_file(source / "model.safetensors")
    assert sum(tensor.dtype in (torch.uint8, torch.float8_e4m3fn) for tensor in stored.values()) > 10
    for cut, submodel in cuts_of(family).items():
        slice_checkpoint(source, tmp_path / cut / "quantized", submodel)
        slice_checkpoint(source.with_name("plain"), tmp_path / cut / "plain", submodel)
        found = reference(load_file(tmp_path / cut / "quantized" / "model.safetensors"))
        wanted = load_file(tmp_path / cut / "plain" / "model.safetensors")
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=f"{cut}: {name}")


def test_a_quantized_slice_loads_as_the_plain_one(quantized: tuple[str, Path], tmp_path: Path) -> None:
    family, source = quantized
    submodel = cuts_of(family)["all"]
    slice_checkpoint(source, tmp_path / "quantized", submodel)
    slice_checkpoint(source.with_name("plain"), tmp_path / "plain", submodel)
    found = ElasticModel.from_pretrained(tmp_path / "quantized", dtype=torch.float32).model
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    assert torch.equal(found(tokens()).logits, wanted(tokens()).logits)


# --- after a kill -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_kill_the_same_command_goes_on(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES[family]().save_pretrained(tmp_path / "source", max_shard_size="40KB")
    words = ["slice", str(tmp_path / "source"), str(tmp_path / "out"), "--width", "hidden=32"]
    slice_checkpoint(tmp_path / "source", tmp_path / "wanted" / "out", Submodel(widths={"hidden": 32}))
    kill_in_mid_write(words, before=21)
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.resume").exists()
    assert len(written_again(words, monkeypatch)) == tensors_in(tmp_path / "wanted") - 20
    for path in (tmp_path / "wanted" / "out").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "wanted"]


# --- a budget -----------------------------------------------------------------------------------------------------

FOLLOWERS = {
    **{family: {field: axis for axis, field in fields.items() if axis.endswith("ffn")} for family, fields in FIELDS.items()},
    "nemotron_h": {"moe_intermediate_size": "expert_ffn", "moe_shared_expert_intermediate_size": "shared_ffn"},
}
"""Family -> fields that follow hidden on the uniform ladder."""


def params_at(family: str, hidden: int) -> int | None:
    """Parameters of transformers' model at a hidden width, MLP widths at the same fraction; None where there is none."""
    if (family == "llama" and hidden % 8) or (family == "granitemoehybrid" and 128 % hidden):
        return None
    config = FAMILIES[family]().config
    for field in FOLLOWERS[family]:
        setattr(config, field, max(4, getattr(config, field) * hidden // 64 // 4 * 4))  # 16 bytes in fp32
    config.hidden_size = hidden
    if family == "granitemoehybrid":
        config.mamba_expand = 128 // hidden
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("share", [0.55, 0.9])
@pytest.mark.parametrize("family", FAMILIES)
def test_params_takes_the_largest_at_or_under(
    family: str, share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = FAMILIES[family]()
    parent.save_pretrained(tmp_path / "source")
    limit = int(share * sum(parameter.numel() for parameter in parent.parameters()))
    sizes = {hidden: size for hidden in range(4, 65, 4) if (size := params_at(family, hidden)) is not None}
    best = max(hidden for hidden, size in sizes.items() if size <= limit)
    assert 4 < best < 64
    assert main(["slice", str(tmp_path / "source"), str(tmp_path / "out"), "--params", str(limit)]) == 0
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and model.config.hidden_size == best
    assert sum(parameter.numel() for parameter in model.parameters()) == sizes[best]
    assert f"chosen: hidden {best}: " in capsys.readouterr().out
