"""What a verification found: one line a check, and everything as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_FAULTS = 5  # that a check prints; JSON lists all


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        what: a file, tensor or field.
        expected: what would be right.
        found: what is there.
    """

    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Check:
    """One check, made or not.

    Attributes:
        name: one word.
        about: what it looked at, for people.
        faults: what is wrong; empty where all is well.
        skipped: why it could not be made; empty where it was.
    """

    name: str
    about: str = ""
    faults: tuple[Fault, ...] = ()
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was made and found nothing wrong."""
        return not self.faults and not self.skipped

    def lines(self) -> Iterator[str]:
        """Lines for people: ``ok``, ``FAILED`` (one a fault), or ``skipped``."""
        if self.skipped:
            yield f"skipped  {self.name}: {self.skipped}"
        elif not self.faults:
            yield f"ok       {self.name}: {self.about}"
        for fault in self.faults[:MOST_FAULTS]:
            yield f"FAILED   {self.name}: {fault}"
        if len(self.faults) > MOST_FAULTS:
            yield f"FAILED   {self.name}: ... and {len(self.faults) - MOST_FAULTS} more"


@dataclass
class Verification:
    """All checks of a folder, in order.

    Attributes:
        folder: what was looked at.
        checks: in the order in which they were made.
    """

    folder: Path
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every check was made and found nothing wrong."""
        return all(check.ok for check in self.checks)

    @property
    def faults(self) -> list[Fault]:
        """Everything that is wrong."""
        return [fault for check in self.checks for fault in check.faults]

    def check(self, name: str, about: str, faults: Sequence[Fault] = ()) -> bool:
        """Note a check that was made; return whether it found nothing wrong."""
        self.checks.append(Check(name, about, tuple(faults)))
        return not faults

    def skip(self, why: str, *names: str) -> None:
        """Note checks that could not be made."""
        self.checks += [Check(name, skipped=why) for name in names]

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "folder": str(self.folder),
            "ok": self.ok,
            "checks": [
                {
                    "name": check.name,
                    "ok": check.ok,
                    **({"skipped": check.skipped} if check.skipped else {"about": check.about}),
                    "faults": [vars(fault) for fault in check.faults],
                }
                for check in self.checks
            ],
        }
