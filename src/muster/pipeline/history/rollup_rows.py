"""Reports of groups, zones and the system, and alerts, as rows of the history."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from muster.core import messages
from muster.pipeline.fleet import cells, rollups
from muster.pipeline.history import tables

_UNKNOWN = (np.nan,) * 3  # quantiles
_TIME = pa.timestamp("ms", tz="UTC")

SCHEMA = pa.schema(
    [
        ("scope", pa.string()),
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


def rows(totals: Sequence[rollups.ScopeTotals], window_ms: int) -> pa.Table:
    """One row for each metric; one row without a metric if nothing was reported."""
    figures = np.stack([many.figures for many in totals])  # scope by figure by metric
    which, metric = np.nonzero(figures[:, 0])
    extra = [
        (number, name, extra_metric)
        for number, many in enumerate(totals)
        for name, extra_metric in sorted(many.cell.extra.items())
    ]
    empty = sorted(set(range(len(totals))) - set(which.tolist()) - {number for number, _, _ in extra})
    listed = np.concatenate([which, [number for number, _, _ in extra], empty]).astype(np.int64)
    values = np.concatenate(
        [
            figures[which, :, metric],
            np.array(
                [
                    [extra_metric.count, extra_metric.sum, extra_metric.min, extra_metric.max, *_UNKNOWN]
                    for _, _, extra_metric in extra
                ]
            ).reshape(-1, 7),
            np.full((len(empty), 7), np.nan),
        ]
    )
    names = [*(cells.METRICS[at] for at in metric.tolist()), *(name for _, name, _ in extra)]
    of = pa.array(listed)
    from_ms = pa.array([many.from_ms for many in totals])
    heads: dict[str, pa.Array] = {
        "scope": pa.array([many.scope for many in totals]),
        "name": pa.array([many.name for many in totals]),
        "from": from_ms.cast(_TIME),
        "to": pc.add(from_ms, window_ms).cast(_TIME),
        "machines": pa.array([many.cell.machine_count() for many in totals]),
        "reports": pa.array([many.cell.total for many in totals]),
        "known": pa.array([many.known for many in totals]),
        "stale": pa.array([many.stale for many in totals]),
        "partial": pa.array([many.cell.partial for many in totals]),
    }
    numbers = {
        name: pa.array(values[:, row], from_pandas=True).cast(SCHEMA.field(name).type)
        for row, name in enumerate(cells.FIGURES)
    }
    metrics = pa.array([*names, *(None for _ in empty)], pa.string())
    known = {**{name: column.take(of) for name, column in heads.items()}, "metric": metrics, **numbers}
    return pa.Table.from_arrays([known[name] for name in SCHEMA.names], schema=SCHEMA)


def write(totals: Sequence[rollups.ScopeTotals], window_ms: int, root: Path, run: str, batch: int) -> None:
    if totals:
        folder = tables.batch_folder(root, tables.ROLLUPS, run, batch)
        tables.write(rows(totals, window_ms), folder / "part-0.parquet")


def write_alerts(changed: Sequence[messages.Alert], root: Path, run: str, batch: int) -> None:
    if changed:
        listed = [
            (
                alert.rule,
                alert.about,
                alert.severity.value,
                alert.state.value,
                alert.since_ms,
                alert.at_ms,
                alert.value,
                alert.reason,
                alert.labels.get("group"),
            )
            for alert in changed
        ]
        folder = tables.batch_folder(root, tables.ALERTS, run, batch)
        tables.write(_table(listed, ALERT_SCHEMA), folder / "part-0.parquet")


def load_baselines(
    baselines: rollups.Baselines, root: Path, scopes: Collection[str], *, files: int = 200
) -> None:
    """Restore the baselines of these scopes from the latest files of the history."""
    if not scopes:
        return
    history: dict[tuple[int, str, str], np.ndarray[Any, Any]] = {}
    place = {name: row for row, name in enumerate(cells.METRICS)}
    paths = sorted(tables.files(root, tables.ROLLUPS), key=lambda path: path.stat().st_mtime)[-files:]
    for path in paths:
        table = pq.read_table(path, columns=["scope", "name", "from", "metric", "count", "sum"])
        table = table.filter(pc.is_in(table.column("scope"), pa.array(sorted(scopes))))
        table = table.filter(pc.is_in(table.column("metric"), pa.array(cells.METRICS)))
        columns = [table.column(name).to_pylist() for name in ("scope", "name", "metric", "count", "sum")]
        from_ms = table.column("from").cast(pa.int64()).to_pylist()
        for at_ms, scope, name, metric, count, total in zip(from_ms, *columns, strict=True):
            means = history.setdefault((at_ms, scope, name), np.full(len(place), np.nan))
            means[place[metric]] = total / count
    for at_ms, scope, name in sorted(history):
        baselines.scores(scope, name, at_ms, history[at_ms, scope, name])


def _table(listed: list[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = zip(*listed, strict=True)
    return pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
