"""Where the numbers of a run go while it runs: ``metrics.jsonl`` always, TensorBoard and Weights & Biases where asked.

Each logged step is one dict, whatever the destination; what a line of ``metrics.jsonl`` nests is named with slashes elsewhere:
``{"kd": {"small": 0.5}}`` is ``kd/small``.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from star_elastic.errors import ElasticError, TargetError
from star_elastic.train.state import RunFolder

TRACKERS = {
    "tensorboard": ("torch.utils.tensorboard", "pip install 'star-elastic[track]'"),
    "wandb": ("wandb", "pip install wandb"),
}
EVENTS = "tensorboard"  # folder of event files in the run's folder; beside the output when the run is done


class TrackerError(ElasticError, ImportError):
    """A package that the recipe asks for is not installed."""


class Tracker(Protocol):
    """A further destination of metrics."""

    def log(self, line: Mapping[str, Any]) -> None:
        """Take the numbers of one step."""

    def close(self) -> None:
        """Write what waits."""


class Metrics:
    """Takes one dict per logged step.

    Args:
        run: The run's folder. On processes other than the main one nothing is written.
        track: Names of further destinations.
        config: What a tracker shows as the run's settings.

    Attributes:
        listeners: Further functions that take each line.
    """

    def __init__(self, run: RunFolder, track: Sequence[str] = (), config: Mapping[str, Any] | None = None) -> None:
        self.run, self.listeners = run, list[Any]()
        self._track, self._config = (track if run.ranks.is_main else ()), config or {}
        self._trackers: list[Tracker] | None = None

    def log(self, line: dict[str, Any]) -> None:
        """Take the numbers of one step, JSON-ready, with ``step`` among them."""
        self.run.log(line)
        if self._trackers is None:  # the first step says where on the axis a resumed run goes on
            self._trackers = [_open(name, self.run, self._config, line["step"]) for name in self._track]
        for tracker in self._trackers:
            tracker.log(line)
        for listener in self.listeners:
            listener(line)

    def close(self) -> None:
        """Close the trackers; safe to call twice."""
        for tracker in self._trackers or ():
            tracker.close()
        self._trackers = None

    def keep_events(self, output: Path) -> None:
        """Move event files out of the run's folder, which goes, to ``OUTPUT.tensorboard``.

        They do not go into the output: their names hold the name of the machine.
        """
        self.close()
        if self.run.ranks.is_main and (self.run.path / EVENTS).exists():
            shutil.move(self.run.path / EVENTS, events_folder(output))


def events_folder(output: Path) -> Path:
    """Where the event files of a finished run lie."""
    return Path(f"{output}.{EVENTS}")


def check_trackers(track: Sequence[str], output: Path) -> None:
    """Refuse before any work what could not be written at its end.

    Raises:
        TrackerError: a package that is not installed; names the command that installs it.
        TargetError: event files of an earlier run are in the way.
    """
    for name in track:
        module, install = TRACKERS[name]
        try:
            importlib.import_module(module)
        except ImportError:
            raise TrackerError(f"track: {name} is not installed here; {install}, or remove it from 'track'") from None
    if "tensorboard" in track and events_folder(output).exists():
        raise TargetError(f"{events_folder(output)} holds the events of an earlier run: move or remove it")


def scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line under one name each.

    Text and the step itself are left out. A list holds the probabilities of candidates; the largest is that of the width shown.
    """
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list) and value:
            yield f"{prefix}{name}", max(value)
        elif isinstance(value, int | float) and name != "step":
            yield f"{prefix}{name}", value


class TensorBoard:
    """Event files in a folder; those of steps that a resumed run takes again are hidden."""

    def __init__(self, folder: Path, first_step: int) -> None:
        writer = importlib.import_module(TRACKERS["tensorboard"][0]).SummaryWriter
        self._writer = writer(log_dir=str(folder), purge_step=first_step)

    def log(self, line: Mapping[str, Any]) -> None:
        """Write one step."""
        for name, value in scalars(line):
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, offline or where its own environment variables say; a resumed run goes on with the same one."""

    def __init__(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module(TRACKERS["wandb"][0])
        known = run.path / "wandb-id"
        given = known.read_text(encoding="utf-8") if known.exists() else None
        project = os.environ.get("WANDB_PROJECT", "star-elastic")
        name = run.recipe.output.name
        self._run = wandb.init(project=project, name=name, id=given, resume="allow", config=dict(config))
        known.write_text(self._run.id, encoding="utf-8")

    def log(self, line: Mapping[str, Any]) -> None:
        """Send one step."""
        self._run.log(dict(scalars(line)), step=line["step"])

    def close(self) -> None:
        """Wait until all is sent, or written where it runs offline."""
        self._run.finish()


def _open(name: str, run: RunFolder, config: Mapping[str, Any], first_step: int) -> Tracker:
    if name == "tensorboard":
        return TensorBoard(run.path / EVENTS, first_step)
    return Wandb(run, config)
