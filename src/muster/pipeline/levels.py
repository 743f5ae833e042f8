"""Reports of groups, zones and the system, and alerts, as rows of the history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from muster.core import messages
from muster.pipeline import cells, history, results

_TIME = pa.timestamp("ms", tz="UTC")

SCHEMA = pa.schema(
    [
        ("level", pa.string()),
        ("name", pa.string()),
        ("from", _TIME),
        ("to", _TIME),
        ("machines", pa.int64()),
        ("reports", pa.int64()),
        ("known", pa.int64()),
        ("stale", pa.int64()),
        ("partial", pa.bool_()),
        ("metric", pa.string()),
        ("count", pa.int64()),
        ("sum", pa.float64()),
        ("min", pa.float64()),
        ("max", pa.float64()),
        ("p50", pa.float64()),
        ("p95", pa.float64()),
        ("p99", pa.float64()),
    ]
)

ALERT_SCHEMA = pa.schema(
    [
        ("rule", pa.string()),
        ("about", pa.string()),
        ("severity", pa.string()),
        ("state", pa.string()),
        ("since", _TIME),
        ("at", _TIME),
        ("value", pa.float64()),
        ("reason", pa.string()),
        ("group", pa.string()),
    ]
)


def rows(found: Iterable[results.Many], window_ms: int) -> pa.Table:
    """One row for each metric; one without a metric where nothing was reported."""
    listed: list[tuple[Any, ...]] = []
    for many in found:
        cell = many.cell
        head = (
            many.level,
            many.name,
            many.from_ms,
            many.from_ms + window_ms,
            cell.machines,
            cell.total,
            many.known,
            many.stale,
            cell.partial,
        )
        metrics = cell.rollups()
        if not metrics:
            listed.append((*head, *(None,) * 8))
        listed += [
            (*head, name, one.count, one.sum, one.min, one.max, one.p50, one.p95, one.p99)
            for name, one in metrics.items()
        ]
    return _table(listed, SCHEMA)


def write(found: Sequence[results.Many], window_ms: int, root: Path, run: str, batch: int) -> None:
    if found:
        folder = history.batch_folder(root, history.LEVELS, run, batch)
        history.write(rows(found, window_ms), folder / "part-0.parquet")


def write_alerts(changed: Sequence[messages.Alert], root: Path, run: str, batch: int) -> None:
    if changed:
        listed = [
            (
                one.rule,
                one.about,
                one.level.value,
                one.state.value,
                one.since_ms,
                one.at_ms,
                one.value,
                one.reason,
                one.labels.get("group"),
            )
            for one in changed
        ]
        folder = history.batch_folder(root, history.ALERTS, run, batch)
        history.write(_table(listed, ALERT_SCHEMA), folder / "part-0.parquet")


def teach(baselines: results.Baselines, root: Path, *, files: int = 200) -> None:
    """What is usual, from the latest of the history: after a restart nothing has to be learnt anew."""
    paths = sorted(history.files(root, history.LEVELS), key=lambda path: path.stat().st_mtime)[-files:]
    if not paths:
        return
    wanted = ["level", "name", "from", "metric", "count", "sum"]
    table = pa.concat_tables([pq.read_table(path, columns=wanted) for path in paths])
    found: dict[tuple[int, str, str], np.ndarray[Any, Any]] = {}
    place = {name: row for row, name in enumerate(cells.METRICS)}
    columns = [table.column(name).to_pylist() for name in ("level", "name", "metric", "count", "sum")]
    from_ms = table.column("from").cast(pa.int64()).to_pylist()
    for at_ms, level, name, metric, count, total in zip(from_ms, *columns, strict=True):
        if metric in place and count:
            means = found.setdefault((at_ms, level, name), np.full(len(place), np.nan))
            means[place[metric]] = total / count
    for at_ms, level, name in sorted(found):
        baselines.scores(level, name, at_ms, found[at_ms, level, name])


def _table(listed: list[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = zip(*listed, strict=True)
    return pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
