"""A plot of lines as SVG text, without scripts or libraries, readable on light and dark pages. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 720, 220, 88, 24, 24, 10
COLOURS = ("#2b83c6", "#d58512", "#3f9c46", "#d0467f", "#8462d6", "#78909c")
LEGEND_LINE = 16
LINE, DOT = 1.5, 5  # widths of a line, and of a point without neighbours
LETTER = 7.0  # mean width of a character in the legend

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
    legend, rows = _legend(list(lines))
    top, floor = TOP + rows * LEGEND_LINE, height + rows * LEGEND_LINE - BOTTOM

    def x(value: float) -> float:
        return LEFT + x_axis.share(value) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + (floor - top) * (1 - y_axis.share(value))

    drawn = [legend]
    for value, text in y_axis.ticks:
        drawn.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH}" stroke="currentColor" stroke-opacity=".15"/>')
        drawn.append(_text(LEFT - 6, y(value) + 4, text, "end"))
    drawn.append(
        f'<path d="M{LEFT} {top}V{floor}H{WIDTH}" fill="none" stroke="currentColor" stroke-opacity=".5"/>'
    )
    drawn += [_text(x(value), floor + BOTTOM - 6, text, "middle") for value, text in x_axis.ticks]
    for number, points in enumerate(lines.values()):
        for run in _runs(points, gap):
            path = " ".join(f"{x(across):.1f},{y(up):.1f}" for across, up in run)
            width = LINE if len(set(run)) > 1 else DOT
            drawn.append(
                f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="{width}" '
                'stroke-linecap="round"/>'
            )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {floor + BOTTOM}" role="img" '
        f'font-family="system-ui, sans-serif" aria-label="{html.escape(label)}">{"".join(drawn)}</svg>'
    )


def round_axis(low: float, high: float) -> PlotAxis:
    """An axis that contains both values, with three to six ticks at round numbers."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = next(step for step in (0.2 * power, 0.5 * power, power, 2 * power) if span / step <= 5)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    ticks = [round(number * step, 10) for number in range(first, last + 1)]
    return PlotAxis(ticks[0], ticks[-1], [(tick, figure(tick)) for tick in ticks])


def figure(value: float) -> str:
    """A number for a label: with separators, at most four digits after rounding."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4g}"


def _legend(names: Sequence[str]) -> tuple[str, int]:
    """The names above the plot with the colours of their lines; and the rows that they take."""
    drawn, left, row = [], float(LEFT), 0
    for number, name in enumerate(names):
        width = 38 + LETTER * len(name)
        if left + width > WIDTH and left > LEFT:
            left, row = float(LEFT), row + 1
        middle = TOP + row * LEGEND_LINE
        drawn.append(f'<path d="M{left:.1f} {middle}h14" stroke="{_colour(number)}" stroke-width="3"/>')
        drawn.append(_text(left + 19, middle + 4, name, "start"))
        left += width
    return "".join(drawn), row + 1


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" fill="currentColor">'
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
