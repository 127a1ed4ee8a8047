"""Slices in llama.cpp: its own converter takes them, and it writes the tokens that transformers writes. ``make test-engines``.

``LLAMA_CPP`` names llama.cpp's folder, ``XLLAMACPP_PYTHON`` a Python that has xllamacpp, and ``ELASTIC_FOLDER`` a trained elastic
checkpoint; without the last the quick demo trains one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from greedy import NEW_TOKENS, greedy, moved_by_bf16, run_engine
from models import PROMPTS, task_prompts, tiny_slice

from star_elastic import slice_checkpoint
from star_elastic.demo import run_demo
from star_elastic.export import export_gguf
from star_elastic.submodel import ElasticConfig

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not {"LLAMA_CPP", "XLLAMACPP_PYTHON"} <= os.environ.keys(), reason="LLAMA_CPP and XLLAMACPP_PYTHON are not set"
    ),
]
CONVERTER = Path(__file__).with_name("convert.py")
EOS = 2  # llama.cpp goes on after the end by never taking its token
SIZES = ("full", "mid", "small")


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained elastic checkpoint."""
    if "ELASTIC_FOLDER" in os.environ:
        return Path(os.environ["ELASTIC_FOLDER"])
    out = tmp_path_factory.mktemp("demo") / "out"
    run_demo(out, quick=True, progress=False)
    return out / "elastic"


def compare(folder: Path, kind: str, scratch: Path, prompts: list[list[int]]) -> list[int]:
    """Convert and compare; how many tokens of each prompt's answer were compared, and equal."""
    file = export_gguf(folder, scratch / f"{kind}.gguf", kind=kind, converter=CONVERTER)
    found = run_engine(os.environ["XLLAMACPP_PYTHON"], "run_llama.py", file, prompts, scratch)
    wanted = greedy(folder, prompts, never=[EOS])
    counts = [NEW_TOKENS] * len(prompts)
    if kind == "BF16":
        moved = moved_by_bf16(folder, prompts, wanted)
        counts = [answer.until_near_tie(by) for answer, by in zip(wanted, moved, strict=True)]
    for tokens, answer, count in zip(found, wanted, counts, strict=True):
        assert tokens[:count] == answer.tokens[:count]
    print(f"{folder.name} {kind}: {counts} tokens compared and equal")
    return counts


@pytest.mark.parametrize("size", SIZES)
def test_slices_of_a_trained_family(size: str, elastic: Path, tmp_path: Path) -> None:
    slice_checkpoint(elastic, tmp_path / size, ElasticConfig.load(elastic).get(size))
    prompts = [*PROMPTS, *task_prompts(tmp_path / size)]
    assert compare(tmp_path / size, "F32", tmp_path, prompts) == [NEW_TOKENS] * len(prompts)


@pytest.mark.parametrize("size", SIZES)
def test_bf16_slices_of_a_trained_family(size: str, elastic: Path, tmp_path: Path) -> None:
    """Up to the first token of which BF16 itself leaves the choice open; of each question some are compared."""
    slice_checkpoint(elastic, tmp_path / size, ElasticConfig.load(elastic).get(size))
    questions = task_prompts(tmp_path / size)
    counts = compare(tmp_path / size, "BF16", tmp_path, [*questions, *PROMPTS])
    assert all(count > 0 for count in counts[: len(questions)])


@pytest.mark.parametrize("name", ["nemotron_h", "llama", "qwen3", "qwen3_moe", "mixtral"])
def test_slices_of_every_family(name: str, tmp_path: Path) -> None:
    assert compare(tiny_slice(name, tmp_path), "F32", tmp_path, PROMPTS) == [NEW_TOKENS] * len(PROMPTS)
