"""The chapter ``history``: questions about the past of a fleet, with predicates, SQL and an earlier state.

It writes the reports of one day of a small fleet to the tables of the history as the pipeline does, without
Spark and without a domain.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from muster.core import messages
from muster.core.reports import columns
from muster.demo import tour
from muster.pipeline.fleet import blocks
from muster.pipeline.history import data_files, delta, export, search, sql, tables

MACHINES, HOURS, PERIOD_S = 60, 24, 300
HOT = "web-17"  # the machine with a fault
FAULT_HOURS = range(14, 17)
SELECTED = "group = 'web' AND cpu_percent > 90"
BUSIEST = (
    "SELECT machine, count(*) AS reports, round(avg(cpu_percent), 1) AS cpu FROM nodes "
    "WHERE \"group\" = 'web' GROUP BY machine ORDER BY cpu DESC LIMIT 3"
)
BY_HOUR = (
    "SELECT hour(reported_at) AS hour, round(max(cpu_percent)) AS cpu FROM nodes "
    f"WHERE machine = '{HOT}' GROUP BY hour HAVING max(cpu_percent) > 90 ORDER BY hour"
)


async def scenes(root: Path) -> AsyncIterator[tour.Scene]:
    began = time.perf_counter()
    count = await asyncio.to_thread(_write, root)
    yield tour.Scene(
        "written",
        f"{count:,} reports: {MACHINES} machines in the groups web and db, one day, a report every "
        f"{PERIOD_S // 60} minutes, in a Delta table ({time.perf_counter() - began:.1f} s)",
        {"reports": count},
    )
    for step in (_searched, _summarised, _queried, _dated, _restored):
        yield await asyncio.to_thread(step, root)


def _write(root: Path) -> int:
    """An hour is a commit, as a micro-batch of the pipeline is."""
    noise = random.Random(7)
    day_ms = (int(time.time()) // 86_400 - 1) * 86_400_000
    table = delta.HistoryTable(root, tables.NODES)
    count = 0
    for hour in range(HOURS):
        rows = list(_hour(day_ms, hour, noise))
        piece = blocks.ReportPiece.from_message(hour, 0, columns.to_batch(rows), columns.BatchInfo())
        batch = pa.Table.from_batches([piece.rows()])
        written = data_files.write(root, tables.NODES, batch, f"demo-{hour}")
        table.commit(written.files, ("demo", hour))
        count += len(rows)
    return count


def _hour(day_ms: int, hour: int, noise: random.Random) -> Iterator[messages.NodeReport]:
    for tick in range(3600 // PERIOD_S):
        for number in range(MACHINES):
            group = "web" if number < MACHINES // 2 else "db"
            name = f"{group}-{number}"
            cpu = 20.0 + 15.0 * (8 <= hour < 20) + noise.gauss(0, 4)
            if name == HOT and hour in FAULT_HOURS:
                cpu = 97.0 + noise.random() * 3
            yield messages.NodeReport(
                machine=name,
                sequence=hour * 3600 // PERIOD_S + tick + 1,
                at_ms=day_ms + (hour * 3600 + tick * PERIOD_S) * 1000,
                period_s=float(PERIOD_S),
                group=group,
                metrics={"cpu_percent": max(1.0, cpu), "memory_percent": 40.0 + noise.gauss(0, 5)},
            )


def _searched(root: Path) -> tour.Scene:
    asked = search.HistorySearch(where=SELECTED, columns=("machine", "reported_at"))
    rows = [row for batch in search.search(root, asked) for row in batch.to_pylist()]
    tour.expect({row["machine"] for row in rows} == {HOT}, f"{rows[:3]} match")
    return tour.Scene(
        "searched",
        f'muster history "{SELECTED}": {len(rows)} reports, all of {rows[0]["machine"]}',
        {"rows": len(rows)},
    )


def _summarised(root: Path) -> tour.Scene:
    table = search.summarise(root, search.HistorySearch(), of="cpu_percent", by=("group",)).to_pylist()
    shown = ", ".join(f"{row['group']} {row['mean']:.0f} % (max {row['max']:.0f} %)" for row in table)
    return tour.Scene(
        "summarised", f"muster history TRUE --of cpu_percent --by group: {shown}", {"groups": table}
    )


def _queried(root: Path) -> tour.Scene:
    rows = sql.rows(sql.query(root, BUSIEST).table)
    tour.expect(rows[0]["machine"] == HOT, f"{rows[0]} is the busiest")
    shown = ", ".join(f"{row['machine']} {row['cpu']:g} %" for row in rows)
    return tour.Scene(
        "queried", f"muster sql, the busiest machines: {BUSIEST}. Answer: {shown}", {"rows": rows}
    )


def _dated(root: Path) -> tour.Scene:
    rows: list[dict[str, Any]] = sql.rows(sql.query(root, BY_HOUR).table)
    hours = [row["hour"] for row in rows]
    tour.expect(hours == list(FAULT_HOURS), f"it was hot in the hours {hours}")
    return tour.Scene(
        "dated",
        f"muster sql, when that was: {BY_HOUR}. Answer: {HOT} was hot from {hours[0]}:00 to "
        f"{hours[-1] + 1}:00 UTC",
        {"hours": hours},
    )


def _restored(root: Path) -> tour.Scene:
    """A machine is forgotten; the earlier state of the tables still has it until it is vacuumed."""
    before = delta.Snapshot(root, tables.NODES).delta.version()
    deleted = sum(export.forget(root, HOT).values())
    count = f"SELECT count(*) AS n FROM nodes WHERE machine = '{HOT}'"
    now = sql.rows(sql.query(root, count).table)[0]["n"]
    then = sql.rows(sql.query(root, count, as_of=before).table)[0]["n"]
    tour.expect((now, then) == (0, deleted), f"{now} rows now, {then} before, {deleted} deleted")
    return tour.Scene(
        "forgotten",
        f"muster history forget {HOT}: {deleted} rows deleted. The table has {now} of them now, and had "
        f"{then} before (--as-of); --purge removes those too",
        {"deleted": deleted, "before": then},
    )
