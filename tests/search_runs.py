"""Small runs that learn widths, for several test files."""

from __future__ import annotations

import yaml
from tiny import tiny_folder

from star_elastic.demo.tokenizer import write_tokenizer

# Five steps teach a router nothing: every choice is inside.
LENIENT = ("router.tolerance=0.9", "budgets.small={params: 0.6}")


def search_parent(folder):
    """A parent without Mamba layers, which are slow here."""
    tiny_folder(folder, pattern="E*", vocab_size=288)
    write_tokenizer(folder)
    return folder


def search_content(parent, folder):
    """A recipe of 5 search steps and 5 settle steps with longer rows; two of three budgets learn from each search step."""
    (folder / "text.txt").write_text("\n\n".join(f"Paragraph {n} is some text to read." for n in range(60)))
    return {
        "parent": str(parent),
        "output": str(folder / "out"),
        "budgets": {"full": {"params": 1.0}, "mid": {"params": 0.75}, "small": {"params": "50%"}},
        "router": {"axes": {"hidden": [1, 0.75, 0.5], "expert_ffn": [1, 0.5]}},
        "stages": [
            {"phase": "search", "steps": 5, "budgets_per_step": 2},
            {
                "phase": "settle",
                "steps": 5,
                "sequence_length": 24,
                "probabilities": {"full": 0.5, "mid": 0.3, "small": 0.2},
            },
        ],
        "data": {
            "packing": "apart",
            "sources": [{"path": str(folder / "text.txt"), "sample_by": "paragraph"}],
            "shuffle_tokens": 128,
        },
        "sequence_length": 16,
        "batch_size": 2,
        "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 1},
        "activation_checkpointing": False,
        "precision": "fp32",
        "kl_chunk_tokens": 64,
        "device": "cpu",
    }


def write_recipe(content, folder):
    """The recipe as a file."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path
