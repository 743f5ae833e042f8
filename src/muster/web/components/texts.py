"""Texts of values on pages: numbers with units, times, and the styles of states. Pure."""

from __future__ import annotations

import datetime
import re
import time

from muster.core import units
from muster.core.formats import cell_texts

TITLES = {"since_ms": "Since", "at_ms": "Time"}  # pages have the time, the command line the age
ABBREVIATIONS = ("cpu", "id", "pid", "url")
#: The style of a state; others are neutral.
TONES = {
    **dict.fromkeys(("up", "running", "done", "connected", "resolved", "holds", "primary"), "good"),
    **dict.fromkeys(("completed", "create"), "good"),
    **dict.fromkeys(("starting", "draining", "pending", "decided", "acknowledged", "permanent"), "busy"),
    "change": "busy",
    **dict.fromkeys(("late", "stale", "unknown", "warning", "in-doubt", "refused", "paused"), "warn"),
    **dict.fromkeys(("stopping", "unreachable"), "warn"),
    **dict.fromkeys(("fails", "down", "failed", "firing", "critical", "delete", "stopped"), "bad"),
}


def tone(state: str) -> str:
    return TONES.get(state, "calm")


def title(name: str) -> str:
    """The title of a column or a metric, without the unit, as on the command line."""
    if name in TITLES:
        return TITLES[name]
    words = cell_texts.title(name).split(" ")
    text = " ".join(word.upper() if word in ABBREVIATIONS else word for word in words)
    return text[:1].upper() + text[1:]


def literal(text: str) -> str:
    """A text in a predicate."""
    return "'" + text.replace("'", "''") + "'"


def counted(number: int, singular: str, many: str = "") -> str:
    """``1 channel``, ``2 channels``."""
    return f"{number:,} {singular if number == 1 else many or singular + 's'}"


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def measurement(value: float | None) -> str:
    """A value of unknown unit: 150, 99.17."""
    return number(value, 0 if value is None or float(value).is_integer() else 2)


def rate(per_s: float | None) -> str:
    """A number of events a second; a slow rate is not shown as none."""
    if per_s is None:
        return "–"
    return f"{per_s:,.0f}/s" if not per_s or per_s >= 9.95 else f"{per_s:.2g}/s"


def percent(value: float | None) -> str:
    return "–" if value is None else units.rounded_percent(value)


def seconds(value: float | None) -> str:
    return "–" if value is None else units.rounded_duration(value)


def size(value: float | None) -> str:
    return "–" if value is None else units.rounded_size(value)


def figure(name: str, value: float | None) -> str:
    """The value of a metric, in the unit of its name."""
    if name.endswith("_bytes_s"):
        return f"{size(value)}/s"
    shown = {"_bytes": size, "_percent": percent, "_s": seconds}
    return next((text for end, text in shown.items() if name.endswith(end)), measurement)(value)


def clock(at_ms: int | None) -> tuple[str, str, str] | None:
    """A time as short text, for machines and complete. None: no calendar has it."""
    try:
        at = datetime.datetime.fromtimestamp((at_ms or 0) / 1000, datetime.UTC)
    except (ValueError, OverflowError):
        return None  # clients state times: such a one must not hide the rest
    today = abs(time.time() - (at_ms or 0) / 1000) < 43_200
    short = at.strftime("%H:%M:%S") if today else at.strftime("%Y-%m-%d %H:%M")
    return short, at.isoformat(timespec="milliseconds"), f"{at:%Y-%m-%d %H:%M:%S} UTC"


def relative_time(at_ms: int | None) -> str:
    return "–" if not at_ms else f"{seconds(max(0, int(time.time() - at_ms / 1000)))} ago"


def sentence(message: str) -> str:
    """The messages of errors begin with a small letter, as the command line shows them after ``error:``.

    A name such as ``web-1`` at the beginning stays as it is.
    """
    return message[:1].upper() + message[1:] if message.partition(" ")[0].isalpha() else message


def quoted(message: str) -> list[tuple[bool, str]]:
    """The parts of a message, and whether they are commands in backquotes."""
    return [(bool(place % 2), part) for place, part in enumerate(re.split("`([^`]*)`", message)) if part]
