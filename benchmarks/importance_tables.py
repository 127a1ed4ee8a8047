"""Tables, in Markdown, of what benchmarks/importance.py measured.

    python benchmarks/importance_tables.py RESULTS

Numbers are what a cut adds to the loss of the whole model on the same rows, in nats per token: mean over seeds and, behind it,
the sample standard deviation. *wins* counts the seeds on which ``sorted`` is lower than unsorted, random and reverse.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ORDERS = ("sorted", "unsorted", "random", "reverse")
METHODS = ("reap", "reap_sum", "activation", "frequency", "router_weight", "random", "reap_reverse")


def main() -> None:
    """Print every table for which there are results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    runs = [json.loads(path.read_text()) for path in sorted(parser.parse_args().results.glob("*.json"))]
    for experiment, show in {
        "orders": show_orders,
        "experts": show_experts,
        "depth": show_depth,
        "criteria": show_criteria,
    }.items():
        for name in sorted({group_of(run) for run in runs if run["about"]["experiment"] == experiment}):
            chosen = [run for run in runs if run["about"]["experiment"] == experiment and group_of(run) == name]
            print(f"\n### {experiment}: {name}\n\n{facts(chosen)}\n")
            show(chosen)


def group_of(run: dict[str, Any]) -> str:
    """Runs of one parent, whatever its seed: ``demo`` for ``demo-1``."""
    return str(run["about"]["parent"]).rsplit("-", 1)[0]


def facts(runs: Sequence[dict[str, Any]]) -> str:
    """What was measured, in one line."""
    about = runs[0]["about"]
    seeds = ", ".join(f"{run['about']['parent']} with seed {run['about']['seed']}: {whole(run):.4f}" for run in runs)
    sizes = f"{about['params']:,} parameters, {about['active_params']:,} active, {about['dtype']}"
    rows = f"{about['calibration_tokens']:,} calibration and {about['held_out_tokens']:,} held-out tokens"
    return f"{sizes}; {rows}. Loss of the whole model, nats per token: {seeds}."


def whole(run: dict[str, Any]) -> float:
    """Loss of the whole model."""
    return next(float(one["loss"]) for one in run["losses"] if one["axis"] == "none")


def added(run: dict[str, Any], order: str, cut: dict[str, Any]) -> float | None:
    """What a cut adds to the loss in an order; None where it was not measured."""
    for one in run["losses"]:
        if one["order"] == order and all(one[key] == cut[key] for key in ("axis", "share", "note")):
            return float(one["loss"]) - whole(run)
    return None


def spread(values: Iterable[float | None], digits: int = 3) -> str:
    """Mean and sample standard deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = f"{statistics.mean(known):+.{digits}f}"
    return f"{mean} ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean


def cuts_of(runs: Sequence[dict[str, Any]], order: str) -> list[dict[str, Any]]:
    """Different cuts measured in an order, in the order of measuring; two shares that give one width count once."""
    found: dict[str, dict[str, Any]] = {}
    for one in (one for run in runs for one in run["losses"] if one["order"] == order and one["axis"] != "none"):
        same = [one["axis"], one["widths"], len(one["layers"] or ())]
        found.setdefault(json.dumps(same, sort_keys=True), one)
    return list(found.values())


def label(cut: dict[str, Any], about: dict[str, Any]) -> str:
    """What is left, beside what there was."""
    if cut["axis"] == "depth":
        return f"{len(cut['layers'])} of {about['axes']['depth']}"
    if cut["axis"] in cut["widths"]:
        return f"{cut['widths'][cut['axis']]} of {about['axes'][cut['axis']]}"
    left = ", ".join(f"{axis} {width}" for axis, width in cut["widths"].items() if width < about["axes"][axis])
    return f"{cut['active_params'] / about['active_params']:.0%} active: {left}"


def show_orders(runs: Sequence[dict[str, Any]]) -> None:
    """Every cut in four orders."""
    print(f"| axis | kept | {' | '.join(ORDERS)} | wins |\n|---|---|{'---|' * len(ORDERS)}---|")
    axes = [*runs[0]["about"]["axes"], "together"]
    for cut in sorted(cuts_of(runs, "sorted"), key=lambda cut: (axes.index(cut["axis"]), -cut["share"])):
        values = {order: [added(run, order, cut) for run in runs] for order in ORDERS}
        cells = [spread(values[order]) for order in ORDERS]
        wins = ", ".join(count_wins(values["sorted"], values[order]) for order in ORDERS[1:])
        print(f"| {cut['axis']} | {label(cut, runs[0]['about'])} | {' | '.join(cells)} | {wins} |")


def count_wins(ours: Sequence[float | None], theirs: Sequence[float | None]) -> str:
    """On how many seeds the first is lower."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return f"{sum(a < b for a, b in pairs)}/{len(pairs)}"


