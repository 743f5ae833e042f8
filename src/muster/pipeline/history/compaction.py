"""Compaction: the small files of the history are merged by hour and by day.

The node reports of a finished hour are rewritten into files sorted by group, machine and time, without
duplicates. A finished day also gets hourly rows for each machine.  Both are Spark batch jobs, so an hour of a
million machines does not have to fit into memory.  Roll-ups and alerts are much smaller: their batches are
joined into one file for each hour, and the hours of a finished day into one file, without Spark.

Each run writes into a new folder, then lists its inputs and outputs in one atomic step, and only then removes
the inputs.  If it is killed at any point, the remaining files are not read, and the run is repeated.
"""

from __future__ import annotations

import datetime
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from muster.core.reports import columns
from muster.pipeline.history import tables
from muster.pipeline.source import session

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

HOUR_MS = 3_600_000
BATCHES_MAX = 2000  # in one turn
_TIMES = {tables.ROLLUPS: "from", tables.ALERTS: "at"}


def run(spark: SparkSession, root: Path, now_ms: int, *, grace_s: float = 300.0) -> dict[str, int]:
    """Compact finished hours and days; returns how many."""
    session.activate(spark)
    _clean(root)
    until_ms = now_ms - int(grace_s * 1000)
    return {
        "batches": _hours(spark, root, until_ms),
        "days": _days(spark, root, until_ms),
        "joined": sum(join(root, kind, until_ms) for kind in _TIMES),
    }


def join(root: Path, kind: str, now_ms: int) -> int:
    """Join roll-ups or alerts by finished hour, then by finished day. The number of joined files."""
    joined = 0
    done = tables.compacted(root)
    kept = done.kept(kind)
    taken = set(kept.batches)
    by_hour: dict[str, list[tuple[str, Path]]] = {}
    for name, folder in tables.complete_batches(root, kind):
        newest_ms = _newest_ms(folder, _TIMES[kind])
        if name not in taken and newest_ms is not None and newest_ms < now_ms // HOUR_MS * HOUR_MS:
            # A batch that spans two hours belongs to the later one: readers use the times of the rows.
            by_hour.setdefault(_stamp(newest_ms, "day=%Y-%m-%d/hour=%H"), []).append((name, folder))
    for hour, ready in sorted(by_hour.items()):
        parts = [path for _, folder in ready for path in sorted(folder.glob("part-*.parquet"))]
        made = _joined(root, root / kind / f"turn={done.turns}" / hour, parts)
        kept.files.append(made)
        kept.batches += [name for name, _ in ready]
        joined += len(parts)
    if by_hour:
        done.turns += 1
        tables.save_compacted(root, done)
    today = _stamp(now_ms, "%Y-%m-%d")
    by_day: dict[str, list[str]] = {}
    for path in kept.files:
        if _part(path, "day") < today and "/hour=" in path:
            by_day.setdefault(_part(path, "day"), []).append(path)
    for day, paths in sorted(by_day.items()):
        # Including the file that an earlier run made of the same day, if late data arrived.
        paths += [path for path in kept.files if f"/day={day}/" in path and "/hour=" not in path]
        parts = [root / path for path in paths]
        made = _joined(root, root / kind / f"turn={done.turns}" / f"day={day}", parts)
        kept.files = [path for path in kept.files if path not in paths] + [made]
        done.turns += 1
        tables.save_compacted(root, done)
        for part in parts:
            part.unlink(missing_ok=True)
        joined += len(parts)
    _clean(root)
    return joined


