"""Reads the tables of the pipeline's history. All functions block: call them in a thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from muster.core import errors
from muster.web.data.measurements.charts import Row

if TYPE_CHECKING:
    from muster.pipeline.history import search

ROWS_MAX = 1_000  # in one response
ROWS_OF_SERIES_MAX = 100_000
MEMBERS = {"mean": "{}_mean", "95 %": "{}_p95"}  # the lines of many machines, and their columns


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


def members_query(scope: str, name: str, metric: str, from_ms: int) -> search.HistorySearch:
    """A metric of the fleet, a group or a zone since a time."""
    from muster.pipeline.history import search, tables

    where = f"scope = {_literal(scope)}" + (f" AND name = {_literal(name)}" if name else "")
    return search.HistorySearch(
        tables.GROUPS, where, from_ms, None, ("window_start", *_columns(metric, MEMBERS.values()))
    )


def machine_query(machine: str, metric: str, from_ms: int, to_ms: int) -> search.HistorySearch:
    from muster.pipeline.history import search, tables

    where = f"machine = {_literal(machine)}"
    return search.HistorySearch(
        tables.NODES, where, from_ms, to_ms, ("reported_at", *_columns(metric, ("{}",)))
    )


def series(root: str, query: search.HistorySearch, metric: str) -> list[Row]:
    """The rows of a chart that have the metric, oldest first; none if there is no history."""
    from muster.pipeline.history import delta, search

    if not delta.exists(root, query.kind):
        return []
    time, *_ = query.columns
    names = {line: ending.format(metric) for line, ending in MEMBERS.items()}
    lines = names if time == "window_start" else {metric: metric}
    rows: list[Row] = []
    for batch in search.search(root, query):
        for row in batch.to_pylist():
            values = dict(row["metrics"] or ()) if "metrics" in row else row
            measured = {line: values.get(name) for line, name in lines.items()}
            if any(value is not None for value in measured.values()):
                rows.append((row[time].timestamp(), measured))
        if len(rows) > ROWS_OF_SERIES_MAX:
            raise errors.LimitExceeded("there are too many rows for one plot", hint="choose a shorter time")
    return sorted(rows, key=lambda row: row[0])


def _columns(metric: str, statistics: Iterable[str]) -> tuple[str, ...]:
    """The columns of a metric: those that are not standard are in a map."""
    from muster.core.reports import columns

    standard = metric in columns.STANDARD_METRICS
    return tuple(ending.format(metric) for ending in statistics) if standard else ("metrics",)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
