"""What config.json and hf_quant_config.json say by module name, for a slice whose layers and experts have new numbers.

Where nothing was renumbered, which is every cut that only narrows, the files stay as they are. Otherwise each name is taken for
what it means in the source: the module of this name and all below it or, with a ``*``, all that it matches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from typing import Any

from star_elastic.quant.declared import SECTION, SIDECAR, Declared

LISTS = ("ignore", "exclude_modules", "targets")
MAPPINGS = ("quantized_layers",)


@dataclass
class Renaming:
    """New names of modules.

    Attributes:
        tensors: name of each tensor of the source -> its name in the slice, or None where it is left out.
    """

    tensors: Mapping[str, str | None]
    _known: dict[str, list[str]] = field(default_factory=dict)

    @cached_property
    def modules(self) -> dict[str, str | None]:
        """The same for the modules that hold them, and for every module above: None where nothing below stays."""
        modules: dict[str, str | None] = {}
        for old, new in self.tensors.items():
            words, new_words = old.split("."), new.split(".") if new else []
            for depth in range(1, len(words)):
                name = ".".join(words[:depth])
                modules[name] = ".".join(new_words[:depth]) if new else modules.get(name)
        return modules

    @cached_property
    def is_identity(self) -> bool:
        """Whether every module that stays keeps its name, and every module has something that stays."""
        same = all(old == new for old, new in self.tensors.items())  # saves the names of all modules in a cut that only narrows
        return same or all(old == new for old, new in self.modules.items())

    def __call__(self, pattern: str) -> list[str]:
        """What stands in the slice for a module name or pattern of the source: one name, several, or none."""
        if pattern not in self._known:
            self._known[pattern] = self._matched(pattern) if re.search(r"[*?\[]", pattern) else self._named(pattern)
        return self._known[pattern]

    def _named(self, name: str) -> list[str]:
        """A module, or something below one: the longest part of the name that is known is replaced."""
        words = name.split(".")
        for depth in range(len(words), 0, -1):
            prefix = ".".join(words[:depth])
            if prefix in self.modules:
                new = self.modules[prefix]
                return [] if new is None else [".".join([new, *words[depth:]])]
        return [name]

    def _matched(self, pattern: str) -> list[str]:
        """A pattern: itself or itself with a new layer number if that matches what stays of its modules, else their names."""
        matches = re.compile(translate(pattern)).match
        source = [name for name in self.modules if matches(name)]
        if not source:  # of modules without tensors, or of tensors that were left out by hand
            return self._named(pattern)
        wanted = {new for name in source if (new := self.modules[name]) is not None}
        if not wanted:
            return []
        present = {new for new in self.modules.values() if new is not None}
        # The pattern's own beginning up to its last whole word before the star may be a module with a new number.
        stem = pattern[: min(pattern.find(sign) for sign in "*?[" if sign in pattern)]
        known = stem if stem in self.modules else stem.rpartition(".")[0]
        new_stem = self.modules.get(known)
        renumbered = pattern if new_stem is None else new_stem + pattern[len(known) :]
        for candidate in (renumbered, pattern):
            matches = re.compile(translate(candidate)).match
            if {name for name in present if matches(name)} == wanted:
                return [candidate]
        return sorted(wanted)


def renamed_files(declared: Declared, tensors: Mapping[str, str | None]) -> dict[str, Any]:
    """The two places where a slice says how it is quantized.

    Args:
        declared: what the source says.
        tensors: name of each tensor of the source -> its name in the slice, or None.

    Returns:
        ``quantization_config`` and ``hf_quant_config.json``, each only where the source has it.
    """
    renaming = Renaming(tensors)
    said = {SECTION: declared.section, SIDECAR: declared.sidecar}
    return {
        where: content if renaming.is_identity else _renamed(content, renaming)
        for where, content in said.items()
        if content
    }


def _renamed(said: Any, renaming: Renaming) -> Any:
    if isinstance(said, list):
        return [_renamed(one, renaming) for one in said]
    if not isinstance(said, dict):
        return said
    return {key: _field(key, value, renaming) for key, value in said.items()}


def _field(key: str, value: Any, renaming: Renaming) -> Any:
    if key in LISTS and isinstance(value, Sequence) and not isinstance(value, str):
        names = [new for old in value for new in (renaming(old) if isinstance(old, str) else [old])]
        return list(dict.fromkeys(names))
    if key in MAPPINGS and isinstance(value, dict):
        return {new: one for old, one in value.items() for new in renaming(old)}
    return _renamed(value, renaming)
