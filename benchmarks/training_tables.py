"""Prints the tables of docs/results/training.md from the JSON files that benchmarks/training.py wrote.

python benchmarks/training_tables.py RESULTS
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

SIZES = ("full", "mid", "small")
NESTED = ("mid", "small")
RANDOM = [f"random-{number}" for number in range(5)]


class Results:
    """All arms of all seeds.

    Args:
        folder: what benchmarks/training.py wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.arms: dict[tuple[str, int], dict[str, Any]] = {}
        for file in sorted(folder.glob("*-seed*.json")):
            arm = json.loads(file.read_text(encoding="utf-8"))
            self.arms[arm["arm"], arm["seed"]] = arm
        self.seeds = sorted({seed for _, seed in self.arms})

    def values(self, arm: str, size: str, key: str) -> dict[int, float]:
        """A number of one size of an arm, by seed, where it was measured."""
        found = {
            seed: self.arms[arm, seed]["sizes"].get(size, {}).get(key)
            for seed in self.seeds
            if (arm, seed) in self.arms
        }
        return {seed: value for seed, value in found.items() if value is not None}

    def tokens(self, arm: str) -> list[int]:
        """Tokens of an arm, one per seed."""
        return [self.arms[arm, seed]["tokens"] for seed in self.seeds if (arm, seed) in self.arms]


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    if not values:
        return ""
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print("|" + "|".join(f" {cell} " for cell in headings) + "|")
    print("|" + "---|" * len(headings))
    for row in rows:
        print("|" + "|".join(f" {cell} " for cell in row) + "|")
    print()


def budgets(results: Results) -> None:
    """What the router chose."""
    print("### What the router chose\n")
    rows = []
    for seed in results.seeds:
        for size in SIZES:
            if ("learned", seed) not in results.arms:
                continue
            entry = results.arms["learned", seed]["sizes"][size]
            widths = ", ".join(f"{axis} {width}" for axis, width in entry["widths"].items())
            rows.append([str(seed), size, f"{100 * entry['budget_error']:+.1f}%", widths])
    table(["seed", "size", "off its budget", "widths"], rows)


def widths(results: Results) -> None:
    """Learned widths against random and uniform ones, at equal training."""
    print("### Widths: learned against random and uniform, equal training from fixed widths\n")
    rows = []
    for size in SIZES:
        chosen = results.values("chosen", size, "kd")
        randoms = {seed: [results.values(arm, size, "kd").get(seed) for arm in RANDOM] for seed in chosen}
        means = {seed: mean(found) for seed, all_ in randoms.items() if (found := [v for v in all_ if v is not None])}
        beaten = sum(chosen[seed] < value for seed, all_ in randoms.items() for value in all_ if value is not None)
        count = sum(value is not None for all_ in randoms.values() for value in all_)
        uniform = results.values("uniform", size, "kd")
        rows.append(
            [
                size,
                spread(list(results.values("parent", size, "kd").values())),
                spread(list(results.values("learned", size, "kd").values())),
                spread(list(chosen.values())),
                spread(list(means.values())),
                spread(list(uniform.values())),
                wins(chosen, means),
                f"{beaten}/{count}",
                wins(chosen, uniform),
            ]
        )
    table(
        [
            "size",
            "one-shot",
            "search + settle",
            "learned widths",
            "mean of 5 random",
            "uniform",
            "beats the mean",
            "of single random",
            "beats uniform",
        ],
        rows,
    )


def wins(left: dict[int, float], right: dict[int, float]) -> str:
    """On how many of the seeds that have both ``left`` is lower."""
    both = left.keys() & right.keys()
    return f"{sum(left[seed] < right[seed] for seed in both)}/{len(both)}"


def nested(results: Results) -> None:
    """One run against many."""
    print("### One run against many: the same widths, from the same slice\n")
    rows = []
    for key, what in (("kd", "KD"), ("ce", "CE")):
        for size in NESTED:
            ours = results.values("chosen", size, key)
            share, all_ = (results.values(f"alone-{kind}-{size}", size, key) for kind in ("share", "all"))
            ratio = [ours[seed] / all_[seed] for seed in ours if seed in all_]
            rows.append(
                [what, size, *(spread(list(v.values())) for v in (ours, share, all_)), wins(ours, share), spread(ratio)]
            )
    table(
        [
            "number",
            "size",
            "nested",
            "alone, a third of the tokens",
            "alone, all tokens",
            "nested below a third",
            "nested / all",
        ],
        rows,
    )


def scratch(results: Results) -> None:
    """Trained from random weights."""
    print("### From random weights: cross-entropy, nats per token\n")
    rows = []
    for size in SIZES:
        cells = [
            spread(list(results.values(arm, size, "ce").values()))
            for arm in ("parent", "chosen", f"scratch-share-{size}", f"scratch-all-{size}")
        ]
        rows.append([size, *cells])
    table(["size", "one-shot slice", "nested", "scratch, a third of the tokens", "scratch, all tokens"], rows)
    tokens = {
        arm: results.tokens(arm)
        for arm in ("chosen", *(f"scratch-{kind}-{size}" for kind in ("share", "all") for size in SIZES))
    }
    nested_tokens = mean(tokens["chosen"]) if tokens["chosen"] else 0
    share = sum(mean(tokens[f"scratch-share-{size}"]) for size in SIZES if tokens[f"scratch-share-{size}"])
    whole = sum(mean(tokens[f"scratch-all-{size}"]) for size in SIZES if tokens[f"scratch-all-{size}"])
    print(
        f"Tokens (mean over seeds): nested, all sizes together {nested_tokens:,.0f}; "
        f"from random weights, three runs {share:,.0f} (a third each) or {whole:,.0f}.\n"
    )


def curriculum(results: Results) -> None:
    """Stages and probabilities."""
    print("### Curriculum: equal tokens; rows of the training length, and four times as long\n")
    rows = []
    arms = {
        "chosen": "one stage, uniform",
        "skewed": "one stage, skewed",
        "two-stage": "two stages, uniform",
        "two-stage-skewed": "two stages, skewed",
    }
    for arm, what in arms.items():
        cells = [spread(list(results.values(arm, size, key).values())) for key in ("kd", "kd_long") for size in SIZES]
        rows.append([what, *cells])
    table(["run", *(f"{size}{where}" for where in ("", ", long") for size in SIZES)], rows)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    results = Results(parser.parse_args().results)
    print(f"Seeds {', '.join(map(str, results.seeds))}; {len(results.arms)} runs.\n")
    sections: tuple[Callable[[Results], None], ...] = (budgets, widths, nested, scratch, curriculum)
    for section in sections:
        section(results)


if __name__ == "__main__":
    main()
