"""Several processes in a test: the same function in each, joined by gloo as ``torchrun`` would join them.

They are forked from a server that has imported the heavy modules once.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PATIENCE = 120  # seconds


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (minus the signal that killed it), and what it printed."""

    code: int
    out: str
    err: str


class Processes:
    """Processes that run ``function(*args)``; ``wait`` for them, or talk to them through ``all`` before."""

    def __init__(self, folder: Path, size: int, function: Callable[..., Any], *args: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "transformers", "tiny", "star_elastic.elastic", "star_elastic.train.loop"]
        )
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.all = [
            context.Process(target=_run, args=(folder, rank, size, port, function, args)) for rank in range(size)
        ]
        for process in self.all:
            process.start()

    def wait(self) -> list[Ended]:
        """Wait for the end of all; whoever is still running after two minutes is killed."""
        for process in self.all:
            process.join(PATIENCE)
        for process in self.all:
            if process.is_alive():
                process.kill()
                process.join()
        return [
            Ended(process.exitcode or 0, *((self._folder / f"{rank}.{name}").read_text() for name in ("out", "err")))
            for rank, process in enumerate(self.all)
        ]


def run(folder: Path, size: int, function: Callable[..., Any], *args: Any) -> list[Ended]:
    """Run a function in several processes, and see that all end well."""
    ended = Processes(folder, size, function, *args).wait()
    for process in ended:
        assert process.code == 0, process.err
    return ended


def _run(folder: Path, rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    torch.set_num_threads(1)
    world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        code = function(*args)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code or 0)
