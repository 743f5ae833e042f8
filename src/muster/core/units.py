"""Durations and sizes as people write them: ``15s``, ``1h30m``, ``64MiB``.

A plain number is already in the unit that its field's name ends with (``_s``, ``_bytes``).  Sizes follow the
standard: ``kB`` is 1,000 bytes and ``KiB`` 1,024; a bare ``64M`` is refused, since half of its readers would
guess wrong.

Two forms for people: a setting or a limit is exact, in the form that settings accept (`format_size`); a
measurement is rounded (`rounded_size`, `rounded_percent`, `rounded_duration`): 6.3 GB, 10.9 %, 42 s, 7h55m.
"""

from __future__ import annotations

import math
import re

from muster.core import errors

_DURATION_UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 7 * 86400.0,
}
_SIZE_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    prefix + binary + "B": (1024 if binary else 1000) ** power
    for power, prefixes in enumerate(("kK", "M", "G", "T", "P"), start=1)
    for prefix in prefixes
    for binary in ("", "i")
}
_NUMBER = r"[0-9]{1,19}(?:\.[0-9]{1,9})?"
_DURATION = re.compile(rf"(?:{_NUMBER}\s*[a-zµ]+\s*)+\Z")
_DURATION_PART = re.compile(rf"({_NUMBER})\s*([a-zµ]+)")
_PLAIN = re.compile(rf"{_NUMBER}\Z")
_SIZE = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)\Z")


def parse_duration_s(text: str) -> float:
    """Seconds: ``"90"``, ``"90s"``, ``"1m30s"``, ``"250ms"``, ``"7d"``."""
    trimmed = text.strip()
    if _PLAIN.match(trimmed):
        return float(trimmed)
    if not _DURATION.match(trimmed):
        raise errors.InvalidInput(
            f"{text[:40]!r} is not a duration: write for example 15s, 250ms, 1h30m or 7d"
        )
    total_s = 0.0
    for number, unit in _DURATION_PART.findall(trimmed):
        if unit not in _DURATION_UNITS:
            raise errors.InvalidInput(
                f"{unit[:10]!r} is not a unit of time: use {', '.join(_DURATION_UNITS)}",
            )
        total_s += float(number) * _DURATION_UNITS[unit]
    return total_s


def parse_size_bytes(text: str) -> int:
    """Bytes: ``"4096"``, ``"64MiB"``, ``"1.5 GB"``."""
    match = _SIZE.match(text.strip())
    if not match or match[2] not in _SIZE_UNITS:
        raise errors.InvalidInput(
            f"{text[:40]!r} is not a size: write for example 512KiB, 64MiB (powers of 1,024) or 2GB "
            "(powers of 1,000)"
        )
    number, factor = match[1], _SIZE_UNITS[match[2]]
    return int(float(number) * factor) if "." in number else int(number) * factor


def format_size(size_bytes: int) -> str:
    """The shortest exact form for people; `parse_size_bytes` reads it back."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _SIZE_UNITS[unit] == 0:
            return f"{size_bytes // _SIZE_UNITS[unit]}{unit}"
    return f"{size_bytes}B"


def rounded_size(size_bytes: float) -> str:
    """A measured size with one decimal, in powers of 1,000: 6.3 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 999.95:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.1f} TB"


def rounded_percent(percent: float) -> str:
    """A measured share with one decimal: 10.9 %."""
    return f"{percent:,.1f} %"


def rounded_duration(duration_s: float) -> str:
    """A measured time or an age, in one or two units: 350 ms, 3.21 s, 42 s, 3m10s, 7h55m, 12d03h, 2h."""
    if duration_s < 0:
        return f"-{rounded_duration(-duration_s)}"
    if 0 < duration_s < 0.9995:
        return f"{duration_s * 1e3:.3g} ms" if duration_s >= 0.9995e-3 else f"{duration_s * 1e6:.3g} µs"
    if not 119.5 <= duration_s < math.inf:
        return f"{duration_s:.3g} s"
    count = round(duration_s)
    if count < 3600:
        whole, rest = f"{count // 60}m", f"{count % 60:02}s"
    elif count < 86400:
        whole, rest = f"{count // 3600}h", f"{count % 3600 // 60:02}m"
    else:
        whole, rest = f"{count // 86400:,}d", f"{count % 86400 // 3600:02}h"
    return whole if rest.startswith("00") else whole + rest


def format_count(number: int, noun: str) -> str:
    """``1 resource``, ``2,000 resources``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
