"""Held-out loss of one-shot slices: is the order worth it? Results go to JSON files that a rerun continues.

    python benchmarks/importance.py orders  PARENT RESULTS --data library --seeds 0 1 2 --dtype bfloat16 --axes hidden ffn
    python benchmarks/importance.py orders  OUT/demo-1 RESULTS --data OUT/data --seeds 1
    python benchmarks/importance.py experts OUT/uneven-0 RESULTS --data OUT/data --seeds 0
    python benchmarks/importance.py depth   PARENT RESULTS --data library --seeds 0
    python benchmarks/importance.py criteria OUT/demo-0 RESULTS --data OUT/data --seeds 0
    python benchmarks/importance_tables.py RESULTS

``orders`` cuts every axis to 0.9, 0.75 and 0.5 of its width (nearest legal), and all width axes together to those shares of the
active parameters, with the members sorted by importance, as they lie, at random, and sorted the wrong way round. ``experts``
cuts routed experts in the order of each way to rank them. ``depth`` compares layers removed with widths cut, at equal parameters.
``criteria`` cuts each axis in the order of each way to rank it, and in many random orders.

A seed picks the calibration rows, the held-out rows and the random order. Calibration and held-out rows never share a file.
Cuts run through the sliced lens on a model sorted in memory, which computes what the exported slice would.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from star_elastic import cost
from star_elastic.demo.pretrain import mixture
from star_elastic.demo.task import HELD_OUT_ROWS, HELD_OUT_TEXT
from star_elastic.elastic import ElasticModel
from star_elastic.families import layout_of
from star_elastic.layout import Layout
from star_elastic.loading import load_model
from star_elastic.reorder import sort_model
from star_elastic.score.depth import depth_order
from star_elastic.score.measure import Scores, score_model
from star_elastic.score.methods import EXPERT_METHODS, ScoreOptions, methods_for
from star_elastic.score.probe import measure_losses, orders_of
from star_elastic.submodel import ElasticConfig, Submodel
from star_elastic.train.data import Batch, Calibration, calibration_batches, held_out_batches
from star_elastic.train.documents import load_tokenizer
from star_elastic.train.recipe import DataRecipe

SHARES = (0.9, 0.75, 0.5)
HELD_OUT_TOKENS = 8192
PIECE = 1200  # characters of one document cut from the library, about a row


def main() -> None:
    """Run one experiment for every seed."""
    options = read_options()
    for seed in options.seeds:
        job = Job.open(options, seed)
        EXPERIMENTS[options.experiment](job)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("parent", type=Path)
    parser.add_argument("results", type=Path, help="folder of JSON files")
    parser.add_argument("--data", required=True, help="'library' for Python's own sources, or the demo's data folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--axes", nargs="*", help="axes to cut alone; default: all")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--samples", type=int, default=256, help="calibration rows")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--depth-samples", type=int, default=16, help="rows that removal of layers reads")
    parser.add_argument("--depth-methods", nargs="+", default=["cosine", "removal", "kl"])
    parser.add_argument("--criteria", nargs="+", help="ways to rank, for criteria; default: all")
    parser.add_argument("--random-orders", type=int, default=8, help="of each axis, for criteria, beside unsorted")
    parser.add_argument(
        "--depth-shares", type=float, nargs="+", default=[0.85, 0.75], help="of the parameters, to keep"
    )
    return parser.parse_args()


@dataclass
class Job:
    """One parent, one seed: the model, its rows, and the file of results."""

    options: argparse.Namespace
    seed: int
    model: Any
    layout: Layout
    calibration: Calibration
    held_out: list[Batch]
    results: Results

    @classmethod
    def open(cls, options: argparse.Namespace, seed: int) -> Job:
        """Load everything."""
        model = load_model(options.parent, device=torch.device("cpu"), dtype=getattr(torch, options.dtype))
        layout = layout_of({**model.config.to_dict(), "dtype": str(model.dtype)})
        calibration, held_out = rows_of(options, seed)
        results = Results(options.results / f"{options.experiment}-{options.parent.name}-seed{seed}.json")
        results.about(
            experiment=options.experiment,
            parent=options.parent.name,
            seed=seed,
            dtype=options.dtype,
            params=int(cost.params(layout, {})),
            active_params=int(cost.active_params(layout, {})),
            axes={name: axis.size for name, axis in layout.axes.items()},
            calibration_tokens=calibration.tokens,
            held_out_tokens=held_out.tokens,
            calibration_sha256=calibration.sha256,
            held_out_sha256=held_out.sha256,
        )
        return cls(options, seed, model, layout, calibration, held_out.batches, results)

    def score(self, methods: Mapping[str, str]) -> Scores:
        """Importance by the calibration rows."""
        options = ScoreOptions(methods, depth_samples=self.options.depth_samples, seed=self.seed)
        return score_model(self.model, self.layout, self.calibration.batches, options, progress=True)

    def measure(self, order: str, scores: Scores | None, cuts: Sequence[Cut]) -> None:
        """Held-out loss of cuts from a copy in the order of ``scores``; None leaves members as they lie."""
        missing = [cut for cut in cuts if not self.results.has(order, cut)]
        if not missing:
            return
        model = copy.deepcopy(self.model)
        if scores is not None:
            sort_model(model, self.layout, orders_of(scores, self.layout))
        elastic = ElasticModel(model, ElasticConfig(family=self.layout.family))
        for cut in missing:
            began = time.process_time()
            [loss] = measure_losses(elastic, [cut.submodel], self.held_out, label=order)
            self.results.add(order, cut, loss, self.layout, time.process_time() - began)


@dataclass(frozen=True)
class Cut:
    """A nested model; ``axis`` is what is cut, ``share`` the aim, ``note`` tells apart what has both in common."""

    axis: str
    share: float
    submodel: Submodel
    note: str = ""


class Results:
    """A JSON file of losses, written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"losses": []}

    def about(self, **facts: Any) -> None:
        """Say what is measured; a file of something else is refused."""
        if self.content.setdefault("about", facts) != facts:
            raise SystemExit(f"{self.path} holds results of something else: remove it, or give another folder")

    def note(self, name: str, value: Any) -> None:
        """Keep a fact beside the losses."""
        self.content[name] = value

    def has(self, order: str, cut: Cut) -> bool:
        """Whether this loss is known."""
        return any(_key(one) == (order, cut.axis, cut.share, cut.note) for one in self.content["losses"])

    def add(self, order: str, cut: Cut, loss: float, layout: Layout, seconds: float) -> None:
        """Record a loss."""
        widths, layers = cut.submodel.widths, cut.submodel.layers
        entry = {
            "order": order,
            "axis": cut.axis,
            "share": cut.share,
            "note": cut.note,
            "widths": widths,
            "layers": layers,
            "params": int(cost.params(layout, widths, layers)),
            "active_params": int(cost.active_params(layout, widths, layers)),
            "loss": loss,
            "cpu_s": round(seconds, 2),
        }
        self.content["losses"].append(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(f".{self.path.name}.partial")
        fresh.write_text(json.dumps(self.content, indent=1) + "\n")
        fresh.replace(self.path)
        print(
            f"{self.path.stem}  {order:12} {cut.axis:16} {cut.share:<5} {cut.note:10} {loss:.4f}  {seconds:.1f} s",
            flush=True,
        )


def _key(entry: Mapping[str, Any]) -> tuple[str, str, float, str]:
    return entry["order"], entry["axis"], entry["share"], entry["note"]


def rows_of(options: argparse.Namespace, seed: int) -> tuple[Calibration, Calibration]:
    """Calibration rows and held-out rows of a seed."""
    tokenizer = load_tokenizer(options.parent)
    rows = {"seq_len": options.seq_len, "batch_size": options.batch_size, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        known: Path | DataRecipe
        fresh: Path | DataRecipe
        if options.data == "library":
            known, fresh = write_library(Path(folder))
        else:
            known, fresh = mixture(Path(options.data)), mixture(Path(options.data), HELD_OUT_ROWS, HELD_OUT_TEXT)
        calibration = calibration_batches(known, tokenizer, samples=options.samples, **rows)
        return calibration, held_out_batches(fresh, tokenizer, tokens=HELD_OUT_TOKENS, **rows)


def write_library(folder: Path) -> tuple[Path, Path]:
    """Python's standard library in pieces, as two JSON-lines files: of every second module, and of the others."""
    paths = folder / "calibration.jsonl", folder / "held-out.jsonl"
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for number, path in enumerate(paths):
        with path.open("w", encoding="utf-8") as file:
            for module in modules[number::2]:
                text = module.read_text(encoding="utf-8", errors="ignore")
                for start in range(0, len(text), PIECE):
                    file.write(json.dumps({"text": text[start : start + PIECE]}) + "\n")
    return paths


def run_orders(job: Job) -> None:
    """Every cut in four orders."""
    job.measure("unsorted", None, [Cut("none", 1.0, Submodel())])
    alone = job.options.axes if job.options.axes is not None else list(job.layout.axes)
    scores = job.score({} if "depth" in alone else {"depth": "none"})
    layers = layer_orders(job, scores) if "depth" in alone else {}
    ranked = width_orders(scores, job.seed)
    for order in ranked:
        cuts = [cut for axis in alone if axis != "depth" for cut in axis_cuts(job.layout, axis)]
        job.measure(order, ranked[order], cuts + (depth_cuts(job.layout, layers[order]) if layers else []))
    for order in ranked:
        job.measure(order, ranked[order], [together(job.layout, share, "active_params") for share in SHARES])


def width_orders(scores: Scores, seed: int) -> dict[str, Scores | None]:
    """Scores that put members in each order."""
    generator = torch.Generator().manual_seed(seed)
    chance = {key: torch.rand(len(one), generator=generator) for key, one in scores.tensors.items()}
    against = {key: -one for key, one in scores.tensors.items()}
    return {
        "sorted": scores,
        "unsorted": None,
        "random": replace(scores, tensors=chance),
        "reverse": replace(scores, tensors=against),
    }


def layer_orders(job: Job, scores: Scores) -> dict[str, list[int]]:
    """Layers from first kept to last kept, in each order; every kind that the model needs is among the first."""
    best = list(scores.depth_order or ())
    shuffled = random.Random(job.seed).sample(best, len(best))
    orders = {"sorted": best, "unsorted": sorted(best), "random": shuffled, "reverse": best[::-1]}
    return {
        name: depth_order({layer: -place for place, layer in enumerate(order)}, job.layout)
        for name, order in orders.items()
    }


def axis_cuts(layout: Layout, name: str) -> list[Cut]:
    """One axis at the legal widths nearest to each share, the others whole."""
    return [
        Cut(name, share, Submodel(widths={name: width}))
        for share in SHARES
        if (width := nearest_width(layout, name, share)) < layout.axes[name].size
    ]


def nearest_width(layout: Layout, name: str, share: float, beside: Mapping[str, int] | None = None) -> int:
    """The legal width nearest to a share of the parent's that fits beside other widths."""
    axis, others = layout.axes[name], beside or {}
    legal = [width for width in axis.legal() if layout.fits({**others, name: width})]
    return min(legal, key=lambda width: abs(width - share * axis.size))


def depth_cuts(layout: Layout, order: Sequence[int]) -> list[Cut]:
    """The first layers of an order."""
    counts = {share: round(share * layout.num_layers) for share in SHARES}
    return [Cut("depth", share, keep(order, count)) for share, count in counts.items() if count < layout.num_layers]


def keep(order: Sequence[int], count: int) -> Submodel:
    """The nested model of the first layers of an order."""
    return Submodel(layers=tuple(sorted(order[:count])))


def together(layout: Layout, share: float, kind: str, axes: Sequence[str] | None = None) -> Cut:
    """Width axes all cut by the same factor, so that what is left is nearest to a share of the parameters of a ``kind``."""
    count = {"params": cost.params, "active_params": cost.active_params}[kind]
    names = list(layout.width_axes if axes is None else axes)
    aim = share * float(count(layout, {}))
    found = []
    for factor in torch.linspace(0.3, 1.0, 141).tolist():
        widths: dict[str, int] = {}
        for name in sorted(names, key=lambda name: name == "hidden"):  # the finest axis last: it adapts to the others
            widths[name] = nearest_width(layout, name, factor, widths)
        found.append(widths)
    best = min(found, key=lambda widths: abs(float(count(layout, widths)) - aim))
    return Cut("together" if axes is None else "+".join(names), share, Submodel(widths=best))


def run_experts(job: Job) -> None:
    """Routed experts cut in the order of each way to rank them, and of REAP backwards."""
    axis = job.layout.axes["experts"]
    cuts = [
        Cut("experts", round(width / axis.size, 3), Submodel(widths={"experts": width})) for width in axis.legal()[:-1]
    ]
    job.measure("unsorted", None, [Cut("none", 1.0, Submodel())])
    found = {}
    for method in EXPERT_METHODS:
        scores = found[method] = job.score({"experts": method, "depth": "none"})
        experts = {key: one.tolist() for key, one in scores.tensors.items() if key.endswith(".experts")}
        job.results.note(f"scores_{method}", experts)
        job.measure(method, scores, cuts)
    job.measure("reap_reverse", width_orders(found["reap"], job.seed)["reverse"], cuts)


def run_depth(job: Job) -> None:
    """Layers removed by each way to rank them, against widths cut to as many parameters."""
    job.measure("unsorted", None, [Cut("none", 1.0, Submodel())])
    whole = float(cost.params(job.layout, {}))
    for method in job.options.depth_methods:
        scores = job.score({"depth": method})
        order = list(scores.depth_order or ())
        for share in job.options.depth_shares:
            kept = min(
                range(1, len(order)), key=lambda n: abs(cost.params(job.layout, {}, sorted(order[:n])) - share * whole)
            )
            layers = keep(order, kept)
            left = float(cost.params(job.layout, {}, layers.layers)) / whole
            job.measure(f"depth_{method}", scores, [Cut("depth", share, layers)])
            widths = [cut for axes in width_sets(job.layout) if (cut := together(job.layout, left, "params", axes))]
            job.measure("sorted", scores, [replace(cut, share=share, note="as " + method) for cut in widths])


def width_sets(layout: Layout) -> list[list[str]]:
    """Sets of axes that are cut instead of layers: those of the published family, and its parts."""
    inner = [name for name in ("ffn", "expert_ffn", "shared_ffn") if name in layout.axes]
    return [["hidden", *inner], inner, ["hidden"]]


def run_criteria(job: Job) -> None:
    """Every way to rank each axis of channels or heads, against many random orders."""
    job.measure("unsorted", None, [Cut("none", 1.0, Submodel())])
    listed = job.options.axes or [axis for axis in job.layout.width_axes if axis != "experts"]
    for axis in listed:
        cuts = axis_cuts(job.layout, axis)
        job.measure("unsorted", None, cuts if job.options.random_orders else [])
        wanted = job.options.criteria or methods_for(axis)
        for method in (name for name in methods_for(axis) if name != "random" and name in wanted):
            scores = job.score({"depth": "none", axis: method})
            job.measure(method, scores, cuts)
        for number in range(job.options.random_orders):
            generator = torch.Generator().manual_seed(1000 * job.seed + number)
            chance = {key: torch.rand(len(one), generator=generator) for key, one in scores.tensors.items()}
            job.measure(f"random {number}", replace(scores, tensors=chance), cuts)


EXPERIMENTS = {"orders": run_orders, "experts": run_experts, "depth": run_depth, "criteria": run_criteria}


if __name__ == "__main__":
    main()
