"""A YAML file whose values still know their lines, and validation errors told in one line with that place."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from star_elastic.errors import RecipeError, nearest

Key = tuple[str | int, ...]

MAX_DEPTH = 20  # a recipe has five levels; an alias inside what it stands for has endlessly many

WORDS = {  # pydantic's for Python's types, and ours for YAML's
    "Value error, ": "",
    "Input should": "should",
    "Input is not a valid path for <class 'pathlib.Path'>": "should be a path",
    "valid dictionary": "mapping",
    "valid tuple": "list",
    "Tuple should": "should",
    "Dictionary should": "should",
    " after validation": "",
}


@dataclass(frozen=True)
class YamlText:
    """A parsed YAML mapping.

    Attributes:
        path: The file it came from.
        content: Plain values.
        lines: Line (from 1) of every key and list item.
    """

    path: Path
    content: dict[str, Any]
    lines: dict[Key, int]

    @classmethod
    def read(cls, path: Path) -> YamlText:
        """Parse a file.

        Raises:
            RecipeError: missing, unreadable, not YAML, nested too deeply, not a mapping, or with a key given twice.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RecipeError(f"recipe {path} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe {path} cannot be read: {error}") from None
        try:
            root, content = _parse(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f"{path}:{mark.line + 1}" if mark else str(path)
            raise RecipeError(f"{place}: not valid YAML: {_reason(error)}") from None
        if not isinstance(root, yaml.MappingNode):
            raise RecipeError(f"{path}: a recipe is a mapping of keys to values, such as 'parent: ./sorted'")
        lines: dict[Key, int] = {}
        for key, line in _lines(root, ()):
            if key in lines:
                raise RecipeError(f"{path}:{line}: key {_dotted(key)!r} is given twice, first in line {lines[key]}")
            lines[key] = line
        return cls(path, content, lines)

    def line(self, key: Key) -> int | None:
        """Line of a key, or of the nearest section around it that the file has."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key)


class Overrides:
    """``key=value`` changes on top of a recipe.

    Raises:
        RecipeError: one of them has no ``=``, or a value that is not YAML.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.values: dict[Key, tuple[str, Any]] = {}
        for text in texts:
            dotted, equals, value = text.partition("=")
            if not equals or not dotted.strip():
                raise RecipeError(f"override {text!r} must be key=value, such as optimizer.lr=3e-4")
            key = tuple(int(part) if part.isdigit() else part for part in dotted.strip().split("."))
            try:
                self.values[key] = (text, _parse(value)[1])
            except yaml.YAMLError:
                raise RecipeError(f"override {_short(text)}: {_short(value)} is not a YAML value; quote it") from None

    def apply(self, content: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``content`` with the changes made."""
        changed = copy.deepcopy(content)
        for key, (text, value) in self.values.items():
            place: Any = changed
            for part in key[:-1]:
                place = _step(place, part, text, create=True)
            _step(place, key[-1], text, create=False)
            place[key[-1]] = value
        return changed

    def text(self, key: Key, *, made: bool = False) -> str | None:
        """The override that set a key or a section around it; or, where overrides ``made`` the section, one inside it."""
        inside = (text for at, (text, _) in self.values.items() if made and at[: len(key)] == key)
        return next((text for at, (text, _) in self.values.items() if key[: len(at)] == at), next(inside, None))


def explain(error: ValidationError, model: type[BaseModel], text: YamlText | None, overrides: Overrides) -> RecipeError:
    """Turn the first mistake (by line) into one line: place, key, value, and what would be right."""
    told = []
    mistakes = error.errors()
    for mistake in mistakes:
        if mistake["type"] == "too_short" and any(_lies_below(other["loc"], mistake["loc"]) for other in mistakes):
            continue  # pydantic counts the items that are right: a lone wrong one makes the list "empty" as well
        key = (
            *mistake["loc"],
            *mistake.get("ctx", {}).get("key", ()),
        )  # a rule may say which key of its section breaks it
        made = bool(key) and (text is None or key not in text.lines)
        if (changed := overrides.text(key, made=made)) is not None:
            place, order = f"override {changed!r}: ", 0
        elif text is not None:
            line = text.line(key)
            place, order = (f"{text.path}:{line}: ", line) if line else (f"{text.path}: ", 0)
        else:
            place, order = "recipe: ", 0
        told.append((order, place + _sentence(mistake, key, model)))
    first = min(told, key=lambda entry: entry[0])[1]
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return RecipeError(" ".join((first + more).split()))


def _sentence(mistake: Any, key: Key, model: type[BaseModel]) -> str:
    kind, message = mistake["type"], mistake["msg"]
    if kind == "extra_forbidden":
        section = _model_at(model, key[:-1])
        return f"unknown key {_dotted(key)!r}; {nearest(str(key[-1]), section.model_fields)}"
    if kind == "missing":
        return f"key {_dotted(key)!r} is missing"
    if key and key[-1] == "[key]":
        return f"{_dotted(key[:-1])}: {_short(mistake['input'])} is no text, as a name should be: quote it"
    if kind == "model_type":
        known = ", ".join(_model_at(model, key).model_fields)
        return f"{_dotted(key)} = {_short(mistake['input'])}: should be a mapping; known keys: {known}"
    if kind == "rule":
        return message
    for pydantics, ours in WORDS.items():
        message = message.replace(pydantics, ours)
    if kind == "value_error" and isinstance(mistake["input"], dict | list | tuple | BaseModel):
        return message  # a rule between several keys, which it names itself
    return f"{_dotted(key)} = {_short(mistake['input'])}: {message}"


def _lies_below(key: Key, section: Key) -> bool:
    return len(key) > len(section) and key[: len(section)] == section


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(model: type[BaseModel], key: Key) -> type[BaseModel]:
    """The section that a key leads to: fields of sections, names in mappings and numbers in lists are followed."""
    kind: Any = model
    for part in key:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = _without_none(kind.model_fields[str(part)].annotation)
        else:
            kind = _without_none(next(a for a in reversed(get_args(kind)) if a is not Ellipsis))
    return kind


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return next(option for option in get_args(kind) if option is not type(None))
    return kind


def _step(place: Any, part: str | int, text: str, *, create: bool) -> Any:
    """Go one part of a dotted key down, making the section where the recipe has none."""
    if isinstance(place, list):
        if not isinstance(part, int) or part >= len(place):
            raise RecipeError(f"override {text!r}: {part!r} is not an item of a list of {len(place)}")
        return place[part]
    if not isinstance(place, dict):
        raise RecipeError(f"override {text!r}: {place!r} has no key {part!r}")
    if create and place.get(part) is None:
        place[part] = {}
    return place.get(part)


class _Loader(yaml.SafeLoader):
    """SafeLoader whose constructors tell a value that they cannot make (a 13th month, ...) as a YAML error with its line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, OverflowError) as error:
            problem = f"{_short(node.value)} cannot be read ({error}); quote it if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _parse(text: str) -> tuple[yaml.Node | None, Any]:
    """A YAML text as nodes, which carry line numbers, and as plain values, which lose them.

    Raises:
        yaml.YAMLError: whatever is wrong with it.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError(f"nested more than {MAX_DEPTH} levels deep") from None
    if root is not None:
        _check_depth(root, 0)
    return root, yaml.load(text, Loader=_Loader)


def _check_depth(node: yaml.Node, depth: int) -> None:
    if depth > MAX_DEPTH:
        problem = f"nested more than {MAX_DEPTH} levels deep, or an alias inside what it stands for"
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
    if not isinstance(node, yaml.ScalarNode):
        for item in node.value:
            for below in item if isinstance(item, tuple) else (item,):
                _check_depth(below, depth + 1)


def _reason(error: yaml.YAMLError) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _lines(node: yaml.Node, key: Key) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            below = (*key, name.value)
            yield below, name.start_mark.line + 1
            yield from _lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*key, index), value.start_mark.line + 1
            yield from _lines(value, (*key, index))


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)
