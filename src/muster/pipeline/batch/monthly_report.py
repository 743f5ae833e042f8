"""The monthly report: a self-contained HTML page with SVG plots."""

from __future__ import annotations

import collections
import datetime
import html
from collections.abc import Mapping, Sequence
from typing import Any

from muster.core import errors
from muster.pipeline.batch import rule_replay
from muster.pipeline.history import search, storage, tables

GROUPS_SHOWN = 20
PLOTTED = ("cpu_percent", "memory_percent", "load_1m")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 180, 60, 20

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:48rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}svg{width:100%;height:auto}"
)


def render_report(
    root: storage.Root, month: str, *, demand: Sequence[rule_replay.ContextDemand] | None = None
) -> str:
    """``month`` has the form 2030-01. `errors.NotFound` if the history has no data of it.

    ``demand``: optional section about the demand for metadata (`rule_replay.demand`).
    """
    from_ms, to_ms = bounds(month)
    system = _by_hour(root, from_ms, to_ms)
    if not system:
        raise errors.NotFound(f"the history has no data of {month}")
    plots: list[tuple[str, list[tuple[int, float | None]]]] = [
        ("Machines that reported", [(hour, values["machines"]) for hour, values in system]),
        ("Stale machines", [(hour, values["stale"]) for hour, values in system]),
        ("CPU, mean over the fleet, %", [(hour, values.get("cpu_percent")) for hour, values in system]),
        ("Memory, mean over the fleet, %", [(hour, values.get("memory_percent")) for hour, values in system]),
        ("Load, mean over the fleet", [(hour, values.get("load_1m")) for hour, values in system]),
    ]
    parts = [f"<h1>The fleet in {html.escape(month)}</h1>", _summary(system)]
    for heading, points in plots:
        known = [(hour, float(value)) for hour, value in points if value is not None]
        if known:
            parts += [f"<h2>{html.escape(heading)}</h2>", plot(known, from_ms, to_ms)]
    parts += ["<h2>Busiest groups</h2>", _groups(root, from_ms, to_ms)]
    parts += ["<h2>Alerts</h2>", _alerts(root, from_ms, to_ms)]
    if demand is not None:
        parts += ["<h2>Demand for metadata</h2>", _demand(demand)]
    body = "\n".join(parts)
    title = f"The fleet in {html.escape(month)}"
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style>\n{body}\n</html>\n"
    )


def plot(points: Sequence[tuple[int, float]], from_ms: int, to_ms: int) -> str:
    """A line plot over time, with its maximum and minimum."""
    most, least = max(value for _, value in points), min(0.0, *(value for _, value in points))
    span = (most - least) or 1.0

    def place(at_ms: int, value: float) -> str:
        across = _LEFT + (at_ms - from_ms) / (to_ms - from_ms) * (_WIDTH - _LEFT)
        down = (_HEIGHT - _BOTTOM) * (1 - (value - least) / span) + 5
        return f"{across:.1f},{down:.1f}"

    line = " ".join(place(*point) for point in points)
    floor = _HEIGHT - _BOTTOM + 5
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 10}" role="img">'
        f'<path d="M{_LEFT} 5V{floor}H{_WIDTH}" fill="none" stroke="#999"/>'
        f'<text x="{_LEFT - 6}" y="14" font-size="12" text-anchor="end">{most:.4g}</text>'
        f'<text x="{_LEFT - 6}" y="{floor}" font-size="12" text-anchor="end">{least:.4g}</text>'
        f'<polyline points="{line}" fill="none" stroke="#1769aa" stroke-width="1.5"/></svg>'
    )


def bounds(month: str) -> tuple[int, int]:
    try:
        first = datetime.datetime.strptime(month, "%Y-%m").replace(tzinfo=datetime.UTC)
    except ValueError:
        raise errors.InvalidInput(f"{month!r} is not a month: write one like 2030-01") from None
    following = (first + datetime.timedelta(days=32)).replace(day=1)
    return int(first.timestamp() * 1000), int(following.timestamp() * 1000)


