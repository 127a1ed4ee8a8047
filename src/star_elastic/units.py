"""Numbers as people write them: ``12e9``, ``12B``, ``1.5M`` for counts; ``24GiB``, ``500MB`` for sizes.

Counts use powers of 1000. Sizes follow their unit: ``GB`` is 1000^3 bytes, ``GiB`` is 1024^3.
"""

from __future__ import annotations

import re
from fractions import Fraction

from star_elastic.errors import ElasticError

_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_NUMBER = re.compile(r"([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z]*)")


class QuantityError(ElasticError, ValueError):
    """A number or size that cannot be read, or is not positive."""


def parse_count(text: str) -> int:
    """Read a count such as ``12e9``, ``12B``, ``1.5M`` or ``31_577_937_344``.

    Raises:
        QuantityError: ``text`` is not a positive whole number after its unit is applied.
    """
    return _parse(text, _COUNT_UNITS, "a positive number such as 12e9, 12B, 1.5M or 300k")


def parse_size(text: str) -> int:
    """Read a size in bytes such as ``24GiB`` (1024^3), ``24GB`` (1000^3) or ``500MB``.

    Raises:
        QuantityError: ``text`` is not a positive number of bytes.
    """
    return _parse(text, _SIZE_UNITS, "a positive size such as 24GiB, 24GB or 500MB")


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match and match[2].lower() in units:
        # Fraction: exact for whole numbers of any size and for decimals such as 1.1M, where floats are off by one.
        value = Fraction(match[1].replace("_", "").replace(",", "")) * units[match[2].lower()]
        if value >= 1:
            return int(value)
    raise QuantityError(f"cannot read {text!r}: want {wanted}")


def format_count(value: float) -> str:
    """Three or four digits and a unit: ``3580073408`` -> ``3.580B``, ``950`` -> ``950``."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3f}{unit}"
    return f"{value:.0f}"


def format_bytes(value: float) -> str:
    """Binary units: ``63155874688`` -> ``58.82 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def format_milliseconds(seconds: float) -> str:
    """``0.0352`` -> ``35.2 ms``."""
    return f"{1000 * seconds:.3g} ms"
