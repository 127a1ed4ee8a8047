"""What scoring costs: against a bare forward pass over the same rows, and layer by layer in time and memory.

    python benchmarks/score.py [--hidden 512 --pattern MEM*EMEMEM*E --tokens 2048 --rounds 5 ...]

Scoring every width axis, without the order of layers, against the model's body over the same batches (aim: at most 1.25x);
they run in turn, and the median of the rounds' ratios is reported. Then the whole-model and the layerwise run, each in a process
of its own that loads the same folder: seconds, and the peak of anonymous memory (RssAnon, sampled; mapped files do not count)
above what the imports took. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import NemotronHConfig, NemotronHForCausalLM

from star_elastic.checkpoint import Checkpoint
from star_elastic.families import layout_of
from star_elastic.loading import load_model
from star_elastic.score import ScoreOptions, score_model
from star_elastic.score.layerwise import score_layerwise
from star_elastic.submodel import read_config

KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
OPTIONS = ScoreOptions({"depth": "none"})
AIM = 1.25


def main() -> None:
    """Build a random parent, time, print."""
    options = read_options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "parent"
        if options.measure:
            print(json.dumps(measure(Path(options.folder), options)))
            return
        torch.manual_seed(0)
        parent = NemotronHForCausalLM(config_of(options)).eval()
        parent.save_pretrained(folder)
        ratio = against_forward(parent, options)
        del parent
        runs = {way: in_process(folder, way) for way in ("whole", "layerwise")}
    size = runs["whole"].pop("bytes")
    runs["layerwise"].pop("bytes")
    setting = {"weights_mib": round(size / 2**20), "tokens": options.tokens, "threads": torch.get_num_threads()}
    show(setting, ratio, runs)
    print(json.dumps({"benchmark": "score", **setting, "against_forward": ratio, "aim": AIM, "runs": runs}))


def read_options() -> argparse.Namespace:
    """Sizes of the parent and of the data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--pattern", default="MEM*EMEMEM*E", help="kinds of layer: M Mamba-2, E experts, * attention, - MLP")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", choices=["whole", "layerwise"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def config_of(options: argparse.Namespace) -> NemotronHConfig:
    """A hybrid in the proportions of the published one."""
    hidden = options.hidden
    return NemotronHConfig(
        vocab_size=1024,
        hidden_size=hidden,
        layers_block_type=[KINDS[letter] for letter in options.pattern],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden // 8,
        mamba_num_heads=16,
        mamba_head_dim=hidden // 8,
        n_groups=4,
        ssm_state_size=32,
        chunk_size=64,
        n_routed_experts=options.experts,
        num_experts_per_tok=4,
        moe_intermediate_size=hidden * 2 // 3 // 16 * 16,
        moe_shared_expert_intermediate_size=hidden * 4 // 3 // 16 * 16,
    )


def batches_of(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Random rows in two batches."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.tokens // options.batch // 2)
    return [{"input_ids": torch.randint(3, 1024, shape, generator=generator)} for _ in range(2)]


def against_forward(model: Any, options: argparse.Namespace) -> dict[str, float]:
    """The ratio of scoring to a bare forward pass: median and quartiles over rounds."""
    batches, layout = batches_of(options), layout_of(model.config.to_dict())

    def bare() -> None:
        with torch.inference_mode():
            for batch in batches:
                model.model(input_ids=batch["input_ids"], use_cache=False)

    def scored() -> None:
        score_model(model, layout, batches, OPTIONS)

    bare()
    ratios = sorted(seconds(scored) / seconds(bare) for _ in range(options.rounds))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": statistics.median(ratios), "low": quartiles[0], "high": quartiles[2]}


def seconds(work: Callable[[], None]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_process(folder: Path, way: str) -> dict[str, Any]:
    """Time and memory of one way to score, in a process of its own."""
    words = [*sys.argv, "--measure", way, "--folder", str(folder)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Score the folder in this process; seconds and peak memory above the start."""
    batches, layout, checkpoint = batches_of(options), layout_of(read_config(folder)), Checkpoint.open(folder)
    cpu = torch.device("cpu")

    def work() -> None:
        if options.measure == "whole":
            score_model(load_model(folder, device=cpu), layout, batches, OPTIONS)
        else:
            score_layerwise(checkpoint, layout, batches, OPTIONS, device=cpu)

    before = anonymous_bytes()
    peak = [before]
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        spent = seconds(work)
    finally:
        finished.set()
        watcher.join()
    return {"seconds": spent, "peak_mib": round((peak[0] - before) / 2**20), "bytes": checkpoint.nbytes}


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this benchmark needs Linux")


def show(setting: dict[str, Any], ratio: dict[str, float], runs: dict[str, dict[str, Any]]) -> None:
    """Print tables."""
    console = Console(width=110)
    console.print(", ".join(f"{name} {value}" for name, value in setting.items()), highlight=False)
    console.print(
        f"scoring / bare forward: {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}), aim {AIM}", highlight=False
    )
    table = Table()
    for heading in ("scored", "seconds", "peak MiB"):
        table.add_column(heading, justify="left" if heading == "scored" else "right")
    for way, found in runs.items():
        table.add_row(way, f"{found['seconds']:.2f}", str(found["peak_mib"]))
    console.print(table)


if __name__ == "__main__":
    main()
