"""The capacity report as a self-contained HTML page with SVG plots. Pure."""

from __future__ import annotations

import datetime
import html
from collections.abc import Callable, Sequence
from typing import Any

from muster.analyses import capacity_report
from muster.core import units
from muster.core.formats import line_plot

_GAP_MS = 2 * 3_600_000  # points further apart are not joined

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "table{border-collapse:collapse}div{overflow-x:auto}"
    "td,th{padding:.2rem .9rem .2rem 0;text-align:left;border-bottom:1px solid #8883;white-space:nowrap}"
    "th{font-weight:600;vertical-align:bottom;white-space:normal}"
    "td.n,th.n,table.facts td+td{text-align:right;font-variant-numeric:tabular-nums}"
    "svg{width:100%;height:auto}"
    "h2{margin-top:2rem;font-size:1.15rem}p.note{color:#777}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#16191d}p.note{color:#999}}"
)
# Columns: titles, and their fields if they have other names.
_GROUPS = (
    "group; machines; stale at most=stale; CPU, mean %=cpu_percent; CPU, highest p95 %=cpu_p95_percent; "
    "memory, %=memory_percent; disk, %=disk_percent"
)
_DISKS = (
    "machine; group; now, %=disk_percent; % a day=percent_per_day; full=full_ms; earliest=earliest_ms; "
    "latest=latest_ms"
)
_OUTLIERS = "machine; group; metric; value; median of the group=group_median; score"
_ALERTS = "rule; severity; times"
_TITLES = {
    "cpu_percent": "CPU, %",
    "memory_percent": "Memory, %",
    "disk_percent": "Disk, %",
    "load_1m": "Load",
}


def render(report: capacity_report.CapacityReport) -> str:
    title = f"Capacity in {html.escape(report.period)}"
    parts = [f"<h1>{title}</h1>", _summary(report)]
    parts += _plots(report)
    for heading, otherwise, columns, rows in (
        ("Busiest groups", "No group reported.", _GROUPS, report.groups),
        ("Disks that become full", "No disk is expected to be full within 30 days.", _DISKS, report.disks),
        ("Machines unlike their group", "None.", _OUTLIERS, report.outliers),
        ("Alerts", "None fired.", _ALERTS, report.alerts),
    ):
        titles = [column.partition("=") for column in columns.split("; ")]
        cells = [[_shown(name or title, row) for title, _, name in titles] for row in rows]
        parts += _section(heading, [title for title, *_ in titles], cells, otherwise)
    if report.demand is not None:
        parts += _section(
            "Demand for contexts",
            ("key", "accesses", "from", "suggested replica zones"),
            [
                (
                    demand.key,
                    round(demand.total),
                    ", ".join(f"{zone} {round(count)}" for zone, count in sorted(demand.by_zone.items())),
                    ", ".join(demand.place_in),
                )
                for demand in report.demand
            ],
            "No demand was reported.",
        )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style>\n{body}\n</html>\n"
    )


def _shown(name: str, row: object) -> Any:
    """Times as dates, other numbers with a few digits."""
    value = getattr(row, name)
    if name.endswith("_ms"):
        return _date(value)
    if isinstance(value, float):
        return round(value, 2 if abs(value) < 10 else 1) if abs(value) < 1000 else round(value)
    return value


def _summary(report: capacity_report.CapacityReport) -> str:
    rows = [
        ("hours with reports", line_plot.figure(len(report.hours))),
        ("machines, at most", line_plot.figure(report.machines_max)),
        ("stale machines, at most", line_plot.figure(report.stale_max)),
        ("reports a second, in the busiest hour", line_plot.figure(report.reports_per_s_max)),
    ]
    if report.machines_per_day is not None:
        rows.append(("machines added a day", line_plot.figure(report.machines_per_day)))
    if report.reports_per_s_limit:
        share = report.reports_per_s_max / report.reports_per_s_limit
        rows.append(("limit of the pipeline, reports a second", line_plot.figure(report.reports_per_s_limit)))
        rows.append(("use of the pipeline in the busiest hour", units.rounded_percent(100 * share)))
    return _table((), rows)


def _plots(report: capacity_report.CapacityReport) -> list[str]:
    def series(value: Callable[[capacity_report.HourFigures], float | None]) -> line_plot.Points:
        points = ((hour.at_ms, value(hour)) for hour in report.hours)
        return [(at_ms, float(figure)) for at_ms, figure in points if figure is not None]

    plots = {
        "Machines": {
            "reporting": series(lambda hour: hour.machines),
            "stale": series(lambda hour: hour.stale),
        },
        "Reports a second": {"reports": series(lambda hour: hour.reports_per_s)},
    }
    for metric in capacity_report.METRICS:
        plots[_TITLES[metric]] = {
            "mean": series(lambda hour, metric=metric: hour.means.get(metric)),  # type: ignore[misc]
            "highest p95 of a window": series(lambda hour, metric=metric: hour.p95.get(metric)),  # type: ignore[misc]
        }
    parts = []
    for heading, lines in plots.items():
        shown = {name: points for name, points in lines.items() if points}
        if shown:
            parts += [f"<h2>{html.escape(heading)}</h2>", _plot(shown, report.from_ms, report.to_ms, heading)]
    return parts


def _plot(lines: dict[str, line_plot.Points], from_ms: int, to_ms: int, label: str) -> str:
    """Lines over the days of the period."""
    values = [value for points in lines.values() for _, value in points]
    days = (to_ms - from_ms) // capacity_report.DAY_MS
    marks = range(from_ms, to_ms, max(1, days // 7) * capacity_report.DAY_MS)
    return line_plot.svg(
        lines,
        line_plot.PlotAxis(from_ms, to_ms, [(at_ms, _date(at_ms)[5:10]) for at_ms in marks]),
        line_plot.round_axis(min(0.0, *values), max(values)),
        label=label,
        gap=_GAP_MS,
    )


def _section(heading: str, head: Sequence[str], rows: Sequence[Sequence[Any]], otherwise: str) -> list[str]:
    body = _table(head, rows) if rows else f'<p class="note">{html.escape(otherwise)}</p>'
    return [f"<h2>{html.escape(heading)}</h2>", body]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any, tag: str = "td", *, number: bool) -> str:
        kind = ' class="n"' if number else ""
        return f"<{tag}{kind}>{html.escape('' if value is None else str(value))}</{tag}>"

    numeric = [all(isinstance(row[place], int | float | None) for row in rows) for place in range(len(head))]
    titles = "".join(cell(title, "th", number=number) for title, number in zip(head, numeric, strict=True))
    lines = "".join(
        "<tr>" + "".join(cell(value, number=isinstance(value, int | float)) for value in row) + "</tr>"
        for row in rows
    )
    return (
        f"<div><table><tr>{titles}</tr>{lines}</table></div>"
        if head
        else f'<table class="facts">{lines}</table>'
    )


def _date(at_ms: int) -> str:
    return datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M")
