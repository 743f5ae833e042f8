"""Hourly rows and compaction by the executors of a cluster, whose history is too much for one process.

The files are written by executors and committed here, so the guarantees are those of `maintenance`, whose
process finds nothing left to do afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from muster.core.reports import columns
from muster.pipeline import spark as spark_
from muster.pipeline.history import data_files, delta, maintenance, storage, tables
from muster.pipeline.source import spark_internals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LARGE_ROWS = 20_000_000  # reports of an hour: some 55,000 machines at a period of ten seconds
_FILE = pa.schema([("file", pa.binary())])


def is_large(root: storage.Root, now_s: float) -> bool:
    """By the reports of the last two hours."""
    if not delta.exists(root, tables.NODES):
        return False
    since_ms = int((now_s - 2 * maintenance.HOUR_S) * 1000)
    recent = delta.Snapshot(root, tables.NODES).files_between(since_ms, None)
    return sum(file.rows for file in recent) >= 2 * LARGE_ROWS


def run(
    spark: SparkSession, root: storage.Root, now_s: float, keep_s: float, check: Callable[[], None]
) -> dict[str, int]:
    """What was done, in numbers. ``check`` is called before each commit and may raise."""
    spark_internals.activate(spark)

    def hour_files(hour: int) -> list[data_files.DataFile]:
        made = _hour_files(spark, root, hour)
        check()
        return made

    def merge(name: str, groups: Sequence[list[delta.TableFile]]) -> Iterable[data_files.DataFile]:
        """All at once, each in a task."""
        merging = spark.sparkContext.parallelize(groups, len(groups))
        return merging.map(lambda group: maintenance.merge(root, name, group)).collect()

    done = {"hours": maintenance.update_hourly(root, now_s, keep_s, hour_files), "compacted": 0}
    for name in tables.definitions():
        if delta.exists(root, name):
            done["compacted"] += maintenance.compact(root, name, now_s, check, merge)
    return done


def _hour_files(spark: SparkSession, root: storage.Root, hour: int) -> list[data_files.DataFile]:
    from pyspark.sql.pandas.types import from_arrow_schema

    from_ms = hour * maintenance.HOUR_S * 1000
    nodes = spark_.read(spark, root, tables.NODES, from_ms=from_ms, to_ms=from_ms + maintenance.HOUR_S * 1000)
    nodes.createOrReplaceTempView("nodes")
    schema = tables.definition(tables.HOURLY).file_schema
    rows = spark.sql(maintenance.hour_sql(from_ms, maintenance.SPARK_SQL))

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        made = [columns.conform_schema(batch, schema) for batch in batches if batch.num_rows]
        written = data_files.write(root, tables.HOURLY, pa.Table.from_batches(made), "hour") if made else None
        listed = [msgspec.msgpack.encode(file) for file in written.files] if written else []
        yield pa.RecordBatch.from_arrays([pa.array(listed, pa.binary())], schema=_FILE)

    files = rows.mapInArrow(write, from_arrow_schema(_FILE)).collect()
    return [msgspec.msgpack.decode(row["file"], type=data_files.DataFile) for row in files]
