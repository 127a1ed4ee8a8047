"""Slicing a model of the hub, from a server on this machine: the bytes that the folder gives, fetching only what is needed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from hub_server import COMMIT, Faults, HubServer, use
from quantized import quantized_folder
from tiny import tiny_folder

from star_elastic import rewrite
from star_elastic.checkpoint import Checkpoint, cut, onepass, reader
from star_elastic.checkpoint.ranges import length, merged
from star_elastic.cli import main
from star_elastic.errors import CheckpointError, ChecksumError, RemoteError
from star_elastic.quant import folder as quantized_folders
from star_elastic.remote import mirror
from star_elastic.remote.hub import Patience
from star_elastic.slice import Size, slice_checkpoint, slice_sizes
from star_elastic.submodel import ElasticConfig, Submodel
from star_elastic.verify import against

SRC = Path(__file__).parents[1] / "src"
CUT = Submodel(widths={"hidden": 48, "expert_ffn": 16, "mamba_heads": 4, "experts": 4})
SMALL = Submodel(widths={"hidden": 32, "heads": 4})
PATTERN = "ME*"
HALFWAY = 40  # requests, of 61 for CUT; the first 22 are for small files and headers


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_folder(tmp_path_factory.mktemp("remote") / "tiny", sharded=True, pattern=PATTERN)
    ElasticConfig(family="nemotron_h", submodels={"cut": CUT, "small": SMALL}).save(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "LICENSE").write_text("free")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    return folder


@pytest.fixture
def hub(parent: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(parent) as server:
        use(server, monkeypatch)
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_same(remote: Path, local: Path) -> None:
    """Two slices are equal byte for byte, but for the parent's name in the card."""
    ours, wanted = contents(remote), contents(local)
    assert ours.keys() == wanted.keys()
    for name in wanted:
        if name != "README.md":
            assert ours[name] == wanted[name], name
    assert ours["README.md"].decode().replace("org/tiny", "tiny") == wanted["README.md"].decode()


Local = Callable[[HubServer, Submodel], Path]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    """Makes the slice that the folder behind a hub gives, once for all tests that compare with it."""
    made: dict[tuple[Path, str], Path] = {}

    def get(hub: HubServer, submodel: Submodel) -> Path:
        key = hub.folder, submodel.model_dump_json()
        if key not in made:
            made[key] = tmp_path_factory.mktemp("local") / "out"
            slice_checkpoint(hub.folder, made[key], submodel)
        return made[key]

    return get


def check_from_hub(hub: HubServer, tmp_path: Path, local: Local, submodel: Submodel = CUT) -> None:
    slice_checkpoint(hub.name, tmp_path / "a" / "out", submodel)
    check_same(tmp_path / "a" / "out", local(hub, submodel))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]


# --- what is fetched ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "submodel", [CUT, SMALL, Submodel(), Submodel(layers=(0, 2))], ids=["cut", "small", "full", "depth"]
)
def test_the_same_bytes_as_from_the_folder(hub: HubServer, tmp_path: Path, submodel: Submodel, local: Local) -> None:
    check_from_hub(hub, tmp_path, local, submodel)


def test_gaps_and_units_of_real_size(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Local
) -> None:
    monkeypatch.setattr(onepass, "GAP_BYTES", 2**20)
    monkeypatch.setattr(onepass, "UNIT_BYTES", 2**24)
    monkeypatch.setattr(mirror, "HEADER_GUESS", 2**18)
    check_from_hub(hub, tmp_path, local)


def test_a_single_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Local) -> None:
    with HubServer(tiny_folder(tmp_path / "tiny", pattern=PATTERN)) as server:
        use(server, monkeypatch)
        check_from_hub(server, tmp_path, local)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_quantized_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, local: Local) -> None:
    with HubServer(quantized_folder(tmp_path / "tiny", form)) as server:
        use(server, monkeypatch)
        check_from_hub(server, tmp_path, local, Submodel(widths={"hidden": 32, "expert_ffn": 48}))


def fetched_ranges(hub: HubServer) -> dict[str, list[tuple[int, int]]]:
    """What was asked of each weight file after its header."""
    found: dict[str, list[tuple[int, int]]] = {}
    for path in hub.folder.glob("*.safetensors"):
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        asked = [(f.start, f.stop) for f in hub.fetched if f.name == path.name and f.stop > header]
        found[path.name] = asked
    return found


