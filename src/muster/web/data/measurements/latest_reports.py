"""The latest report of every machine, as columns.

Batches are stored as received until a reader needs them or there are many; then only the last row of each
machine is kept.  A hundred thousand machines need some tens of megabytes.  There are at most `ROWS_MAX` rows;
machines with the oldest reports are dropped and counted.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import errors, messages
from muster.core.reports import columns as reports_columns
from muster.monitor import live_view
from muster.web.data import rows as rows_
from muster.web.data.measurements import fleet_map, recent_reports

ROWS_MAX = 500_000
PENDING_MIN, PENDING_MAX = 10_000, 200_000
RATE_S = 60  # over which the rate of reports is measured
AGES_KEPT = 600  # seconds of measured staleness
SAMPLED = 1000  # machines whose own metrics the map offers
METRICS = ("cpu_percent", "memory_percent", "load_1m", "disk_percent")


def rate(counts: Sequence[tuple[float, int]], now_s: float) -> float:
    """Rows per second, from the times of bursts and their rows. Channels forward at once what they have held,
    so only the time between bursts counts. After a silence that is longer than usual it falls.
    """
    counts = [(at_s, rows) for at_s, rows in counts if rows and now_s - RATE_S <= at_s <= now_s]
    if len(counts) < 2:
        return sum(rows for _, rows in counts) / RATE_S
    first_s, last_s = counts[0][0], counts[-1][0]
    longest_s = max(later - sooner for (sooner, _), (later, _) in itertools.pairwise(counts))
    until_s = now_s if now_s - last_s > 2 * longest_s + 1 else last_s
    return sum(rows for _, rows in counts[1:]) / (until_s - first_s)


def merged(seconds: Sequence[ArrivalSecond], step_s: int) -> list[ArrivalSecond]:
    """The statistics of longer intervals: the median of the medians, and the largest age."""
    intervals: dict[int, list[ArrivalSecond]] = {}
    for second in seconds:
        intervals.setdefault(second.at_s // step_s * step_s, []).append(second)
    return [
        ArrivalSecond(
            at_s,
            sum(second.rows for second in inside),
            _weighted_median(inside),
            max(second.max_s for second in inside),
        )
        for at_s, inside in intervals.items()
    ]


def _weighted_median(seconds: Sequence[ArrivalSecond]) -> float:
    """The median of the medians, each as often as it has rows."""
    half, ordered = (
        sum(second.rows for second in seconds) / 2,
        sorted(seconds, key=lambda second: second.p50_s),
    )
    below = itertools.accumulate(second.rows for second in ordered)
    return next(second.p50_s for second, rows in zip(ordered, below, strict=True) if rows >= half)


@dataclass(frozen=True, slots=True)
class ArrivalSecond:
    """Statistics of the rows that arrived within one second: number and age."""

    at_s: int
    rows: int
    p50_s: float
    max_s: float


class LatestReports:
    def __init__(self) -> None:
        self._table: pa.Table | None = None
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._lock = threading.Lock()
        self._ages: collections.deque[ArrivalSecond] = collections.deque(maxlen=AGES_KEPT)
        self._this_second: tuple[int, list[np.ndarray[Any, Any]]] = (0, [])
        self.recent = recent_reports.KeptReports()
        self._layout: tuple[Any, fleet_map.MapLayout] | None = None
        self.levels: dict[int, float] = {}  # level of channels -> time of the last batch, in s

    def take(self, data: bytes, *, at_s: float) -> tuple[reports_columns.BatchInfo, int] | None:
        """Ingest a batch: its properties and its rows. The pipeline counts malformed ones."""
        try:
            batch, facts = reports_columns.decode(data)
        except errors.MusterError:
            return None
        if facts.schema != reports_columns.NODE_SCHEMA:
            return None
        self.add(batch)
        self.levels[facts.level] = at_s
        made = batch.column("reported_at").cast(pa.int64()).to_numpy() / 1e6
        self._measure(int(at_s), at_s - made)
        return facts, batch.num_rows

    def add(self, batch: pa.RecordBatch) -> None:
        with self._lock:
            self._pending.append(batch)
            self._pending_rows += batch.num_rows
        self.recent.add(batch)

    def remove(self, machines: Sequence[str], at_ms: int) -> None:
        """Drop machines that a user removed, unless they reported since."""
        with self._lock:
            self._settle_locked()
            assert self._table is not None
            reported_ms = pc.divide(self._table.column("reported_at").cast(pa.int64()), 1000)
            gone = pc.and_(
                pc.is_in(self._table.column("machine"), value_set=pa.array(machines, pa.string())),
                pc.less_equal(reported_ms, at_ms),
            )
            self._table = self._table.filter(pc.invert(gone)).combine_chunks()

    def _measure(self, second: int, ages_s: np.ndarray[Any, Any]) -> None:
        current, current_ages = self._this_second
        if second != current and current_ages:
            ages = np.concatenate(current_ages)
            self._ages.append(ArrivalSecond(current, len(ages), float(np.median(ages)), float(ages.max())))
            current_ages = []
        current_ages.append(ages_s)
        self._this_second = (second, current_ages)

    @property
    def is_due(self) -> bool:
        """Whether the rows that no page has requested yet take more memory than the table."""
        rows = 0 if self._table is None else self._table.num_rows
        return self._pending_rows > min(PENDING_MAX, max(PENDING_MIN, rows))

    def seconds(self) -> list[ArrivalSecond]:
        return list(self._ages)

    def rows_per_s(self) -> float:
        current, ages = self._this_second
        counts = [(second.at_s, second.rows) for second in self._ages]
        return rate([*counts, (current, sum(map(len, ages)))], time.time())

    async def table(self) -> pa.Table:
        """One row per machine."""
        if self._pending_rows or self._table is None:
            await asyncio.to_thread(self._settle)
        assert self._table is not None
        return self._table

    def _settle(self) -> None:
        with self._lock:
            self._settle_locked()

    def _settle_locked(self) -> None:
        pending, self._pending, self._pending_rows = self._pending, [], 0
        old = self._table.to_batches() if self._table is not None else []
        table = live_view.latest([*old, *pending])
        if table.num_rows > ROWS_MAX:
            newest = pc.sort_indices(table, sort_keys=[("reported_at", "descending")])
            table = live_view.latest(table.take(newest.slice(0, ROWS_MAX)).to_batches())
        self._table = table.combine_chunks()

    async def summary(self) -> rows_.MachineSummary:
        """Counts by state and group, and staleness, in one pass over the columns."""
        table = await self.table()
        return await asyncio.to_thread(_summary, table, time.time())

    async def named(self, text: str, limit: int) -> list[tuple[str, str, str]]:
        """Machines, groups and zones whose names contain the text: kind, name and state."""
        return await asyncio.to_thread(_named, await self.table(), text, limit)

    async def map(self, metric: str, client_layout: str) -> fleet_map.FleetMap:
        """All machines with their states, or the values of a metric."""
        return await asyncio.to_thread(self._map, await self.table(), metric, client_layout)

    def _map(self, table: pa.Table, metric: str, client_layout: str) -> fleet_map.FleetMap:
        key = fleet_map.layout_key(table)
        layout = self._layout
        if layout is None or layout[0] != key:
            layout = self._layout = key, fleet_map.MapLayout(table)
        states = _states(table, time.time())
        metrics = [*recent_reports.extra_names(table.slice(0, SAMPLED)), *METRICS]
        return fleet_map.fleet_map(table, layout[1], states, metric, client_layout, metrics)

    async def system(self) -> reports_columns.SystemReport | None:
        table = await self.table()
        if not table.num_rows:
            return None
        now_ms = int(time.time() * 1000)
        return await asyncio.to_thread(live_view.system_report, table, from_ms=now_ms - 60_000, to_ms=now_ms)

    async def members(self, scope: str, name: str) -> reports_columns.GroupReport | None:
        """The report of a group or a zone."""
        return await asyncio.to_thread(_members, await self.table(), scope, name)

    async def node(self, machine: str) -> messages.NodeReport | None:
        return await asyncio.to_thread(live_view.node, await self.table(), machine)

    async def page(
        self, *, group: str = "", zone: str = "", state: str = "", after: str = "", limit: int = 50
    ) -> tuple[list[rows_.ReportedMachine], int, str | None]:
        """A page of machines after the name ``after``: rows, total number, and the next cursor."""
        table = await self.table()
        return await asyncio.to_thread(_page, table, {"group": group, "zone": zone}, state, after, limit)


def _members(table: pa.Table, scope: str, name: str) -> reports_columns.GroupReport | None:
    members = table.filter(pc.equal(table.column(scope), name))
    if not members.num_rows:
        return None
    if scope == "zone":  # as one group
        place = members.schema.get_field_index("group")
        members = members.set_column(place, members.schema.field(place), members.column("zone"))
    now_ms = int(time.time() * 1000)
    return live_view.group_reports(members, from_ms=now_ms - 60_000, to_ms=now_ms)[0]


def _stale(table: pa.Table, now_s: float) -> tuple[Any, Any]:
    made_s = pc.divide(table.column("reported_at").cast(pa.int64()).cast(pa.float64()), 1e6)
    age_s = pc.subtract(pa.scalar(now_s), made_s)
    return age_s, pc.greater(age_s, pc.multiply(table.column("period_s"), live_view.STALE_AFTER_PERIODS))


def _named(table: pa.Table, text: str, limit: int) -> list[tuple[str, str, str]]:
    named: list[tuple[str, str, str]] = []
    for kind in ("zone", "group"):
        names = pc.unique(table.column(kind)).to_pylist()
        named += [(kind, name, "") for name in sorted(names) if text.lower() in name.lower()][:limit]
    own = table.filter(pc.match_substring(table.column("machine"), text, ignore_case=True)).slice(0, limit)
    return [
        *named,
        *(("machine", row["machine"], row["state"]) for row in own.select(["machine", "state"]).to_pylist()),
    ]


def _states(table: pa.Table, now_s: float) -> Any:
    """The states of the machines; those without recent reports are stale."""
    return pc.if_else(_stale(table, now_s)[1], "stale", table.column("state"))


def _summary(table: pa.Table, now_s: float) -> rows_.MachineSummary:
    if not table.num_rows:
        return rows_.MachineSummary()
    age_s, _ = _stale(table, now_s)
    state = _states(table, now_s)
    small = pa.table({"group": table.column("group"), "state": state, "age_s": age_s})
    by_state = {counted["values"]: counted["counts"] for counted in pc.value_counts(state).to_pylist()}
    groups: dict[str, rows_.GroupRow] = {}
    for row in (
        small.group_by(["group", "state"]).aggregate([("age_s", "max"), ("age_s", "count")]).to_pylist()
    ):
        group = groups.setdefault(row["group"], rows_.GroupRow(group=row["group"]))
        group.machines += row["age_s_count"]
        group.states[row["state"]] = row["age_s_count"]
        group.oldest_s = max(group.oldest_s, row["age_s_max"])
    for row in table.group_by("group").aggregate([(name, "mean") for name in METRICS]).to_pylist():
        for name in METRICS:
            setattr(groups[row["group"]], name, row[f"{name}_mean"])
    return rows_.MachineSummary(
        machines=table.num_rows,
        stale=by_state.get("stale", 0),
        states=by_state,
        groups=sorted(groups.values(), key=lambda group: group.group),
        oldest_s=pc.max(age_s).as_py(),
        median_s=float(np.median(age_s.to_numpy())),
    )


def _page(
    table: pa.Table, of: dict[str, str], state: str, after: str, limit: int
) -> tuple[list[rows_.ReportedMachine], int, str | None]:
    now_s = time.time()
    for column, name in of.items():
        if name:
            table = table.filter(pc.equal(table.column(column), name))
    if state and table.num_rows:
        _, is_stale = _stale(table, now_s)
        names = (
            is_stale
            if state == "stale"
            else pc.and_(pc.equal(table.column("state"), state), pc.invert(is_stale))
        )
        table = table.filter(names)
    total = table.num_rows
    if after:
        table = table.filter(pc.greater(table.column("machine"), after))
    rest = table.num_rows
    selected = table.slice(0, limit)  # the table is sorted by name
    if not selected.num_rows:
        return [], total, None
    age_s, is_stale = _stale(selected, now_s)
    rows = []
    columns = selected.select(["machine", "group", "zone", "state", "period_s", *METRICS]).to_pylist()
    services = selected.column("services").to_pylist()
    for row, age, stale, own in zip(columns, age_s.to_pylist(), is_stale.to_pylist(), services, strict=True):
        row["state"] = "stale" if stale else row["state"]
        rows.append(rows_.ReportedMachine(**row, age_s=round(max(0.0, age), 3), services=len(own or ())))
    return rows, total, rows[-1].machine if rest > len(rows) else None
