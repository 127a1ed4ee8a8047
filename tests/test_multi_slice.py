"""Several sizes in one pass: each as if cut alone, the source read once, all of it checked before anything is written."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections import Counter, namedtuple
from pathlib import Path

import pytest
from killed import kill_in_mid_write, tensors_in, written_again
from tiny import tiny_folder

from star_elastic.checkpoint import TensorInfo, onepass, target
from star_elastic.checkpoint.onepass import in_order
from star_elastic.checkpoint.ranges import length, merged, rows_read
from star_elastic.cli import main
from star_elastic.errors import CheckpointError, ElasticError, TargetError, WidthError
from star_elastic.slice import Size, slice_checkpoint, slice_sizes
from star_elastic.submodel import ElasticConfig, Submodel

SIZES = {
    "a": Submodel(widths={"hidden": 48, "experts": 4, "expert_ffn": 16}),
    "b": Submodel(widths={"hidden": 32, "mamba_heads": 4}),
    "c": Submodel(layers=(0, 1, 2)),
}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp("multi") / "parent", sharded=True)
    ElasticConfig(family="nemotron_h", submodels=SIZES).save(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, parent: Path) -> Path:
    folder = tmp_path_factory.mktemp("multi_alone")
    for name, submodel in SIZES.items():
        slice_checkpoint(parent, folder / name, submodel, name=name, max_shard_bytes=60_000)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sizes(out: Path) -> list[Size]:
    return [Size(out / name, submodel, name) for name, submodel in SIZES.items()]


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("unit_bytes", [1, 2**24])
def test_each_as_if_alone(
    parent: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, unit_bytes: int
) -> None:
    monkeypatch.setattr(onepass, "UNIT_BYTES", unit_bytes)
    reports = slice_sizes(parent, sizes(tmp_path / "out"), max_shard_bytes=60_000, threads=threads)
    assert contents(tmp_path / "out") == contents(alone)
    assert [report.submodel.widths["hidden"] for report in reports] == [48, 32, 64]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "b", "c"]


def test_the_source_is_read_in_order(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[TensorInfo] = []
    original = TensorInfo.array

    def array(self: TensorInfo):  # type: ignore[no-untyped-def]
        opened.append(self)
        return original(self)

    monkeypatch.setattr(TensorInfo, "array", array)
    slice_sizes(parent, sizes(tmp_path / "out"))
    places = [(str(info.path), info.offset) for info in opened]
    assert places == sorted(places) and max(Counter(places).values()) == 3


def bytes_read() -> int:
    """Bytes that this process has had read from disks so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def forget(path: Path, start: int = 0, stop: int = 0) -> None:
    """Make the system read a file, or a part of it, from the disk again."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="nobody counts what is read from disks")
def test_each_byte_comes_from_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model larger than memory: what was read is forgotten as soon as its unit is finished."""
    source = tiny_folder(tmp_path / "source", pattern="M*E", vocab_size=2**16)  # embedding and head of 16 MiB each
    finished = onepass._Log.finished

    def forgetting(self: onepass._Log, unit: onepass.Unit) -> None:
        finished(self, unit)
        for start, stop in unit.ranges:
            forget(unit.path, start, stop)

    monkeypatch.setattr(onepass._Log, "finished", forgetting)
    weights = source / "model.safetensors"

    def counted(*widths: int) -> float:
        sizes = [Size(tmp_path / f"{len(widths)}-{hidden}", Submodel(widths={"hidden": hidden})) for hidden in widths]
        forget(weights)
        before = bytes_read()
        slice_sizes(source, sizes)
        return (bytes_read() - before) / weights.stat().st_size

    once = counted(48)
    if once == 0:
        pytest.skip("this file system lies in memory")
    assert 0.99 <= once < 1.05 and 0.99 <= counted(48, 32) < 1.05


