"""How much of an unfinished folder is surely on the disk, so that the same work, started again after a kill, goes on from there.

The journal of ``out/small`` is ``out/.small.resume``, beside the unfinished ``out/.small.partial``. It names the work by a
fingerprint of everything that decides the result's bytes: a folder left by other work is not continued.
"""

from __future__ import annotations

import json
from pathlib import Path

from star_elastic.checkpoint.durable import sync_path


class Journal:
    """The count of finished tensors of one target.

    Attributes:
        path: the journal's file.
        keep: whether the unfinished folder stays after an exception too, because its bytes were costly to get.
    """

    def __init__(self, target: Path | str, fingerprint: str, *, keep: bool = False) -> None:
        target = Path(target).resolve()
        self.path = target.with_name(f".{target.name}.resume")
        self.keep = keep
        self._fingerprint = fingerprint

    @property
    def done(self) -> int:
        """Tensors that are finished, of the same work; 0 where nothing of it is left."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            done = content["done"] if content["fingerprint"] == self._fingerprint else 0
        except (OSError, ValueError, TypeError, KeyError):
            return 0
        return done if isinstance(done, int) and done > 0 else 0

    def record(self, done: int) -> None:
        """Say that ``done`` tensors are on the disk; the caller has synced them."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_text(json.dumps({"fingerprint": self._fingerprint, "done": done}), encoding="utf-8")
        sync_path(fresh)
        fresh.replace(self.path)

    def forget(self) -> None:
        """The work is finished or given up."""
        self.path.unlink(missing_ok=True)
