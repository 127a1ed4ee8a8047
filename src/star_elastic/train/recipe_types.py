"""Kinds of values in a recipe. Stricter than Python: ``true`` is no number, ``'32'`` and ``32.0`` are no whole numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from star_elastic.paths import expanded
from star_elastic.units import parse_count


class Section(BaseModel):
    """Base of the recipe and its parts: no unknown key passes, nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _count(value: Any) -> Any:
    """``60B`` and ``1.5e9``, which YAML reads as text, and ``1.5e+9``, which it reads as a float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return parse_count(value) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # Python's True is 1
        raise ValueError("should be a number")
    return value


def _filled(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():  # as a path it would mean the current folder
        raise ValueError("should not be empty")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("should not contain a NUL character")
    return value


def _expanded(value: Any) -> Any:
    return expanded(value) if isinstance(value, str) else value


def _switch(value: Any) -> Any:
    if not isinstance(value, bool) and value != "auto":
        raise ValueError("should be true, false or auto")
    return value


def _off(value: Any) -> Any:
    """YAML reads ``off`` as false."""
    return None if value is False or value == "off" else _number(value)


def _sharding(value: Any) -> Any:
    return "off" if value is False else value


# Other numbers than whole ones may be text, since YAML reads 1e-4 as text.
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NaturalInt = Annotated[int, Field(ge=0, strict=True)]
Tokens = Annotated[PositiveInt, BeforeValidator(_count)]
RowLength = Annotated[int, Field(ge=2, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
Share = Annotated[float, Field(gt=0, lt=1), BeforeValidator(_number)]
Sharding = Annotated[Literal["full", "hybrid", "off"], BeforeValidator(_sharding)]
Beta = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number)]
Decay = Annotated[Annotated[float, Field(gt=0, lt=1)] | None, BeforeValidator(_off)]
Switch = Annotated[bool | Literal["auto"], BeforeValidator(_switch)]
Folder = Annotated[Path, BeforeValidator(_expanded), BeforeValidator(_filled)]
PathText = Annotated[str, BeforeValidator(_expanded), BeforeValidator(_filled)]
Name = Annotated[str, BeforeValidator(_filled)]


def mistake(message: str, *key: str | int) -> PydanticCustomError:
    """A broken rule between several keys: ``message`` is told as it is, with the line of ``key`` below the checked section."""
    return PydanticCustomError("rule", "{message}", {"message": message, "key": key})


def all_or_none(key: str, values: Mapping[str, float | None]) -> None:
    """Refuse a key that some of the named entries have and others lack."""
    missing = [name for name, value in values.items() if value is None]
    if missing and len(missing) < len(values):
        raise ValueError(f"give {key!r} for all or for none; it is missing for {', '.join(missing)}")
