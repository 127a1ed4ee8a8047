"""The processes of a run. One process alone is the default, and then nothing here touches ``torch.distributed``.

Decisions that all processes must share (which budget, which noise, when to stop) are computed by each from the same state, or
taken from one and told to the others here. What is told travels as text or tensors, never as pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from star_elastic.errors import ElasticError, StoppedElsewhere

PATIENCE = timedelta(hours=1)  # how long processes wait for one that reads or writes a large checkpoint


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        local_rank: Number of this process on its machine, from 0.
        local_size: Number of processes on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """This process in the group that ``torch.distributed`` has; alone where it has none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank, local_size = (int(os.environ.get(name, -1)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        return cls(rank, size, rank if local_rank < 0 else local_rank, size if local_size < 1 else local_size)

    @property
    def is_main(self) -> bool:
        """Whether this process prints, logs and writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(()))  # a barrier of NCCL would take the GPU; this is the CPU's group

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block on one process of each machine after the other, for work that takes much of the machine's memory."""
        turns = self.largest(self.local_size)
        for _ in range(self.local_rank):
            self.barrier()
        try:
            yield
        finally:
            for _ in range(self.local_rank, turns):
                self.barrier()

    def largest(self, value: int) -> int:
        """The largest of the processes' values."""
        if self.size == 1:
            return value
        told = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return int(told)

    @torch.no_grad()
    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its mean over the processes, which is bitwise the same on all; one message per dtype.

        All processes give tensors of the same shapes in the same order.
        """
        tensors = list(tensors) if self.size > 1 else []
        for kind in sorted({(str(tensor.device), str(tensor.dtype)) for tensor in tensors}):
            group = [tensor for tensor in tensors if (str(tensor.device), str(tensor.dtype)) == kind]
            flat = torch.cat([tensor.flatten() for tensor in group])
            dist.all_reduce(flat)
            flat /= self.size
            for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, text: str) -> list[str]:
        """The processes' texts, in order of rank."""
        if self.size == 1:
            return [text]
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor(len(own)))
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        padded[: len(own)] = own
        texts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded)
        return [bytes(text[: int(size)].tolist()).decode() for text, size in zip(texts, sizes, strict=True)]

    def from_main(self, value: Any) -> Any:
        """The main process's value, which is JSON-ready; those of the others do not count."""
        return value if self.size == 1 else json.loads(self.gather(json.dumps(value) if self.is_main else "")[0])

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run a block that may fail: where it does on one process, all end, and the main one tells a mistake of the user.

        The block itself must not let the processes talk to each other.

        Raises:
            ElasticError: on the main process, what it or the first other process found.
            StoppedElsewhere: on the others.
            Exception: where a process met anything else, there.
        """
        found: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            found = error
        told = [text for text in self.gather("" if found is None else str(found) or type(found).__name__) if text]
        if not told:
            return
        if found is not None and (self.is_main or not isinstance(found, ElasticError)):
            raise found
        raise ElasticError(told[0]) if self.is_main else StoppedElsewhere(told[0])

    def same(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Raise RuntimeError unless all processes hold the same numbers, bit for bit: then they no longer train one model."""
        if self.size == 1:
            return
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        if len(set(self.gather(digest.hexdigest()))) > 1:
            raise RuntimeError(f"internal error: the processes hold different {what}")


ALONE = Ranks()


def check_alone(command: str) -> None:
    """Refuse to run a command that knows nothing of other processes in several of them: each would write the same files.

    Raises:
        ElasticError: in the first of the processes that ``torchrun`` has started.
        StoppedElsewhere: in the others.
    """
    if (size := _started()) <= 1:
        return
    told = f"{command} is one process, and {size} were started (WORLD_SIZE): run it without torchrun"
    raise ElasticError(told) if os.environ.get("RANK", "0") == "0" else StoppedElsewhere(told)


def _started() -> int:
    """How many processes a launcher says that it has started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` has started, for the length of the block; without it, this process is alone.

    A group that the caller has made is used as it is, and left. On processes other than the main one a mistake of the user
    becomes ``StoppedElsewhere``, so that it is told once.
    """
    own = _started() > 1 and "RANK" in os.environ and not dist.is_initialized()
    if own:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    ranks = Ranks.here()
    try:
        yield ranks
    except ElasticError as error:
        if ranks.is_main:
            raise
        raise StoppedElsewhere(str(error)) from None
    finally:
        if own:
            dist.destroy_process_group()
