"""A Spark sink that stores rows in a stream of the bus: ``writeStream.format("muster")``.

Rows have the columns ``subject``, ``data`` and ``message_id``.  Spark may write a batch twice (after a crash,
or when a task is retried), and the writer does not know the batch.  So the id must be derived from the
content, such as window and group: a duplicate inside the stream's duplicate window is then stored
once.  Configure that window longer than the longest outage that has to be tolerated.

Options: ``servers``, ``credentials`` as for the source; ``stream``, which must exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from muster.core import errors
from muster.pipeline.source import reader

COLUMNS = ("subject", "data", "message_id")


@dataclass
class WriteCommit(WriterCommitMessage):
    messages: int


class BusStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: MutableMapping[str, str], schema: StructType) -> None:
        missing = [name for name in COLUMNS if name not in schema.names]
        if missing:
            raise errors.InvalidInput(f"the rows lack the columns {', '.join(missing)}")
        self._access = reader.StreamAccess.from_options(options)
        self._stream = options.get("stream", "")
        if not self._stream:
            raise errors.InvalidInput("the option 'stream' is missing: the name of an existing stream")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs on an executor, once for each partition."""
        rows = [
            row
            for batch in iterator
            for row in zip(
                *(batch.column(batch.schema.get_field_index(c)).to_pylist() for c in COLUMNS), strict=True
            )
        ]
        if rows:
            asyncio.run(self._store(rows))
        return WriteCommit(len(rows))

    async def _store(self, rows: Sequence[tuple[str, bytes, str]]) -> None:
        async with await self._access.connect() as bus:
            stream = await bus.open_stream(self._stream)
            async with asyncio.TaskGroup() as group:  # concurrent publications share the sync
                for subject, data, message_id in rows:
                    group.create_task(stream.publish(subject, bytes(data), message_id=message_id))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to do: the rows are already stored."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to undo: the batch is written again, and its ids prevent duplicates."""
