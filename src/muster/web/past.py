"""The pipeline's history, read from its Parquet files; these block: call them in a thread."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.core import errors
from muster.web import rows as rows_

if TYPE_CHECKING:
    from muster.pipeline import query

ROWS_MAX = 1_000  # in one answer
PLOT_ROWS_MAX = 100_000


def search(folder: Path, asked: query.Query) -> list[dict[str, Any]]:
    from muster.pipeline import query

    if not folder.is_dir():
        raise errors.NotFound(
            "there is no history here", hint="the pipeline writes it: `muster pipeline run`"
        )
    rows: list[dict[str, Any]] = []
    for batch in query.search(folder, asked):
        rows += batch.to_pylist()
    return [{name: rows_.plain(value) for name, value in row.items()} for row in rows]


def levels(level: str, name: str, metric: str, from_ms: int) -> query.Query:
    """What `plot` reads: a metric of a group, or of everything (no name), since then."""
    from muster.pipeline import query

    where = " AND ".join(
        f"{column} = '{value.replace(chr(39), 2 * chr(39))}'"
        for column, value in (("level", level), ("name", name), ("metric", metric))
        if value or column != "name"
    )
    wanted = ("from", "sum", "count", "min", "max", "p95", "machines", "stale")
    return query.Query("levels", where, from_ms, None, wanted)


def plot(folder: Path, asked: query.Query, points: int) -> list[dict[str, Any]]:
    """Thinned: at most ``points`` rows, oldest first."""
    from muster.pipeline import query

    if not folder.is_dir():
        return []
    rows: list[dict[str, Any]] = []
    for batch in query.search(folder, asked):
        rows += batch.to_pylist()
        if len(rows) > PLOT_ROWS_MAX:
            raise errors.LimitExceeded("too many rows for one plot", hint="choose a shorter time")
    rows.sort(key=lambda row: row["from"])
    step = max(1, math.ceil(len(rows) / points))
    return [
        {
            "at_ms": int(row["from"].timestamp() * 1000),
            "mean": row["sum"] / row["count"] if row["count"] else None,
            **{key: row[key] for key in ("min", "max", "p95", "machines", "stale")},
        }
        for row in rows[::step]
    ]
