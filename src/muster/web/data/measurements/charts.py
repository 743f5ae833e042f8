"""Charts: lines with one unit over one time axis, the interval of alerts and their threshold. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

GAP_PACES, GAP_S_MIN = 3, 5.0
POINTS_MAX = 2000

Row = tuple[float, Mapping[str, float | None]]  # time in s, and values by the name of their line


class ChartLine(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a line; null: none was measured."""

    name: str
    values: list[float | None]


class ChartMark(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which an alert fired; ``to_ms`` null: it still does."""

    from_ms: int
    to_ms: int | None = None
    severity: str
    text: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Lines over one time axis. ``threshold``: where the rule of an alert begins."""

    title: str
    unit: str = ""
    at_ms: list[int] = []
    lines: list[ChartLine] = []
    threshold: float | None = None
    marks: list[ChartMark] = []


class ChartedThing(msgspec.Struct, frozen=True, kw_only=True):
    """Something of which there are charts, and their metrics."""

    kind: str
    name: str
    metrics: list[str]


def chart(
    title: str, rows: Iterable[Row], *, from_s: float, to_s: float, points: int = 600, unit: str = ""
) -> Chart:
    """The rows of a time in at most about ``points`` steps. Where several are missing, there is a gap."""
    inside = sorted((row for row in rows if from_s <= row[0] <= to_s), key=lambda row: row[0])
    names = list(dict.fromkeys(name for _, values in inside for name in values))
    inside = with_gaps(downsampled(inside, names, (to_s - from_s) / points if len(inside) > points else 0.0))
    return Chart(
        title=title,
        unit=unit,
        at_ms=[int(at_s * 1000) for at_s, _ in inside],
        lines=[
            ChartLine(name=name, values=[_known(values.get(name)) for _, values in inside]) for name in names
        ],
    )


def downsampled(rows: Sequence[Row], names: Sequence[str], step_s: float) -> list[Row]:
    """Means of steps; a step without any value of a line has none."""
    if step_s <= 0:
        return list(rows)
    made: list[Row] = []
    for step, group in itertools.groupby(rows, key=lambda row: row[0] // step_s):
        inside = [values for _, values in group]
        made.append((step * step_s, {name: _mean([values.get(name) for values in inside]) for name in names}))
    return made


def with_gaps(rows: Sequence[Row]) -> list[Row]:
    """Insert a row without values where rows of a regular series are missing for several intervals."""
    paces = sorted(later - sooner for (sooner, _), (later, _) in itertools.pairwise(rows))
    pace_s = paces[len(paces) // 2] if paces else 0.0
    made: list[Row] = []
    for row in rows:
        if made and row[0] - made[-1][0] > max(GAP_S_MIN, GAP_PACES * pace_s):
            made.append((made[-1][0] + min(pace_s, GAP_S_MIN), {}))
        made.append(row)
    return made


def in_percent(rows: Sequence[Row]) -> list[Row] | None:
    """The rows in percent if all values are shares; else None."""
    known = [value for _, values in rows for value in values.values() if value is not None]
    if not known or not all(0 <= value <= 1 for value in known):
        return None
    return [
        (at_s, {name: None if value is None else 100 * value for name, value in values.items()})
        for at_s, values in rows
    ]


def unit(metric: str) -> str:
    """The unit of a metric, from its name."""
    endings = {"_percent": " %", "_bytes": " B", "_bytes_s": " B/s", "_s": " s"}
    return next((text for end, text in endings.items() if metric.endswith(end)), "")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