def test_on_the_command_line(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["slice", str(parent), str(out), "--to", "a", "--to", "b", "--threads", "2"]) == 0
    said = capsys.readouterr().out
    assert "a:\n" in said and f"wrote {out / 'b'}: " in said
    assert sorted(path.name for path in out.iterdir()) == ["a", "b"]
    for name in ("a", "b"):
        slice_checkpoint(parent, tmp_path / name, SIZES[name], name=name)
        assert contents(tmp_path / name) == contents(out / name)
    # One name keeps its meaning: the folder itself.
    assert main(["slice", str(parent), str(tmp_path / "one"), "--to", "a"]) == 0
    assert (tmp_path / "one" / "config.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "a", "--to", "a"], "--to a is given twice"),
        (["--to", "a", "--to", "d"], "no submodel 'd'"),
        (["--to", "a", "--to", ".."], "--to '..' cannot name a folder"),
        (["--to", "a", "--to", "b", "--width", "hidden=32"], "--to and --width/--layers exclude each other"),
    ],
)
def test_refused_on_the_command_line(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["slice", str(parent), str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_all_is_checked_before_anything_is_written(parent: Path, tmp_path: Path) -> None:
    good = Size(tmp_path / "good", SIZES["a"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases: list[tuple[Size, type[ElasticError]]] = [
        (Size(tmp_path / "bad", Submodel(widths={"hidden": 1000})), WidthError),
        (Size(tmp_path / "full", SIZES["b"]), TargetError),
        (Size(tmp_path / "good", SIZES["b"]), TargetError),
        (Size(tmp_path / "good" / "inside", SIZES["b"]), TargetError),
        (Size(parent / "inside", SIZES["b"]), TargetError),
    ]
    for bad, error in cases:
        for pair in ([good, bad], [bad, good]):
            with pytest.raises(error):
                slice_sizes(parent, pair)
            assert [path.name for path in tmp_path.iterdir()] == ["full"]


# --- the disk -----------------------------------------------------------------------------------------------------


def test_the_sizes_together_must_fit(
    parent: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    largest = max(sum(map(len, contents(alone / name).values())) for name in SIZES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, largest))
    with pytest.raises(CheckpointError, match=r"not enough space for .*a and .*b and .*c: needs "):
        slice_sizes(parent, sizes(tmp_path))
    assert list(tmp_path.iterdir()) == []
    slice_sizes(parent, sizes(tmp_path)[:1])


def test_each_disk_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two disks of 100 bytes each, one of them told by its path."""
    usage, stat = namedtuple("usage", "total used free"), namedtuple("stat", "st_dev st_mode")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    original = Path.stat
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 100))

    def device(self: Path, **options: bool) -> object:
        found = original(self, **options)
        return stat(1 if self.name == "one" else 2, found.st_mode)

    monkeypatch.setattr(Path, "stat", device)
    target.check_space({tmp_path / "one" / "a": 60, tmp_path / "two" / "b": 60})
    with pytest.raises(CheckpointError, match=r"needs 120 B, 100 B are free"):
        target.check_space({tmp_path / "one" / "a": 60, tmp_path / "one" / "b": 60})


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_targets_on_two_file_systems(parent: Path, alone: Path, tmp_path: Path) -> None:
    other = Path("/dev/shm") / f"star-elastic-{os.getpid()}"
    try:
        slice_sizes(
            parent, [Size(tmp_path / "a", SIZES["a"], "a"), Size(other / "b", SIZES["b"], "b")], max_shard_bytes=60_000
        )
        assert contents(tmp_path / "a") == contents(alone / "a") and contents(other / "b") == contents(alone / "b")
    finally:
        shutil.rmtree(other, ignore_errors=True)


def test_what_is_finished_is_on_the_disk(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is synced under its temporary name, then the folder; after the rename, the folder that holds the name."""
    synced: list[tuple[str, bool]] = []
    original, out = os.fsync, tmp_path / "out"

    def fsync(descriptor: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), out.exists()))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    slice_checkpoint(parent, out, SIZES["a"])
    partial = tmp_path / ".out.partial"
    assert {(str(partial / path.name), False) for path in out.iterdir()} | {(str(partial), False)} <= set(synced)
    assert synced[-1] == (str(tmp_path), True)


# --- going on -----------------------------------------------------------------------------------------------------

def test_after_a_kill_the_same_command_goes_on(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["slice", str(parent), str(out), "--to", "a", "--to", "b"]
    slice_sizes(parent, [Size(tmp_path / "wanted" / name, SIZES[name], name) for name in ("a", "b")])
    total = tensors_in(tmp_path / "wanted")
    kill_in_mid_write(words, before=60)
    assert {".a.partial", ".a.resume", ".b.partial", ".b.resume"} == {path.name for path in out.iterdir()}
    (out / ".a.partial" / "stale").touch()
    # 59 were written; the last of them may belong to a tensor that the other size had not got yet.
    assert total - 59 <= len(written_again(words, monkeypatch)) <= total - 58
    assert contents(out) == contents(tmp_path / "wanted")


@pytest.mark.parametrize("change", ["size", "source", "file gone", "header"])
def test_after_a_kill_other_work_starts_over(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source, out = Path(shutil.copytree(parent, tmp_path / "source")), tmp_path / "out"
    words = ["slice", str(source), str(out), "--width", "hidden=48"]
    kill_in_mid_write(words, before=60)
    assert (tmp_path / ".out.resume").exists()
    weights = tmp_path / ".out.partial" / "model.safetensors"
    if change == "size":
        words[-1] = "hidden=40"
    elif change == "source":
        path = next(source.glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif change == "file gone":
        weights.unlink()
    else:
        weights.write_bytes(b"garbage")
    written = written_again(words, monkeypatch)
    slice_checkpoint(source, tmp_path / "wanted" / "out", Submodel(widths={"hidden": int(words[-1][-2:])}))
    assert contents(out) == contents(tmp_path / "wanted" / "out")
    assert len(written) == tensors_in(out)
    assert not (tmp_path / ".out.resume").exists()


# --- small pieces -------------------------------------------------------------------------------------------------


def test_rows_read_against_touching_every_byte() -> None:
    """By a mask of the bytes that indexing really touches, widened to whole rows of the last dimension."""
    import numpy as np

    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 7, size=rng.integers(1, 4)))
        index = [None if rng.random() < 0.4 else rng.permutation(n)[: rng.integers(0, n + 1)].tolist() for n in shape]
        touched = np.zeros(shape, bool)
        positions = [np.array(range(n) if kept is None else kept, int) for kept, n in zip(index, shape, strict=True)]
        touched[np.ix_(*positions)] = True
        if len(shape) > 1:
            touched |= touched.any(axis=-1, keepdims=True)
        covered = np.zeros(touched.size * 2, bool)
        found = rows_read(shape, index, itemsize=2)
        for start, stop in found:
            covered[start:stop] = True
        assert (covered == np.repeat(touched.reshape(-1), 2)).all(), (shape, index)
        assert found == merged(found)
        bridged = rows_read(shape, index, itemsize=2, gap=8)
        assert merged([*found, *bridged]) == bridged, "the bridged ranges hold the others"
        assert all(b[0] - a[1] > 8 for a, b in itertools.pairwise(bridged))
        assert length(bridged) >= length(found)


@pytest.mark.parametrize("threads", [1, 3])
def test_in_order(threads: int) -> None:
    done: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.002 * (number % 3))
        if number == 20:
            raise ValueError("stop")
        done.append(number)

    finished, cancelled = [], []
    with pytest.raises(ValueError, match="stop"):
        for number in in_order(work, range(100), threads, cancel=lambda: cancelled.append(True)):
            finished.append(number)
    assert finished == list(range(20)) and max(done) < 20 + 2 * threads
    assert cancelled == [True] * (threads > 1)
