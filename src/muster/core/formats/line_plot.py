"""A plot of lines as SVG text, without scripts or libraries. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 720, 220, 88, 24, 24, 10
COLOURS = ("#1769aa", "#c77700", "#2e7d32", "#ad1457", "#5e35b1", "#546e7a")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """``ticks``: values with their labels."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """The position of a value between the ends of the axis: 0 to 1."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / ((high - low) or 1.0)


def svg(
    lines: Mapping[str, Points],
    x_axis: PlotAxis,
    y_axis: PlotAxis,
    *,
    label: str,
    gap: float = math.inf,
    height: int = HEIGHT,
) -> str:
    """The lines with axes and a legend. Points that are further apart than ``gap`` are not joined."""
    floor = height - BOTTOM

    def x(value: float) -> float:
        return LEFT + x_axis.share(value) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (floor - TOP) * (1 - y_axis.share(value))

    drawn = [f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH}" fill="none" stroke="#999"/>']
    for value, text in y_axis.ticks:
        drawn.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH}" stroke="#eee"/>')
        drawn.append(_text(LEFT - 6, y(value) + 4, text, "end"))
    drawn += [_text(x(value), height - 6, text, "middle") for value, text in x_axis.ticks]
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        for run in _runs(points, gap):
            path = " ".join(f"{x(across):.1f},{y(up):.1f}" for across, up in run)
            drawn.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" '
                'stroke-linecap="round"/>'
            )
        drawn.append(_text(LEFT + 8, TOP + 12 + 14 * number, name, "start", colour))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" aria-label="{html.escape(label)}">{"".join(drawn)}</svg>'
    )


def figure(value: float) -> str:
    """A number for a label: with separators, at most four digits after rounding."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4g}"


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(text)}</text>"
    )


def _runs(points: Points, gap: float) -> list[list[tuple[float, float]]]:
    """The parts without gaps. A part of one point is drawn as a dot."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if not runs or point[0] - runs[-1][-1][0] > gap:
            runs.append([])
        runs[-1].append(point)
    return [run if len(run) > 1 else run * 2 for run in runs]
