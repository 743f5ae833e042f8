"""Parts of a container's log, by cursors like those of `muster.manage.adapters.output`. Pure.

Engines store the lines with their times, to the second in Podman. A cursor (``ID:SECOND:NUMBER``) names the
container, the second of the last line that was read, and how many lines of that second were: the next part
omits as many. The log ends with its container, and with the next one begins another.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from muster.manage import protocol
from muster.manage.adapters.containers import engine

_CURSOR = re.compile(r"([0-9a-f]{12}):(\d{1,12}):(\d{1,12})\Z")


@dataclass(frozen=True, slots=True, order=True)
class LogPlace:
    """After this many lines of a second."""

    second: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class ContainerLogLine:
    place: LogPlace  # behind it
    text: str


def place_in(cursor: str, container: str) -> LogPlace | None:
    """None: it is not a cursor of this container."""
    match = _CURSOR.match(cursor)
    return LogPlace(int(match[2]), int(match[3])) if match and match[1] == container[:12] else None


def entries(data: bytes) -> list[ContainerLogLine]:
    """The lines in what an engine returns with ``timestamps=1``, in the order of their seconds."""
    lines: list[tuple[int, str]] = []
    for frame in engine.frames(data):
        stamp, _, text = frame.decode("utf-8", "replace").partition(" ")
        try:
            lines.append((calendar.timegm(time.strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S")), text))
        except ValueError:
            continue
    lines.sort(key=lambda line: line[0])
    result: list[ContainerLogLine] = []
    place = LogPlace()
    for second, text in lines:
        place = LogPlace(second, place.number + 1 if second == place.second else 1)
        result.append(ContainerLogLine(place, text))
    return result


def page(
    container: str, known: Sequence[ContainerLogLine], query: protocol.LogQuery, now_s: float
) -> protocol.LogPage:
    """What the query selects of the known lines: those since the second of its cursor, at least."""
    begin, until = place_in(query.cursor, container), place_in(query.until, container)
    selected = [entry for entry in known if until is None or entry.place <= until]
    if begin is not None:
        selected = [entry for entry in selected if entry.place > begin]
    elif not query.cursor:
        if query.since_s is not None:
            selected = [entry for entry in selected if entry.place.second >= int(now_s - query.since_s)]
        if query.lines is not None:
            selected = selected[len(selected) - min(len(selected), query.lines) :]
    last = known[-1].place if known else begin or LogPlace()
    kept = _fitting(selected, query.bytes_max)
    is_last = len(kept) == len(selected)
    end = begin or LogPlace()
    if kept:
        end = kept[-1].place
    elif not selected:
        end = max(end, last) if until is None else end
    return protocol.LogPage(
        text="".join(entry.text for entry in kept),
        cursor=_cursor(container, end),
        end=_cursor(container, last),
        is_last=is_last,
    )


def _cursor(container: str, place: LogPlace) -> str:
    return f"{container[:12]}:{place.second}:{place.number}"


def _fitting(selected: Iterable[ContainerLogLine], bytes_max: int) -> list[ContainerLogLine]:
    """As many of the first as fit, but at least one, which is cut if necessary."""
    kept: list[ContainerLogLine] = []
    left = bytes_max
    for entry in selected:
        size = len(msgspec.json.encode(entry.text))
        if size > left and kept:
            break
        if size > bytes_max:
            entry = ContainerLogLine(entry.place, entry.text[: bytes_max // 8] + " …\n")
        kept.append(entry)
        left -= size
    return kept