def show_experts(runs: Sequence[dict[str, Any]]) -> None:
    """Experts by each way to rank them, in percent of the whole model's loss."""
    print(f"{load(runs[0])}\n\n| experts kept | {' | '.join(METHODS)} |\n|---|{'---|' * len(METHODS)}")
    for cut in cuts_of(runs, "reap"):
        cells = []
        for method in METHODS:
            values = [(added(run, method, cut), whole(run)) for run in runs]
            cells.append(spread((100 * value / base for value, base in values if value is not None), 2))
        print(f"| {label(cut, runs[0]['about'])} | {' | '.join(cells)} |")


def load(run: dict[str, Any]) -> str:
    """How unevenly calibration tokens fall on experts, and how alike REAP and frequency rank them."""
    parts = []
    for key, counts in run.get("scores_frequency", {}).items():
        total, mean = sum(counts), sum(counts) / len(counts)
        few = sum(count < mean / 4 for count in counts)
        alike = spearman(counts, run["scores_reap"][key])
        parts.append(
            f"{key}: the busiest takes {max(counts) / total:.0%}, {few} of {len(counts)} less than a quarter of the mean, "
            f"rank correlation of REAP with frequency {alike:+.2f}"
        )
    return "Load: " + "; ".join(parts) + "."


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values rank as they come."""
    return statistics.correlation(ranks(first), ranks(second))


def ranks(values: Sequence[float]) -> list[int]:
    """Place of each value among all, ascending."""
    places = sorted(range(len(values)), key=lambda number: values[number])
    return [places.index(number) for number in range(len(values))]


def show_depth(runs: Sequence[dict[str, Any]]) -> None:
    """Layers against widths at equal parameters; parents may differ in which layers go, and so in what is left."""
    print("| aim | cut | parameters left | added loss |\n|---|---|---|---|")
    for method in ("removal", "kl", "cosine"):
        chosen = [one for one in runs[0]["losses"] if method in (one["note"][3:], one["order"].removeprefix("depth_"))]
        for cut in sorted(chosen, key=lambda one: -one["share"]):
            name = (
                f"layers by {method}"
                if cut["axis"] == "depth"
                else f"{cut['axis']}, as many as layers by {method} leave"
            )
            same = [one for run in runs for one in run["losses"] if alike(one, cut)]
            left = [one["params"] / runs[0]["about"]["params"] for one in same]
            share = f"{min(left):.1%}" if max(left) - min(left) < 5e-4 else f"{min(left):.1%} to {max(left):.1%}"
            print(
                f"| {cut['share']:.0%} | {name} | {share} | {spread(added(run, cut['order'], cut) for run in runs)} |"
            )


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two entries measure the same cut in the same order."""
    return all(one[key] == other[key] for key in ("order", "axis", "share", "note"))


def show_criteria(runs: Sequence[dict[str, Any]]) -> None:
    """A table for each axis: each way to rank it, with how many random and unsorted orders it beats."""
    names = list(dict.fromkeys(one["order"] for run in runs for one in run["losses"]))
    random = [name for name in names if name.startswith("random ")]
    for axis in dict.fromkeys(one["axis"] for one in runs[0]["losses"] if one["axis"] != "none"):
        measured = {one["order"] for run in runs for one in run["losses"] if one["axis"] == axis}
        criteria = [name for name in names if name in measured and name not in (*random, "unsorted")]
        others = ["unsorted", f"{len(random)} random orders"] if random else []
        print(f"| {axis} | {' | '.join([*criteria, *others])} |\n|---|{'---|' * len([*criteria, *others])}")
        for cut in (one for one in cuts_of(runs, criteria[0]) if one["axis"] == axis):
            cells = [spread(added(run, name, cut) for run in runs) for name in criteria]
            if random:
                wins = [(beaten(runs, name, random, cut), beaten(runs, name, ["unsorted"], cut)) for name in criteria]
                cells = [f"{cell}; {chance}, {lying}" for cell, (chance, lying) in zip(cells, wins, strict=True)]
                cells += [spread(added(run, "unsorted", cut) for run in runs)]
                cells += [spread(added(run, name, cut) for run in runs for name in random)]
            print(f"| {label(cut, runs[0]['about'])} | {' | '.join(cells)} |")
        print()


def beaten(runs: Sequence[dict[str, Any]], order: str, others: Sequence[str], cut: dict[str, Any]) -> str:
    """How many of other orders, each on every parent, cost more than one."""
    ours = [added(run, order, cut) for run in runs for _ in others]
    return count_wins(ours, [added(run, other, cut) for run in runs for other in others])


if __name__ == "__main__":
    main()
