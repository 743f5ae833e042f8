"""Shares of states, bars in tables, and timelines: SVG that needs no script. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

from muster.web.components import templates, widgets
from muster.web.components.html import Markup

WIDTH, LEFT, RIGHT = 1280, 220, 1268
TICKS = ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end"))

Span = tuple[float, float, str, str]  # begin and end in s, a style, and words


def shares(counts: Mapping[str, int], *, label: str) -> Markup:
    """A stacked bar of the shares of states, with the counts as text."""
    total = sum(counts.values())
    if not total:
        return widgets.empty("No data yet.")
    x, parts = 0.0, []
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        width = count / total * WIDTH
        parts.append((name, f"{count:,}", round(x, 2), round(max(width - 1.5, 0.8), 2)))
        x += width
    return templates.render("shares.html", parts=parts, width=WIDTH, label=label)


def bar(share: float, *, look: str = "calm") -> Markup:
    """A small bar in a table cell, beside its value."""
    return templates.render("bar.html", width=round(max(0.0, min(1.0, share)) * 100, 1), look=look)


def timeline(lanes: Mapping[str, Sequence[Span]], *, from_s: float, to_s: float, label: str) -> Markup:
    """What happened in each lane: a time, or a moment of no length."""

    def place(at_s: float) -> float:
        return round(LEFT + min(1.0, max(0.0, (at_s - from_s) / (to_s - from_s))) * (RIGHT - LEFT), 1)

    drawn = [
        (
            name,
            [
                (min(place(begin_s), RIGHT - 6), max(6.0, place(end_s) - place(begin_s)), look, words)
                for begin_s, end_s, look, words in spans
                if end_s >= from_s
            ],
        )
        for name, spans in lanes.items()
    ]
    times = [(from_s + share * (to_s - from_s), anchor) for share, anchor in TICKS]
    ticks = [(place(at_s), _clock(at_s), anchor) for at_s, anchor in times]
    return templates.render("timeline.html", width=WIDTH, left=LEFT, lanes=drawn, ticks=ticks, label=label)


def _clock(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%H:%M")
