"""What the hub knows about a model: one commit, its files, their sizes and hashes; and what it says where it gives nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from star_elastic.errors import RemoteError

TRY_AGAIN = frozenset(
    {408, 416, 425, 429, 500, 502, 503, 504}
)  # 416: a copy that is not complete yet, somewhere on the way


@dataclass(frozen=True)
class Patience:
    """How often to try again without having got a byte, and how long to wait before: ``wait`` seconds, doubled each time.

    Attributes:
        tries: tries in all.
        wait: seconds before the second.
        longest: seconds before any.
        timeout: seconds without an answer or a byte after which a connection counts as dropped.
    """

    tries: int = 7
    wait: float = 1.0
    longest: float = 30.0
    timeout: float = 30.0

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        return min(self.longest, self.wait * 2 ** (failures - 1))


PATIENCE = Patience()
IMPATIENCE = Patience(tries=3)  # a first question: if nobody answers, the user wants to know soon


@dataclass(frozen=True)
class RemoteFile:
    """A file of one commit.

    Attributes:
        name: path in the repository.
        url: where to get it.
        size: bytes.
        sha256: of the content, where the hub keeps it as a large file.
        git_sha1: of a blob with this content, as git counts it, where it does not.
    """

    name: str
    url: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True)
class HubModel:
    """One commit of a model.

    Attributes:
        name: ``org/name``.
        commit: the commit that the revision meant when it was asked; all files are read from it.
        files: by path.
    """

    name: str
    commit: str
    files: dict[str, RemoteFile]


def find_model(name: str, revision: str | None = None, patience: Patience = IMPATIENCE) -> HubModel:
    """Ask the hub for a model; HF_ENDPOINT and HF_TOKEN are honoured.

    Raises:
        RemoteError: there is no such model or revision, it is not ours to read, or the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_url

    with hub_errors(name, revision):
        info = _model_info(name, revision, patience)
    commit = str(info.sha)
    files = {}
    for file in info.siblings or ():
        if file.size is None:
            raise RemoteError(f"the hub does not say how large {file.rfilename} of {name} is")
        files[file.rfilename] = RemoteFile(
            name=file.rfilename,
            url=hf_hub_url(name, file.rfilename, revision=commit),
            size=file.size,
            sha256=file.lfs.sha256 if file.lfs else None,
            git_sha1=None if file.lfs else file.blob_id,
        )
    return HubModel(name, commit, files)


def _model_info(name: str, revision: str | None, patience: Patience) -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    for failures in range(1, patience.tries + 1):
        try:
            return HfApi().model_info(name, revision=revision, files_metadata=True, timeout=patience.timeout)
        except HTTPError as error:
            refused = isinstance(error, HfHubHTTPError) and error.response.status_code not in TRY_AGAIN
            if refused or failures == patience.tries:
                raise
        time.sleep(patience.pause(failures))
    raise AssertionError("the last try returns or raises")


@contextmanager
def hub_errors(name: str, revision: str | None = None) -> Iterator[None]:
    """Tell what the hub or the network says in one line, as a RemoteError."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    here = f"there is no folder {name} here, and"
    access = "HF_TOKEN has no access" if get_token() else "no token is set (HF_TOKEN)"
    try:
        yield
    except GatedRepoError:
        page = f"{constants.ENDPOINT}/{name}"
        raise RemoteError(f"{name} is gated and {access}: accept its terms at {page}, then set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise RemoteError(
            f"{here} the hub has no model {name}: check the spelling; if it is private, note that {access}"
        ) from None
    except RevisionNotFoundError:
        raise RemoteError(
            f"{name} has no revision {revision!r}: give a branch, a tag or a commit after the @"
        ) from None
    except HFValidationError as error:
        raise RemoteError(f"{here} {name} is no name of the hub: {error}") from None
    except HfHubHTTPError as error:
        raise RemoteError(f"the hub answered {error.response.status_code} when asked for {name}") from None
    except (HTTPError, ConnectionError) as error:
        if isinstance(error, RemoteError):
            raise
        offline = " (HF_HUB_OFFLINE is set)" if constants.is_offline_mode() else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RemoteError(f"{here} the hub at {constants.ENDPOINT} cannot be reached{offline}: {reason}") from None
