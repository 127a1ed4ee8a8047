"""Files in and out: damaged input is told, output is exact, and memory does not grow with the checkpoint."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import tiny_folder

from star_elastic.checkpoint import Checkpoint, write_weights
from star_elastic.checkpoint.reader import read_header
from star_elastic.checkpoint.take import take_blocks
from star_elastic.errors import CheckpointError, ElasticError
from star_elastic.families import layout_of
from star_elastic.rewrite import locate
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import ElasticConfig, Submodel

# --- taking -------------------------------------------------------------------------------------------------------

INDEXES = {
    "whole": lambda n: None,
    "spelled out": lambda n: list(range(n)),
    "prefix": lambda n: list(range(n - 1)) or [0],
    "grouped": lambda n: [i for i in range(n) if i % 4 < 2],
    "permuted": lambda n: random.Random(n).sample(range(n), n),
    "one": lambda n: [n - 1],
    "none": lambda n: [],
}


@pytest.mark.parametrize("shape", [(40,), (6, 40), (40, 6), (5, 7, 12), (3, 1, 4), (1, 1), (6, 20, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["V1", "V2", "V4", "V8", "u2"])
@pytest.mark.parametrize("block_bytes", [8, 64, 500, 1 << 20])
def test_taking_is_indexing(shape: tuple[int, ...], dtype: str, block_bytes: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 255, size=1 + np.prod(shape) * np.dtype(dtype).itemsize, dtype="u1")
    array = np.frombuffer(numbers, dtype, offset=1).reshape(shape)  # at an odd address, as files of others may be
    for kinds in itertools.product(INDEXES, repeat=len(shape)):
        index = [INDEXES[kind](size) for kind, size in zip(kinds, shape, strict=True)]
        positions = [np.array(range(n) if kept is None else kept, int) for kept, n in zip(index, shape, strict=True)]
        wanted = array[np.ix_(*positions)]
        blocks = [bytes(block) for block in take_blocks(array, index, block_bytes)]
        assert b"".join(blocks) == wanted.tobytes(), kinds
        assert all(len(block) <= block_bytes for block in blocks), kinds


def test_taking_a_scalar() -> None:
    assert [bytes(block) for block in take_blocks(np.array(7, "u2"), [])] == [b"\x07\x00"]


# --- writing ------------------------------------------------------------------------------------------------------


@dataclass
class Ready:
    """A tensor that is already there."""

    name: str
    tensor: torch.Tensor
    dtype: str

    @property
    def itemsize(self) -> int:
        return self.tensor.element_size()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def blocks(self) -> Iterator[memoryview]:
        yield memoryview(self.tensor.view(torch.uint8).numpy().tobytes())


def some_tensors() -> list[Ready]:
    """Odd counts of narrow numbers between wide ones, which would leave the wide ones unaligned."""
    return [
        Ready("b", torch.randn(3, 5).to(torch.bfloat16), "BF16"),
        Ready("a", torch.randn(7), "F32"),
        Ready("c", torch.randn(5).to(torch.float8_e4m3fn), "F8_E4M3"),
        Ready("d", torch.randn(2, 3, dtype=torch.float64), "F64"),
    ]


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = some_tensors()
    told: list[int] = []
    assert write_weights(tmp_path, tensors, advance=told.append) == sum(told) == sum(t.nbytes for t in tensors)
    read = load_file(tmp_path / "model.safetensors")
    assert all(read[t.name].dtype == t.tensor.dtype for t in tensors)
    assert all(torch.equal(read[t.name].view(torch.uint8), t.tensor.view(torch.uint8)) for t in tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for info in read_header(tmp_path / "model.safetensors"):
        assert info.offset % info.itemsize == 0, info.name


@pytest.mark.parametrize(("limit", "files"), [(1, 4), (50, 3), (60, 2), (110, 2), (111, 1)])
def test_shards_keep_to_their_size(tmp_path: Path, limit: int, files: int) -> None:
    tensors = some_tensors()  # 30 + 28 + 5 + 48 bytes
    write_weights(tmp_path, tensors, max_shard_bytes=limit)
    found = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(found) == files
    if files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 111}
        assert set(index["weight_map"].values()) == set(found) and sorted(index["weight_map"]) == ["a", "b", "c", "d"]
        assert all(t.name in load_file(tmp_path / index["weight_map"][t.name]) for t in tensors)


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("checkpoint") / "parent")


@pytest.fixture
def folder(parent: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(parent, tmp_path / "folder"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "shards", sharded=True)


def refused(folder: Path) -> str:
    """The one line with which slicing a folder is refused; nothing is written."""
    out = folder.parent / "out"
    with pytest.raises(ElasticError) as caught:
        slice_checkpoint(folder, out, Submodel(widths={"hidden": 48}))
    assert "\n" not in str(caught.value)
    assert not out.exists() and not (out.parent / ".out.partial").exists()
    return str(caught.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_reading_gives_the_tensors(tmp_path: Path, sharded: bool) -> None:
    folder = tiny_folder(tmp_path / "model", sharded=sharded)
    checkpoint = Checkpoint.open(folder)
    state: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        state |= load_file(path)
    assert checkpoint.tensors.keys() == state.keys()
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in state.values())
    for name, info in checkpoint.tensors.items():
        assert info.shape == tuple(state[name].shape)
        assert info.array().tobytes() == state[name].numpy().tobytes()


def test_numbers_at_odd_offsets(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    original = path.read_bytes()
    length = int.from_bytes(original[:8], "little")
    path.write_bytes((length + 3).to_bytes(8, "little") + original[8 : 8 + length] + b"   " + original[8 + length :])
    slice_checkpoint(folder, tmp_path / "out", Submodel(widths={"hidden": 48, "mamba_heads": 4}))
    path.write_bytes(original)
    slice_checkpoint(folder, tmp_path / "same", Submodel(widths={"hidden": 48, "mamba_heads": 4}))
    assert (tmp_path / "out" / path.name).read_bytes() == (tmp_path / "same" / path.name).read_bytes()


def test_missing_folder_config_or_weights(folder: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere") == f"folder {tmp_path / 'nowhere'} does not exist"
    (tmp_path / "file").touch()
    assert refused(tmp_path / "file") == f"{tmp_path / 'file'} is not a folder"
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert "holds no weights: neither model.safetensors nor model.safetensors.index.json" in refused(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert "only pickled weights (pytorch_model.bin)" in refused(folder) and "convert them to safetensors" in refused(
        folder
    )
    (folder / "config.json").write_text("[1]")
    assert "must hold a JSON object" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(folder)
    (folder / "config.json").unlink()
    assert "holds no config.json" in refused(folder)


def test_unknown_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nemotron_g"}))
    assert "model_type 'nemotron_g' is not a family with a table: did you mean 'nemotron_h'" in refused(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 3000, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is not a whole safetensors file" in refused(folder)


def test_trailing_bytes(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "is not a whole safetensors file" in refused(folder)


def test_no_flipped_bit_of_the_header_goes_unnoticed(folder: Path) -> None:
    path = folder / "model.safetensors"
    original = path.read_bytes()
    before = Checkpoint.open(folder)
    layout = layout_of(before.config)
    length = 8 + int.from_bytes(original[:8], "little")
    where = random.Random(0)
    harmless = 0
    for place in [*range(40), *range(40, length, 7)]:
        flipped = bytearray(original)
        flipped[place] ^= 1 << where.randrange(8)
        path.write_bytes(flipped)
        try:
            after = Checkpoint.open(folder)
            locate(layout, after)
        except CheckpointError as error:
            assert "\n" not in str(error)
            assert "model.safetensors" in str(error) or f"{folder} misses" in str(error)
            continue
        # Metadata and padding may change unseen; what is read may not.
        assert after.tensors == before.tensors, f"byte {place}"
        harmless += 1
    assert harmless < 10


def test_names_told_twice(folder: Path) -> None:
    path = folder / "model.safetensors"
    original = path.read_bytes()
    path.write_bytes(original.replace(b'"backbone.layers.3.norm.weight"', b'"backbone.layers.1.norm.weight"', 1))
    refused(folder)


def test_an_unknown_dtype(folder: Path) -> None:
    save_file({"x": torch.zeros(4, dtype=torch.float8_e5m2fnuz)}, folder / "model.safetensors")
    assert "tensor 'x' has dtype F8_E5M2FNUZ; known: F64" in refused(folder)


def edit_index(folder: Path, edit: dict[str, object]) -> dict[str, str]:
    """Change entries of a weight map (None removes one); return it as it was."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    changed = {name: shard for name, shard in {**index["weight_map"], **edit}.items() if shard is not None}
    path.write_text(json.dumps({**index, "weight_map": changed}))
    return index["weight_map"]


