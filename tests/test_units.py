"""Sizes: what people write, and what they read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.units import counted, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("7 B", 7),
        ("1KiB", 1024),
        ("512 MiB", 512 * 2**20),
        ("22GiB", 22 * 2**30),
        ("  22 gib ", 22 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("2 TiB", 2 * 2**40),
        ("8 kB", 8_000),
        ("8 MB", 8_000_000),
        ("8 GB", 8_000_000_000),
        ("0.7GB", 700_000_000),
        ("1.0000000001 kB", 1000),
    ],
)
def test_binary_and_decimal_units(text: int | str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "wrong", ["", "GiB", "22G", "-1", -1, "1e3", "1,5 GiB", "22 GiB free", True, 2.5, None, "auto"]
)
def test_anything_else_is_an_error_that_says_what_is_allowed(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(wrong)  # type: ignore[arg-type]
    assert repr(wrong) in str(caught.value)
    assert "KiB, MiB, GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12 * 1024 + 300, "12.3 KiB"),
        (640 * 1024, "640 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (-5 * 2**20, "-5.00 MiB"),
    ],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 2**50))
def test_what_people_read_can_be_written_back(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.006)


@pytest.mark.parametrize(("count", "text"), [(0, "0 cells"), (1, "1 cell"), (2, "2 cells")])
def test_one_has_no_plural(count: int, text: str) -> None:
    assert counted(count, "cell") == text
