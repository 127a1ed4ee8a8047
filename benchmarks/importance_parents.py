"""Trains the parents that benchmarks/importance.py cuts: the demo's, from several seeds, and one with many experts.

    python benchmarks/importance_parents.py OUT --seeds 0 1 2 [--kinds demo uneven balanced] [--steps 600]

``OUT/data`` holds the demo's data, ``OUT/demo-0`` is the parent of ``star-elastic demo``, ``OUT/demo-1`` the same from
another seed. ``uneven`` and ``balanced`` are made such that experts matter: fewer mixers beside them, 16 experts of which two
serve a token, and a shared expert too small to carry a layer alone. transformers never moves the router's selection bias, so
the load of ``uneven`` is uneven; ``balanced`` differs only in that every step moves the bias of each expert against its load.
A folder that exists is not trained again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import NemotronHForCausalLM

from star_elastic.checkpoint import target_folder
from star_elastic.demo.pretrain import parent_config, pretrain, train_parent
from star_elastic.demo.settings import FULL, Settings
from star_elastic.demo.task import write_data
from star_elastic.demo.tokenizer import write_tokenizer
from star_elastic.train.documents import load_tokenizer

PATTERN = "ME*E"
EXPERTS = {"n_routed_experts": 16, "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 16}
BIAS_STEP = 0.01


def main() -> None:
    """Write the data, train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--steps", type=int, default=FULL.parent_steps)
    options = parser.parse_args()
    data = options.out / "data"
    if not data.exists():
        with target_folder(data) as made:
            write_data(made, rows=FULL.rows, text_chars=FULL.text_chars, held_out=FULL.held_out, seed=FULL.seed)
            write_tokenizer(made / "tokenizer")
    for kind in options.kinds:
        for seed in options.seeds:
            folder = options.out / f"{kind}-{seed}"
            if not folder.exists():
                settings = replace(FULL, seed=seed, parent_steps=options.steps)
                KINDS[kind](folder, data, settings)


def train_demo(out: Path, data: Path, settings: Settings) -> None:
    """The demo's parent."""
    train_parent(out, data, settings, progress=True)


def train_experts(out: Path, data: Path, settings: Settings, *, balance: bool = False) -> None:
    """The same data, length and rates for a parent in which experts carry more."""
    tokenizer = load_tokenizer(data / "tokenizer")
    torch.manual_seed(settings.seed)
    config = parent_config(replace(settings, pattern=PATTERN), len(tokenizer))
    for name, value in EXPERTS.items():
        setattr(config, name, value)
    model = NemotronHForCausalLM(config).train()
    routers = [layer.mixer.gate for layer in model.model.layers if hasattr(layer.mixer, "gate")] if balance else []
    for router in routers:
        router.register_forward_hook(level)
    pretrain(model, data, tokenizer, settings, progress=True)
    with target_folder(out, data) as folder:
        model.eval().save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@torch.no_grad()
def level(router: Any, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Move the selection bias of each expert one step against its load. chosen: (tokens, k)."""
    _, _, chosen = output
    load = torch.bincount(chosen.flatten(), minlength=router.num_experts).float()
    router.e_score_correction_bias += BIAS_STEP * (load.mean() - load).sign()


KINDS: dict[str, Callable[[Path, Path, Settings], None]] = {
    "demo": train_demo,
    "uneven": train_experts,
    "balanced": partial(train_experts, balance=True),
}


if __name__ == "__main__":
    main()
