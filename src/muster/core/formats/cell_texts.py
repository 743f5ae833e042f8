"""The texts of values for people, in tables of the command line and of the dashboard. Pure.

The unit of a field is the end of its name (``since_ms``, ``used_bytes``, ``cpu_percent``): a text has the
value in a unit that people read, and the title omits it. Output for programs carries the exact values.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from muster.core import units

_EPOCH_MS, _EPOCH_S = 10**11, 10**9  # greater values are times, smaller ones durations

_TITLES = {"since_ms": "for", "at_ms": "age"}
_UTC = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00)")  # a time as text
_STATISTIC = re.compile(r"_(?:mean|min|max|p\d\d)\Z")  # of a metric: it has the metric's unit
_UNITS = ("_ms", "_bytes", "_percent", "_s")
_QUANTITIES = {"_ms": "time", "_s": "time", "_bytes": "size", "_percent": "share"}
_TIMES = ("at_ms", "since_ms", "from_ms", "to_ms", "until_ms", "timestamp_ms", "expiration_ms")


def title(name: str) -> str:
    """The title of a column, without the unit."""
    name = name.removesuffix("?")
    if statistic := _STATISTIC.search(name):
        return f"{title(name[: statistic.start()])} {statistic[0][1:]}"
    shown = _TITLES.get(name) or name
    if _is_rate(shown):
        return shown.removesuffix("_s").removesuffix("_per").removesuffix("_bytes").replace("_", " ") + "/s"
    for unit in (*_UNITS, "_at"):
        shown = shown.removesuffix(unit)
    return shown.replace("_", " ")


def titles(names: Iterable[str]) -> dict[str, str]:
    """Different titles for the facts of an object: ``batch`` and ``batch_s`` are "batch" and "batch time".

    A time that is also given as text (``issued`` and ``issued_at``) has no title.
    """
    made: dict[str, str] = {}
    for name in sorted(names, key=lambda name: title(name) != name.replace("_", " ")):
        text = title(name)
        if text in made.values():
            if name.endswith("_at"):
                continue
            text += next((f" {word}" for unit, word in _QUANTITIES.items() if name.endswith(unit)), "")
        made[name] = text
    return made


def _is_rate(name: str) -> bool:
    """The name of a metric such as ``orders_s`` does not distinguish a rate from a duration."""
    return name.endswith(("_per_s", "_bytes_s")) or name in ("rows_s", "reports_s")


def cell(name: str, value: Any, *, now_s: float | None = None) -> str:
    """The text of a cell: empty for None, comma-separated for a list, numbers with the unit of ``name``."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return _number(name, value, time.time() if now_s is None else now_s)
        case Mapping():
            pairs = {key: item for key, item in value.items() if item is not None}
            unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
            return ", ".join(f"{key}={_inner(f'{key}{unit}', item, now_s)}" for key, item in pairs.items())
        case list() | tuple() | set() | frozenset():
            return ", ".join(_inner(name, item, now_s) for item in value)
        case str() if match := _UTC.fullmatch(value):
            return f"{match[1]} {match[2]}"
    return str(value)


def _inner(name: str, value: Any, now_s: float | None) -> str:
    """A value inside another one; lists and maps are delimited."""
    text = cell(name, value, now_s=now_s)
    if isinstance(value, Mapping):
        return f"{{{text}}}"
    return f"[{text}]" if isinstance(value, list | tuple) else text


def time_s(name: str, value: float) -> float | None:
    """The time that a number is, in seconds since 1970; 0: it is unknown. None: it is another number."""
    if name.endswith("_ms") and (value > _EPOCH_MS or (not value and name.endswith(_TIMES))):
        return value / 1000
    return value if name.endswith("_at") and (value > _EPOCH_S or not value) else None


def _number(name: str, value: float, now_s: float) -> str:
    name = _STATISTIC.sub("", name)
    at_s = time_s(name, value)
    if at_s is not None:
        return _moment(name, at_s, now_s)
    if name.endswith(("_bytes", "_bytes_s")):
        return units.rounded_size(value)
    if name.endswith("_percent"):
        return units.rounded_percent(value)
    if name.endswith(("_s", "_ms")) and not _is_rate(name):
        return units.rounded_duration(value if name.endswith("_s") else value / 1000)
    if isinstance(value, int):
        return str(value)
    if value.is_integer() or abs(value) >= 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 10 else f"{value:,.2f}"


def _moment(name: str, at_s: float, now_s: float) -> str:
    """A time relative to now; 0 is an unknown time."""
    if not at_s:
        return ""
    if at_s > now_s + 1:
        return f"in {units.rounded_duration(int(at_s - now_s))}"
    return units.rounded_duration(max(0, int(now_s - at_s))) + ("" if name in _TITLES else " ago")


def is_numeric(texts: Sequence[Any]) -> bool:
    """Whether a column contains numbers, which are aligned to the right."""
    values = [value for value in texts if value is not None]
    return bool(values) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
