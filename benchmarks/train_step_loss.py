"""Peak memory and time of the chunked divergence against the plain one; a part of ``train_step.py``."""

from __future__ import annotations

import argparse
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import interleaved, ratio_row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from star_elastic.train.distill import chunked_kl

CHUNKS = (1024, 256)  # tokens; the first is the recipe's default
ROUNDS, LIMIT = 5, 20.0

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(student states [N, D], student head [V, D], teacher states, teacher head) -> mean divergence."""


def compare_losses(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and backward of both losses in fp32, gradients of states and head included."""
    generator = torch.Generator().manual_seed(0)
    shapes = 2 * [(options.tokens, options.hidden), (options.loss_vocab, options.hidden)]
    inputs = [torch.randn(shape, generator=generator) * options.hidden**-0.25 for shape in shapes]
    losses: dict[str, Loss] = {"plain": plain_kl}
    losses |= {f"chunks of {size}": functools.partial(chunked, size) for size in CHUNKS}
    peaks = {name: peak_bytes(loss, inputs) for name, loss in losses.items()}
    sides = {name: functools.partial(backward, loss, inputs) for name, loss in losses.items()}
    taken = interleaved(sides, min(options.rounds, ROUNDS), LIMIT, options.clock)
    rows: list[dict[str, Any]] = []
    for name in list(losses)[1:]:
        against = f"plain loss, vocabulary {options.loss_vocab}"
        rows += [
            {
                "what": f"{name}: peak memory",
                "against": against,
                "ratio": round(peaks[name] / peaks["plain"], 3),
                "ours": round(peaks[name] / 2**20, 1),
                "other": round(peaks["plain"] / 2**20, 1),
                "unit": "MiB",
            },
            ratio_row(taken[name], taken["plain"], what=f"{name}: time", against=against),
        ]
    return rows


def plain_kl(student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor) -> Tensor:
    """The loss as one would write it: all logits at once."""
    with torch.no_grad():
        wanted = (teacher @ teacher_head.T).log_softmax(dim=-1)
    return F.kl_div((student @ student_head.T).log_softmax(dim=-1), wanted, reduction="batchmean", log_target=True)


def chunked(chunk_tokens: int, student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor) -> Tensor:
    """The trainer's loss, on one row of tokens."""
    return chunked_kl(student[None], student_head, teacher[None], teacher_head, None, chunk_tokens)


def backward(loss: Loss, inputs: list[Tensor]) -> None:
    """One forward and backward; gradients reach the student's states and head."""
    student = [tensor.detach().requires_grad_() for tensor in inputs[:2]]
    loss(*student, *inputs[2:]).backward()


def peak_bytes(loss: Loss, inputs: list[Tensor]) -> int:
    """The most bytes that a forward and backward holds beyond its inputs."""
    with LiveBytes(inputs) as live:
        backward(loss, inputs)
    return live.peak


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of the storages that operators make while it is on, views and ``known`` tensors left out."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = [tensor.untyped_storage() for tensor in known]
        self._sizes = {storage._cdata: 0 for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
