"""Publishing a folder on the hub: verified first, with a model card that names the repository, in one commit.

The hub keeps large files by their hash, so pushing again after an interruption sends only what it does not have yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from star_elastic.card import front_matter_text, reparented, retitled, split_card
from star_elastic.checkpoint.companions import is_companion
from star_elastic.errors import ElasticError, RemoteError
from star_elastic.opened import HUB_NAME
from star_elastic.quant import SIDECAR
from star_elastic.submodel import FILE_NAME
from star_elastic.units import format_bytes
from star_elastic.verify import verify_folder

CARD = "README.md"
MESSAGE = "Upload with star-elastic"
OWN_FILES = frozenset(
    {"config.json", "model.safetensors.index.json", CARD, FILE_NAME, SIDECAR, "training.json", "Modelfile"}
)
OWN_SUFFIXES = frozenset({".safetensors", ".gguf"})


class PushError(ElasticError, ValueError):
    """A folder that is not fit to be published, or a name that the hub cannot give it."""


@dataclass(frozen=True)
class PushReport:
    """What was pushed, or would be.

    Attributes:
        repo: ``org/name``.
        revision: branch; None is the main one.
        files: relative names and sizes in bytes.
        left_out: relative names of other files in the folder.
        url: of the commit; None for a dry run.
        notes: what the user should know.
    """

    repo: str
    revision: str | None
    files: dict[str, int]
    left_out: tuple[str, ...]
    url: str | None = None
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """For people, one fact a line."""
        if self.url is None:
            for name, size in self.files.items():
                yield f"would push {name}: {format_bytes(size)}"
        for name in self.left_out:
            yield f"left out: {name}"
        yield from (f"note: {note}" for note in self.notes)
        branch = f", branch {self.revision}" if self.revision else ""
        total = f"{len(self.files)} files, {format_bytes(sum(self.files.values()))}"
        if self.url is None:
            yield f"dry run: {total} were not pushed to {self.repo}{branch}"
        else:
            yield f"pushed {total} to {self.repo}{branch}: {self.url}"


def push_folder(
    folder: Path | str,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    base_model: str | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> PushReport:
    """Publish a folder on the hub.

    Args:
        folder: a slice or an elastic checkpoint, with its model card.
        repo: ``org/name``; made if it is not there.
        private: make a new repository private; an existing one stays as it is.
        revision: branch to push to, made if it is not there; the main one if left out.
        base_model: the parent's name on the hub, for the card; what the card says if left out.
        dry_run: check everything, talk to nobody.
        progress: draw a progress bar for the verification on a terminal.

    Raises:
        PushError: the folder is broken, unfinished or has no model card, or a name is none of the hub's.
        RemoteError: there is no token, or the hub refuses or cannot be reached.

    Example:
        >>> push_folder("small", "my-org/small", dry_run=True).files  # doctest: +SKIP
    """
    folder = Path(folder)
    _check_names(repo, base_model)
    _check_finished(folder)
    if not dry_run:
        _check_token()
    report = verify_folder(folder, progress=progress)
    if not report.ok:
        first = str(report.faults[0]) if report.faults else "not every check could be made"
        more = f" ({len(report.faults)} faults in all)" if len(report.faults) > 1 else ""
        raise PushError(f"{folder} is not whole, so it is not pushed: {first}{more}; see star-elastic verify {folder}")
    names, left_out = _chosen(folder)
    card, notes = _published_card(folder, repo, base_model)
    files = {name: (folder / name).stat().st_size for name in names} | {CARD: len(card)}
    planned = PushReport(repo, revision, files, tuple(left_out), notes=tuple(notes))
    if dry_run:
        return planned
    url, warned = _commit(folder, repo, names, card, private=private, revision=revision)
    return replace(planned, url=url, notes=(*planned.notes, *warned))


def _check_names(repo: str, base_model: str | None) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    for option, name in (("REPO", repo), ("--base-model", base_model)):
        if name is None:
            continue
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise PushError(f"{option} {name!r} is no name of the hub: {error}") from None
        if name.count("/") != 1:
            raise PushError(f"{option} {name!r} is no name of the hub: want org/name")


def _check_finished(folder: Path) -> None:
    name = folder.resolve().name
    if name.endswith(".run") or (name.startswith(".") and name.endswith((".partial", ".hub"))):
        raise PushError(f"{folder} holds unfinished work: push the folder that comes of it")
    if not (folder / CARD).is_file() and (folder / "config.json").is_file():
        raise PushError(
            f"{folder} has no {CARD}: write a model card first, which says what the model is and its licence"
        )


def _check_token() -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        raise RemoteError("no token is set: run hf auth login, or set HF_TOKEN to one that may write")


def _chosen(folder: Path) -> tuple[list[str], list[str]]:
    """Relative names of files that are pushed, and of those that are not."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    chosen = [
        name
        for name in found
        if is_companion(name) or ("/" not in name and (name in OWN_FILES or Path(name).suffix in OWN_SUFFIXES))
    ]
    return chosen, [name for name in found if name not in chosen]


def _published_card(folder: Path, repo: str, base_model: str | None) -> tuple[bytes, list[str]]:
    """The folder's card, with the repository's name in its commands and a parent that the hub can link to."""
    fields, body = split_card((folder / CARD).read_text(encoding="utf-8"))
    notes, told = [], fields.get("base_model")
    if base_model and isinstance(told, str):
        body = reparented(body, told, base_model)
    parent = base_model or told
    if isinstance(parent, str) and (match := HUB_NAME.fullmatch(parent)):
        fields["base_model"] = match["name"]
    elif isinstance(parent, str):
        del fields["base_model"]
        notes.append(f"the card names no parent on the hub ({parent!r} is none): say it with --base-model org/name")
    if "license" not in fields:
        notes.append("the card names no licence, because the parent's does not")
    return (front_matter_text(fields) + retitled(body, repo)).encode(), notes


def _commit(
    folder: Path, repo: str, names: Sequence[str], card: bytes, *, private: bool, revision: str | None
) -> tuple[str, list[str]]:
    """Make one commit; its address, and what the hub warns of."""
    from huggingface_hub import CommitOperationAdd, HfApi

    operations = [CommitOperationAdd(name, card if name == CARD else str(folder / name)) for name in names]
    api = HfApi()
    with _refusals(repo), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        api.create_repo(repo, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit: Any = api.create_commit(repo, operations, commit_message=MESSAGE, revision=revision)
    said = [" ".join(str(one.message).split()) for one in warned if issubclass(one.category, UserWarning)]
    return str(commit.commit_url), said


@contextmanager
def _refusals(repo: str) -> Iterator[None]:
    """Tell what the hub or the network says in one line, as a RemoteError."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        why = {
            401: "it does not know the token: run hf auth login, or set HF_TOKEN to a valid one",
            403: f"the token may not write to {repo}: make one with write access, for this account or organisation",
        }.get(status, " ".join(str(error.server_message or error).split()))
        raise RemoteError(f"the hub answered {status} when {repo} was pushed: {why}") from None
    except (HTTPError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RemoteError(f"the hub at {constants.ENDPOINT} cannot be reached: {reason}") from None
    except RuntimeError as error:  # a file that could not be uploaded; its cause says why
        reason = " ".join(str(error.__cause__ or error).split())
        raise RemoteError(f"{repo} was not pushed: {reason}; push again to go on") from None
    except ValueError as error:  # the hub's own check of the card
        raise PushError(f"the hub refuses the model card: {' '.join(str(error).split())}") from None
