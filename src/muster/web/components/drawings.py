"""Where things are in drawings: shares of states, timelines and the topology. Pure; templates draw them."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

from muster.web.data import topology

WIDTH, LEFT, RIGHT = 1280, 220, 1268
TICKS = ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end"))
SPAN_MIN = 6.0

Span = tuple[float, float, str, str]  # begin and end in s, a style, and words


def shares(counts: Mapping[str, int]) -> list[tuple[str, int, float, float]]:
    """The parts of a bar, the largest first: name, count, place and width."""
    total = sum(counts.values())
    x, parts = 0.0, []
    for name, count in sorted(filter(operator.itemgetter(1), counts.items()), key=lambda item: -item[1]):
        width = count / total * WIDTH
        parts.append((name, count, round(x, 2), round(max(width - 1.5, 0.8), 2)))
        x += width
    return parts


def timeline(lanes: Mapping[str, Sequence[Span]], *, from_s: float, to_s: float) -> dict[str, Any]:
    """What happened in each lane: a time, or a moment of no length."""

    def place(at_s: float) -> float:
        return round(LEFT + min(1.0, max(0.0, (at_s - from_s) / (to_s - from_s))) * (RIGHT - LEFT), 1)

    drawn = [
        (
            name,
            [
                (
                    min(place(begin_s), RIGHT - SPAN_MIN),
                    max(SPAN_MIN, place(end_s) - place(begin_s)),
                    look,
                    words,
                )
                for begin_s, end_s, look, words in spans
                if end_s >= from_s
            ],
        )
        for name, spans in lanes.items()
    ]
    long_s = to_s - from_s
    clock = "%m-%d %H:%M" if long_s >= 86400 else "%H:%M" if long_s > 600 else "%H:%M:%S"
    times = [(from_s + share * (to_s - from_s), anchor) for share, anchor in TICKS]
    ticks = [
        (place(at_s), int(at_s * 1000), time.strftime(clock, time.gmtime(at_s)), anchor)
        for at_s, anchor in times
    ]
    return {"width": WIDTH, "left": LEFT, "lanes": drawn, "ticks": ticks}


# The topology: brokers in the middle, what reports on the left, services on the right

KIND_MAX = 16
UP = ("up", "running")
MAP_WIDTH, BOX, STEP, TOP, EDGE = 1000, 200, 58, 30, 14
COLUMNS = {"machines": 0, "channel": 1, "broker": 2, "domain": 2}  # others: 3
PAGES = {
    "machines": "/machines",
    "channel": "/report-delay",
    "broker": "/brokers",
    "manager": "/managers",
    "information node": "/contexts",
    "pipeline": "/pipeline",
    "gateway": "/queues",
    "dispatcher": "/queues",
    "notifier": "/events",
}


def _of_each_kind(parts: Sequence[topology.DomainPart]) -> list[topology.DomainPart]:
    """At most `KIND_MAX` of each kind, those that are not up first, and a part for the others."""
    kinds: dict[str, list[topology.DomainPart]] = {}
    for part in parts:
        kinds.setdefault(part.kind, []).append(part)
    shown: list[topology.DomainPart] = []
    for kind, own in kinds.items():
        shown += sorted(own, key=lambda part: part.state in UP)[:KIND_MAX] if len(own) > KIND_MAX else own
        if len(own) > KIND_MAX:
            shown.append(
                topology.DomainPart(id=f"more {kind}", kind=kind, name=f"{len(own) - KIND_MAX:,} more")
            )
    return shown


def topology_places(made: topology.DomainTopology) -> dict[str, Any]:
    shown = _of_each_kind(made.parts)
    columns: dict[int, list[topology.DomainPart]] = {}
    for part in shown:
        columns.setdefault(COLUMNS.get(part.kind, 3), []).append(part)
    rows = max((len(parts) for parts in columns.values()), default=1)
    used = sorted({*columns, 2})

    def left(column: int) -> float:
        return used.index(column) * (MAP_WIDTH - BOX) / max(1, len(used) - 1)

    places: dict[str, tuple[float, float]] = {}
    for column, parts in columns.items():
        start = TOP + (rows - len(parts)) * STEP / 2
        places |= {part.id: (round(left(column), 1), start + row * STEP) for row, part in enumerate(parts)}
    bus_x, height = left(2), TOP + rows * STEP + 24

    def path(link: topology.PartLink) -> str:
        x, y = places[link.near]
        to_x, to_y = places.get(link.far, (bus_x, y))
        if to_x == x:  # beside each other in a column
            edge, bow = x + BOX, x + BOX + 34
            return f"M{edge},{y + 22} C{bow},{y + 22} {bow},{to_y + 22} {edge},{to_y + 22}"
        begin, end = (x + BOX, to_x) if to_x > x else (x, to_x + BOX)
        if link.far == topology.BUS:
            end += -EDGE if to_x > x else EDGE
        middle = (begin + end) / 2
        return f"M{begin},{y + 22} C{middle},{y + 22} {middle},{to_y + 22} {end},{to_y + 22}"

    return {
        "width": MAP_WIDTH,
        "height": height,
        "box": BOX,
        "bus": {"x": bus_x - EDGE, "y": 2, "width": BOX + 2 * EDGE, "height": height - 4},
        "lines": [(path(link), link) for link in made.links if link.near in places],
        "parts": [(part, *places[part.id], PAGES.get(part.kind)) for part in shown],
        "counts": (len(made.parts), sum(part.state in UP for part in made.parts)),
        "missing": made.missing,
    }