def _joined(root: Path, folder: Path, parts: list[Path]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "part-0.parquet"
    with pq.ParquetWriter(path, pq.read_schema(parts[0]), compression="zstd") as writer:
        for part in parts:
            writer.write_table(pq.read_table(part, partitioning=None))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.relative_to(root).as_posix()


def _hours(spark: SparkSession, root: Path, now_ms: int) -> int:
    """Compact complete batches that contain only reports of finished hours."""
    done = tables.compacted(root)
    taken = set(done.batches)
    hour_ms = now_ms // HOUR_MS * HOUR_MS
    ready = [
        (name, folder)
        for name, folder in tables.complete_batches(root, tables.NODES)
        if name not in taken and (newest := _newest_ms(folder)) is not None and newest < hour_ms
    ][:BATCHES_MAX]
    if not ready:
        return 0
    turn = root / tables.HOURS / f"turn={done.turns}"
    paths = [str(path) for _, folder in ready for path in sorted(folder.glob("part-*.parquet"))]
    frame = spark.read.parquet(*paths).dropDuplicates(["machine", "boot", "sequence"])
    (
        frame.selectExpr(
            "*",
            "date_format(reported_at, 'yyyy-MM-dd') AS day",
            "date_format(reported_at, 'HH') AS hour",
        )
        .repartition("day", "hour", "group")
        .sortWithinPartitions("day", "hour", "group", "machine", "reported_at")
        .write.mode("overwrite")
        .partitionBy("day", "hour")
        .option("compression", "zstd")
        .parquet(str(turn))
    )
    done.sequence = max(done.sequence, tables.highest(map(Path, paths)))
    done.hours += _made(root, turn)
    done.batches += [name for name, _ in ready]
    done.turns += 1
    tables.save_compacted(root, done)
    _clean(root)
    return len(ready)


def _days(spark: SparkSession, root: Path, now_ms: int) -> int:
    done = tables.compacted(root)
    today = _stamp(now_ms, "%Y-%m-%d")
    by_day: dict[str, list[str]] = {}
    for path in done.hours:
        by_day.setdefault(_part(path, "day"), []).append(path)
    known = {_part(path, "day") for path in done.days}
    ready = sorted(day for day in by_day if day < today and day not in known)
    if not ready:
        return 0
    turn = root / tables.DAYS / f"turn={done.turns}"
    frame = spark.read.option("basePath", str(root / tables.HOURS)).parquet(
        *(str(root / path) for day in ready for path in by_day[day])
    )
    names = columns.STANDARD_METRICS
    stacked = ", ".join(f"'{name}', {name}" for name in names)
    (
        frame.selectExpr(
            "day",
            "date_trunc('HOUR', reported_at) AS hour",
            "machine",
            "group",
            "zone",
            f"stack({len(names)}, {stacked}) AS (metric, value)",
        )
        .where("value IS NOT NULL")
        .groupBy("day", "hour", "machine", "group", "zone", "metric")
        .agg(*_statistics())
        .repartition("day")
        .sortWithinPartitions("day", "machine", "hour")
        .write.mode("overwrite")
        .partitionBy("day")
        .option("compression", "zstd")
        .parquet(str(turn))
    )
    done.days += _made(root, turn)
    done.turns += 1
    tables.save_compacted(root, done)
    return len(ready)


def _statistics() -> list[Column]:
    from pyspark.sql import functions

    return [
        functions.count("value").alias("count"),
        functions.avg("value").alias("mean"),
        functions.min("value").alias("min"),
        functions.max("value").alias("max"),
    ]


def _made(root: Path, turn: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in turn.rglob("*.parquet"))


def _clean(root: Path) -> None:
    """Remove compacted batches, including those of a run that was killed."""
    done = tables.compacted(root)
    lists = {tables.NODES: done.batches, **{kind: done.kept(kind).batches for kind in _TIMES}}
    for kind, batches in lists.items():
        for name in batches:
            shutil.rmtree(root / kind / name, ignore_errors=True)
        batches[:] = [name for name in batches if (root / kind / name).exists()]
    if any(lists.values()) or done != tables.compacted(root):
        tables.save_compacted(root, done)


def _stamp(at_ms: int, form: str) -> str:
    return datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC).strftime(form)


def _newest_ms(folder: Path, column: str = "reported_at") -> int | None:
    newest: int | None = None
    for path in folder.glob("part-*.parquet"):
        metadata = pq.read_metadata(path)
        place = metadata.schema.names.index(column)
        for number in range(metadata.num_row_groups):
            statistics = metadata.row_group(number).column(place).statistics
            if statistics is None or not statistics.has_min_max:
                return None
            newest = max(newest or 0, int(statistics.max.timestamp() * 1000))
    return newest


def _part(path: str, name: str) -> str:
    """The value of a folder ``name=value`` in a path."""
    return next(part.partition("=")[2] for part in path.split("/") if part.startswith(f"{name}="))
