"""Shares, graphs and timelines as SVG, without scripts. Pure.

Each chart has an accessible name and repeats its figures as text.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.web.components import widgets
from muster.web.components.html import Markup, tag

WIDTH, HEIGHT = 640, 160
LEFT, RIGHT, TOP, BOTTOM = 72, 8, 12, 28


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
        drawn.append(tag("text", clock(at, to_s - from_s), x=f"{x:.1f}", y=height - 4, cls=f"axis {anchor}"))
    return tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label, cls="chart")


def clock(at_s: float, span_s: float) -> str:
    at = datetime.datetime.fromtimestamp(at_s, datetime.UTC)
    return at.strftime("%H:%M:%S" if span_s < 3600 else "%H:%M" if span_s < 86400 else "%m-%d %H:%M")
