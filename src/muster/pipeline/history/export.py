"""Copies of the history's rows in files, and deletion of the rows of a machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from muster.core import errors, files
from muster.pipeline.history import delta, maintenance, search, sql, storage, tables

FORMATS = (".parquet", ".csv", ".jsonl")


def write(root: storage.Root, query: search.HistorySearch, path: Path) -> int:
    """Write the rows of a search to a file. The number of rows.

    The file appears when it is complete.  Nested values of CSV are JSON.
    """
    if path.suffix not in FORMATS:
        raise errors.InvalidInput(
            f"{path.name}: unknown format {path.suffix!r}",
            hint=f"use a name that ends with {', '.join(FORMATS)}",
        )
    if not path.absolute().parent.is_dir():
        raise errors.NotFound(f"there is no folder {path.parent}")
    snapshot = search.open_snapshot(root, query)
    if snapshot is None:
        raise errors.NotFound(f"the history has no table {query.kind} yet")
    names = query.columns or tuple(snapshot.schema.names)
    with files.FileDraft(path, mode=files.requested_mode()) as draft:
        count = 0
        batches = search.search(root, query)
        first = next(batches, None)
        schema = (
            first.schema
            if first is not None
            else pa.schema([snapshot.schema.field(name) for name in names if name in snapshot.schema.names])
        )
        with _writer(draft.path, path.suffix, schema) as write_batch:
            while first is not None:
                write_batch(first)
                count += first.num_rows
                first = next(batches, None)
        draft.publish()
        return count


@contextlib.contextmanager
def _writer(path: Path, suffix: str, schema: pa.Schema) -> Iterator[Any]:
    if suffix == ".parquet":
        with pq.ParquetWriter(path, schema, compression="zstd") as parquet:
            yield parquet.write_batch
    elif suffix == ".csv":
        with pa_csv.CSVWriter(path, flat(schema.empty_table()).schema) as text:
            yield lambda batch: text.write_table(flat(pa.Table.from_batches([batch])))
    else:
        with path.open("wb") as lines:
            yield lambda batch: lines.writelines(
                msgspec.json.encode(row) + b"\n" for row in sql.rows(pa.Table.from_batches([batch]))
            )


def flat(table: pa.Table) -> pa.Table:
    """Nested values as JSON, for formats without nesting."""
    for place, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            values = tables.to_pylist(table.column(place))
            texts = [
                None if value is None else msgspec.json.encode(sql.plain(value)).decode() for value in values
            ]
            table = table.set_column(place, field.name, pa.array(texts, pa.string()))
    return table


def forget(root: storage.Root, machine: str, *, purge: bool = False) -> dict[str, int]:
    """Delete the rows of a machine. How many, by table."""
    values = {
        tables.NODES: ("machine", machine),
        tables.HOURLY: ("machine", machine),
        tables.ALERTS: ("about", f"node:{machine}"),
    }
    deleted = {}
    for name, (column, value) in values.items():
        if not delta.exists(root, name):
            continue
        deleted[name] = maintenance.delete_rows(root, name, column, value)
        if purge:
            maintenance.purge(root, name)
    if not sum(deleted.values()):
        raise errors.NotFound(f"the history has no rows of the machine {machine!r}")
    return deleted