def _by_hour(root: storage.Root, from_ms: int, to_ms: int) -> list[tuple[int, dict[str, float]]]:
    """For each hour: the maximum of machines and stale machines, and the mean of each metric."""
    statistics = [f"{metric}_{part}" for metric in PLOTTED for part in ("count", "mean")]
    query = search.HistorySearch(
        tables.GROUPS,
        "scope = 'system'",
        from_ms,
        to_ms,
        ("window_start", "machines", "stale", *statistics),
    )
    hours: dict[int, dict[str, float]] = {}
    sums: dict[tuple[int, str], list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for part in search.search(root, query):
        for row in part.to_pylist():
            hour = int(row["window_start"].timestamp()) // 3600 * 3_600_000
            values = hours.setdefault(hour, {"machines": 0, "stale": 0})
            values["machines"] = max(values["machines"], row["machines"])
            values["stale"] = max(values["stale"], row["stale"])
            for metric in PLOTTED:
                if row[f"{metric}_count"]:
                    sums[hour, metric][0] += row[f"{metric}_mean"] * row[f"{metric}_count"]
                    sums[hour, metric][1] += row[f"{metric}_count"]
    for (hour, metric), (total, count) in sums.items():
        hours[hour][metric] = total / count
    return sorted(hours.items())


def _summary(system: Sequence[tuple[int, dict[str, float]]]) -> str:
    rows: list[tuple[str, Any]] = [
        ("hours with reports", len(system)),
        ("most machines", max(values["machines"] for _, values in system)),
        ("most stale machines", max(values["stale"] for _, values in system)),
    ]
    return _table(("", ""), rows)


def _groups(root: storage.Root, from_ms: int, to_ms: int) -> str:
    """Groups by mean CPU over the month, with maximum machines and highest 95th percentile of a window."""
    query = search.HistorySearch(
        tables.GROUPS,
        "scope = 'group' AND cpu_percent_count > 0",
        from_ms,
        to_ms,
        ("name", "machines", "stale", "cpu_percent_count", "cpu_percent_mean", "cpu_percent_p95"),
    )
    groups: dict[str, list[float]] = {}
    for batch in search.search(root, query):
        for row in batch.to_pylist():
            count = row["cpu_percent_count"]
            before = groups.get(row["name"], [0.0] * 5)
            groups[row["name"]] = [
                before[0] + count,
                before[1] + row["cpu_percent_mean"] * count,
                max(before[2], row["machines"]),
                max(before[3], row["stale"]),
                max(before[4], row["cpu_percent_p95"] or 0.0),
            ]
    if not groups:
        return "<p>No group reported.</p>"
    ranked = sorted(groups.items(), key=lambda item: -item[1][1] / (item[1][0] or 1))[:GROUPS_SHOWN]
    rows = [
        (name, int(machines), int(stale), round(total / (count or 1), 1), round(p95, 1))
        for name, (count, total, machines, stale, p95) in ranked
    ]
    return _table(("group", "machines", "stale at most", "CPU, mean %", "highest p95 %"), rows)


def _demand(demands: Sequence[rule_replay.ContextDemand]) -> str:
    if not demands:
        return "<p>No demand was reported.</p>"
    rows = [
        (
            demand.key,
            round(demand.total),
            ", ".join(f"{zone} {round(n)}" for zone, n in sorted(demand.by_zone.items())),
            ", ".join(demand.place_in),
        )
        for demand in demands[:GROUPS_SHOWN]
    ]
    return _table(("key", "accesses", "from", "suggested replica zones"), rows)


def _zones(by_zone: Mapping[str, float]) -> str:
    return ", ".join(f"{zone} {round(times)}" for zone, times in sorted(by_zone.items()))


def _alerts(root: storage.Root, from_ms: int, to_ms: int) -> str:
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    query = search.HistorySearch("alerts", "state = 'firing'", from_ms, to_ms, ("rule", "severity"))
    for part in search.search(root, query):
        counts.update((row["rule"], row["severity"]) for row in part.to_pylist())
    if not counts:
        return "<p>None fired.</p>"
    return _table(("rule", "severity", "times"), [(*key, times) for key, times in counts.most_common()])


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        kind = ' class="n"' if isinstance(value, int | float) else ""
        return f"<td{kind}>{html.escape(str(value))}</td>"

    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{lines}</table>"
