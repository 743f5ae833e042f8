"""Data files of a table: written by executors or the driver, invisible until the driver commits them.

A file contains rows of one day.  Its name is unique, so a repeated batch never overwrites a committed file;
files of a batch that was not committed are removed by vacuum (`maintenance`).
"""

from __future__ import annotations

import datetime
import json
import uuid
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from muster.pipeline.history import storage, tables

DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000
DAYS_MAX = 100  # in one batch of a shard: clocks of machines can be arbitrarily wrong
GROUP_ROWS = 250_000  # of a row group in a merged file
WRITTEN_AT_ONCE = 65_536  # values: a report has dozens of metrics
_EPOCH = datetime.date(1970, 1, 1)
_LAST_DAY = (datetime.date(9999, 12, 30) - _EPOCH).days  # later times have no date in most readers


class DataFile(msgspec.Struct, frozen=True, array_like=True):
    path: str  # relative to the table
    size: int
    rows: int
    day: str  # as in the log: 2030-01-31
    statistics: str  # JSON, as in the log
    hours: tuple[int, ...] = ()  # with rows, since 1970


class WrittenRows(msgspec.Struct, frozen=True):
    files: list[DataFile]
    rejected: int = 0  # rows of too many different days, or of impossible ones


def write(root: storage.Root, table: str, rows: pa.Table, stem: str) -> WrittenRows:
    """Write ``rows`` to a file for each day; they have the columns of the table except ``day``, as in
    `tables.TableDefinition.file_schema` or ``row_schema``.

    Optimized for speed: LZ4 except for maps, and dictionaries for strings only.  Compaction reduces the size.
    """
    definition = tables.definition(table)
    times = rows.column(definition.time).cast(pa.int64()).to_numpy()
    days, counts = np.unique(times // DAY_US, return_counts=True)
    kept = days[np.argsort(-counts, kind="stable")][:DAYS_MAX]
    kept = kept[(kept >= 0) & (kept <= _LAST_DAY)]
    rejected = int(counts.sum() - counts[np.isin(days, kept)].sum())
    files = [
        _write_day(
            root,
            definition,
            rows if len(days) == 1 else rows.filter(pa.array(times // DAY_US == day)),
            times if len(days) == 1 else times[times // DAY_US == day],
            (_EPOCH + datetime.timedelta(days=int(day))).isoformat(),
            stem,
        )
        for day in sorted(kept)
    ]
    return WrittenRows(files, rejected)


def _write_day(
    root: storage.Root,
    definition: tables.TableDefinition,
    rows: pa.Table,
    times: np.ndarray[Any, Any],
    day: str,
    stem: str,
) -> DataFile:
    path = f"{tables.DAY}={day}/{stem}-{uuid.uuid4().hex[:12]}.parquet"
    # Maps are mostly numbers of metrics: to compress them would take a third of the time of writing.
    compression = {name: "lz4" for field in rows.schema for name in _texts_and_numbers(field)}
    rows = rows.unify_dictionaries()
    size = storage.write_file(
        storage.join(root, definition.name),
        path,
        lambda file: pq.write_table(rows, file, compression=compression, **_options(rows.schema)),
    )
    start = int(times.min()) // HOUR_US
    hours = np.flatnonzero(np.bincount(times // HOUR_US - start)) + start
    return DataFile(path, size, rows.num_rows, day, _statistics(definition, rows), tuple(hours.tolist()))


def _options(schema: pa.Schema) -> dict[str, Any]:
    # A machine is in a file of reports once or a few times: a dictionary of them would only cost time.
    words = [field.name for field in schema if pa.types.is_string(field.type) and field.name != "machine"]
    words += [f"{field.name}.key_value.key" for field in schema if pa.types.is_map(field.type)]
    return {
        "use_dictionary": words,
        # Readers compare no elements of lists and maps.
        "write_statistics": [field.name for field in schema if not pa.types.is_nested(field.type)],
        "write_batch_size": WRITTEN_AT_ONCE,
        "store_schema": False,  # or else codes would be read as codes
    }


def merge(root: storage.Root, table: str, rows: ds.Dataset, day: str) -> DataFile:
    """Write the rows of a day to one file that is smaller than those of `write`, in little memory."""
    definition = tables.definition(table)
    schema = pa.schema([field for field in rows.schema if field.name != tables.DAY])

    def copy(file: Any) -> None:
        with pq.ParquetWriter(file, schema, compression="zstd", **_options(schema)) as writer:
            waiting: list[pa.RecordBatch] = []
            for batch in rows.to_batches(columns=schema.names, use_threads=False):
                waiting.append(batch)
                if sum(part.num_rows for part in waiting) >= GROUP_ROWS:
                    writer.write_table(pa.Table.from_batches(waiting))
                    waiting = []
            writer.write_table(pa.Table.from_batches(waiting, schema))

    path = f"{tables.DAY}={day}/merged-{uuid.uuid4().hex[:12]}.parquet"
    size = storage.write_file(storage.join(root, table), path, copy)
    indexed = rows.to_table(columns=list(definition.statistics))
    return DataFile(path, size, indexed.num_rows, day, _statistics(definition, indexed))


def _texts_and_numbers(field: pa.Field) -> list[str]:
    """The columns of Parquet in a field, except those in maps."""
    if pa.types.is_map(field.type):
        return []
    if not pa.types.is_list(field.type):
        return [field.name]
    inner = (field.type.value_type.field(place) for place in range(field.type.value_type.num_fields))
    return [f"{field.name}.list.element.{name}" for part in inner for name in _texts_and_numbers(part)]


def _statistics(definition: tables.TableDefinition, rows: pa.Table) -> str:
    lowest, highest, nulls = {}, {}, {}
    for name in definition.statistics:
        column = rows.column(name)
        nulls[name] = column.null_count
        if column.null_count < len(column):
            bounds = pc.min_max(column)
            lowest[name], highest[name] = (_bound(bounds, end) for end in ("min", "max"))
    return json.dumps(
        {"numRecords": rows.num_rows, "minValues": lowest, "maxValues": highest, "nullCount": nulls}
    )


def _bound(bounds: Any, end: str) -> Any:
    """A minimum or maximum for the log, where times have milliseconds: rounded away from the values."""
    value = bounds[end]
    if not pa.types.is_timestamp(value.type):
        return value.as_py()
    us = value.cast(pa.int64()).as_py()
    ms = us // 1000 if end == "min" else -(-us // 1000)
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=ms)
    return moment.isoformat(timespec="milliseconds") + "Z"
