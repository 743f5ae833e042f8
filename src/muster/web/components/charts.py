"""Charts as SVG, without scripts or libraries. Pure.

Each chart has an accessible name and repeats its figures as text.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.core import units
from muster.web.components import widgets
from muster.web.components.html import Markup, tag

WIDTH, HEIGHT = 640, 160
LEFT, RIGHT, TOP, BOTTOM = 72, 8, 12, 28

GAP_PACES, GAP_S_MIN = 3, 5.0

Point = tuple[float, float | None]  # seconds, value


@dataclass(frozen=True, slots=True)
class ChartLine:
    name: str
    points: Sequence[Point]
    look: str = "line-1"


def lines(series: Sequence[ChartLine], *, label: str, unit: str = "") -> Markup:
    """A line chart over time. Gaps are shown as gaps."""
    series = [
        ChartLine(line.name, split_gaps(line.points), line.look)
        for line in series
        if any(_is_known(y) for _, y in line.points)
    ]
    known = [(x, y) for line in series for x, y in line.points if y is not None and math.isfinite(y)]
    if len({x for x, _ in known}) < 2:
        return widgets.empty("Not enough data yet.", "Points appear when measurements arrive.")
    low_x, high_x = min(x for x, _ in known), max(x for x, _ in known)
    high_y = _nice(max(y for _, y in known))
    span_x = max(high_x - low_x, 1e-9)

    def place(x: float, y: float) -> str:
        px = LEFT + (x - low_x) / span_x * (WIDTH - LEFT - RIGHT)
        py = HEIGHT - BOTTOM - min(1.0, max(0.0, y / high_y)) * (HEIGHT - TOP - BOTTOM)
        return f"{px:.1f},{py:.1f}"

    drawn: list[Markup] = []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        drawn.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", cls="grid"))
        drawn.append(
            tag("text", _axis_text(high_y * share, unit), x=LEFT - 6, y=f"{y + 4:.1f}", cls="axis end")
        )
    for at, anchor in ((low_x, "start"), ((low_x + high_x) / 2, "middle"), (high_x, "end")):
        x = LEFT + (at - low_x) / span_x * (WIDTH - LEFT - RIGHT)
        drawn.append(tag("text", _clock(at, span_x), x=f"{x:.1f}", y=HEIGHT - 4, cls=f"axis {anchor}"))
    gaps = sorted({gap for line in series for gap in _gaps(line.points)})
    for begin, end in gaps:
        left, right = (float(place(x, 0.0).partition(",")[0]) for x in (begin, end))
        drawn.append(
            tag(
                "rect",
                tag("title", f"No data, {_clock(begin, span_x)} to {_clock(end, span_x)}"),
                x=f"{left:.1f}",
                y=TOP,
                width=f"{right - left:.1f}",
                height=HEIGHT - TOP - BOTTOM,
                cls="gap",
            )
        )
    for line in series:
        run: list[str] = []
        for x, value in (*line.points, (high_x, None)):
            if value is not None and _is_known(value):
                run.append(place(x, value))
            elif run:
                drawn.append(
                    tag("polyline", points=" ".join(run if len(run) > 1 else run * 2), cls=line.look)
                )
                run = []
    last = [
        f"{line.name}: {_figure([y for _, y in line.points if y is not None and _is_known(y)][-1], unit)}"
        for line in series
    ]
    legend = tag(
        "div",
        *(tag("span", words, cls=f"key {line.look}") for words, line in zip(last, series, strict=True)),
        tag("span", "no data", cls="key gap") if gaps else None,
        cls="legend",
    )
    picture = tag(
        "svg",
        *drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{label}. Now {'; '.join(last)}",
        cls="chart",
    )
    return tag("figure", picture, legend)


def split_gaps(points: Sequence[Point]) -> list[Point]:
    """Insert a gap where points of a regular series are missing for several intervals."""
    paces = sorted(later - sooner for (sooner, _), (later, _) in itertools.pairwise(points))
    most_s = max(GAP_S_MIN, GAP_PACES * paces[len(paces) // 2]) if paces else 0.0
    drawn: list[Point] = []
    for at_s, value in points:
        if drawn and at_s - drawn[-1][0] > most_s:
            drawn.append((at_s, None))
        drawn.append((at_s, value))
    return drawn


def _is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _gaps(points: Sequence[Point]) -> Iterator[tuple[float, float]]:
    """Yield each gap: from the last value before it to the first value after it."""
    known: float | None = None
    missing = False
    for x, y in points:
        if not _is_known(y):
            missing = True
            continue
        if missing and known is not None:
            yield known, x
        known, missing = x, False


def shares(counts: Mapping[str, int], *, label: str) -> Markup:
    """A stacked bar of the shares of states, with the counts as text."""
    total = sum(counts.values())
    if not total:
        return widgets.empty("No data yet.")
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    x, drawn = 0.0, []
    for name, count in ordered:
        width = count / total * WIDTH
        drawn.append(
            tag(
                "rect",
                tag("title", f"{name}: {count:,}"),
                x=f"{x:.2f}",
                y=0,
                width=f"{max(width - 1.5, 0.8):.2f}",
                height=14,
                cls=f"fill {widgets.severity_class(name)}",
            )
        )
        x += width
    words = ", ".join(f"{name} {count:,}" for name, count in ordered)
    picture = tag(
        "svg",
        *drawn,
        viewBox=f"0 0 {WIDTH} 14",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{label}: {words}",
        cls="shares",
    )
    keys = [
        tag("span", tag("b", f"{count:,}"), f" {name}", cls=f"key {widgets.severity_class(name)}")
        for name, count in ordered
    ]
    return tag("figure", picture, tag("div", *keys, cls="legend"))


def bar(share: float, *, look: str = "calm", label: str = "") -> Markup:
    """A small bar in a table cell, beside its value."""
    width = max(0.0, min(1.0, share)) * 100
    return tag(
        "svg",
        tag("rect", x=0, y=0, width=100, height=8, cls="track"),
        tag("rect", x=0, y=0, width=f"{width:.1f}", height=8, cls=f"fill {look}"),
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        cls="bar-in-row",
        aria_hidden="true" if not label else None,
        role="img" if label else None,
        aria_label=label or None,
    )


@dataclass(frozen=True, slots=True)
class GraphNode:
    name: str
    look: str
    words: str  # text below the name
    weight: float = 0.0  # relative size, 0 to 1


@dataclass(frozen=True, slots=True)
class GraphEdge:
    near: str
    far: str
    up: bool
    words: str
    weight: float = 0.0


def graph(nodes: Sequence[GraphNode], edges: Sequence[GraphEdge], *, label: str) -> Markup:
    """Brokers in a ring, with links: a thicker link carries more traffic, a dashed link is down."""
    height = 360 if len(nodes) > 2 else 150
    middle_x, middle_y = WIDTH / 2, height / 2 - 4
    across, down = WIDTH / 2 - 110, height / 2 - 78  # room for text above and below, larger on a phone
    places: dict[str, tuple[float, float]] = {}
    for index, node in enumerate(nodes):
        angle = 2 * math.pi * index / len(nodes) - math.pi / 2
        if len(nodes) == 1:
            places[node.name] = (middle_x, middle_y)
        elif len(nodes) == 2:
            places[node.name] = (middle_x + (index * 2 - 1) * across * 0.7, middle_y)
        else:
            places[node.name] = (middle_x + across * math.cos(angle), middle_y + down * math.sin(angle))
    drawn: list[Markup] = []
    for edge in edges:
        if edge.near not in places or edge.far not in places:
            continue
        (x1, y1), (x2, y2) = places[edge.near], places[edge.far]
        drawn.append(
            tag(
                "line",
                tag("title", f"{edge.near} – {edge.far}: {edge.words}"),
                x1=f"{x1:.1f}",
                y1=f"{y1:.1f}",
                x2=f"{x2:.1f}",
                y2=f"{y2:.1f}",
                stroke_width=f"{1.5 + 6 * edge.weight:.1f}",
                cls=f"edge {'good' if edge.up else 'bad'}",
            )
        )
        x, y = x1 + (x2 - x1) * 0.5, y1 + (y2 - y1) * 0.5
        if len(edges) <= 12:
            drawn.append(tag("text", edge.words, x=f"{x:.1f}", y=f"{y - 6:.1f}", cls="axis middle halo"))
    for node in nodes:
        x, y = places[node.name]
        # Outside of the ring, where no links are drawn.
        name_y, words_y = (y - 52, y - 34) if len(nodes) > 2 and y < middle_y else (y + 44, y + 64)
        drawn += [
            tag(
                "circle",
                tag("title", f"{node.name}: {node.words}"),
                cx=f"{x:.1f}",
                cy=f"{y:.1f}",
                r=f"{12 + 14 * node.weight:.1f}",
                cls=f"node {node.look}",
            ),
            tag("text", node.name, x=f"{x:.1f}", y=f"{name_y:.1f}", cls="name middle halo"),
            tag("text", node.words, x=f"{x:.1f}", y=f"{words_y:.1f}", cls="axis middle halo"),
        ]
    return tag(
        "svg", *drawn, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label, cls="chart graph"
    )


@dataclass(frozen=True, slots=True)
class TimelineMark:
    lane: str
    at_s: float
    words: str
    look: str


def timeline(
    lanes: Sequence[str], marks: Sequence[TimelineMark], *, from_s: float, to_s: float, label: str
) -> Markup:
    """Events over time, each in its lane."""
    step = 26
    height = step * len(lanes) + 24
    left = 120
    drawn: list[Markup] = []
    for index, lane in enumerate(lanes):
        y = step * index + step / 2
        drawn.append(tag("line", x1=left, x2=WIDTH - RIGHT, y1=y, y2=y, cls="grid"))
        drawn.append(tag("text", lane[:18], x=left - 10, y=y + 4, cls="axis end"))
    for mark in marks:
        if mark.lane not in lanes or not from_s <= mark.at_s <= to_s:
            continue
        x = left + (mark.at_s - from_s) / (to_s - from_s) * (WIDTH - RIGHT - left)
        y = step * lanes.index(mark.lane) + step / 2
        drawn.append(
            tag("circle", tag("title", mark.words), cx=f"{x:.1f}", cy=y, r=6, cls=f"fill {mark.look}")
        )
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x = left + share * (WIDTH - RIGHT - left)
        at = from_s + share * (to_s - from_s)
        drawn.append(tag("text", _clock(at, to_s - from_s), x=f"{x:.1f}", y=height - 4, cls=f"axis {anchor}"))
    return tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label, cls="chart")


def _nice(value: float) -> float:
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * 0.999)


def _figure(value: float, unit: str) -> str:
    """A value in the legend, as in tables."""
    if unit == " %":
        return units.rounded_percent(value)
    if unit in (" B", " B/s"):
        return units.rounded_size(value) + unit.removeprefix(" B")
    return widgets.seconds(value) if unit == " s" else f"{_short(value)}{unit}"


def _axis_text(value: float, unit: str) -> str:
    """A mark of the axis with all its digits: 2.5k, 1.25 GB."""
    digits = _short(value)
    if unit in (" B", " B/s") and digits[-1].isalpha():
        return f"{digits[:-1]} {digits[-1]}{unit.strip()}"
    return f"{digits}{unit}"


def _short(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def _clock(at_s: float, span_s: float) -> str:
    at = datetime.datetime.fromtimestamp(at_s, datetime.UTC)
    return at.strftime("%H:%M:%S" if span_s < 3600 else "%H:%M" if span_s < 86400 else "%m-%d %H:%M")
