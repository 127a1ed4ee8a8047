"""Slicing against the obvious way: load the parent with transformers, copy what the child keeps into one, save that.

The parent is bf16 noise in the shapes of Nemotron 3 Nano's experts, one matrix per expert on disk, as published. Both ways cut
hidden to 1920 and the expert width to 960. Each run is a process of its own and they alternate, best of ``--repeats``; "work"
counts from the moment that all modules are imported, "process" from its start. Peak memory is RssAnon: what a process holds for
itself, without mapped pages of files. All tensors of both folders are compared, number by number.

    python benchmarks/slice_obvious.py --gb 2
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from slice_io import BOTH_CUT, best, make_parent

WATCH = """
import json, sys, threading, time

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]))

source, out, widths, threads = *sys.argv[1:3], json.loads(sys.argv[3]), int(sys.argv[4])
peak, done = 0, threading.Event()
threading.Thread(target=watch, daemon=True).start()
"""

OURS = """
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import Submodel

started = time.perf_counter()
slice_checkpoint(source, out, Submodel(widths=widths), threads=threads)
"""

OBVIOUS = """
import copy
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(threads)
started = time.perf_counter()
parent = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
config = copy.deepcopy(parent.config)
config.hidden_size, config.moe_intermediate_size = widths["hidden"], widths["expert_ffn"]
child = AutoModelForCausalLM.from_config(config, dtype=parent.dtype)
state = parent.state_dict()
kept = {name: state[name][tuple(slice(n) for n in tensor.shape)] for name, tensor in child.state_dict().items()}
child.load_state_dict(kept)
child.save_pretrained(out)
"""

REPORT = """
seconds = time.perf_counter() - started
done.set()
print(json.dumps({"work": seconds, "peak_mib": peak / 1024}))
"""

WAYS = {"star-elastic": OURS, "from_pretrained, cut, save_pretrained": OBVIOUS}


def measure(way: str, parent: Path, out: Path, threads: int) -> dict[str, float]:
    """Cut once, in a process of its own."""
    os.sync()
    words = [sys.executable, "-W", "ignore", "-c", WATCH + WAYS[way] + REPORT]
    words += [str(parent), str(out), json.dumps(BOTH_CUT), str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
    started = time.perf_counter()
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, env=environment)
    return {"process": time.perf_counter() - started, **json.loads(done.stdout.splitlines()[-1])}


def compare(one: Path, two: Path) -> int:
    """Raise unless two folders hold the same tensors; return their bytes."""
    import torch
    from safetensors.torch import load_file

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}

    first, second = tensors(one), tensors(two)
    if first.keys() != second.keys():
        raise SystemExit(f"names differ: {sorted(first.keys() ^ second.keys())[:3]}")
    for name, tensor in first.items():
        # As numbers: transformers keeps the router in fp32, and noise holds NaN.
        if not torch.equal(tensor.float().nan_to_num(), second[name].float().nan_to_num()):
            raise SystemExit(f"{name} differs")
    return sum(tensor.nbytes for tensor in first.values())


def benchmark(work: Path, gb: float, repeats: int) -> list[dict[str, Any]]:
    """Both ways side by side, with one thread and with two."""
    parent = make_parent(work / "parent", gb, fused=False)
    outs = [work / str(number) for number in range(len(WAYS))]
    rows = []
    for threads in (1, 2):
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way, out in zip(WAYS, outs, strict=True):
                runs[way].append(measure(way, parent, out, threads))
            written = compare(*outs)
            for out in outs:
                shutil.rmtree(out)
        rows += [{"way": way, "threads": threads, "gb_out": written / 1e9, **best(runs[way])} for way in WAYS]
    return rows


def show(rows: list[dict[str, Any]], gb: float) -> None:
    """Print the table; each ratio is that of the obvious way to ours, with the same number of threads."""
    table = Table(title=f"{gb:g} GB to {rows[0]['gb_out']:.2f} GB; in brackets: times ours")
    for column in ("way", "threads", "work", "process", "peak"):
        table.add_column(column, justify="left" if column == "way" else "right")
    units = {"work": "{:.2f} s", "process": "{:.2f} s", "peak_mib": "{:.0f} MiB"}
    for row in rows:
        ours = next(other for other in rows if other["threads"] == row["threads"])
        facts = [f"{unit.format(row[key])} ({row[key] / ours[key]:.1f})" for key, unit in units.items()]
        table.add_row(row["way"], str(row["threads"]), *facts)
    Console(width=120).print(table)


def main() -> None:
    """Parse the arguments, run, print a table and one JSON line, and leave nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2, help="size of the parent in 10^9 bytes (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way, of which the best counts (default 3)")
    parser.add_argument("--quick", action="store_true", help="a small parent, once: does it run at all?")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write, and clean up (default: here)")
    arguments = parser.parse_args()
    gb, repeats = (0.1, 1) if arguments.quick else (arguments.gb, arguments.repeats)
    with tempfile.TemporaryDirectory(prefix="slice_obvious_", dir=arguments.dir) as work:
        rows = benchmark(Path(work).resolve(), gb, repeats)
    show(rows, gb)
    print(json.dumps({"benchmark": "slice_obvious", "gb": gb, "rows": rows}))


if __name__ == "__main__":
    main()
