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
    parts += _section(
        "Busiest groups",
        ("group", "machines", "stale at most", "CPU, mean %", "CPU, highest p95 %", "memory, %", "disk, %"),
        [
            (
                group.group,
                group.machines,
                group.stale,
                *(
                    _rounded(value)
                    for value in (
                        group.cpu_percent,
                        group.cpu_p95_percent,
                        group.memory_percent,
                        group.disk_percent,
                    )
                ),
            )
            for group in report.groups
        ],
        "No group reported.",
    )
    parts += _section(
        "Disks that become full",
        ("machine", "group", "now, %", "% a day", "full", "earliest", "latest"),
        [
            (
                disk.machine,
                disk.group,
                _rounded(disk.disk_percent),
                round(disk.percent_per_day, 2),
                *(_date(at_ms) for at_ms in (disk.full_ms, disk.earliest_ms, disk.latest_ms)),
            )
            for disk in report.disks
        ],
        "No disk is expected to be full within 30 days.",
    )
    parts += _section(
        "Machines unlike their group",
        ("machine", "group", "metric", "value", "median of the group", "score"),
        [
            (
                outlier.machine,
                outlier.group,
                outlier.metric,
                line_plot.figure(outlier.value),
                line_plot.figure(outlier.group_median),
                round(outlier.score, 1),
            )
            for outlier in report.outliers
        ],
        "None.",
    )
    parts += _section(
        "Alerts",
        ("rule", "severity", "times"),
        [(alert.rule, alert.severity, alert.times) for alert in report.alerts],
        "None fired.",
    )
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


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _date(at_ms: int) -> str:
    return datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M")
