"""Tables of the history as rows of Spark, also in SQL: ``format("muster")`` with the option ``history``.

docs/guides/pipeline-spark.md lists the options.  A query reads the table as it is then.  Spark passes the
options of a table in SQL only when that is created.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from muster.core import errors, units
from muster.core.reports import columns
from muster.pipeline.history import delta, storage, tables

PART_BYTES = 128 << 20  # of the files that a task reads


def schema_of(options: MutableMapping[str, str]) -> StructType:
    return from_arrow_schema(tables.definition(_table(options)).schema)


def _table(options: MutableMapping[str, str]) -> str:
    name = options.get("table", tables.NODES)
    if name not in tables.definitions():
        known = " or ".join(tables.definitions())
        raise errors.InvalidInput(f"the option 'table' takes {known}, not {name!r}")
    return name


@dataclass
class FileGroup(InputPartition):
    paths: list[str]

    def __init__(self, paths: list[str]) -> None:
        super().__init__(None)
        self.paths = paths


class TableReader(DataSourceReader):
    def __init__(self, options: MutableMapping[str, str], schema: StructType) -> None:
        self._root, self._name = options["history"], _table(options)
        self._schema = to_arrow_schema(schema, timezone="UTC")
        last = options.get("last")
        self._from_ms = None if last is None else int((time.time() - units.parse_duration_s(last)) * 1000)

    def partitions(self) -> Sequence[FileGroup]:
        groups: list[FileGroup] = []
        left = 0
        for file in delta.Snapshot(self._root, self._name).files_between(self._from_ms, None):
            if file.size > left:
                groups.append(FileGroup([]))
                left = PART_BYTES
            groups[-1].paths.append(file.path)
            left -= file.size
        return groups

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Executors read the files: their names are those of the driver's moment."""
        if not isinstance(partition, FileGroup):  # Spark passes None for an empty table
            return
        definition = tables.definition(self._name)
        files = ds.dataset(
            partition.paths,
            schema=delta.nullable(definition.schema),
            format="parquet",
            filesystem=storage.filesystem(self._root, self._name),
            partitioning=ds.partitioning(pa.schema([definition.schema.field(tables.DAY)]), flavor="hive"),
        )
        kept = None
        if self._from_ms is not None:
            since = pa.scalar(max(0, self._from_ms), pa.timestamp("ms", tz="UTC")).cast(tables.TIME)
            kept = ds.field(definition.time) >= since
        with storage.translated(storage.join(self._root, self._name)):
            for batch in files.scanner(columns=self._schema.names, filter=kept).to_batches():
                if batch.num_rows:
                    yield columns.conform_schema(batch, self._schema)
