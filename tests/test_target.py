"""Folders appear whole or not at all: full disks, exceptions, Ctrl-C, SIGKILL, two writers at once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from tiny import tiny_folder

from star_elastic.checkpoint import Checkpoint, TensorCut, target_folder
from star_elastic.errors import CheckpointError, TargetError
from star_elastic.slice import slice_checkpoint
from star_elastic.submodel import Submodel

SRC = Path(__file__).parents[1] / "src"


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("target") / "parent", sharded=True)


def test_it_appears_at_the_end(tmp_path: Path) -> None:
    with target_folder(tmp_path / "deep" / "out") as folder:
        (folder / "file").write_text("content")
        assert not (tmp_path / "deep" / "out").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert (tmp_path / "deep" / "out" / "file").read_text() == "content"


def test_an_empty_folder_may_be_the_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with target_folder(tmp_path / "link") as folder:
        (folder / "file").touch()
    assert (tmp_path / "real" / "file").exists() and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), target_folder(tmp_path / "new" / "parents" / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").touch()
        raise error
    assert list(tmp_path.iterdir()) == []


def test_parents_that_others_use_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop"), target_folder(tmp_path / "new" / "out"):
        (tmp_path / "new" / "other").touch()
        raise ValueError("stop")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]


def test_relations_to_the_source(tmp_path: Path) -> None:
    source = tmp_path / "a" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    cases = {
        source: "is the source itself",
        tmp_path / "link": "is the source itself",
        source / "x": "lies inside the source",
        tmp_path / "link" / "x": "lies inside the source",
        tmp_path / "a" / ".." / "a" / "source" / "x": "lies inside the source",
        tmp_path / "a": "contains the source",
    }
    for out, message in cases.items():
        with pytest.raises(TargetError, match=message), target_folder(out, source):
            raise AssertionError("must not be entered")
    with target_folder(tmp_path / "a" / "source2", source):  # a longer name is not inside
        pass


def test_a_full_or_odd_target(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").touch()
    (tmp_path / "file").touch()
    with pytest.raises(TargetError, match="full exists and is not empty"), target_folder(tmp_path / "full"):
        pass
    with pytest.raises(TargetError, match="file is a file"), target_folder(tmp_path / "file"):
        pass
    with (
        pytest.raises(TargetError, match="out cannot be made: .*file is a file"),
        target_folder(tmp_path / "file" / "out"),
    ):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_space_is_checked_before_writing(tmp_path: Path, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(CheckpointError, match=r"not enough space for .*out: needs 5\d\d\.\d\d KiB, 1000 B are free"):
        slice_checkpoint(parent, tmp_path / "out", Submodel())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    original = TensorCut.blocks

    def blocks(self: TensorCut):  # type: ignore[no-untyped-def]
        if len(written) == 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(self.name)
        return original(self)

    monkeypatch.setattr(TensorCut, "blocks", blocks)
    with pytest.raises(CheckpointError, match=r"cannot write .*out: No space left on device") as caught:
        slice_checkpoint(parent, tmp_path / "out", Submodel(), max_shard_bytes=20_000)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_really_full(tmp_path: Path, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from star_elastic.checkpoint import writer

    original = writer.write_at
    with Path("/dev/full").open("wb") as full:
        monkeypatch.setattr(writer, "write_at", lambda file, *rest: original(full.fileno(), *rest))
        with pytest.raises(CheckpointError, match="No space left on device"):
            slice_checkpoint(parent, tmp_path / "out", Submodel())
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    with target_folder(tmp_path / "out") as first:
        (first / "file").write_text("first")
        with (
            pytest.raises(TargetError, match=r"another process is writing \.out\.partial"),
            target_folder(tmp_path / "out"),
        ):
            pass
        assert (first / "file").read_text() == "first"
    assert (tmp_path / "out" / "file").read_text() == "first"


def test_a_stale_sibling_is_cleared(tmp_path: Path) -> None:
    stale = tmp_path / ".out.partial"
    (stale / "sub").mkdir(parents=True)
    (stale / "model-00001-of-00009.safetensors").write_text("half")
    (stale / "sub" / "file").touch()
    (stale / "link").symlink_to(tmp_path)
    with target_folder(tmp_path / "out") as folder:
        assert list(folder.iterdir()) == []
    assert tmp_path.exists() and list((tmp_path / "out").iterdir()) == []


def test_another_writer_that_finishes_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """We open its temporary folder, it renames that to the target and ends, we get the lock on what is now its result."""
    import fcntl

    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "file").write_text("theirs")
    original = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if partial.exists() and not out.exists():
            partial.rename(out)
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(TargetError, match="out exists and is not empty"), target_folder(out):
        pass
    assert (out / "file").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_third_writer_that_starts_at_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, but a third writer has already made and locked a new temporary folder of the same name."""
    import fcntl

    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    partial.mkdir()
    original, third = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not third:
            partial.rename(out)
            partial.mkdir()
            (partial / "file").write_text("the third writer's")
            third.append(os.open(partial, os.O_RDONLY))
            original(third[0], fcntl.LOCK_EX)
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(TargetError, match="another process is writing"), target_folder(out):
        pass
    assert (partial / "file").exists()
    os.close(third[0])


# --- real signals -------------------------------------------------------------------------------------------------

# The command line itself, slowed down so that the signal falls in the middle of the weights.
SLOW_SLICE = """
import sys, time
from star_elastic import cli
from star_elastic.checkpoint import TensorCut

original = TensorCut.blocks
count = 0

def blocks(self):
    global count
    count += 1
    if count == 10:
        print("writing", flush=True)
        time.sleep(60)
    return original(self)

TensorCut.blocks = blocks
sys.exit(cli.main(sys.argv[1:]))
"""


def start_slice(parent: Path, out: Path) -> subprocess.Popen[str]:
    """Start slicing in another process; return when it is in the middle of writing."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SLICE, "slice", str(parent), str(out), "--width", "hidden=48"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "writing\n":
            return process
    raise AssertionError(process.communicate())


def test_interrupt_in_mid_write(parent: Path, tmp_path: Path) -> None:
    process = start_slice(parent, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors.startswith("error: interrupted") and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_kill_in_mid_write_then_run_again(parent: Path, tmp_path: Path) -> None:
    process = start_slice(parent, tmp_path / "out")
    with pytest.raises(TargetError, match="another process is writing"):
        slice_checkpoint(parent, tmp_path / "out", Submodel())
    process.kill()
    process.communicate(timeout=30)
    assert not (tmp_path / "out").exists()
    stale = tmp_path / ".out.partial"
    assert any(stale.glob("*.safetensors"))
    (stale / "model-00001-of-00099.safetensors").write_text("from a run with other shards")
    deadline = time.monotonic() + 5
    while True:  # the kernel drops the lock of a killed process a moment later
        try:
            slice_checkpoint(parent, tmp_path / "out", Submodel(widths={"hidden": 48}))
            break
        except TargetError:
            assert time.monotonic() < deadline
    assert not stale.exists()
    checkpoint = Checkpoint.open(tmp_path / "out")
    on_disk = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert on_disk == {info.path.name for info in checkpoint.tensors.values()}
