"""One progress bar for all long work: how far, how fast, how long still. It goes to stderr, so that stdout stays clean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from star_elastic.units import format_bytes, format_count


class RateColumn(ProgressColumn):
    """Units of work per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """The rate so far, such as ``12.3k tokens/s`` or ``1.2 GiB/s``."""
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("")
        return Text(f"{format_bytes(speed)}/s" if self.unit == "bytes" else f"{format_count(speed)} {self.unit}/s")


class _Headed(Progress):
    """A bar below something else that changes."""

    above: RenderableType | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.above is not None and self.console.is_terminal:
            yield self.above
        yield from super().get_renderables()


@contextmanager
def progress_bar(
    description: str,
    total: int,
    unit: str,
    *,
    shown: bool = True,
    above: RenderableType | None = None,
    console: Console | None = None,
) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs, and yield a function that advances it.

    Args:
        description: what is being done.
        total: units of work in all.
        unit: their name in the plural; of ``bytes`` it is shown how many are done, in KiB, MiB, ...
        shown: False shows nothing; the function still takes calls.
        above: shown above the bar, and drawn anew with it; in a terminal only.
        console: where to; stderr by default.

    Example:
        >>> with progress_bar("scoring", 4096, "tokens", shown=False) as advance:
        ...     advance(1024)
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        *([DownloadColumn(binary_units=True)] if unit == "bytes" else []),
        RateColumn(unit),
        TimeRemainingColumn(),
    )
    progress = _Headed(*columns, console=console or Console(stderr=True), disable=not shown)
    progress.above = above
    with progress:
        task = progress.add_task(description, total=total)

        def advance(amount: int) -> None:
            progress.advance(task, amount)

        try:
            yield advance
        except BaseException:
            # An error is told in one line: no half a bar above it, nor the empty line that stop() prints without a terminal.
            progress.live.transient = True
            progress.live.stop()
            progress.disable = True
            raise
