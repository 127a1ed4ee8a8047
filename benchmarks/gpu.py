"""What needs a GPU to be seen: masks against slices in bf16, with and without fused Mamba kernels, and times of each size.

    python benchmarks/gpu.py [--hidden 2048 --layers MEMEM*EME --tokens 4096 --device cuda]

Per nested size: the largest difference between the hard-masked and the sliced model in bf16, relative to the largest logit, over
tokens whose experts agree (one swapped expert is another function, not an error), in evaluation (plain modules) and in training
mode (fused kernels where they are installed); whether ``generate`` on views gives the exported slice's tokens; milliseconds
of a forward and of a training step. Runs on a CPU too, where it only shows that it runs. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
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
from star_elastic.masks import hard_masks

KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def main() -> None:
    """Build a random parent in bf16, measure every size, print."""
    options = read_options()
    torch.manual_seed(0)
    parent = NemotronHForCausalLM(config_of(options))
    for name, parameter in parent.named_parameters():
        if "norm" in name:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "parent"
        parent.to(torch.bfloat16).save_pretrained(source)
        elastic = ElasticModel.from_pretrained(source, dtype=torch.bfloat16).to(options.device)
        rows = [measure(elastic, source, name, submodel, options) for name, submodel in submodels(options).items()]
    kernels = [name for name in ("mamba_ssm", "causal_conv1d") if importlib.util.find_spec(name)]
    facts = {"device": options.device, "kernels": kernels, "parameters": sum(p.numel() for p in parent.parameters())}
    show(rows, ", ".join(f"{name} {value}" for name, value in facts.items()))
    print(json.dumps({"benchmark": "gpu", **facts, "rows": rows}))


def read_options() -> argparse.Namespace:
    """Sizes of the parent and of the batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", default="MEMEM*EME")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def config_of(options: argparse.Namespace) -> NemotronHConfig:
    """A parent with the proportions of Nemotron 3 Nano."""
    hidden = options.hidden
    return NemotronHConfig(
        vocab_size=options.vocab,
        hidden_size=hidden,
        layers_block_type=[KINDS[letter] for letter in options.layers],
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        mamba_num_heads=hidden // 32,
        mamba_head_dim=64,
        n_groups=2,
        ssm_state_size=128,
        n_routed_experts=options.experts,
        num_experts_per_tok=min(6, options.experts // 2),
        moe_intermediate_size=hidden // 2,
        moe_shared_expert_intermediate_size=hidden,
        routed_scaling_factor=2.5,
        max_position_embeddings=options.tokens,
    )


def submodels(options: argparse.Namespace) -> dict[str, Submodel]:
    """The whole, the published kind of cut, and one that cuts heads too."""
    hidden = options.hidden
    return {
        "full": Submodel(),
        "hidden": Submodel(widths={"hidden": hidden * 3 // 4}),
        "published": Submodel(widths={"hidden": hidden * 3 // 4, "expert_ffn": hidden // 4}),
        "heads": Submodel(widths={"hidden": hidden * 3 // 4, "mamba_heads": hidden // 64, "heads": hidden // 128}),
    }


def measure(
    elastic: ElasticModel, source: Path, name: str, submodel: Submodel, options: argparse.Namespace
) -> dict[str, Any]:
    """All numbers of one size."""
    elastic.add(name, submodel)
    ids = torch.randint(3, options.vocab, (1, options.tokens), device=options.device)
    exported = source.with_name(name)
    slice_checkpoint(source, exported, submodel, progress=False)
    child = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16).to(options.device).eval()
    prompt = ids[:, :16]
    view = elastic.submodel(name)
    written = [m.generate(prompt, max_new_tokens=16, do_sample=False).tolist() for m in (view, child)]
    return {
        "size": name,
        "eval_difference": difference(elastic.eval(), name, ids),
        "train_difference": difference(elastic.train(), name, ids),
        "same_tokens": written[0] == written[1],
        "forward_ms": milliseconds(lambda: forward(elastic, name, ids), options),
        "step_ms": milliseconds(lambda: step(elastic, name, ids), options),
    }


@torch.no_grad()
def difference(elastic: ElasticModel, name: str, ids: torch.Tensor) -> float:
    """Largest |masked - sliced| logit over the largest logit, among tokens with equal routing in all layers."""
    with elastic.at(name):
        sliced = elastic(ids, use_cache=False, output_router_logits=True)
    with elastic.masked(hard_masks(elastic.layout, elastic.config.get(name), ids.device)):
        masked = elastic(ids, use_cache=False, output_router_logits=True)
    same = torch.ones(ids.shape[1], dtype=torch.bool, device=ids.device)
    top_k = elastic.model.config.num_experts_per_tok
    for one, other in zip(sliced.router_logits, masked.router_logits, strict=True):
        chosen = [logits.topk(top_k, dim=-1).indices.sort(dim=-1).values for logits in (one, other)]
        # A token may only be compared while everything before it was routed equally: its state has seen all of that.
        same &= (chosen[0] == chosen[1]).all(dim=-1).cummin(0).values
    gap = (masked.logits - sliced.logits)[:, same].abs()
    return (gap.max() / sliced.logits.abs().max()).item() if same.any() else float("nan")


@torch.no_grad()
def forward(elastic: ElasticModel, name: str, ids: torch.Tensor) -> None:
    """One forward pass."""
    elastic(ids, submodel=name, use_cache=False)


def step(elastic: ElasticModel, name: str, ids: torch.Tensor) -> None:
    """Forward and backward."""
    elastic(ids, labels=ids, submodel=name, use_cache=False).loss.backward()
    elastic.zero_grad(set_to_none=True)


def milliseconds(work: Callable[[], None], options: argparse.Namespace) -> float:
    """Median time of ``work`` after one warm-up."""
    times = []
    for number in range(options.rounds + 1):
        if options.device.startswith("cuda"):
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if options.device.startswith("cuda"):
            torch.cuda.synchronize()
        times += [time.perf_counter() - begin] if number else []
    return sorted(times)[len(times) // 2] * 1000


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The table."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
