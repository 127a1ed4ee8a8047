"""Publishing: what reaches a hub on this machine is the folder, with its card; broken and unfinished folders stay here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from push_server import TOKEN, PushServer
from tiny import tiny_folder

from star_elastic import Submodel, slice_checkpoint
from star_elastic.card import reparented, split_card
from star_elastic.cli import main
from star_elastic.errors import RemoteError
from star_elastic.push import PushError, push_folder

REPO = "lab/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushServer]:
    from huggingface_hub import constants

    with PushServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slice in two shards, whose parent has a licence, with files beside it that are nobody's business."""
    home = tmp_path_factory.mktemp("push")
    parent = tiny_folder(home / "parent")
    (parent / "README.md").write_text("---\nlicense: other\nlicense_name: open-model\n---\n# Parent\n")
    (parent / "LICENSE").write_text("Do as you like.")
    out = home / "small"
    slice_checkpoint(parent, out, Submodel(widths={"hidden": 48}), max_shard_bytes=300_000)
    (out / "notes.txt").write_text("secret")
    (out / "code.py").write_text("raise SystemExit")
    return out


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(made, tmp_path / "small")


def test_the_folder_arrives_with_a_card_for_its_new_place(hub: PushServer, folder: Path) -> None:
    report = push_folder(folder, REPO, private=True, base_model="nvidia/parent")
    there = hub.branches[REPO, "main"]
    assert hub.repos == {REPO: True} and report.url is not None and report.url.startswith(hub.url)
    assert report.left_out == ("code.py", "notes.txt")
    assert set(there) == {path.name for path in folder.iterdir()} - set(report.left_out)
    assert sum(name.endswith(".safetensors") for name in there) == 2
    for name, content in there.items():
        if name != "README.md":
            assert content == (folder / name).read_bytes(), name
    fields, body = split_card(there["README.md"].decode())
    assert (fields["license"], fields["license_name"], fields["base_model"]) == ("other", "open-model", "nvidia/parent")
    assert fields["star_elastic"]["widths"]["hidden"] == 48
    assert (
        'AutoModelForCausalLM.from_pretrained("lab/tiny", dtype="auto")' in body and "\nvllm serve lab/tiny\n" in body
    )
    assert "hf download lab/tiny --local-dir small\nstar-elastic export small --gguf small.gguf" in body
    assert "# small" in body and '"small"' not in body
    assert "A nested model of `nvidia/parent`" in body and "inherited from `nvidia/parent`" in body
    assert "`parent`" not in body


def test_a_parent_is_renamed_where_it_is_the_parent() -> None:
    body = "A nested model `a.b` of `a.b`, by `a.b`; not `axb`."
    assert reparented(body, "a.b", r"o/\1") == r"A nested model `a.b` of `o/\1`, by `o/\1`; not `axb`."


def test_pushed_again_it_sends_what_is_missing(hub: PushServer, folder: Path) -> None:
    hub.refuse_uploads = 1
    with pytest.raises(RemoteError, match=f"{REPO} was not pushed: .*403.*; push again to go on"):
        push_folder(folder, REPO)
    assert REPO in hub.repos and (REPO, "main") not in hub.branches
    before = hub.uploads
    push_folder(folder, REPO)
    assert hub.uploads == 2 and before <= 1
    push_folder(folder, REPO)
    assert hub.uploads == 2


def test_a_branch(hub: PushServer, folder: Path) -> None:
    push_folder(folder, REPO, revision="v1")
    assert "config.json" in hub.branches[REPO, "v1"] and (REPO, "main") not in hub.branches


def test_a_dry_run_talks_to_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert main(["push", str(folder), REPO, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "left out: notes.txt" in lines
    assert any(line.startswith("would push model-00001-of-00002.safetensors: ") for line in lines)
    assert "note: the card names no parent on the hub ('parent' is none): say it with --base-model org/name" in lines
    assert lines[-1].startswith("dry run: ") and lines[-1].endswith(f"were not pushed to {REPO}")


def test_what_the_hub_warns_of_is_told(hub: PushServer, folder: Path) -> None:
    hub.warning = "unknown licence"
    report = push_folder(folder, REPO)
    assert any("unknown licence" in note for note in report.notes)


def test_broken_folders_stay_here(hub: PushServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert main(["push", str(folder), REPO]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "model-00002-of-00002.safetensors: expected a file" in error
    assert not hub.repos


@pytest.mark.parametrize("name", ["train.run", ".small.partial", ".small.hub"])
def test_unfinished_folders_stay_here(name: str, hub: PushServer, folder: Path) -> None:
    unfinished = shutil.copytree(folder, folder.with_name(name))
    with pytest.raises(PushError, match="holds unfinished work"):
        push_folder(unfinished, REPO)
    assert not hub.repos


def test_a_folder_without_a_card_stays_here(hub: PushServer, folder: Path) -> None:
    (folder / "README.md").unlink()
    with pytest.raises(PushError, match="has no README.md"):
        push_folder(folder, REPO)


@pytest.mark.parametrize("repo", ["tiny", "a/b/c", "lab/ti ny", "../tiny", "lab/tiny.git", ""])
def test_names_that_are_none(repo: str, hub: PushServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(folder), repo]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and "is no name of the hub" in error


def test_no_token(hub: PushServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(RemoteError, match="no token is set: run hf auth login"):
        push_folder(folder, REPO)


@pytest.mark.parametrize(
    ("status", "why"),
    [(403, "may not write to lab/tiny"), (400, "the hub answered 400"), (507, "the hub answered 507")],
)
def test_what_the_hub_refuses(status: int, why: str, hub: PushServer, folder: Path) -> None:
    hub.refuse = status
    with pytest.raises(RemoteError, match=why):
        push_folder(folder, REPO)


def test_a_wrong_token(hub: PushServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(RemoteError, match="401 .*: it does not know the token"):
        push_folder(folder, REPO)


def test_a_hub_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(RemoteError, match="the hub at http://127.0.0.1:1 cannot be reached"):
        push_folder(folder, REPO)
