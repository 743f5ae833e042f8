"""The reports of the last minutes as they arrived, for charts of machines, services, groups and zones.

Batches are kept as columns within a budget of bytes; the oldest are dropped. Of a large fleet that is a few
minutes, of a small one hours: older values are in the history.
"""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from muster.core.reports import columns
from muster.web.data.measurements.charts import Row

BYTES_MAX = 64 << 20
MERGED = 256  # batches that become one: a small batch costs more than its rows
SERVICES_BYTES_MAX = 16 << 20  # of a batch: services of larger ones are not kept
KEPT = ("machine", "group", "zone", "reported_at", *columns.STANDARD_METRICS, columns.EXTRA)

Floats = npt.NDArray[np.float64]


class MachineReports:
    """The reports of one machine: few rows, of which all its charts are made."""

    def __init__(self, tables: list[pa.Table]) -> None:
        self._tables = tables

    def metric(self, name: str) -> list[Row]:
        rows: list[Row] = []
        for table in self._tables:
            values = metric_values(table, name).tolist()
            rows += [
                (at_s, {name: None if np.isnan(value) else value})
                for at_s, value in zip(times_s(table).tolist(), values, strict=True)
            ]
        return sorted(rows, key=_time)

    def service(self, name: str) -> dict[str, list[Row]]:
        """All metrics of a service, by their names."""
        rows: dict[str, list[Row]] = {}
        for table in self._tables:
            if "services" not in table.column_names:
                continue
            reported = zip(times_s(table).tolist(), table.column("services").to_pylist(), strict=True)
            for at_s, services in reported:
                for service in services or ():
                    if service["name"] == name:
                        for metric, value in service["metrics"] or ():
                            rows.setdefault(metric, []).append((at_s, {metric: value}))
        return {metric: sorted(points, key=_time) for metric, points in rows.items()}


class KeptReports:
    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._max = bytes_max
        self._chunks: collections.deque[tuple[pa.Table, int]] = collections.deque()
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._bytes + self._pending_bytes

    def add(self, batch: pa.RecordBatch) -> None:
        names = (*KEPT, "services") if batch.column("services").nbytes <= SERVICES_BYTES_MAX else KEPT
        kept = pa.Table.from_batches([batch.select(list(names))])
        with self._lock:
            self._pending.append(kept)
            self._pending_bytes += kept.nbytes
            if len(self._pending) >= MERGED or self._pending_bytes > self._max // 16:
                self._merge()

    def _merge(self) -> None:
        merged = pa.concat_tables(self._pending, promote_options="default").combine_chunks()
        self._pending, self._pending_bytes = [], 0
        self._chunks.append((merged, merged.nbytes))
        self._bytes += merged.nbytes
        while self._bytes > self._max and len(self._chunks) > 1:
            self._bytes -= self._chunks.popleft()[1]

    def _tables(self) -> list[pa.Table]:
        with self._lock:
            return [*(table for table, _ in self._chunks), *self._pending]

    def of_machine(self, name: str) -> MachineReports:
        tables = [table.filter(pc.equal(table.column("machine"), name)) for table in self._tables()]
        return MachineReports([table for table in tables if table.num_rows])

    def members(self, column: str, name: str, metric: str, from_s: float, step_s: float) -> list[Row]:
        """Mean and 95 % of a metric over the machines of a group or zone, or of all, in steps."""
        times, values = [], []
        for table in self._tables():
            own = table.filter(pc.equal(table.column(column), name)) if name else table
            if own.num_rows:
                times.append(times_s(own))
                values.append(metric_values(own, metric))
        if not times:
            return []
        at_s, value = np.concatenate(times), np.concatenate(values)
        known = ~np.isnan(value) & (at_s >= from_s)
        steps = np.floor(at_s[known] / step_s).astype(np.int64)
        order = np.argsort(steps, kind="stable")
        steps, value = steps[order], value[known][order]
        starts = np.flatnonzero(np.r_[True, np.diff(steps) > 0]) if len(steps) else np.empty(0, np.int64)
        return [
            (
                float(steps[start] * step_s),
                {"mean": float(part.mean()), "95 %": float(np.percentile(part, 95))},
            )
            for start, part in zip(starts.tolist(), np.split(value, starts[1:]), strict=False)
        ]


def times_s(table: pa.Table) -> Floats:
    made: Floats = table.column("reported_at").cast(pa.int64()).to_numpy() / 1e6
    return made


def metric_values(table: pa.Table, metric: str) -> Floats:
    """The values of a metric, standard or not; nan where a report has none."""
    if metric in columns.STANDARD_METRICS:
        column = table.column(metric)
        made: Floats = column.to_numpy() if column.null_count == 0 else column.fill_null(np.nan).to_numpy()
        return np.asarray(made, np.float64)
    return np.concatenate([_extra(chunk, metric) for chunk in table.column("extra").chunks] or [np.empty(0)])


def _extra(maps: Any, metric: str) -> Floats:
    values = np.full(len(maps), np.nan)
    ends = maps.offsets.to_numpy()
    keys = maps.keys.slice(ends[0], ends[-1] - ends[0])
    if pa.types.is_dictionary(keys.type):
        code = keys.dictionary.index(metric).as_py()
        if code < 0:
            return values
        chosen = keys.indices.to_numpy(zero_copy_only=False) == code
    else:
        chosen = pc.equal(keys, metric).to_numpy(zero_copy_only=False)
    places = np.flatnonzero(chosen) + ends[0]
    values[np.searchsorted(ends, places, side="right") - 1] = maps.items.to_numpy(zero_copy_only=False)[
        places
    ]
    return values


def extra_names(table: pa.Table) -> list[str]:
    """The metrics that are not standard."""
    names: set[str] = set()
    for maps in table.column("extra").chunks:
        keys = maps.keys
        names.update((keys.dictionary if pa.types.is_dictionary(keys.type) else pc.unique(keys)).to_pylist())
    return sorted(names)


def _time(row: Row) -> float:
    return row[0]
