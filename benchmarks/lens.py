"""What looking through a lens costs, as ratios of times measured side by side.

    python benchmarks/lens.py [--hidden 256 --pattern MEM*EME --tokens 1024 --rounds 15 ...]

Full width through ElasticModel against the bare transformers model (aim: at most 1.03), and each nested model, through the
lens and as a model on views, against its exported slice (aim: at most 1.05). The two sides of a ratio run in turn, so that a
busy machine slows both; the median of the rounds' ratios is reported with its quartiles. ``--clock cpu`` counts this process's
CPU seconds instead of wall time, for machines that others use too. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, NemotronHConfig, NemotronHForCausalLM

from star_elastic import ElasticModel, Submodel, slice_checkpoint

KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
FULL_AIM, SLICE_AIM = 1.03, 1.05


def main() -> None:
    """Build a random parent, time every pair, print."""
    options = read_options()
    torch.manual_seed(0)
    parent = NemotronHForCausalLM(config_of(options)).eval()
    ids = torch.randint(3, options.vocab, (options.batch, options.tokens // options.batch))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        parent.save_pretrained(Path(folder) / "parent")
        elastic = ElasticModel(copy.deepcopy(parent))
        rows += Pair(elastic, parent, ids, options).compare("full", "lens", FULL_AIM)
        for name, submodel in submodels(options).items():
            slice_checkpoint(Path(folder) / "parent", Path(folder) / name, submodel)
            exported = AutoModelForCausalLM.from_pretrained(Path(folder) / name)
            elastic.add(name, submodel)
            view = elastic.submodel(name)
            with elastic.at(name):
                rows += Pair(elastic, exported, ids, options).compare(name, "lens", SLICE_AIM)
            rows += Pair(view, exported, ids, options).compare(name, "views", SLICE_AIM)
    parameters = sum(parameter.numel() for parameter in parent.parameters())
    setting = {
        "parameters": parameters,
        "tokens": ids.numel(),
        "threads": torch.get_num_threads(),
        "clock": options.clock,
    }
    show(rows, ", ".join(f"{name} {value}" for name, value in setting.items()))
    print(json.dumps({"benchmark": "lens", **setting, "rows": rows}))


def read_options() -> argparse.Namespace:
    """Sizes of the parent and of the batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--pattern", default="MEM*EME", help="kinds of layer: M Mamba-2, E experts, * attention, - MLP")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--expert-width", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of one forward")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    return parser.parse_args()


def config_of(options: argparse.Namespace) -> NemotronHConfig:
    """A hybrid parent of the wanted size."""
    return NemotronHConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        layers_block_type=[KINDS[letter] for letter in options.pattern],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=options.hidden // 8,
        intermediate_size=2 * options.hidden,
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=options.hidden // 4,
        n_groups=2,
        chunk_size=32,
        n_routed_experts=options.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=options.expert_width,
        moe_shared_expert_intermediate_size=2 * options.hidden,
        use_cache=False,
    )


def submodels(options: argparse.Namespace) -> dict[str, Submodel]:
    """Two cuts that are all views, as in the published family, and one that has to gather."""

    def part(size: int, share: float) -> int:
        return int(size * share) // 16 * 16

    return {
        "hidden": Submodel(widths={"hidden": part(options.hidden, 0.75)}),
        "published": Submodel(
            widths={"hidden": part(options.hidden, 0.75), "expert_ffn": part(options.expert_width, 0.52)}
        ),
        "grouped": Submodel(widths={"hidden": part(options.hidden, 0.75), "heads": 4, "mamba_heads": 6}),
    }


def forward(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """One forward without gradients."""
    with torch.no_grad():
        model(ids, use_cache=False)


def step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """One forward and backward; gradients are made anew, as after ``zero_grad``."""
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, use_cache=False).loss.backward()


class Pair:
    """Two models to be timed in turn on the same token ids."""

    def __init__(
        self, ours: torch.nn.Module, other: torch.nn.Module, ids: torch.Tensor, options: argparse.Namespace
    ) -> None:
        self.models = (ours, other)
        self.ids = ids
        self.clock = CLOCKS[options.clock]
        self.rounds = options.rounds

    def seconds(self, run: Callable[..., None], swap: bool) -> tuple[float, float]:
        """Seconds of ours and of the other, one right after the other; ``swap`` starts with the other."""
        taken = [0.0, 0.0]
        for number in (1, 0) if swap else (0, 1):
            start = self.clock()
            run(self.models[number], self.ids)
            taken[number] = self.clock() - start
        return taken[0], taken[1]

    def compare(self, name: str, how: str, aim: float) -> list[dict[str, Any]]:
        """One row per pass; a model on views takes no gradient, so it has no backward."""
        passes = {"forward": forward, "step": step} if how == "lens" else {"forward": forward}
        return [
            self.row(run, {"submodel": name, "how": how, "pass": label, "aim": aim}) for label, run in passes.items()
        ]

    def row(self, run: Callable[..., None], labels: dict[str, Any]) -> dict[str, Any]:
        """The median ratio of one pass, its quartiles, and both sides' median milliseconds."""
        pairs = [self.seconds(run, swap=number % 2 == 1) for number in range(self.rounds + 2)][2:]
        low, middle, high = statistics.quantiles((one / two for one, two in pairs), n=4)
        ours, other = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
        return labels | {
            "ratio": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "ms": round(ours, 1),
            "other_ms": round(other, 1),
        }


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The table."""
    table = Table("submodel", "how", "pass", "ratio", "quartiles", "ms", "other ms", "aim", title=title)
    for row in rows:
        mark = "" if row["ratio"] <= row["aim"] else " missed"
        low, high = row["quartiles"]
        table.add_row(
            row["submodel"],
            row["how"],
            row["pass"],
            f"{row['ratio']:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{row['ms']:.1f}",
            f"{row['other_ms']:.1f}",
            f"{row['aim']}{mark}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
