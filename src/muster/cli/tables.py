"""Cells and columns of tables for people. Pure.

The unit of a field is the end of its name (``since_ms``, ``used_bytes``, ``cpu_percent``): a cell shows the
value in a unit that people read, and the title omits it. Output for programs carries the exact values.

A table that is wider than the terminal first loses its optional columns, last one first; then the long texts
wrap; then it loses other columns, last one first, because a column of six characters cannot be read. The
first column, which identifies the row, keeps its width. Where the user chooses the columns (SQL), none is
omitted: if they do not fit (`fits`), each row is printed as a list of its values.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from muster.core import units

GAP = 2  # between columns
SHORT = 12  # columns up to this width are not made narrower
NARROW = 16  # long columns keep at least this width, or that of a word
WORD = 32  # longer words are broken
LEAST = 6
RULE = 40  # width of the line above a row that is printed as a list
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


def _number(name: str, value: float, now_s: float) -> str:
    name = _STATISTIC.sub("", name)
    if name.endswith("_ms") and (value > _EPOCH_MS or (not value and name.endswith(_TIMES))):
        return _moment(name, value / 1000, now_s)
    if name.endswith("_at") and (value > _EPOCH_S or not value):
        return _moment(name, value, now_s)
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


def utc(at_s: float) -> str:
    """A time in UTC, for lines of a stream and sentences; empty for 0, an unknown time."""
    if not at_s:
        return ""
    return f"{datetime.datetime.fromtimestamp(at_s, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


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


def longest_word(texts: Sequence[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def fits(columns: Sequence[str], widths: Sequence[int], words: Sequence[int], room: int) -> bool:
    """Whether the columns that are not optional fit into ``room`` if only long texts wrap."""
    shown = {index: width for index, width in enumerate(widths) if width and not columns[index].endswith("?")}
    return _total(_narrowest(columns, shown, words)) <= room


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _narrowest(columns: Sequence[str], widths: Mapping[int, int], words: Sequence[int]) -> dict[int, int]:
    """The least widths at which only long texts wrap."""
    least = _least(columns, widths)
    return {
        index: width
        if width == least[index]
        else min(width, max(NARROW, least[index], min(words[index], WORD)))
        for index, width in widths.items()
    }


def _least(columns: Sequence[str], widths: Mapping[int, int]) -> dict[int, int]:
    """The least widths at which long words break, but no title, number or name."""
    return {
        index: width if not index or width <= SHORT else min(width, max(SHORT, len(title(columns[index]))))
        for index, width in widths.items()
    }


def _squeeze(widths: dict[int, int], least: Mapping[int, int], columns: Iterable[int], room: int) -> None:
    """Make ``columns`` narrower until all fit into ``room``, the widest first."""
    for index in sorted(columns, key=lambda index: -widths[index]):
        excess = max(0, _total(widths) - room)
        widths[index] = min(widths[index], max(least[index], widths[index] - excess))


def choose(
    columns: Sequence[str], widths: Sequence[int], words: Sequence[int], room: int | None
) -> dict[int, int]:
    """The columns to show, by index, with their widths; ``room`` None: all, at their full width.

    ``words``: the longest word of each column. A width of 0 marks an empty column. The name of an optional
    column ends with ``?``.
    """
    shown = {index: width for index, width in enumerate(widths) if width or not index}
    if room is None:
        return shown

    optional = [index for index in shown if columns[index].endswith("?")]
    while _total(_narrowest(columns, shown, words)) > room and optional:
        del shown[optional.pop()]
    whole = _narrowest(columns, shown, words)
    least = _least(columns, shown)
    while _total(least) > room and len(least) > 2:
        least.popitem()
    narrow = {index: whole[index] for index in least}
    if _total(narrow) > room:  # the identifying column is made narrower only if there is no other way
        _squeeze(narrow, least, [index for index in narrow if index], room)
        _squeeze(narrow, dict.fromkeys(narrow, LEAST), narrow, room)
        return narrow
    spare = room - _total(narrow)
    for index in sorted(narrow, key=lambda index: shown[index] - narrow[index]):
        wider = min(spare, shown[index] - narrow[index])
        narrow[index] += wider
        spare -= wider
    return narrow
