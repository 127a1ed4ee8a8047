"""Slices of quantized folders, turned back into numbers by other libraries: ``make test-modelopt``.

They live in an environment of their own, whose Python the variable ``MODELOPT_PYTHON`` names.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from quantized import plain_folder, quantized_folder
from safetensors.torch import load_file

from star_elastic import ElasticModel, Submodel, slice_checkpoint

pytestmark = [
    pytest.mark.modelopt,
    pytest.mark.skipif(
        "MODELOPT_PYTHON" not in os.environ, reason="MODELOPT_PYTHON names no environment with nvidia-modelopt"
    ),
]
FIXTURES = Path(__file__).parent / "fixtures"
CUT = Submodel(widths={"hidden": 32, "expert_ffn": 32, "experts": 3, "mamba_heads": 2}, layers=(0, 1, 3, 4))


KINDS = ("fp8", "nvfp4", "exported-fp8", "exported-nvfp4")


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slices of random codes and of what Model Optimizer itself has exported, with the numbers that others make of them."""
    home = tmp_path_factory.mktemp("slices")
    for kind in KINDS:
        form = kind.removeprefix("exported-")
        ours = kind == form
        source = quantized_folder(home / f"{kind}-source", form) if ours else FIXTURES / f"modelopt-{form}"
        slice_checkpoint(source, home / kind, CUT)
        slice_checkpoint(plain_folder(source, home / f"{kind}-plain"), home / f"{kind}-wanted", CUT)
    program = [os.environ["MODELOPT_PYTHON"], str(FIXTURES / "dequantize_modelopt.py"), *(str(home / k) for k in KINDS)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return home


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_slices_are_slices_of_the_dequantized(kind: str, slices: Path) -> None:
    wanted = load_file(slices / f"{kind}-wanted" / "model.safetensors")
    compared = {"modelopt": 0, "compressed": 0}
    for name, tensor in load_file(slices / f"{kind}.numbers").items():
        library, _, matrix = name.partition(".")
        compared[library] += 1
        if library == "modelopt":
            assert torch.equal(tensor, wanted[matrix]), name
        else:  # divides by the reciprocal of the second scale, which rounds once more
            torch.testing.assert_close(tensor, wanted[matrix], rtol=3e-7, atol=0, msg=name)
    # in_proj and out_proj of layer 0; two matrices of three experts and of the shared one in layers 1 and 3.
    assert compared == {"modelopt": 18, "compressed": 18 if "nvfp4" in kind else 0}


@pytest.mark.parametrize("kind", KINDS)
def test_our_models_hold_the_numbers_of_model_optimizer(kind: str, slices: Path) -> None:
    state = ElasticModel.from_pretrained(slices / kind, dtype=torch.float32).model.state_dict()
    others = load_file(slices / f"{kind}.numbers")
    for name in ("0.mixer.in_proj", "0.mixer.out_proj", "1.mixer.shared_experts.up_proj"):
        found = state[f"model.layers.{name}.weight"]
        assert torch.equal(found, others[f"modelopt.backbone.layers.{name}.weight"]), name
    for expert in range(3):
        found = state["model.layers.3.mixer.experts.down_proj"][expert]
        assert torch.equal(found, others[f"modelopt.backbone.layers.3.mixer.experts.{expert}.down_proj.weight"])
