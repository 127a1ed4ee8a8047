"""The demo's data: arithmetic chains whose answer needs thinking and can be checked, and real text, Python's own library.

A chain starts at 0 and adds or subtracts labelled single digits modulo 10. The thought copies each labelled operand and then
writes the running value, so that every step needs only what stands right before it and one look back at the question::

    user       a+3b-4c+2=
    thinking   a+33b-49c+21
    answer     1

Copying the operand into the thought is what makes this learnable in a minute; without it small models stay at chance. In some
training rows the thought is cut short, so that the model also learns to answer from part of it.
"""

from __future__ import annotations

import json
import random
import string
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_OPERANDS = 8
ROWS, TEXT = "reasoning.jsonl", "text.txt"
HELD_OUT_ROWS, HELD_OUT_TEXT = "held-out.jsonl", "held-out.txt"


@dataclass(frozen=True)
class Chain:
    """One question with its full thought and its answer."""

    question: str
    thought: str
    answer: str

    def messages(self, thought: str | None = None) -> list[dict[str, str]]:
        """The chain as a conversation; ``thought`` replaces the full one."""
        shown = self.thought if thought is None else thought
        return [
            {"role": "user", "content": self.question},
            {"role": "assistant", "reasoning_content": shown, "content": self.answer},
        ]


def make_chain(rng: random.Random, operands: int) -> Chain:
    """A random chain of ``operands`` steps, labelled a, b, c, ..."""
    question, thought, value = "", "", 0
    for label in string.ascii_lowercase[:operands]:
        sign, digit = rng.choice("+-"), rng.randrange(10)
        value = (value + digit if sign == "+" else value - digit) % 10
        question += f"{label}{sign}{digit}"
        thought += f"{label}{sign}{digit}{value}"
    return Chain(question + "=", thought, str(value))


def training_rows(rng: random.Random, count: int, cut_share: float = 0.3) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Chat rows to train on; ``cut_share`` of them have their thought cut at a random place."""
    for _ in range(count):
        chain = make_chain(rng, rng.randint(2, MAX_OPERANDS))
        cut = rng.randrange(len(chain.thought)) if rng.random() < cut_share else len(chain.thought)
        yield {"messages": chain.messages(chain.thought[:cut])}


def held_out_chains(rng: random.Random, count: int) -> list[Chain]:
    """Chains to test on: the longer half of the lengths seen in training, as many of each."""
    lengths = range(MAX_OPERANDS // 2 + 1, MAX_OPERANDS + 1)
    return [make_chain(rng, lengths[number % len(lengths)]) for number in range(count)]


def library_text(limit: int, skip: int = 0) -> str:
    """About ``limit`` characters of Python's standard library, in a fixed order, after the first ``skip`` characters."""
    parts: list[str] = []
    seen = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if seen + len(text) > skip:
            parts.append(text[max(0, skip - seen) :])
        seen += len(text)
        if seen >= skip + limit:
            break
    return "".join(parts)[:limit]


def write_data(folder: Path, *, rows: int, text_chars: int, held_out: int, seed: int) -> None:
    """Write training and held-out files into ``folder``: chat rows as JSON lines, text as plain files.

    Training and held-out text come from different parts of the library; chains come from different random streams, and a
    held-out question that also occurs in training is replaced.
    """
    trained: set[str] = set()
    with (folder / ROWS).open("w", encoding="utf-8") as file:
        for row in training_rows(random.Random(seed), rows):
            trained.add(row["messages"][0]["content"])
            file.write(json.dumps(row) + "\n")
    fresh = (chain for chain in held_out_chains(random.Random(seed + 1), 4 * held_out) if chain.question not in trained)
    with (folder / HELD_OUT_ROWS).open("w", encoding="utf-8") as file:
        for _, chain in zip(range(held_out), fresh, strict=False):
            file.write(json.dumps({"messages": chain.messages()}) + "\n")
    (folder / TEXT).write_text(library_text(text_chars), encoding="utf-8")
    (folder / HELD_OUT_TEXT).write_text(library_text(text_chars // 20, skip=text_chars), encoding="utf-8")
