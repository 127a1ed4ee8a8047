"""Devices, dtypes and whole models, from names and folders."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_folder
from transformers.utils import logging

from star_elastic.errors import CheckpointError, DataError
from star_elastic.families import layout_of
from star_elastic.loading import DeviceError, check_batches, check_tokens, choose_device, choose_dtype, load_model

CPU = torch.device("cpu")


def test_names() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_dtype("bfloat16") == torch.bfloat16 and choose_dtype("auto") == "auto"
    for name in ("cpux", "cuda:99", ""):
        with pytest.raises(DeviceError, match="cannot be used here"):
            choose_device(name)
    with pytest.raises(DeviceError, match="did you mean 'bfloat16'"):
        choose_dtype("bfloat61")


def test_dtype_is_the_stored_one_unless_said(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent")
    assert load_model(folder, device=CPU).dtype == torch.float32
    half = load_model(folder, device=CPU, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and not half.training
    assert half.model.layers[1].mixer.gate.weight.dtype == torch.float32  # transformers keeps routers exact


def test_bars_of_transformers_are_put_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path / "parent")
    before = logging.is_progress_bar_enabled()
    capsys.readouterr()
    load_model(folder, device=CPU)
    assert "it/s" not in capsys.readouterr().err
    assert logging.is_progress_bar_enabled() == before


def test_missing_tensor_is_one_line(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "parent")
    tensors = load_file(folder / "model.safetensors")
    del tensors["backbone.norm_f.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys, among them model\.norm_f\.weight"):
        load_model(folder, device=CPU)


def test_tokens_of_another_tokenizer() -> None:
    layout = layout_of(tiny_config().to_dict())
    check_tokens(torch.tensor([[0, 127]]), layout)
    with pytest.raises(DataError, match="token 128 is outside the model's vocabulary of 128"):
        check_tokens(torch.tensor([[0, 128]]), layout)
    with pytest.raises(DataError, match="token 130 is outside"):
        check_batches([{"input_ids": torch.tensor([[number]])} for number in (127, 130)], layout)
