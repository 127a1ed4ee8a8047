"""Slicing against copying: time per output byte beside ``cp``, and peak memory, on a synthetic checkpoint.

The checkpoint is bf16 noise in the shapes of Nemotron 3 Nano's experts (hidden 2688, expert width 1856): half of it lies in
fused (E, F, D) tensors, 2 GB each from 4 GB on, half in one matrix per expert. Three things are timed: a cut of columns of
every matrix (hidden), a cut of rows and columns (hidden and expert width), and sorting both axes, which gathers number by
number. Each is compared with ``cp`` of the files that it wrote, in alternation, best of ``--repeats``. Both read from the page
cache; times are given until the call returns ("cached"), and until fsync says that the bytes are on the disk ("on disk").
Peak memory is RssAnon: what the process holds for itself, without mapped pages of files.

    python benchmarks/slice_io.py --gb 4
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from star_elastic.checkpoint import write_weights
from star_elastic.families import layout_of

HIDDEN, WIDTH = 2688, 1856
SPEED_AIM, MEMORY_AIM_MIB = 1.3, 600
JOBS = {
    "slice hidden": {"hidden": 2016},
    "slice both": {"hidden": 1920, "expert_ffn": 960},
    "sort both": None,
}
TIMES = ("seconds", "cp_seconds", "ratio", "disk_seconds", "cp_disk_seconds", "disk_ratio")

WORKER = """
import json, sys, threading, time
from star_elastic.slice import slice_checkpoint
from star_elastic.sort import sort_parent
from star_elastic.submodel import Submodel

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]))

source, out, scores, widths = sys.argv[1:4] + [json.loads(sys.argv[4])]
peak, done, started = 0, threading.Event(), time.perf_counter()
threading.Thread(target=watch).start()
try:
    sort_parent(source, out, scores) if widths is None else slice_checkpoint(source, out, Submodel(widths=widths))
    seconds = time.perf_counter() - started
finally:
    done.set()
print(json.dumps({"seconds": seconds, "peak_mib": peak / 1024}))
"""


@dataclass(frozen=True)
class Noise:
    """A tensor of random bytes, made block by block."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"
    itemsize: int = 2

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.itemsize

    def blocks(self) -> Iterator[memoryview]:
        rng = np.random.default_rng(0)
        left = self.nbytes
        while left:
            size = min(left, 1 << 24)
            yield memoryview(rng.bytes(size))
            left -= size


def make_parent(folder: Path, gb: float) -> Path:
    """A checkpoint of about ``gb`` * 10^9 bytes of expert matrices."""
    layers = max(1, round(gb / 4))
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "layers_block_type": ["full_attention", *["moe"] * layers],
        "vocab_size": 1024,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "n_routed_experts": round(gb * 1e9 / layers / (2 * 2 * HIDDEN * WIDTH)),
        "moe_intermediate_size": WIDTH,
        "moe_shared_expert_intermediate_size": 64,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = []
    for unit, row in layout_of(config).tensors():
        if row.name.endswith("experts.down_proj"):
            members = range(row.dims[0].size)
            tensors += [Noise(unit.disk_name(row, member=member), row.shape[1:]) for member in members]
        else:
            tensors.append(Noise(unit.name(row), row.shape))
    write_weights(folder, tensors)
    return folder


def write_scores(path: Path, parent: Path) -> None:
    """Random scores for ``hidden`` and the expert width of every MoE layer."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    layers = json.loads((parent / "config.json").read_text())["layers_block_type"]
    widths = {f"layers.{number}.expert_ffn": WIDTH for number, kind in enumerate(layers) if kind == "moe"}
    save_file({key: rng.random(size, np.float32) for key, size in {"hidden": HIDDEN, **widths}.items()}, path)


def measure(work: Path, parent: Path, widths: dict[str, int] | None) -> dict[str, float]:
    """Run one job in a process of its own, then copy what it wrote; both outputs are removed."""
    out, copy = work / "out", work / "copy"
    arguments = [str(parent), str(out), str(work / "scores.safetensors"), json.dumps(widths)]
    os.sync()
    done = subprocess.run([sys.executable, "-c", WORKER, *arguments], check=True, stdout=subprocess.PIPE)
    facts = json.loads(done.stdout)
    facts["gb_out"] = sum(path.stat().st_size for path in out.iterdir()) / 1e9
    facts["disk_seconds"] = facts["seconds"] + seconds_to_sync(out)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(out), str(copy)], check=True)
    facts["cp_seconds"] = time.perf_counter() - started
    facts["cp_disk_seconds"] = facts["cp_seconds"] + seconds_to_sync(copy)
    shutil.rmtree(out)
    shutil.rmtree(copy)
    return facts


def seconds_to_sync(folder: Path) -> float:
    """How long it takes until the files of a folder are on the disk."""
    started = time.perf_counter()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - started


def best_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Shortest times, largest memory."""
    best = {key: min(run[key] for run in runs) for key in runs[0]}
    return {
        **best,
        "ratio": best["seconds"] / best["cp_seconds"],
        "disk_ratio": best["disk_seconds"] / best["cp_disk_seconds"],
        "peak_mib": max(run["peak_mib"] for run in runs),
    }


def benchmark(work: Path, gb: float, repeats: int) -> list[dict[str, Any]]:
    """All jobs on a checkpoint of one size, and the memory of the largest cut on half and twice that size."""
    rows: list[dict[str, Any]] = []
    for size, jobs, times in ((gb, JOBS, repeats), (gb / 2, ["slice hidden"], 1), (gb * 2, ["slice hidden"], 1)):
        parent = make_parent(work / "parent", size)
        write_scores(work / "scores.safetensors", parent)
        for job in jobs:
            runs = [measure(work, parent, JOBS[job]) for _ in range(times)]
            rows.append({"job": job, "gb": size, **best_of(runs), "timed": times > 1 or repeats == 1})
        shutil.rmtree(parent)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title=f"aims: slicing at most {SPEED_AIM} x cp, peak memory under {MEMORY_AIM_MIB} MiB at every size")
    for column in ("job", "of", "written", "cached", "cp", "ratio", "on disk", "cp", "ratio", "peak"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for row in rows:
        times = [f"{row[key]:.2f}" for key in TIMES] if row["timed"] else [""] * len(TIMES)
        table.add_row(row["job"], f"{row['gb']:g} GB", f"{row['gb_out']:.2f} GB", *times, f"{row['peak_mib']:.0f} MiB")
    Console(width=120).print(table)


def main() -> None:
    """Parse the arguments, run, print a table and one JSON line, and leave nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4, help="size of the checkpoint in 10^9 bytes (default 4)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each job, of which the best counts (default 3)")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write, and clean up (default: here)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slice_io_", dir=arguments.dir) as work:
        rows = benchmark(Path(work), arguments.gb, arguments.repeats)
    show(rows)
    print(json.dumps({"benchmark": "slice_io", "rows": rows}))


if __name__ == "__main__":
    main()
