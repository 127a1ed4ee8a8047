"""Where a long scoring run can go on: one file beside the output, replaced as a whole.

It holds the sums themselves in fp64, so that a run that was interrupted ends with the same scores, bit for bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from star_elastic.errors import CheckpointError, DataError, ElasticError, TargetError
from star_elastic.score.finite import NotFiniteError
from star_elastic.score.hidden import flush

STATE_FILE = "state.safetensors"


class ScoringStopped(ElasticError, RuntimeError):
    """A run that was interrupted, by Ctrl-C or SIGTERM, and can go on."""


class RunState:
    """The folder ``OUT.run`` of a scoring run.

    Args:
        out: the run's output folder.
        identity: everything that decides the numbers; a run goes on only where it is equal.
        every: batches between two saves.
    """

    def __init__(self, out: Path | str, identity: Mapping[str, Any], every: int) -> None:
        target = Path(out).resolve()
        self.folder = target.with_name(f"{target.name}.run")
        self.identity = json.loads(json.dumps(identity))
        self.every = every
        self._waiting = 0

    def check(self, *, resume: bool) -> None:
        """See whether an unfinished run is in the way, or is another one than this.

        Raises:
            TargetError: there is one and ``resume`` is not wanted; or a file is in its place.
            CheckpointError: there is one of other settings, or its file is damaged.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise TargetError(f"{self.folder} is a file, where an unfinished run would be kept: move it, or choose another OUT")
        if self.folder.exists() and not resume:
            raise TargetError(f"{self.folder} holds an unfinished run: --resume continues it, or remove it")
        if (self.folder / STATE_FILE).exists():
            theirs = self._read_identity()
            for name in sorted({*theirs, *self.identity}):
                if theirs.get(name) != self.identity.get(name):
                    raise CheckpointError(
                        f"{self.folder} is of another run: its {name} was {theirs.get(name)}, now it is "
                        f"{self.identity.get(name)}; give the same again, or remove it"
                    )

    def load(self) -> dict[str, Tensor]:
        """Everything saved last; empty where nothing was."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return {}
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}

    def after_batch(self, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """Count a batch, and save ``state()`` where it is time to."""
        self._waiting += 1
        if self._waiting >= self.every:
            self.save(state())

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Save everything; the file before stays whole until the new one is."""
        self._waiting = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / f".{STATE_FILE}.partial"
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(own, fresh, metadata={"identity": json.dumps(self.identity)})
        flush(fresh)
        fresh.replace(self.folder / STATE_FILE)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Score inside this block: what a run leaves behind where it fails is what another can go on from, and nothing else.

        Raises:
            ScoringStopped: for KeyboardInterrupt, where there is something to go on from.
        """
        try:
            yield
        except (NotFiniteError, DataError):  # going on would only meet it again
            self.remove()
            raise
        except KeyboardInterrupt:
            if self._saved:
                raise ScoringStopped(f"stopped; what is done is in {self.folder}: the same with --resume continues") from None
            raise
        finally:
            if not self._saved:
                self.remove()

    @property
    def _saved(self) -> bool:
        return (self.folder / STATE_FILE).exists()

    def remove(self) -> None:
        """The run is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read_identity(self) -> dict[str, Any]:
        path = self.folder / STATE_FILE
        try:
            with safe_open(path, framework="pt") as file:
                return dict(json.loads((file.metadata() or {}).get("identity", "{}")))
        except (SafetensorError, OSError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {' '.join(str(error).split())}; remove {self.folder}") from None