def test_index_and_shards_must_agree(shards: Path) -> None:
    name = "backbone.norm_f.weight"
    weight_map = edit_index(shards, {})
    home = weight_map[name]
    other = next(shard for shard in weight_map.values() if shard != home)
    edit_index(shards, {name: other})
    assert f"{name!r}, which model.safetensors.index.json puts into" in refused(shards)
    edit_index(shards, {name: None})
    assert f"{name!r}, which model.safetensors.index.json puts into nowhere" in refused(shards)
    edit_index(shards, {name: home, "extra": home})
    assert f"puts tensor 'extra' into {home}, which does not hold it" in refused(shards)
    edit_index(shards, {"extra": "../elsewhere.safetensors"})
    assert "'../elsewhere.safetensors', which is no file name" in refused(shards)
    edit_index(shards, {"extra": None})
    Checkpoint.open(shards)


def test_index_names_a_missing_shard(shards: Path) -> None:
    gone = sorted(shards.glob("*.safetensors"))[3]
    gone.unlink()
    assert refused(shards) == f"{shards / 'model.safetensors.index.json'} names a missing shard: {gone.name}"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_unreadable_index(shards: Path, text: str) -> None:
    (shards / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(shards)


def test_single_file_beside_an_index(shards: Path) -> None:
    shutil.copy(sorted(shards.glob("*.safetensors"))[0], shards / "model.safetensors")
    assert "holds both model.safetensors and model.safetensors.index.json" in refused(shards)


# --- companions ---------------------------------------------------------------------------------------------------


def test_what_is_copied_along(folder: Path, tmp_path: Path) -> None:
    taken = [
        "LICENSE",
        "NOTICE.txt",
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    left = ["README.md", "modeling.py", "pytorch_model.bin", "LICENSE.bin", "LICENSE.py", "notes.txt"]
    (folder / "additional_chat_templates").mkdir()
    for name in taken + left:
        (folder / name).write_text(name)
    ElasticConfig(family="nemotron_h").save(folder)
    slice_checkpoint(folder, tmp_path / "out", Submodel())
    ours = {"config.json", "README.md", "model.safetensors"}
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {*taken, *ours}
    assert all((tmp_path / "out" / name).read_text() == name for name in taken)
