"""Reads the pipeline's history from its Parquet files. All functions block: call them in a thread."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.core import errors
from muster.web.data import rows as rows_

if TYPE_CHECKING:
    from muster.pipeline.history import search

ROWS_MAX = 1_000  # in one response
PLOT_ROWS_MAX = 100_000
FIGURES = ("mean", "min", "max", "p95", "machines", "stale")


def read_page(
    folder: Path, query: search.HistorySearch, limit: int, cursor: str
) -> tuple[list[dict[str, Any]], str | None]:
    """The newest rows after the cursor, and the cursor of the next page."""
    from muster.pipeline.history import newest_first

    if not folder.is_dir():
        raise errors.NotFound("there is no history", hint="the pipeline writes it: `muster pipeline run`")
    newest, mark = newest_first.read_page(
        folder, query, limit, newest_first.PageCursor.parse(cursor) if cursor else None
    )
    rows = [{name: rows_.to_json(value) for name, value in row.items()} for row in newest.to_pylist()]
    return rows, None if mark is None else str(mark)


def rollup_query(scope: str, name: str, metric: str, from_ms: int) -> search.HistorySearch:
    """The query of `plot`: a metric of a scope since a time."""
    from muster.pipeline.history import search

    where = " AND ".join(
        f"{column} = '{value.replace(chr(39), 2 * chr(39))}'"
        for column, value in (("scope", scope), ("name", name), ("metric", metric))
        if value or column != "name"
    )
    columns = ("from", "to", "sum", "count", "min", "max", "p95", "machines", "stale")
    return search.HistorySearch("rollups", where, from_ms, None, columns)


def plot(folder: Path, query: search.HistorySearch, points: int) -> list[dict[str, Any]]:
    """Downsample to about ``points`` rows, oldest first. A row without values marks missing windows."""
    from muster.pipeline.history import search

    if not folder.is_dir():
        return []
    rows: list[dict[str, Any]] = []
    for batch in search.search(folder, query):
        rows += batch.to_pylist()
        if len(rows) > PLOT_ROWS_MAX:
            raise errors.LimitExceeded("there are too many rows for one plot", hint="choose a shorter time")
    rows.sort(key=lambda row: row["from"])
    step = max(1, math.ceil(len(rows) / points))
    plotted: list[dict[str, Any]] = []
    place = 0  # of a section without gaps
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and row["from"] > before["to"]:
            plotted.append({"at_ms": _ms(before["to"]), **dict.fromkeys(FIGURES)})
            place = 0
        if place % step == 0:
            mean = row["sum"] / row["count"] if row["count"] else None
            plotted.append(
                {"at_ms": _ms(row["from"]), **{key: row.get(key) for key in FIGURES}, "mean": mean}
            )
        place += 1
    return plotted


def _ms(moment: datetime.datetime) -> int:
    return int(moment.timestamp() * 1000)
