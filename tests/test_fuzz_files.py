"""Damaged headers and JSON files: ``slice`` and ``inspect`` end with one line and exit code 2, or work on what the files now say.

Never a traceback, a partial target, a hang or a giant allocation. What a source means after an edit is told by the safetensors
library, which reads it by itself.
"""

from __future__ import annotations

import io
import json
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized import quantized_folder
from safetensors import safe_open
from tiny import FAMILIES, tiny_folder
from torch import Tensor

from star_elastic.cli import main
from star_elastic.errors import ElasticError
from star_elastic.families import FAMILIES as FAMILIES_HERE
from star_elastic.submodel import ElasticConfig, Submodel

FAST = settings(
    max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(FAST, max_examples=150, derandomize=False, print_blob=True)
SECONDS, MOST_BYTES = 20, 2**30  # of the processor; beyond what the process has already
HEADER, INDEX = "model-00001-of-", "model.safetensors.index.json"
FILES = {
    "header": ("bf16", HEADER),
    "header of a quantized file": ("nvfp4", "model.safetensors"),
    "index": ("bf16", INDEX),
    "config": ("bf16", "config.json"),
    "config of a quantized model": ("nvfp4", "config.json"),
    **{f"config of a {family}": (family, "config.json") for family in FAMILIES if family != "nemotron_h"},
    "elastic": ("bf16", "elastic.json"),
    "quantization": ("nvfp4", "hf_quant_config.json"),
}
# Cuts of the first so many along every dimension: no groups are cut.
SMALL = {
    "bf16": Submodel(widths={"hidden": 48, "expert_ffn": 16, "experts": 6}, layers=(0, 1, 2, 3, 4)),
    "nvfp4": Submodel(widths={"hidden": 48, "expert_ffn": 32}),
    "llama": Submodel(widths={"hidden": 48, "ffn": 16}),
    "qwen3": Submodel(widths={"hidden": 48}, layers=(0, 1, 2)),
    "qwen3_moe": Submodel(widths={"hidden": 48, "expert_ffn": 16}),
    "mixtral": Submodel(widths={"experts": 6, "expert_ffn": 16}),
    "granitemoehybrid": Submodel(widths={"experts": 6}),
}


@cache
def work() -> Path:
    """Where the parents lie."""
    return Path(tempfile.mkdtemp(prefix="star-elastic-fuzz-"))


@cache
def parent(kind: str) -> Path:
    """A folder with elastic.json: unquantized in shards, quantized, or of another family."""
    folder = work() / kind
    if kind == "bf16":
        tiny_folder(folder, sharded=True, vocab_size=32)
    elif kind == "nvfp4":
        quantized_folder(folder, kind, vocab_size=32)
    else:
        FAMILIES[kind](vocab_size=32).save_pretrained(folder)
    family = kind if kind in FAMILIES else "nemotron_h"
    ElasticConfig(family=family, submodels={"small": SMALL[kind]}).save(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    """Build the command line once, which takes longer than what is tested; remove the parents in the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield
    shutil.rmtree(work())
    work.cache_clear()
    parent.cache_clear()


# --- edits --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """Replace some bytes; positions wrap around the end of the file."""

    at: int
    removed: int
    added: bytes

    def __call__(self, content: bytes) -> bytes:
        at = self.at % (len(content) + 1)
        return content[:at] + self.added + content[at + self.removed :]


@dataclass(frozen=True)
class Value:
    """Replace one value anywhere in a JSON document, remove it, or give its key another name."""

    at: int
    how: str
    value: Any

    def __call__(self, content: bytes) -> bytes:
        document = json.loads(content)
        places = list(_places(document))
        holder, key = places[self.at % len(places)]
        if self.how == "replace" or isinstance(holder, list):
            holder[key] = self.value
        elif self.how == "rename":
            holder[str(self.value)[:9]] = holder.pop(key)
        else:
            del holder[key]
        return json.dumps(document).encode()


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield document, key
        yield from _places(document[key])


@dataclass(frozen=True)
class InHeader:
    """An edit of the JSON of a safetensors header; the length before it follows."""

    edit: Callable[[bytes], bytes]

    def __call__(self, content: bytes) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        header = self.edit(content[8:end])
        return len(header).to_bytes(8, "little") + header + content[end:]


@dataclass(frozen=True)
class Length:
    """Another length of the header, or of the whole file."""

    header: int | None
    file: int | None

    def __call__(self, content: bytes) -> bytes:
        if self.header is not None:
            content = self.header.to_bytes(8, "little") + content[8:]
        return content if self.file is None else content[: self.file % len(content)]


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**18, -(10**18), 10**400]),
    st.floats(),
)
VALUES = st.one_of(
    NUMBERS,
    st.sampled_from(
        [None, True, False, "", "modelopt", "FP8", "mamba", "../x", "\x00", "\ud800", "F4", "x" * 5000, [], {}, [[]]]
    ),
    st.lists(NUMBERS, max_size=5),
    st.dictionaries(st.text("ab.é\x00", max_size=4), NUMBERS, max_size=3),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=2)),
)
BYTES = st.builds(Bytes, st.integers(0, 2**20), st.integers(0, 40), st.binary(max_size=12))
JSON_EDITS = st.one_of(
    BYTES, st.builds(Value, st.integers(0, 2**20), st.sampled_from(["replace", "rename", "remove"]), VALUES)
)
HEADER_EDITS = st.one_of(
    JSON_EDITS.map(InHeader),
    st.builds(Bytes, st.integers(0, 64), st.integers(0, 12), st.binary(max_size=12)),
    st.builds(Length, st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 2**13), st.none() | st.integers(0, 2**20)),
)


def edits_of(file: str) -> st.SearchStrategy[Callable[[bytes], bytes]]:
    return HEADER_EDITS if file.startswith("header") else JSON_EDITS


# --- what must hold -----------------------------------------------------------------------------------------------


@contextmanager
def bounded() -> Iterator[None]:
    """An error for what takes too long or too much memory."""

    def stop(*_: object) -> None:
        raise AssertionError(f"more than {SECONDS} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(*words: str) -> int:
    """Run a command; where it fails, it says so in one line."""
    said, error = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(error), bounded():
        code = main(words)
    assert code in (0, 2)
    if code == 2:
        assert error.getvalue().startswith("error: ") and error.getvalue().count("\n") == 1
    return code


def tensors_of(folder: Path) -> dict[str, Any]:
    """All tensors of a folder, as the safetensors library reads them."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def check_is_cut(source: Path, out: Path) -> None:
    """Every tensor holds the first so many of each dimension, in the widths that the new config.json says."""
    whole, cut = tensors_of(source), tensors_of(out)
    config = json.loads((out / "config.json").read_text())
    for name, tensor in cut.items():
        wanted = whole[name][tuple(slice(length) for length in tensor.shape)].contiguous()
        assert tensor.dtype == wanted.dtype and raw(tensor) == raw(wanted), name
    embedding = next(
        tensor for name, tensor in cut.items() if name.endswith(("embeddings.weight", "embed_tokens.weight"))
    )
    assert embedding.shape == (config["vocab_size"], config["hidden_size"])


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor: NaN equals itself."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def check_edit(file: str, edit: Callable[[bytes], bytes]) -> None:
    """Edit one file of a folder, then slice and inspect."""
    kind, name = FILES[file]
    with tempfile.TemporaryDirectory() as work:
        source, out = Path(shutil.copytree(parent(kind), Path(work) / "parent")), Path(work) / "out"
        path = next(path for path in sorted(source.iterdir()) if path.name.startswith(name))
        path.write_bytes(edit(path.read_bytes()))
        before = {path: path.read_bytes() for path in source.iterdir()}
        code = run("slice", str(source), str(out), "--to", "small")
        assert sorted(path.name for path in Path(work).iterdir()) == (["parent"] if code else ["out", "parent"])
        assert {path: path.read_bytes() for path in source.iterdir()} == before
        if code == 0:
            check_is_cut(source, out)
        run("inspect", str(source))


@pytest.mark.parametrize("file", FILES)
@FAST
@given(data=st.data())
def test_some_edits(data: st.DataObject, file: str) -> None:
    check_edit(file, data.draw(edits_of(file)))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@LONG
@given(data=st.data())
def test_many_edits(data: st.DataObject, file: str) -> None:
    check_edit(file, data.draw(edits_of(file)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_of_every_config(kind: str) -> None:
    """A field that holds the wrong kind of thing, or far too much of it, is refused or does not matter."""
    saved = json.loads((parent("bf16" if kind == "nemotron_h" else kind) / "config.json").read_text())
    family = FAMILIES_HERE[kind]
    for name in saved.keys() - {"model_type"}:
        for value in (None, True, "x", "", -1, 0, 1.5, 10**18, [], {}, [[]], [None] * 5, ["x"] * 5, {"x": []}):
            config = {**saved, name: value}
            try:
                with bounded():
                    family.layout(config)
                    family.child_config(config, {}, None)
            except ElasticError as error:
                assert "\n" not in str(error)
            except Exception as error:
                raise AssertionError(f"{name}: {value!r}: {error!r}") from error
