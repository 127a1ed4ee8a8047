"""Slicing against copying: time per output byte beside ``cp``, and peak memory, on a synthetic checkpoint.

The checkpoint is bf16 noise in the shapes of Nemotron 3 Nano's experts (hidden 2688, expert width 1856): half of it lies in
fused (E, F, D) tensors, 2 GB each from 4 GB on, half in one matrix per expert. From one file: a cut of columns of every matrix
(hidden), a cut of rows and columns (hidden and expert width), and sorting both axes, which gathers number by number. From a
checkpoint of half that size in eight shards: both cuts in one pass, with one thread and with two. Each is compared with ``cp`` of
the files that it wrote, in alternation, best of ``--repeats``. Both read from the page cache; times are given until the call
returns ("cached"), and until fsync says that the bytes are on the disk ("on disk"). Peak memory is RssAnon: what the process
holds for itself, without mapped pages of files.

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
HIDDEN_CUT, BOTH_CUT = {"hidden": 2016}, {"hidden": 1920, "expert_ffn": 960}
SHARDS = 8
TIMES = ("seconds", "cp_seconds", "ratio", "disk_seconds", "cp_disk_seconds", "disk_ratio")

WORKER = """
import json, sys, threading, time
from pathlib import Path
from star_elastic.slice import Size, slice_sizes
from star_elastic.sort import sort_parent
from star_elastic.submodel import Submodel

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]))

source, out, scores, sizes, threads = *sys.argv[1:4], json.loads(sys.argv[4]), int(sys.argv[5])
peak, done, started = 0, threading.Event(), time.perf_counter()
threading.Thread(target=watch).start()
try:
    if sizes:
        sizes = [Size(Path(out, str(number)), Submodel(widths=widths)) for number, widths in enumerate(sizes)]
        slice_sizes(source, sizes, threads=threads)
    else:
        sort_parent(source, out, scores)
    seconds = time.perf_counter() - started
finally:
    done.set()
print(json.dumps({"seconds": seconds, "peak_mib": peak / 1024}))
"""


@dataclass(frozen=True)
class Job:
    """Something that is timed: cuts in one pass, or sorting where there are none."""

    name: str
    sizes: tuple[dict[str, int], ...]
    threads: int = 1


ONE_FILE = (Job("slice hidden", (HIDDEN_CUT,)), Job("slice both", (BOTH_CUT,)), Job("sort both", ()))
SHARDED = tuple(
    Job(f"two sizes, {SHARDS} shards, {threads} thread{'s' * (threads > 1)}", (HIDDEN_CUT, BOTH_CUT), threads)
    for threads in (1, 2)
)
MEMORY_ONLY = (Job("slice hidden", (HIDDEN_CUT,)),)


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


def make_parent(folder: Path, gb: float, *, shards: int = 1, fused: bool = True) -> Path:
    """A checkpoint of about ``gb`` * 10^9 bytes of expert matrices; ``fused`` leaves half of them in one tensor per layer."""
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
        if row.unrolled and fused and row.name.endswith("up_proj"):
            tensors.append(Noise(unit.name(row), row.shape))
        else:
            shape = row.shape[1:] if row.unrolled else row.shape
            tensors += [Noise(name, shape) for name in unit.disk_names(row)]
    write_weights(folder, tensors, max_shard_bytes=round(gb * 1e9 / shards * 1.05))
    return folder


def write_scores(path: Path, parent: Path) -> None:
    """Random scores for ``hidden`` and the expert width of every MoE layer."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    layers = json.loads((parent / "config.json").read_text())["layers_block_type"]
    widths = {f"layers.{number}.expert_ffn": WIDTH for number, kind in enumerate(layers) if kind == "moe"}
    save_file({key: rng.random(size, np.float32) for key, size in {"hidden": HIDDEN, **widths}.items()}, path)


def measure(work: Path, parent: Path, job: Job) -> dict[str, float]:
    """Run one job in a process of its own, then copy what it wrote; both outputs are removed."""
    out, copy = work / "out", work / "copy"
    arguments = [str(parent), str(out), str(work / "scores.safetensors"), json.dumps(job.sizes), str(job.threads)]
    os.sync()
    done = subprocess.run([sys.executable, "-c", WORKER, *arguments], check=True, stdout=subprocess.PIPE)
    facts = json.loads(done.stdout)
    facts["gb_out"] = sum(path.stat().st_size for path in files_of(out)) / 1e9
    facts["disk_seconds"] = facts["seconds"] + seconds_to_sync(out)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(out), str(copy)], check=True)
    facts["cp_seconds"] = time.perf_counter() - started
    facts["cp_disk_seconds"] = facts["cp_seconds"] + seconds_to_sync(copy)
    shutil.rmtree(out)
    shutil.rmtree(copy)
    return facts


def files_of(folder: Path) -> list[Path]:
    """All files in a folder and below."""
    return [path for path in folder.rglob("*") if path.is_file()]


def seconds_to_sync(folder: Path) -> float:
    """How long it takes until the files of a folder are on the disk."""
    started = time.perf_counter()
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - started


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    """Shortest times, largest memory."""
    return {key: (max if key == "peak_mib" else min)(run[key] for run in runs) for key in runs[0]}


def with_ratios(row: dict[str, float]) -> dict[str, float]:
    """The same with both times as multiples of those of ``cp``."""
    cached, disk = row["seconds"] / row["cp_seconds"], row["disk_seconds"] / row["cp_disk_seconds"]
    return {**row, "ratio": cached, "disk_ratio": disk}


def benchmark(work: Path, gb: float, repeats: int) -> list[dict[str, Any]]:
    """All jobs, and the memory of the largest cut on twice the size."""
    rows: list[dict[str, Any]] = []
    for size, shards, jobs in ((gb, 1, ONE_FILE), (gb / 2, SHARDS, SHARDED), (gb * 2, 1, MEMORY_ONLY)):
        parent = make_parent(work / "parent", size, shards=shards)
        write_scores(work / "scores.safetensors", parent)
        timed = jobs is not MEMORY_ONLY
        for job in jobs:
            runs = [measure(work, parent, job) for _ in range(repeats if timed else 1)]
            rows.append({"job": job.name, "gb": size, **with_ratios(best(runs)), "timed": timed})
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
    parser.add_argument("--quick", action="store_true", help="a small checkpoint, once: does it run at all?")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write, and clean up (default: here)")
    arguments = parser.parse_args()
    gb, repeats = (0.25, 1) if arguments.quick else (arguments.gb, arguments.repeats)
    with tempfile.TemporaryDirectory(prefix="slice_io_", dir=arguments.dir) as work:
        rows = benchmark(Path(work), gb, repeats)
    show(rows)
    print(json.dumps({"benchmark": "slice_io", "rows": rows}))


if __name__ == "__main__":
    main()
