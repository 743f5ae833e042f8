"""Values of XML Schema types: durations, dates and times, integers, booleans."""

from __future__ import annotations

import datetime
import re

from muster.core import errors

_DURATION = re.compile(
    r"(-)?P(?:(\d{1,9})Y)?(?:(\d{1,9})M)?(?:(\d{1,9})D)?"
    r"(?:T(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,9}(?:\.\d{0,12})?)S)?)?\Z",
    re.ASCII,
)
_UNITS_S = (365.25 * 86400, 365.25 * 86400 / 12, 86400.0, 3600.0, 60.0, 1.0)
_YEAR_1_S, _YEAR_9999_S = -62_135_596_800.0, 253_402_300_799.0
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def parse_duration_s(text: str) -> float:
    """``PT1M30.5S`` is 90.5. A year is 365.25 days and a month a twelfth of one."""
    match = _DURATION.match(text)
    if match is None or text.endswith(("P", "T")) or not any(match.groups()[1:]):
        raise errors.InvalidInput(f"{text[:60]!r} is not a duration: use a form like PT60S")
    total_s = sum(
        float(part) * unit_s for part, unit_s in zip(match.groups()[1:], _UNITS_S, strict=True) if part
    )
    return -total_s if match[1] else total_s


def duration(seconds: float) -> str:
    return f"PT{max(0.0, seconds):.3f}".rstrip("0").rstrip(".") + "S"


def parse_datetime(text: str) -> datetime.datetime:
    """Parse a dateTime; without a time zone it is in UTC."""
    try:
        if "T" not in text:
            raise ValueError(text)
        parsed = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise errors.InvalidInput(
            f"{text[:60]!r} is not a dateTime: use a form like 2030-01-31T12:00:00Z"
        ) from error
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=datetime.UTC)


def format_datetime(seconds: float) -> str:
    """Format seconds since 1970 as a dateTime in UTC; times outside of the years 1 to 9999 are clamped.

    Agents and clients supply times, and an invalid one must not break the response to another client.
    """
    within = min(max(seconds, _YEAR_1_S), _YEAR_9999_S)
    made = datetime.datetime.fromtimestamp(within, datetime.UTC)
    return made.isoformat(timespec="milliseconds")[:-6] + "Z"


def parse_until_s(text: str, now_s: float) -> float:
    """Return the seconds until a duration ends or a dateTime is reached."""
    if text.lstrip("-").startswith("P"):
        return parse_duration_s(text)
    return parse_datetime(text).timestamp() - now_s


def parse_integer(text: str, *, minimum: int = 0, maximum: int = (1 << 63) - 1) -> int:
    if not re.fullmatch(r"[+-]?\d{1,19}", text, re.ASCII) or not minimum <= int(text) <= maximum:
        raise errors.InvalidInput(f"{text[:60]!r} is not an integer from {minimum} to {maximum}")
    return int(text)


def parse_boolean(text: str) -> bool:
    if text not in _BOOLEANS:
        raise errors.InvalidInput(f"{text[:60]!r} is neither true nor false")
    return _BOOLEANS[text]
