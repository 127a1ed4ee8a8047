"""Numbers as people write them."""

import pytest

from star_elastic.units import QuantityError, format_bytes, format_count, parse_count, parse_size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12e9", 12_000_000_000),
        ("12B", 12_000_000_000),
        ("1.5M", 1_500_000),
        ("1.1M", 1_100_000),  # 1.1 * 10**6 is 1100000.0000000002 in floats
        ("300k", 300_000),
        ("31_577_937_344", 31_577_937_344),
        ("31,577,937,344", 31_577_937_344),
        ("9007199254740993", 9007199254740993),  # beyond what a float holds
        (" 7 ", 7),
    ],
)
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("500MB", 500 * 10**6), ("1.5 kib", 1536), ("80", 80), ("1TiB", 2**40)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "x", "-3", "0", "0.2", "12X", "e9", "1.2.3", "1e400000", "nan", "inf", "12 GiB GiB"])
def test_refused(text: str) -> None:
    for parse in (parse_count, parse_size):
        with pytest.raises(QuantityError, match="cannot read") as caught:
            parse(text)
        assert "\n" not in str(caught.value)


def test_a_size_is_no_count_and_the_reverse() -> None:
    with pytest.raises(QuantityError):
        parse_count("24GiB")
    with pytest.raises(QuantityError):
        parse_size("12M")


def test_formats() -> None:
    assert [format_count(n) for n in (950, 1000, 3_580_073_408, 1.5e12)] == ["950", "1.000k", "3.580B", "1.500T"]
    assert [format_bytes(n) for n in (0, 1023, 1024, 63155874688)] == ["0 B", "1023 B", "1.00 KiB", "58.82 GiB"]
