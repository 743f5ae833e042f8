"""The pipeline's history, read from its Parquet files; these block: call them in a thread."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.core import errors
from muster.web.data import rows as rows_

if TYPE_CHECKING:
    from muster.pipeline.history import search

ROWS_MAX = 1_000  # in one answer
PLOT_ROWS_MAX = 100_000
FIGURES = ("mean", "min", "max", "p95", "machines", "stale")


def read_page(
    folder: Path, asked: search.HistorySearch, limit: int, cursor: str
) -> tuple[list[dict[str, Any]], str | None]:
    """The newest rows behind the cursor, and the cursor of the next page."""
    from muster.pipeline.history import newest_first

    if not folder.is_dir():
        raise errors.NotFound(
            "there is no history here", hint="the pipeline writes it: `muster pipeline run`"
        )
    found, mark = newest_first.read_page(
        folder, asked, limit, newest_first.PageCursor.parse(cursor) if cursor else None
    )
    rows = [{name: rows_.to_json(value) for name, value in row.items()} for row in found.to_pylist()]
    return rows, None if mark is None else str(mark)


def rollup_query(scope: str, name: str, metric: str, from_ms: int) -> search.HistorySearch:
    """What `plot` reads: a metric of a group, or of everything (no name), since then."""
    from muster.pipeline.history import search

    where = " AND ".join(
        f"{column} = '{value.replace(chr(39), 2 * chr(39))}'"
        for column, value in (("scope", scope), ("name", name), ("metric", metric))
        if value or column != "name"
    )
    wanted = ("from", "to", "sum", "count", "min", "max", "p95", "machines", "stale")
    return search.HistorySearch("rollups", where, from_ms, None, wanted)


def plot(folder: Path, asked: search.HistorySearch, points: int) -> list[dict[str, Any]]:
    """Thinned to some ``points`` rows, oldest first. Where windows are missing, a row without figures."""
    from muster.pipeline.history import search

    if not folder.is_dir():
        return []
    rows: list[dict[str, Any]] = []
    for batch in search.search(folder, asked):
        rows += batch.to_pylist()
        if len(rows) > PLOT_ROWS_MAX:
            raise errors.LimitExceeded("too many rows for one plot", hint="choose a shorter time")
    rows.sort(key=lambda row: row["from"])
    step = max(1, math.ceil(len(rows) / points))
    found: list[dict[str, Any]] = []
    place = 0  # in a stretch without gaps
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and row["from"] > before["to"]:
            found.append({"at_ms": _ms(before["to"]), **dict.fromkeys(FIGURES)})
            place = 0
        if place % step == 0:
            mean = row["sum"] / row["count"] if row["count"] else None
            found.append({"at_ms": _ms(row["from"]), **{key: row.get(key) for key in FIGURES}, "mean": mean})
        place += 1
    return found


def _ms(moment: datetime.datetime) -> int:
    return int(moment.timestamp() * 1000)
