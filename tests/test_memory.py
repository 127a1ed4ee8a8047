"""Peak anonymous memory does not grow with the checkpoint, nor with its largest tensor.

Anonymous memory (RssAnon) is what a process holds for itself; pages of mapped files count elsewhere, and the system takes them
back when it needs them. The checkpoints are sparse files: large to read, without taking space on disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import tiny_config

from star_elastic.families import layout_of

SRC = Path(__file__).parents[1] / "src"
LIMIT_MIB = 160  # interpreter, numpy, pydantic and plans take some 40 MiB; the tensors below are larger than the rest

MEASURED = """
import sys, threading
from pathlib import Path
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_parent
from star_elastic.submodel import Submodel

peak, done = 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
        peak = max(peak, int(line.split()[1]))

threading.Thread(target=watch).start()
try:
    source, out = sys.argv[2:4]
    if sys.argv[1] == "slice":
        slice_checkpoint(source, out, Submodel(widths={"hidden": 1024, "expert_ffn": 256, "experts": 16}))
    else:
        sort_parent(source, out, sys.argv[4])
finally:
    done.set()
print(peak)
"""


def sparse_folder(path: Path, *, fused: bool, experts: int) -> Path:
    """A checkpoint of zeros: expert matrices of 2048 x 1024 in bf16, 4 MiB each, fused into one tensor or not."""
    config = tiny_config(
        "M*E", hidden_size=2048, moe_intermediate_size=1024, n_routed_experts=experts, dtype="bfloat16"
    )
    path.mkdir()
    config.architectures = ["NemotronHForCausalLM"]
    config.save_pretrained(path)
    header: dict[str, object] = {}
    end = 0

    def add(name: str, shape: tuple[int, ...]) -> None:
        nonlocal end
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}

    for unit, row in layout_of(json.loads((path / "config.json").read_text())).tensors():
        if not row.unrolled or fused:
            add(unit.name(row), row.shape)
        else:
            for member in range(experts):
                add(unit.disk_name(row, member=member), row.shape[1:])
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # at odd offsets, the worst case: see TensorInfo.array
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def peak_mib(verb: str, *paths: Path) -> float:
    """Peak RssAnon of a process that slices or sorts."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, verb, *map(str, paths)],
        env={"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "per expert"])
def test_slicing(tmp_path: Path, fused: bool) -> None:
    folder = sparse_folder(tmp_path / "parent", fused=fused, experts=96)  # two times 384 MiB
    assert peak_mib("slice", folder, tmp_path / "out") < LIMIT_MIB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_sorting(tmp_path: Path) -> None:
    folder = sparse_folder(tmp_path / "parent", fused=True, experts=48)  # two times 192 MiB
    rng = np.random.default_rng(0)
    scores = {"hidden": 2048, "layers.2.expert_ffn": 1024, "layers.2.experts": 48}
    save_file({key: rng.random(size, np.float32) for key, size in scores.items()}, tmp_path / "scores.safetensors")
    assert peak_mib("sort", folder, tmp_path / "out", tmp_path / "scores.safetensors") < LIMIT_MIB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_slicing_tensors_of_two_gigabytes(tmp_path: Path) -> None:
    small = peak_mib("slice", sparse_folder(tmp_path / "small", fused=True, experts=32), tmp_path / "small_out")
    large = peak_mib("slice", sparse_folder(tmp_path / "large", fused=True, experts=512), tmp_path / "large_out")
    assert large < LIMIT_MIB
    assert large < small + 16
