"""Rows, batches and comparisons that the tests of scoring share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bytes_tokenizer import write_tokenizer
from slow_scores import Rows
from tiny import tiny_folder, tokens

from star_elastic.families import layout_of
from star_elastic.score import ScoreOptions, Scores, score_model

NO_DEPTH = {"depth": "none"}


def score(model: Any, batches: list[dict[str, torch.Tensor]], **options: Any) -> Scores:
    """Score in memory; layers are left out unless ``methods`` says how."""
    return score_model(model, layout_of(model.config.to_dict()), batches, ScoreOptions(**{"methods": NO_DEPTH, **options}))


def padded(rows: Rows, side: str, batch_size: int = 2, junk: int = 5) -> list[dict[str, torch.Tensor]]:
    """Batches of rows filled up with a real token id on either side: only the mask says what is padding."""
    batches = []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        longest = max(map(len, part))
        fill = [[junk] * (longest - len(row)) for row in part]
        gap = [[0] * len(f) for f in fill]
        real = [[1] * len(row) for row in part]
        ids, mask = (joined(fill, part), joined(gap, real)) if side == "left" else (joined(part, fill), joined(real, gap))
        batches.append({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)})
    return batches


def joined(first: Rows, second: Rows) -> Rows:
    return [a + b for a, b in zip(first, second, strict=True)]


def random_rows(lengths: tuple[int, ...] = (24, 7, 19, 30, 11)) -> Rows:
    return [tokens(1, length, seed=length)[0].tolist() for length in lengths]


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        known = ~tensor.isnan()  # NaN stands for what was not measured: the package marks it by a negative number
        assert torch.allclose(found[key][known].double(), tensor[known].double(), rtol=rtol, atol=0), key
        assert (found[key][~known] < 0).all(), key


def scored_parent(path: Path) -> Path:
    """A model folder with a tokenizer of one token per byte (below 125)."""
    folder = tiny_folder(path, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    write_tokenizer(folder)
    return folder


def calibration_file(path: Path) -> Path:
    """Nine documents of growing length."""
    lines = [{"text": f"line {number}: {'abcdefgh' * (number + 1)}"} for number in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
