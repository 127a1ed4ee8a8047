"""Tokens per second of ``star-elastic train`` in one process and in several; a part of ``train_step.py``."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

FIRST = 1  # steps of each phase that warm up
RUNS = {
    # what -> processes, threads of each, overrides
    "1 process, 1 thread": (1, 1, ()),
    "2 processes, 1 thread each": (2, 1, ()),
    "2 processes, 1 thread each, shard off": (2, 1, ("shard=off",)),
    "1 process, 2 threads": (1, 2, ()),
}


def compare_processes(place: Path, content: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Train the same recipe in every way; rates are compared step by step, since every way draws the same nested models."""
    recipe = place / "scaling.yaml"
    stages = [{"phase": phase, "steps": steps, "warmup_steps": 0} for phase in ("search", "settle")]
    recipe.write_text(yaml.safe_dump({**content, "stages": stages}))
    rates = {
        what: tokens_per_second(recipe, place / f"scaled-{number}", *run)
        for number, (what, run) in enumerate(RUNS.items())
    }
    alone, *others = RUNS
    rows = []
    for what in others:
        for phase, ours in rates[what].items():
            other = rates[alone][phase]
            low, middle, high = statistics.quantiles((one / two for one, two in zip(ours, other, strict=True)), n=4)
            rows.append(
                {
                    "what": f"{what}: {phase}",
                    "against": alone,
                    "ratio": round(middle, 3),
                    "quartiles": [round(low, 3), round(high, 3)],
                    "rounds": len(ours),
                    "ours": round(statistics.median(ours)),
                    "other": round(statistics.median(other)),
                    "unit": "tokens/s",
                }
            )
    return rows


def tokens_per_second(
    recipe: Path, output: Path, processes: int, threads: int, overrides: tuple[str, ...]
) -> dict[str, list[float]]:
    """Rates of the steps of each phase of one run, the first left out."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    command = [sys.executable, "-m", *(launcher if processes > 1 else []), "star_elastic", "train", str(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [*command, f"output={output}", *overrides], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"star-elastic train failed: {done.stderr[-2000:]}")
    rates: dict[str, list[float]] = {}
    for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
        rates.setdefault(line["phase"], []).append(line["tokens_per_second"])
    return {phase: found[FIRST:] for phase, found in rates.items()}