def needed_by_hand(parent: Path, *cuts: tuple[int, int]) -> int:
    """Bytes of the rows that cuts to so many experts and hidden channels need together.

    All rows of what hidden indexes by column, the first rows where it is the row, and the first experts.
    """
    from safetensors import safe_open

    wanted = 0
    for path in parent.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                row_bytes = file.get_tensor(name).nbytes // shape[0]
                expert = name.split("experts.")[1].split(".")[0] if ".experts." in name else "0"
                cut = [(experts, hidden) for experts, hidden in cuts if not expert.isdigit() or int(expert) < experts]
                by_row = name.endswith(("down_proj.weight", "o_proj.weight", "out_proj.weight")) or shape == [64]
                if name.endswith(("gate.weight", "e_score_correction_bias")):
                    rows = [experts for experts, _ in cut]
                elif by_row and "mixer.norm" not in name:
                    rows = [hidden for _, hidden in cut]
                else:
                    rows = [shape[0] for _ in cut]
                wanted += max(rows, default=0) * row_bytes
    return wanted


def test_only_the_needed_rows_once_each(hub: HubServer, tmp_path: Path, parent: Path) -> None:
    slice_checkpoint(hub.name, tmp_path / "out", Submodel(widths={"experts": 4, "hidden": 32}))
    asked = fetched_ranges(hub)
    for ranges in asked.values():
        assert length(ranges) == length(merged(ranges)), "some bytes were fetched twice"
    assert sum(map(length, asked.values())) == needed_by_hand(parent, (4, 32))
    assert {f.name for f in hub.fetched if f.name.endswith((".bin", ".py"))} == set()


def test_several_sizes_fetch_each_byte_once(hub: HubServer, tmp_path: Path) -> None:
    reports = slice_sizes(hub.name, [Size(tmp_path / "a" / "cut", CUT), Size(tmp_path / "a" / "small", SMALL)])
    assert [report.folder.name for report in reports] == ["cut", "small"]
    for ranges in fetched_ranges(hub).values():
        assert length(ranges) == length(merged(ranges))
    for name, submodel in {"cut": CUT, "small": SMALL}.items():
        slice_checkpoint(hub.folder, tmp_path / "b" / name, submodel)
        check_same(tmp_path / "a" / name, tmp_path / "b" / name)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_bar_counts_the_bytes_that_are_fetched(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: Path, threads: int
) -> None:
    """Its length is known beforehand, and reached exactly; several sizes count what they share once."""
    bars: list[tuple[str, int, str]] = []
    counts: list[int] = []

    @contextmanager
    def bar(label: str, total: int, unit: str, **_: object) -> Iterator[Callable[[int], None]]:
        bars.append((label, total, unit))
        yield counts.append

    monkeypatch.setattr(rewrite, "progress_bar", bar)
    cuts = {"a": (6, 32), "b": (4, 64)}  # neither holds the other
    hub.faults.drop = 2  # what was got before stays counted, and is not asked for again
    sizes = [Size(tmp_path / n, Submodel(widths={"experts": e, "hidden": h})) for n, (e, h) in cuts.items()]
    slice_sizes(hub.name, sizes, threads=threads)
    assert bars == [("fetch", needed_by_hand(parent, *cuts.values()), "bytes")]
    assert sum(counts) == bars[0][1] and min(counts) > 0 and len(counts) > 20


def test_what_is_read_is_given_back_to_the_disk(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 256)
    before = path.stat().st_blocks
    mirror.punch(path, 5000, 60000)
    content = path.read_bytes()
    assert content[:5000] == (bytes(range(256)) * 256)[:5000] and content[60000:] == (bytes(range(256)) * 256)[60000:]
    assert path.stat().st_blocks < before and not any(content[8192:57344])
    punched: list[tuple[int, int]] = []
    monkeypatch.setattr(mirror, "punch", lambda path, start, stop: punched.append((start, stop)))
    slice_checkpoint(hub.name, tmp_path / "out", CUT)
    assert length(punched) == sum(map(length, fetched_ranges(hub).values()))


# --- where it is fetched from -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_the_hub_redirects_once_a_file(hub: HubServer, tmp_path: Path, local: Local, threads: int) -> None:
    slice_checkpoint(hub.name, tmp_path / "out", CUT, threads=threads)
    check_same(tmp_path / "out", local(hub, CUT))
    assert sorted(hub.redirected) == sorted(path.name for path in hub.folder.glob("*.safetensors"))
    assert len([f for f in hub.fetched if f.name.endswith(".safetensors")]) > 2 * len(hub.redirected)


