"""Quantized folders as ordinary models: every number is the one that the format defines, rounded once to the dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized import plain_folder, quantized_folder, reference
from safetensors.torch import load_file
from tiny import tokens
from transformers import AutoModelForCausalLM

from star_elastic import ElasticModel, Submodel, slice_checkpoint
from star_elastic.checkpoint import Checkpoint
from star_elastic.errors import CheckpointError, ElasticError
from star_elastic.families import layout_of
from star_elastic.loading import load_model
from star_elastic.streamed import read_row

CPU = torch.device("cpu")
FORMS = ("fp8", "nvfp4")


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_folder(tmp_path_factory.mktemp("quantized") / "source", request.param)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    """The same numbers in fp32, which transformers loads."""
    return plain_folder(folder, folder.with_name(f"{folder.name}-plain"))


def test_every_matrix_is_read_as_its_format_defines_it(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    wanted = reference(load_file(folder / "model.safetensors"))
    for unit, row in layout_of(checkpoint.config).tensors():
        whole = read_row(checkpoint, unit, row, torch.float32)
        for name, (member, _) in zip(unit.disk_names(row), row.pieces, strict=True):
            found = whole if member is None else whole[member]
            assert torch.equal(found, torch.tensor(wanted[name])), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_loads_as_the_plain_folder_does(folder: Path, plain: Path, dtype: torch.dtype) -> None:
    wanted = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype).eval()
    found = ElasticModel.from_pretrained(folder, dtype=dtype).model
    assert found.dtype == dtype and not found.training and all(p.requires_grad for p in found.parameters())
    state = found.state_dict()
    assert state.keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert torch.equal(found(tokens()).logits, wanted(tokens()).logits)
    assert found.config.to_dict().get("quantization_config") is None


def test_without_a_dtype_it_is_what_config_json_says(folder: Path) -> None:
    assert load_model(folder, device=CPU).dtype == torch.bfloat16
    assert ElasticModel.from_pretrained(folder).model.dtype == torch.bfloat16
    assert ElasticModel.from_pretrained(folder, dtype="float32").model.dtype == torch.float32


def test_a_slice_loads_as_the_submodel_of_its_parent(folder: Path, tmp_path: Path) -> None:
    cut = Submodel(widths={"hidden": 32, "expert_ffn": 48, "experts": 3}, layers=(0, 1, 3))
    slice_checkpoint(folder, tmp_path / "out", cut)
    parent = ElasticModel.from_pretrained(folder, dtype=torch.float32, submodels={"small": cut})
    small = load_model(tmp_path / "out", device=CPU, dtype=torch.float32)
    torch.testing.assert_close(small(tokens()).logits, parent.submodel("small")(tokens()).logits)


def test_generation_settings_come_along(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    assert load_model(folder, device=CPU).generation_config.max_new_tokens == 7


@pytest.mark.parametrize("place", ["auto", {"": "cpu"}])
def test_it_cannot_be_spread(folder: Path, place: object) -> None:
    with pytest.raises(ElasticError, match="cannot be used with quantized weights"):
        ElasticModel.from_pretrained(folder, device_map=place)


def test_another_layout_is_named_and_not_loaded(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path / "other", "fp8", sidecar=False)
    text = (folder / "config.json").read_text().replace('"modelopt"', '"gptq"')
    (folder / "config.json").write_text(text)
    for load in (lambda: load_model(folder, device=CPU), lambda: ElasticModel.from_pretrained(folder)):
        with pytest.raises(CheckpointError, match=r"is quantized \(gptq\)") as caught:
            load()
        assert "\n" not in str(caught.value)
