"""Where a model that is to be cut lies: a folder on this disk, or the hub. Everything that follows sees a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from star_elastic.checkpoint import Checkpoint
from star_elastic.errors import CheckpointError, ElasticError

if TYPE_CHECKING:
    from star_elastic.remote import HubMirror

HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^\s@]+))?")


@dataclass(frozen=True)
class OpenedSource:
    """A model that can be read.

    Attributes:
        folder: config, small files, and weight files of full length; where ``fetch`` is set, their tensors are holes.
        identity: changes when the model does.
        parent: name of the parent for the card; None where the folder tells.
        fetch: gets tensors into those files; None where they are there.
    """

    folder: Path
    identity: str
    parent: str | None = None
    fetch: HubMirror | None = None


def is_hub_name(source: Path | str) -> bool:
    """Whether ``source`` means a model of the hub, ``org/name`` or ``org/name@revision``: a folder of that name comes first."""
    return HUB_NAME.fullmatch(str(source)) is not None and not Path(source).exists()


@contextmanager
def open_source(source: Path | str, scratch: Path | None = None) -> Iterator[OpenedSource]:
    """Open a model folder, or a model of the hub.

    Args:
        source: folder or hub name.
        scratch: a folder to make for what is fetched from the hub, and to remove in the end; a temporary one if left out.

    Raises:
        CheckpointError: there is no such folder, and it is no hub name.
        RemoteError: see ``remote.open_hub``.
    """
    if is_hub_name(source):
        from star_elastic.remote import open_hub

        match = HUB_NAME.fullmatch(str(source))
        assert match is not None
        with open_hub(match["name"], match["revision"], scratch) as opened, _told_as(str(source), opened.folder):
            yield opened
    elif Path(source).exists():
        yield OpenedSource(Path(source), "")
    else:
        hint = "" if Path(source).is_absolute() else ", and is no name of the hub: want org/name or org/name@revision"
        raise CheckpointError(f"folder {source} does not exist{hint}")


@contextmanager
def _told_as(name: str, folder: Path) -> Iterator[None]:
    """Errors name the model, not the folder that stands for it."""
    try:
        yield
    except ElasticError as error:
        if str(folder) not in str(error):
            raise
        raise type(error)(str(error).replace(str(folder), name)) from error


def folder_identity(checkpoint: Checkpoint) -> str:
    """Names, sizes and times of change of the weight files of a folder."""
    stats = {path.name: path.stat() for path in {info.path for info in checkpoint.tensors.values()}}
    return json.dumps({name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in sorted(stats.items())})
