"""A Spark sink that publishes rows to topics: ``writeStream.format("muster")``.

Rows have the columns ``topic`` and ``data`` (text or bytes), and may have ``message_id`` (text).  Current
subscribers receive them.  With the option ``stream``, the name of a stream that keeps these topics, the batch
is done when the stream has stored them; that needs credentials of an operator.

Spark may write a batch twice (after a crash, or when a task is retried), and the writer does not know the
batch.  So ``message_id``, the header ``Nats-Msg-Id``, must be derived from the content, such as window and
group: a stream stores a duplicate inside of its duplicate window once, and subscribers can recognise it.

Options: ``servers``, ``credentials`` and ``ca`` as for the source.  The role ``reader`` may not publish;
``user`` may.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from muster.bus import api
from muster.core import errors, topics
from muster.pipeline.source import reader

MESSAGE_ID = "message_id"


@dataclass
class WriteCommit(WriterCommitMessage):
    messages: int


class BusStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: MutableMapping[str, str], schema: StructType) -> None:
        missing = [name for name in ("topic", "data") if name not in schema.names]
        if missing:
            raise errors.InvalidInput(f"the rows lack the columns {', '.join(missing)}")
        self._access = reader.StreamAccess.from_options(options)
        self._stream = options.get("stream", "")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs on an executor, once for each partition."""
        rows = [row for batch in iterator for row in batch.to_pylist()]
        if rows:
            outgoing = [_outgoing(row) for row in rows]
            asyncio.run(self._access.call(functools.partial(self._publish, outgoing)))
        return WriteCommit(len(rows))

    async def _publish(self, outgoing: Sequence[api.OutgoingMessage], bus: api.Bus) -> None:
        if self._stream:
            stream = await bus.open_stream(self._stream)
            publishing = (stream.publish(m.subject, m.data, message_id=m.message_id) for m in outgoing)
            await asyncio.gather(*publishing)  # they share the sync
            return
        for message in outgoing:
            headers = {"Nats-Msg-Id": message.message_id} if message.message_id else None
            await bus.publish(message.subject, message.data, headers=headers)
        await bus.flush()
        if bus.statistics().violations:
            raise errors.Forbidden(f"{bus.identity} may not publish to all topics of the rows")

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to do: the rows are already published."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to undo: the batch is written again, with the same ids."""


def _outgoing(row: dict[str, object]) -> api.OutgoingMessage:
    data = row["data"]
    if row["topic"] is None:
        raise errors.InvalidInput("a row has no topic")
    return api.OutgoingMessage(
        topics.Topic.parse(str(row["topic"])).subject,
        data if isinstance(data, bytes) else str(data or "").encode(),
        message_id=str(row[MESSAGE_ID]) if row.get(MESSAGE_ID) is not None else None,
    )
