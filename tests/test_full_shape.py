"""The published 30B to 23B and 12B in one pass, killed and started again, on a disk that could hold none of them.

The parent is a sparse file in its real shapes (``full_shape``), and so are the slices: only blocks that hold something are really
written. Everything else is what a user runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from full_shape import CUT, Stored, all_tensors, check_slice, sparse_folder

from star_elastic.presets import NEMOTRON_3_NANO

SRC = Path(__file__).parents[1] / "src"
LIMIT_MIB = 600
NEVER = 2**60

RUN = """
import json, resource, shutil, sys, threading, time
from collections import namedtuple
import numpy as np
from star_elastic import cli
from star_elastic.checkpoint import onepass, writer

original, written, peak, done = writer.write_at, 0, 0, threading.Event()
stop_at, onepass.SYNC_BYTES = int(sys.argv[1]), int(sys.argv[2])
shutil.disk_usage = lambda path: namedtuple("usage", "total used free")(0, 0, 2**50)  # holes need no room

def write_sparse(file, block, offset):
    global written
    numbers = np.frombuffer(block, np.uint8)
    if np.bitwise_or.reduce(numbers[: len(numbers) // 8 * 8].view(np.uint64), initial=0) or numbers[-7:].any():
        for at in range(0, len(numbers), 4096):
            if numbers[at : at + 4096].any():
                original(file, block[at : at + 4096], offset + at)
    written += len(block)
    if written >= stop_at:
        print(json.dumps({"written": written, "peak_mib": peak / 1024}), flush=True)
        time.sleep(600)

def watch():
    global peak
    while not done.wait(0.01):
        peak = max(peak, int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]))

writer.write_at = write_sparse
threading.Thread(target=watch, daemon=True).start()
code = cli.main(sys.argv[3:])
done.set()
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"written": written, "peak_mib": peak / 1024, "cpu": used.ru_utime + used.ru_stime}))
sys.exit(code)
"""


def run(words: list[str], sync_bytes: int, stop_at: int = NEVER) -> dict[str, Any]:
    """Run a command, or kill it once it has written so much; return what it says about itself."""
    facts: dict[str, Any] = {}
    command = [sys.executable, "-c", RUN, str(stop_at), str(sync_bytes), *words]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                facts = json.loads(line)
                if stop_at < NEVER:
                    process.send_signal(signal.SIGKILL)
    assert process.returncode == (0 if stop_at == NEVER else -signal.SIGKILL)
    return facts


def check(folder: Path, out: Path, tensors: list[Stored], sync_bytes: int) -> None:
    """Slice to both sizes, killed after 40%; go on; compare every byte that is not zero."""
    sizes = {name: sum(_nbytes(tensor, name) for tensor in tensors) for name in CUT}
    words = ["slice", str(folder), str(out), "--to", "23b", "--to", "12b"]
    first = run(words, sync_bytes, stop_at=sum(sizes.values()) * 2 // 5)
    assert {".23b.resume", ".12b.resume"} <= {path.name for path in out.iterdir()}
    second = run(words, sync_bytes)
    print(json.dumps({"bytes": sizes, "killed": first, "went on": second}))
    assert sorted(path.name for path in out.iterdir()) == ["12b", "23b"]
    # What was on the disk is not written again.
    assert sum(sizes.values()) <= first["written"] + second["written"] <= sum(sizes.values()) + 4 * sync_bytes + 2**25
    assert max(first["peak_mib"], second["peak_mib"]) < LIMIT_MIB
    for name, lengths in CUT.items():
        assert sum(path.stat().st_size for path in (out / name).glob("*.safetensors")) >= sizes[name]
        check_slice(out / name, tensors, lengths)


def _nbytes(tensor: Stored, size: str) -> int:
    return Stored("", tensor.dtype, tensor.cut(CUT[size])).nbytes


def needs_holes(path: Path) -> None:
    """Skip where a hole would take room, or memory cannot be measured."""
    with (path / "hole").open("wb") as file:
        file.truncate(2**30)
    if (path / "hole").stat().st_blocks * 512 > 2**20 or not Path("/proc/self/status").exists():
        pytest.skip("needs a file system with sparse files, and /proc")


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_a_few_layers_at_full_width(tmp_path: Path, form: str) -> None:
    needs_holes(tmp_path)
    pattern, edits = "MEM*", {"n_routed_experts": 8, "vocab_size": 1024, "num_hidden_layers": 4}
    tensors = list(all_tensors(pattern, 8, 1024, form))
    folder = sparse_folder(tmp_path / "parent", tensors, form, 2 * 10**8, hybrid_override_pattern=pattern, **edits)
    submodels = {
        "23b": {"widths": {"hidden": 2016}},
        "12b": {"widths": {"hidden": 1920, "expert_ffn": 960}},
    }
    elastic = {"format_version": 1, "family": "nemotron_h", "submodels": submodels}
    (folder / "elastic.json").write_text(json.dumps(elastic))
    check(folder, tmp_path / "out", tensors, sync_bytes=2**24)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_the_published_model(tmp_path: Path, form: str) -> None:
    """30B: 6,243 matrices and vectors, 63 GB in bf16; recognised by its config alone."""
    needs_holes(tmp_path)
    tensors = list(all_tensors(NEMOTRON_3_NANO.config["hybrid_override_pattern"], 128, 131072, form))
    folder = sparse_folder(tmp_path / "parent", tensors, form, 5 * 10**9)
    check(folder, tmp_path / "out", tensors, sync_bytes=2**29)
