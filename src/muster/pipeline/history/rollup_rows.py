"""Reports of groups, zones and the system, and alerts, as rows of the history."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import errors, messages
from muster.pipeline.fleet import cells, rollups
from muster.pipeline.history import delta, storage, tables

Ints = npt.NDArray[np.int64]

_MS = pa.timestamp("ms", tz="UTC")
_OTHER = ("count", "mean", "min", "max")  # statistics of metrics that are not standard


def rows(totals: Sequence[rollups.ScopeTotals]) -> pa.Table:
    """A row of `groups` for each scope and window; metrics that were not reported are NULL."""
    parts = rollups.by_table(totals)
    figures = np.empty((len(totals), len(cells.FIGURES), len(cells.METRICS)))  # scope by figure by metric
    for table, places, rows_ in parts:
        figures[places] = table.figures()[rows_]
    counts, sums = figures[:, 0], figures[:, 1]
    missing = counts == 0
    with np.errstate(divide="ignore", invalid="ignore"):
        by_statistic = {"count": counts, "mean": sums / counts} | {
            name: figures[:, row] for row, name in enumerate(cells.FIGURES) if row > 1
        }
    from_ms = pa.array([many.from_ms for many in totals], pa.int64())
    named: dict[str, pa.Array] = {
        "window_start": from_ms.cast(_MS),
        "window_end": pa.array([many.to_ms for many in totals], pa.int64()).cast(_MS),
        "scope": pa.array([many.scope for many in totals]),
        "name": pa.array([many.name for many in totals]),
        "machines": pa.array([many.cell.machine_count() for many in totals]),
        "reports": pa.array([many.cell.total for many in totals]),
        "known": pa.array([many.known for many in totals]),
        "stale": pa.array([many.stale for many in totals]),
        "partial": pa.array([many.cell.partial for many in totals]),
        "metrics": _other_metrics(parts, len(totals)),
    }
    for at, metric in enumerate(cells.METRICS):
        for statistic in tables.STATISTICS:
            values = by_statistic[statistic][:, at]
            unknown = missing[:, at] | np.isnan(values)
            named[f"{metric}_{statistic}"] = pa.array(values, mask=unknown)
    return _table(named, tables.GROUPS)


def _other_metrics(tables_: Sequence[tuple[cells.CellTable, Ints, Ints]], count_: int) -> pa.MapArray:
    """The metrics that are not standard, in columns: there are dozens of them for each of many groups."""
    names = sorted({name for table, *_ in tables_ for name in table.extra_names})
    rank = {name: number for number, name in enumerate(names)}
    parts = []
    for table, places, rows_ in tables_:
        place_of = np.full(len(table), -1)
        place_of[rows_] = places
        row, code, figures = table.extra_arrays()
        ranks = np.array([rank[name] for name in table.extra_names], np.int64)
        known = (figures[0] > 0) & (place_of[row] >= 0)
        parts.append((place_of[row[known]], ranks[code[known]], figures[:, known]))
    place, name, figures = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
    order = np.argsort(place * max(1, len(names)) + name)
    count, total, least, most = figures[:, order]
    keys = pa.array([f"{key}_{statistic}" for key in names for statistic in _OTHER], pa.string())
    number = name[order, None] * len(_OTHER) + np.arange(len(_OTHER))
    values = np.stack([count, total / count, least, most], axis=1)
    ends = np.cumsum(np.bincount(place, minlength=count_)) * len(_OTHER)
    return pa.MapArray.from_arrays(
        pa.array(np.r_[0, ends].astype(np.int32)),
        pa.DictionaryArray.from_arrays(pa.array(number.ravel().astype(np.int32)), keys),
        pa.array(values.ravel()),
    )


def alert_rows(changed: Sequence[messages.Alert]) -> pa.Table:
    """A row of `alerts` for each change."""
    return _table(
        {
            "changed_at": pa.array([alert.at_ms for alert in changed], pa.int64()).cast(_MS),
            "rule": pa.array([alert.rule for alert in changed]),
            "about": pa.array([alert.about for alert in changed]),
            "severity": pa.array([alert.severity.value for alert in changed]),
            "state": pa.array([alert.state.value for alert in changed]),
            "since": pa.array([alert.since_ms for alert in changed], pa.int64()).cast(_MS),
            "value": pa.array([alert.value for alert in changed], pa.float64()),
            "reason": pa.array([alert.reason for alert in changed], pa.string()),
            "group": pa.array([alert.labels.get("group") for alert in changed], pa.string()),
        },
        tables.ALERTS,
    )


def load_baselines(
    baselines: rollups.Baselines,
    root: storage.Root,
    scopes: Collection[str],
    *,
    window_ms: int,
    windows: int = 121,
) -> None:
    """Restore the baselines of these scopes from the latest windows of the history."""
    if not scopes:
        return
    try:
        snapshot = delta.Snapshot(root, tables.GROUPS)
    except errors.NotFound:
        return
    ends = [file.until for file in snapshot.files if file.until is not None]
    if not ends:
        return
    from_ms = int(max(ends).timestamp() * 1000) - windows * window_ms
    time = pa.scalar(from_ms, _MS).cast(tables.TIME)
    table = snapshot.dataset(snapshot.files_between(from_ms, None)).to_table(
        columns=["scope", "name", "window_start", *(f"{metric}_mean" for metric in cells.METRICS)],
        filter=(pc.field("window_start") >= time) & pc.field("scope").isin(sorted(scopes)),
    )
    table = table.sort_by("window_start")
    starts = table.column("window_start").cast(pa.int64()).to_pylist()
    means = np.stack(
        [table.column(f"{metric}_mean").to_numpy(zero_copy_only=False) for metric in cells.METRICS], axis=1
    ).astype(np.float64)
    names = zip(table.column("scope").to_pylist(), table.column("name").to_pylist(), strict=True)
    for at_us, (scope, name), values in zip(starts, names, means, strict=True):
        baselines.scores(scope, name, at_us // 1000, values)


def _table(named: dict[str, Any], table: str) -> pa.Table:
    schema = tables.definition(table).row_schema
    return pa.table(named).select(schema.names).cast(schema)
