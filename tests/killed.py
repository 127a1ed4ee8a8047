"""Killing a command of the command line in the middle of its writing, and what a second run writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from star_elastic.checkpoint import TensorCut
from star_elastic.cli import main

SRC = Path(__file__).parents[1] / "src"

SLOW = """
import sys, time
from star_elastic import cli
from star_elastic.checkpoint import TensorCut, onepass

onepass.UNIT_BYTES, onepass.SYNC_SECONDS = 1, 0.0
original, count = TensorCut.blocks, 0

def blocks(self):
    global count
    count += 1
    if count == int(sys.argv[1]):
        print("writing", flush=True)
        time.sleep(60)
    return original(self)

TensorCut.blocks = blocks
sys.exit(cli.main(sys.argv[2:]))
"""


def kill_in_mid_write(words: list[str], before: int) -> None:
    """Kill a command just before it writes its tensor number ``before``, counted from 1; every earlier one is in the journal."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(before), *words],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any(line == "writing\n" for line in process.stdout)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def written_again(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the same command here; return the names of the tensors that are written."""
    written: list[str] = []
    original = TensorCut.blocks

    def blocks(self: TensorCut):  # type: ignore[no-untyped-def]
        written.append(self.name)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(TensorCut, "blocks", blocks)
        deadline = time.monotonic() + 5
        while main(words) != 0:  # the kernel drops the lock of a killed process a moment later
            assert time.monotonic() < deadline
    return written


def tensors_in(folder: Path) -> int:
    """Number of tensors in all safetensors files below a folder."""
    return sum(len(json.loads(_header(path))) - 1 for path in folder.rglob("*.safetensors"))


def _header(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]