@pytest.mark.parametrize("threads", [1, 4])
def test_an_address_that_has_expired_is_asked_for_again(
    hub: HubServer, tmp_path: Path, local: Local, threads: int
) -> None:
    """Without a wait, and without a byte twice."""
    hub.faults.expire_after = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror, "PATIENCE", Patience(tries=1, timeout=5))  # a refusal of an old address is no failure
        slice_checkpoint(hub.name, tmp_path / "out", CUT, threads=threads)
    check_same(tmp_path / "out", local(hub, CUT))
    large = [f for f in hub.fetched if f.name.endswith(".safetensors")]
    assert len(large) // 3 <= len(hub.redirected) < len(large)
    for ranges in fetched_ranges(hub).values():
        assert length(ranges) == length(merged(ranges))


@pytest.mark.parametrize("own", [True, False])
def test_the_token_goes_to_the_hub_alone(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Also where a file lies at another address of its own."""
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.gated = True
    if own:
        monkeypatch.setattr(HubServer, "content_url", HubServer.url)
    slice_checkpoint(hub.name, tmp_path / "out", CUT)
    wanted = f"Bearer {hub.token}" if own else None
    assert {f.authorization for f in hub.fetched if f.name.endswith(".safetensors")} == {wanted}


def test_a_content_network_that_refuses_everything(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new address is not asked for without end."""

    def refuse() -> None:
        if len(hub.fetched) > HALFWAY:
            monkeypatch.setattr(HubServer, "admits", lambda self, ticket: False)

    hub.faults.wait = refuse
    assert "the hub answered 403 when asked for org/tiny" in refused([hub.name, str(tmp_path / "out"), "--to", "cut"], capsys)
    assert len(hub.redirected) <= len(list(hub.folder.glob("*.safetensors"))) + 4  # one for each connection


def test_a_plan_reads_headers_once_and_computes_each_range_once(
    hub: HubServer, tmp_path: Path, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the published models these are tens of thousands, for each size."""
    counts: Counter[str] = Counter()

    def counted(module: ModuleType, name: str) -> None:
        original = getattr(module, name)

        def call(*args: object, **options: object) -> object:
            counts[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    tensors = sum(len(Checkpoint.open(local(hub, submodel)).tensors) for submodel in (CUT, SMALL))
    for module, name in ((reader, "read_header"), (quantized_folders, "quantized_parts"), (cut, "rows_read")):
        counted(module, name)
    assert main(["slice", hub.name, str(tmp_path / "out"), "--to", "cut", "--to", "small", "--dry-run"]) == 0
    shards = len(list(hub.folder.glob("*.safetensors")))
    assert counts == {"read_header": shards, "quantized_parts": 1, "rows_read": tensors}


# --- on the command line ------------------------------------------------------------------------------------------


def test_dry_run_says_how_much(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slice", f"{hub.name}@main", str(tmp_path / "out"), "--to", "cut", "--to", "small", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert not any(map(length, fetched_ranges(hub).values())) and list(tmp_path.iterdir()) == []
    whole = sum(path.stat().st_size for path in hub.folder.glob("*.safetensors")) / 1024
    assert f"of {whole:.2f} KiB" in said and "to fetch: " in said
    assert main(["slice", hub.name, str(tmp_path / "out"), "--to", "cut", "--to", "small"]) == 0
    fetched = sum(map(length, fetched_ranges(hub).values())) / 1024
    assert f"to fetch: {fetched:.2f} KiB of {whole:.2f} KiB ({fetched / whole:.0%})" in said
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'out' / 'cut'}: " in said and "checked: " in said


def test_the_environment_is_honoured(hub: HubServer, tmp_path: Path, local: Local) -> None:
    hub.gated = True
    environment = {**os.environ, "PYTHONPATH": str(SRC), "HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token}
    words = [sys.executable, "-m", "star_elastic", "slice", hub.name, str(tmp_path / "a" / "out"), "--to", "cut"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    check_same(tmp_path / "a" / "out", local(hub, CUT))
    # The token goes to the hub, and not to the content network that it points to.
    assert {f.authorization for f in hub.fetched if not f.name.endswith(".safetensors")} == {f"Bearer {hub.token}"}
    assert {f.authorization for f in hub.fetched if f.name.endswith(".safetensors")} == {None}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["slice", *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    return said.err


def test_refusals(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = [str(tmp_path / "out"), "--to", "cut"]
    assert "there is no folder org/other here, and the hub has no model org/other" in refused(
        ["org/other", *out], capsys
    )
    assert "org/tiny has no revision 'v9'" in refused(["org/tiny@v9", *out], capsys)
    assert "no submodel 'big'" in refused([hub.name, str(tmp_path / "out"), "--to", "big"], capsys)
    assert "no name of the hub" in refused(["org/a--b", *out], capsys)
    hub.gated = True
    said = refused([hub.name, *out], capsys)
    assert "org/tiny is gated and no token is set (HF_TOKEN): accept its terms at http" in said
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "gated and HF_TOKEN has no access" in refused([hub.name, *out], capsys)
    assert list(tmp_path.iterdir()) == []


def test_no_network(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    said = refused([hub.name, str(tmp_path / "out"), "--to", "cut"], capsys)
    assert "there is no folder org/tiny here, and the hub at http://127.0.0.1:9 cannot be reached: " in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "(HF_HUB_OFFLINE is set)" in refused([hub.name, str(tmp_path / "out"), "--to", "cut"], capsys)


def test_a_folder_of_that_name_comes_first(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(hub.folder, tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    slice_checkpoint("org/tiny", "out", CUT)
    assert hub.fetched == []


def test_models_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: Path) -> None:
    (tmp_path / "model").mkdir()
    with HubServer(tmp_path / "model") as server:
        use(server, monkeypatch)
        with pytest.raises(RemoteError, match="org/tiny holds no config.json"):
            slice_checkpoint(server.name, tmp_path / "out", CUT)
        shutil.copy(parent / "config.json", tmp_path / "model")
        with pytest.raises(RemoteError, match="neither model.safetensors nor model.safetensors.index.json"):
            slice_checkpoint(server.name, tmp_path / "out", CUT)
        (tmp_path / "model" / "model.bin").touch()
        with pytest.raises(RemoteError, match=r"only pickled weights \(model.bin\)"):
            slice_checkpoint(server.name, tmp_path / "out", CUT)


@pytest.mark.parametrize("damage", ["truncated", "length", "shape", "missing"])
def test_headers_are_checked_as_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: Path, damage: str
) -> None:
    folder = Path(shutil.copytree(parent, tmp_path / "tiny"))
    path = sorted(folder.glob("*.safetensors"))[1]
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "length":
        path.write_bytes((2**60).to_bytes(8, "little") + content[8:])
    elif damage == "shape":
        path.write_bytes(re.sub(rb'"shape":\[\d', b'"shape":[7', content, count=1))
    else:
        path.unlink()
    with HubServer(folder) as server:
        use(server, monkeypatch)
        with pytest.raises(CheckpointError) as local:
            slice_checkpoint(folder, tmp_path / "out", CUT)
        with pytest.raises(CheckpointError) as remote:
            slice_checkpoint(server.name, tmp_path / "out", CUT)
    assert str(remote.value) == str(local.value).replace(str(folder), server.name)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["busy", "drop", "short", "shifted", "refuse_range", "gzip"])
def test_faults_that_pass(hub: HubServer, tmp_path: Path, fault: str, local: Local) -> None:
    setattr(hub.faults, fault, 3)
    hub.faults.busy_listing = 2
    slice_checkpoint(hub.name, tmp_path / "a" / "out", CUT)
    assert getattr(hub.faults, fault) == 0
    check_same(tmp_path / "a" / "out", local(hub, CUT))


@pytest.mark.parametrize("fault", ["stall", "stall_midway"])
def test_a_connection_that_stalls_is_given_up_and_made_anew(
    hub: HubServer, tmp_path: Path, local: Local, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PATIENCE", Patience(tries=4, wait=0.001, timeout=0.5))
    monkeypatch.setattr(mirror, "IMPATIENCE", Patience(tries=3, wait=0.001, timeout=0.5))
    setattr(hub.faults, fault, 2)
    hub.faults.stall_listing = 1
    slice_checkpoint(hub.name, tmp_path / "out", CUT)
    assert (getattr(hub.faults, fault), hub.faults.stall_listing) == (0, 0)
    check_same(tmp_path / "out", local(hub, CUT))


def test_a_server_that_never_answers(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PATIENCE", Patience(tries=2, wait=0.001, timeout=0.2))
    monkeypatch.setattr(mirror, "IMPATIENCE", Patience(tries=2, wait=0.001, timeout=0.2))
    words = [hub.name, str(tmp_path / "out"), "--to", "cut"]
    hub.faults.stall_listing = 2
    assert f"the hub at {hub.url} cannot be reached: " in (said := refused(words, capsys)) and "timed out" in said
    hub.faults.stall = 100
    said = refused(words, capsys)
    assert "of org/tiny cannot be fetched: " in said and "timed out (2 tries)" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("busy", "the server answered 503"),
        ("shifted", "when asked for 'bytes "),
        ("refuse_range", "the server answered 416"),
        ("gzip", "encoded as gzip"),
    ],
)
def test_faults_that_do_not_pass(
    hub: HubServer, tmp_path: Path, fault: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def strike() -> None:
        if len(hub.fetched) > HALFWAY:
            setattr(hub.faults, fault, 1)

    hub.faults.wait = strike
    message = refused([hub.name, str(tmp_path / "out"), "--to", "cut"], capsys)
    assert "of org/tiny cannot be fetched: " in message and said in message and "(4 tries)" in message
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.hub").exists()


def test_a_server_without_ranges(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], local: Local
) -> None:
    hub.faults.no_ranges = True
    hub.faults.drop = 1  # a half file, which is asked for again from its beginning
    assert main(["slice", hub.name, str(tmp_path / "a" / "out"), "--to", "cut"]) == 0
    said = capsys.readouterr().out
    count = len(list(hub.folder.glob("*.safetensors")))
    assert f"note: the server gives no parts of files, so {count} are fetched whole" in said and "(100%)" in said
    assert f"{count} of {count} weight files by SHA-256\n" in said
    check_same(tmp_path / "a" / "out", local(hub, CUT))


@pytest.mark.parametrize("no_ranges", [False, True])
def test_a_file_with_another_hash(hub: HubServer, tmp_path: Path, no_ranges: bool) -> None:
    name = sorted(hub.folder.glob("*.safetensors"))[-1].name
    hub.faults = Faults(corrupt=name, no_ranges=no_ranges)
    with pytest.raises(ChecksumError, match=f"{name} of org/tiny has not the SHA-256 that the hub says"):
        slice_checkpoint(hub.name, tmp_path / "out", Submodel())
    assert list(tmp_path.iterdir()) == []


def test_a_small_file_with_another_hash(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.corrupt = "tokenizer.json"
    with pytest.raises(ChecksumError, match=r"tokenizer.json of org/tiny has not the hash"):
        slice_checkpoint(hub.name, tmp_path / "out", CUT)
    assert list(tmp_path.iterdir()) == []


# --- going on -----------------------------------------------------------------------------------------------------


def test_going_on_after_an_error(hub: HubServer, tmp_path: Path, local: Local) -> None:
    """The second run fetches only what the first did not finish."""

    def strike() -> None:
        if len(hub.fetched) > HALFWAY:
            hub.faults.busy = 1

    hub.faults.wait = strike
    with pytest.raises(RemoteError, match="503"):
        slice_checkpoint(hub.name, tmp_path / "a" / "out", CUT, threads=1)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".out.partial", ".out.resume"]
    first = fetched_ranges(hub)
    hub.faults = Faults()
    hub.fetched.clear()
    slice_checkpoint(hub.name, tmp_path / "a" / "out", CUT, threads=1)
    second = fetched_ranges(hub)
    check_same(tmp_path / "a" / "out", local(hub, CUT))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]
    hub.fetched.clear()
    slice_checkpoint(hub.name, tmp_path / "c", CUT)
    whole = sum(map(length, fetched_ranges(hub).values()))
    # Each byte once, but for the unit that failed.
    both = sum(map(length, first.values())) + sum(map(length, second.values()))
    assert sum(map(length, second.values())) < whole and whole <= both <= whole + 10 * 4096


@pytest.mark.parametrize("change", ["another size", "another commit"])
def test_other_work_is_not_continued(hub: HubServer, tmp_path: Path, change: str, local: Local) -> None:
    def strike() -> None:
        if len(hub.fetched) > HALFWAY:
            hub.faults.busy = 1

    hub.faults.wait = strike
    with pytest.raises(RemoteError):
        slice_checkpoint(hub.name, tmp_path / "a" / "out", CUT, threads=1)
    hub.faults = Faults()
    submodel = CUT
    if change == "another size":
        submodel = CUT.model_copy(update={"widths": {**CUT.widths, "hidden": 40}})
    else:
        hub.commit = COMMIT[::-1]
        hub.folder = tiny_folder(tmp_path / "tiny", sharded=True, seed=1, pattern=PATTERN)
    slice_checkpoint(hub.name, tmp_path / "a" / "out", submodel)
    check_same(tmp_path / "a" / "out", local(hub, submodel))


SLOW = """
import sys
from star_elastic import cli
from star_elastic import rewrite
from star_elastic.checkpoint import Checkpoint, cut, onepass, reader
from star_elastic.quant import folder as quantized_folders
from star_elastic.remote import mirror
from star_elastic.remote.hub import Patience
mirror.HEADER_GUESS = 16
onepass.GAP_BYTES, onepass.UNIT_BYTES, onepass.SYNC_SECONDS = 0, 4096, 0.0
sys.exit(cli.main())
"""


def wait_for(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.01)


SLOW_SIGNALS = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("how", [signal.SIGKILL, *SLOW_SIGNALS])
def test_going_on_after_a_signal(hub: HubServer, tmp_path: Path, how: signal.Signals, local: Local) -> None:
    reached, go = threading.Event(), threading.Event()

    def wait() -> None:
        if len(hub.fetched) > HALFWAY:
            reached.set()
            go.wait(30)

    hub.faults.wait = wait
    words = [sys.executable, "-c", SLOW, "slice", hub.name, str(tmp_path / "a" / "out"), "--to", "cut"]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "HF_ENDPOINT": hub.url}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    assert reached.wait(30)
    wait_for(tmp_path / "a" / ".out.resume")
    process.send_signal(how)
    time.sleep(0.2)
    go.set()
    _, said = process.communicate(timeout=30)
    if how == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert (process.returncode, said.count("\n")) == (2, 1)
        assert said.startswith("error: interrupted; what is finished is kept: the same command goes on")
        assert not (tmp_path / "a" / ".out.hub").exists()
    assert (tmp_path / "a" / ".out.resume").exists() and not (tmp_path / "a" / "out").exists()
    hub.faults = Faults()
    first = sum(map(length, fetched_ranges(hub).values()))
    hub.fetched.clear()
    assert subprocess.run(words, env=environment).returncode == 0
    second = sum(map(length, fetched_ranges(hub).values()))
    check_same(tmp_path / "a" / "out", local(hub, CUT))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]
    hub.fetched.clear()
    slice_checkpoint(hub.name, tmp_path / "c", CUT)
    whole = sum(map(length, fetched_ranges(hub).values()))
    assert second < whole and first + second <= whole + 10 * 8192


def test_no_space(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    slice_checkpoint(hub.folder, tmp_path / "size", CUT)
    size = sum(path.stat().st_size for path in (tmp_path / "size").glob("*.safetensors"))
    shutil.rmtree(tmp_path / "size")
    # Enough for the slice, not for what waits to be cut.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, size + 1000))
    with pytest.raises(CheckpointError, match="not enough space for "):
        slice_checkpoint(hub.name, tmp_path / "out", CUT)
    assert list(tmp_path.iterdir()) == [] and not any(map(length, fetched_ranges(hub).values()))


# --- verified against the hub -------------------------------------------------------------------------------------


def test_a_slice_is_verified_against_the_hub(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(against, "GAP_BYTES", 0)
    out = tmp_path / "out"
    slice_checkpoint(hub.folder, out, CUT)
    assert main(["verify", str(out), "--against", f"{hub.name}@main"]) == 0
    assert "tensors are the cut of org/tiny, bit for bit" in capsys.readouterr().out
    for ranges in fetched_ranges(hub).values():
        assert 0 < length(ranges) == length(merged(ranges)), "bytes were fetched twice"
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00")
    assert main(["verify", str(out), "--against", hub.name]) == 1
    assert "expected the parent's cut, bit for bit, found other numbers" in capsys.readouterr().out
    assert main(["verify", str(out), "--against", "org/other"]) == 2
    assert "the hub has no model org/other" in capsys.readouterr().err
    assert main(["verify", str(out), "--against", hub.name, "--forward"]) == 2
    assert "--forward runs the parent, and org/tiny is not on this disk" in capsys.readouterr().err
