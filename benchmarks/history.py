"""The history: commits, size, and questions over a week, beside the same rows in plain Parquet.

**Commits.** A batch writes a file for each shard, then a transaction commits them.  The time of a transaction
depends on the number of files, not on their rows, so many small batches are committed to measure it.

**Size.** Batches as the pipeline writes them at a million machines with a period of ten seconds, and the same
after compaction.  A day has 8,640 of them: rows marked "extrapolated" are the measured batches times that.
Every metric is random with two decimals, so real metrics, many of which hardly change, take less.

**Questions.** A fleet that reports once a minute for a week, with a daily cycle and growing disks.  The same
rows are in the Delta table, compacted by the day, and in plain Parquet files, partitioned and compressed the
same.  DuckDB reads both through Arrow, with the limits of `muster sql` raised, Spark both through its own
reader.  Both sides take turns; the first round is not counted.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from benchmarks import harness, measure
from muster.core.reports import columns
from muster.pipeline import spark as spark_
from muster.pipeline.history import data_files, delta, maintenance, sql, tables
from muster.pipeline.source import session

RUN_S_MAX = 1800
QUICK_S_MAX = 600  # a minute of an idle machine; Spark takes several on a busy one
QUESTION_S_MAX = 20.0  # for the rounds of a question on one engine
T0_S = 1_699_833_600  # 2023-11-13T00:00:00Z, a Monday
DAY_S = 86_400
DAYS = 7
BATCHES_A_DAY = 8_640  # of ten seconds
FILES_A_BATCH = 4  # a file for each shard
MILLION = 1_000_000

LAST_DAY = "DATE '2023-11-19'"
QUESTIONS = {
    "CPU by zone, one day": (
        f"SELECT zone, avg(cpu_percent) AS cpu FROM nodes WHERE day = {LAST_DAY} GROUP BY zone"
    ),
    "ten busiest machines, a week": (
        "SELECT machine, avg(cpu_percent) AS cpu FROM nodes GROUP BY machine ORDER BY cpu DESC LIMIT 10"
    ),
    "an hour of one machine": (
        f"SELECT reported_at, cpu_percent FROM nodes WHERE machine = 'm0000042' AND day = {LAST_DAY} "
        "AND reported_at >= TIMESTAMP '2023-11-19 12:00:00' AND reported_at < TIMESTAMP '2023-11-19 13:00:00'"
    ),
    "overloaded machines by day, a week": (
        "SELECT day, count(DISTINCT machine) AS machines FROM nodes WHERE cpu_percent > 95 GROUP BY day"
    ),
    "growth of disks, a week": (
        "SELECT machine, regr_slope(disk_percent, minute) AS slope FROM ("
        "SELECT machine, disk_percent, CAST(sequence AS DOUBLE) AS minute FROM nodes) AS points "
        "GROUP BY machine ORDER BY slope DESC LIMIT 10"
    ),
}


def reports(machines: int, times_s: np.ndarray[Any, Any], seed: int = 0, first: int = 0) -> pa.Table:
    """A report of each machine at each time, in the order of time, with the columns of `nodes`.

    ``first``: the number of the first machine.
    """
    chance = np.random.default_rng(seed)
    number = np.tile(np.arange(first, first + machines), len(times_s))
    at_s = np.repeat(times_s, machines)
    rows = len(number)
    hours = (at_s % DAY_S) / 3600
    cpu = 40 + 20 * np.sin(hours / 24 * 2 * np.pi) + chance.normal(0, 10, rows) + number % 7 * 5
    values = {
        "cpu_percent": np.clip(cpu, 0, 100),
        "disk_percent": np.clip(30 + (at_s - T0_S) / DAY_S * (number % 50) / 10, 0, 100),
        "uptime_s": at_s - T0_S + number,
    }
    names = pa.array([f"m{n:07}" for n in range(first, first + machines)])
    groups, zones = (pa.array([f"{kind}{n}" for n in range(count)]) for kind, count in (("g", 20), ("z", 5)))
    made: dict[str, Any] = {
        "reported_at": pa.array((at_s * 1_000_000).astype(np.int64), tables.TIME),
        "machine": names.take(pa.array(number - first)),
        "group": groups.take(pa.array(number % 20)),
        "zone": zones.take(pa.array(number % 5)),
        "state": pa.repeat("up", rows),
        "boot": pa.repeat(1, rows),
        "sequence": pa.array(((at_s - T0_S) // 60 + 1).astype(np.int64)),
        "period_s": pa.repeat(60.0, rows),
        "dropped": pa.repeat(0, rows),
        "partial": pa.repeat(False, rows),
        tables.SEQUENCE: pa.array(((at_s - T0_S) // 60).astype(np.int64)),
    }
    for metric in columns.STANDARD_METRICS:
        made[metric] = pa.array(values.get(metric, np.round(chance.gamma(2.0, 20.0, rows), 2)))
    schema = tables.definition(tables.NODES).file_schema
    arrays = [
        made[field.name].cast(field.type) if field.name in made else pa.nulls(rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def commits(folder: pathlib.Path, batches: int) -> list[harness.Row]:
    """Time of a transaction."""
    table = delta.HistoryTable(folder / "commits", tables.NODES)
    rows = reports(10, np.array([T0_S]))
    took_ms = []
    for batch in range(batches):
        files = write_batch(folder / "commits", [rows] * FILES_A_BATCH, batch)
        took_ms.append(1000 * measure.seconds(functools.partial(table.commit, files, ("r", batch))))
    return harness.under(
        f"{batches:,} batches of {FILES_A_BATCH} small files",
        [
            _row(
                f"commit of a batch, p{percent}", measure.percentile(took_ms, percent), "ms", samples=batches
            )
            for percent in (50, 99)
        ],
    )


def sizes(folder: pathlib.Path, machines: int, batches: int) -> list[harness.Row]:
    """Time to write batches, and the size of a day."""
    root = folder / "sizes"
    table = delta.HistoryTable(root, tables.NODES)
    written_s, committed_ms, size, count = 0.0, 0.0, 0, 0
    part = machines // FILES_A_BATCH
    for batch in range(batches):
        at_s = np.array([T0_S + 10 * batch])
        shards = [
            reports(part, at_s, seed=FILES_A_BATCH * batch + shard, first=shard * part)
            for shard in range(FILES_A_BATCH)
        ]
        start = time.perf_counter()
        files = write_batch(root, shards, batch)
        written_s += time.perf_counter() - start
        size, count = size + sum(file.size for file in files), count + len(files)
        committed_ms += 1000 * measure.seconds(functools.partial(table.commit, files, ("r", batch)))
    written = machines * batches
    compact_s = measure.seconds(lambda: maintenance.compact(root, tables.NODES, T0_S + 2 * DAY_S))
    after = delta.Snapshot(root, tables.NODES).files
    whole = sum(file.size for file in after)
    day = MILLION * BATCHES_A_DAY
    a_day = "a million machines at 10 s, extrapolated: a day"
    return harness.under(
        f"{machines:,} machines, {batches} batches, {FILES_A_BATCH} files each, 12 metrics",
        [
            _row(
                "files of a batch written on one core, a million reports", written_s / written * MILLION, "s"
            ),
            _row("commit of such a batch, mean", committed_ms / batches, "ms", samples=batches),
            _row("compaction, a million reports", compact_s / written * MILLION, "s"),
            _row("size of a report as written", size / written, "bytes"),
            _row("size of a report, compacted", whole / written, "bytes"),
            _row(f"{a_day} as written", size / written * day / 1e9, "GB"),
            _row(f"{a_day}, compacted", whole / written * day / 1e9, "GB"),
            _row(f"{a_day} as written, files", count / batches * BATCHES_A_DAY, "files"),
            _row("files after compaction, of those batches", len(after), "files"),
        ],
    )


def write_batch(root: pathlib.Path, shards: list[pa.Table], batch: int) -> list[data_files.DataFile]:
    return [
        file
        for number, rows in enumerate(shards)
        for file in data_files.write(root, tables.NODES, rows, f"bench-{batch}-{number}").files
    ]


def _row(metric: str, ours: float, unit: str, **more: Any) -> harness.Row:
    return harness.Row(metric=metric, ours=ours, unit=unit, better="lower", **more)


def make_week(folder: pathlib.Path, machines: int) -> tuple[pathlib.Path, pathlib.Path, int]:
    """The same rows as a table and as plain Parquet; and how many."""
    root, plain = folder / "week", folder / "plain"
    table = delta.HistoryTable(root, tables.NODES)
    total = 0
    for day in range(DAYS):
        date = datetime.date(2023, 11, 13) + datetime.timedelta(days=day)
        target = plain / f"day={date}"
        target.mkdir(parents=True)
        for part in range(4):
            first = T0_S + day * DAY_S + part * DAY_S // 4
            rows = reports(machines, np.arange(first, first + DAY_S // 4, 60), seed=4 * day + part)
            total += rows.num_rows
            pq.write_table(rows, target / f"{part}.parquet", compression="zstd")
            written = data_files.write(root, tables.NODES, rows, f"week-{day}-{part}")
            table.commit(written.files, ("week", 4 * day + part))
    maintenance.compact(root, tables.NODES, T0_S + 30 * DAY_S)
    return root, plain, total


Ask = Callable[[str], int]


@contextlib.contextmanager
def engines(root: pathlib.Path, plain: pathlib.Path) -> Iterator[dict[str, tuple[Ask, Ask]]]:
    """For each engine: how to ask the table, and how to ask plain Parquet. Both return the number of rows."""
    import duckdb

    limits = sql.SqlLimits(seconds=600.0, memory_bytes=8 << 30, rows=None)
    with session.temporary_session("local[2]", memory="2g") as spark, duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'")
        partitions = ds.partitioning(pa.schema([("day", pa.date32())]), flavor="hive")
        spark_.register(spark, root)
        spark.read.parquet(str(plain)).createOrReplaceTempView("plain")

        def on_table(text: str) -> int:
            return len(sql.query(root, text, limits).table)

        def on_plain(text: str) -> int:
            database.register("nodes", ds.dataset(plain, partitioning=partitions))
            return len(database.sql(text).to_arrow_table())

        def spark_table(text: str) -> int:
            spark_.register(spark, root)  # a new snapshot, as for every query of a user
            return len(spark.sql(text).collect())

        def spark_plain(text: str) -> int:
            spark.read.parquet(str(plain)).createOrReplaceTempView("plain")
            return len(spark.sql(text.replace("FROM nodes", "FROM plain")).collect())

        yield {"DuckDB": (on_table, on_plain), "Spark": (spark_table, spark_plain)}


def questions(folder: pathlib.Path, machines: int, rounds: int) -> list[harness.Row]:
    started = time.monotonic()
    root, plain, total = make_week(folder, machines)
    load = f"{machines:,} machines, a report a minute, {DAYS} days, {total:,} rows, 2 cores"
    print(f"a week of {total:,} rows in {time.monotonic() - started:.0f} s", flush=True)
    rows = []
    with engines(root, plain) as asked:
        for name, text in QUESTIONS.items():
            for engine, (ours, peer) in asked.items():
                assert ours(text) == peer(text), name  # and warm
                sides = {
                    "ours": functools.partial(measure.seconds, functools.partial(ours, text)),
                    "peer": functools.partial(measure.seconds, functools.partial(peer, text)),
                }
                times = measure.in_turns(sides, rounds=rounds, seconds_max=QUESTION_S_MAX)
                rows.append(
                    _row(
                        f"{name}: {engine}, p50",
                        1000 * measure.percentile(times["ours"], 50),
                        "ms",
                        peer=1000 * measure.percentile(times["peer"], 50),
                        peer_name=f"plain Parquet, {engine}",
                        samples=len(times["ours"]),
                    )
                )
    return harness.under(load, rows)


def run(quick: bool) -> list[harness.Row]:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = pathlib.Path(name)
        return [
            *commits(folder, 20 if quick else 1_000),
            *sizes(folder, 100_000 if quick else MILLION, 2 if quick else 12),
            *questions(folder, 20 if quick else 1_000, 1 if quick else 5),
        ]
