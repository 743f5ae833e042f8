"""Reads the tables of the pipeline's history. All functions block: call them in a thread."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from muster.core import errors
from muster.web.data import rows as rows_

if TYPE_CHECKING:
    from muster.pipeline.history import search

ROWS_MAX = 1_000  # in one response
PLOT_ROWS_MAX = 100_000
STATISTICS = ("mean", "min", "max", "p95")
FIGURES = (*STATISTICS, "machines", "stale")


def read_page(
    root: str, query: search.HistorySearch, limit: int, cursor: str
) -> tuple[list[dict[str, Any]], str | None]:
    """The newest rows after the cursor, and the cursor of the next page."""
    from muster.pipeline.history import delta, newest_first, sql, tables

    if not any(delta.exists(root, name) for name in tables.definitions()):
        raise errors.NotFound("there is no history", hint="the pipeline writes it: `muster run pipeline`")
    newest, mark = newest_first.read_page(
        root, query, limit, newest_first.PageCursor.parse(cursor) if cursor else None
    )
    return sql.rows(newest), None if mark is None else str(mark)


def rollup_query(scope: str, name: str, metric: str, from_ms: int) -> search.HistorySearch:
    """The query of `plot`: a metric of a scope since a time."""
    from muster.core.reports import columns
    from muster.pipeline.history import search, tables

    where = " AND ".join(
        f"{column} = '{value.replace(chr(39), 2 * chr(39))}'"
        for column, value in (("scope", scope), ("name", name))
        if value or column != "name"
    )
    standard = metric in columns.STANDARD_METRICS
    values = tuple(f"{metric}_{statistic}" for statistic in STATISTICS) if standard else ("metrics",)
    shown = ("window_start", "window_end", "machines", "stale", *values)
    return search.HistorySearch(tables.GROUPS, where, from_ms, None, shown)


def machine_query(machine: str, metric: str, from_ms: int, to_ms: int) -> search.HistorySearch:
    """The query of `machine_plot`."""
    from muster.core.reports import columns
    from muster.pipeline.history import search, tables

    value = metric if metric in columns.STANDARD_METRICS else "metrics"
    where = f"machine = '{machine.replace(chr(39), 2 * chr(39))}'"
    return search.HistorySearch(tables.NODES, where, from_ms, to_ms, ("reported_at", value))


def machine_plot(root: str, query: search.HistorySearch, metric: str) -> list[tuple[float, float | None]]:
    """The times in s and the values of a metric of a machine; none if there is no history."""
    from muster.pipeline.history import delta, search

    if not delta.exists(root, query.kind):
        return []
    rows: list[tuple[float, float | None]] = []
    for batch in search.search(root, query):
        for row in batch.to_pylist():
            value = row[metric] if metric in row else dict(row["metrics"] or ()).get(metric)
            rows.append((row["reported_at"].timestamp(), value))
        if len(rows) > PLOT_ROWS_MAX:
            raise errors.LimitExceeded("there are too many rows for one plot", hint="choose a shorter time")
    return rows


def plot(root: str, query: search.HistorySearch, metric: str, points: int) -> list[rows_.PlotPoint]:
    """Downsample to about ``points`` rows, oldest first. A row without values marks missing windows."""
    from muster.pipeline.history import search

    rows: list[dict[str, Any]] = []
    for batch in search.search(root, query):
        rows += [row for row in map(_with_values(metric), batch.to_pylist()) if row["mean"] is not None]
        if len(rows) > PLOT_ROWS_MAX:
            raise errors.LimitExceeded("there are too many rows for one plot", hint="choose a shorter time")
    rows.sort(key=lambda row: row["window_start"])
    step = max(1, math.ceil(len(rows) / points))
    plotted: list[rows_.PlotPoint] = []
    place = 0  # of a section without gaps
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and row["window_start"] > before["window_end"]:
            plotted.append(rows_.PlotPoint(at_ms=_ms(before["window_end"])))
            place = 0
        if place % step == 0:
            figures = {key: row.get(key) for key in FIGURES}
            plotted.append(rows_.PlotPoint(at_ms=_ms(row["window_start"]), **figures))
        place += 1
    return plotted


def _with_values(metric: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Rows with the statistics of a metric, whether it has columns or is in the map."""

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        values = dict(row["metrics"] or ()) if "metrics" in row else row
        return {**row, **{name: values.get(f"{metric}_{name}") for name in STATISTICS}}

    return convert


def _ms(moment: datetime.datetime) -> int:
    return int(moment.timestamp() * 1000)
