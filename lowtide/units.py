"""Sizes in bytes: from what people write, and back; and how many there are of something, for people."""

import re

from lowtide.errors import ConfigError

_UNITS_BYTES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
UNITS = tuple(_UNITS_BYTES)
_BY_WORD = {unit.lower(): size_bytes for unit, size_bytes in _UNITS_BYTES.items()}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.ASCII)
_ALLOWED = (
    "allowed: a number of bytes, or a number with a unit: KiB, MiB, GiB, TiB (binary, 1 GiB = 1024³ bytes) or "
    "kB, MB, GB, TB (decimal, 1 GB = 1000³ bytes), as in 22GiB or '8 GB'"
)


def parse_bytes(size: int | str) -> int:
    """Bytes of a size: a whole number, or text such as ``"22GiB"``, ``"8 GB"``, ``"1.5 GiB"``; the case is ignored.

    A fraction of a byte is dropped. Raises ConfigError for anything else, a negative number or a boolean included.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip().lower()) if isinstance(size, str) else None
    unit_bytes = _BY_WORD.get(match[2] or "b") if match else None
    if match is None or unit_bytes is None:
        raise ConfigError(f"{size!r} is not a size; {_ALLOWED}")
    whole, _, fraction = match[1].partition(".")
    return int(whole) * unit_bytes + int(fraction or 0) * unit_bytes // 10 ** len(fraction)


def format_bytes(size_bytes: int) -> str:
    """A size for people, in binary units and three digits or so: ``"21.5 GiB"``, ``"640 KiB"``, ``"12 B"``."""
    sign, size = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        value = size / _UNITS_BYTES[unit]
        if value >= 1:
            return f"{sign}{value:.{_decimals(value)}f} {unit}"
    return f"{sign}{size} B"


def counted(count: int, what: str) -> str:
    """``"1 cell"``, ``"2 cells"``. what: a word whose plural has an s."""
    return f"{count} {what}{'s' * (count != 1)}"


def _decimals(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2
