"""Publishes to a stream of which this process must be the only writer, and stops when it is not.

Every publication names the last sequence of the stream, and the broker refuses it if the stream has another.
A new driver first stores an empty marker: from then on every publication of the former driver is refused,
also one that was sent before and arrives later.  Readers skip messages that are neither reports nor alerts.
Messages go in atomic batches, so that a batch costs one comparison and one sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muster.bus import api
from muster.core import errors
from muster.pipeline.job.driver import driver_lease

BATCH = 500  # the broker allows 1,000
BATCH_BYTES = 4 << 20
ATTEMPTS = 5


class FencedStream:
    def __init__(self, stream: api.Stream, authority: driver_lease.DriverAuthority) -> None:
        self._stream = stream
        self._authority = authority
        self._last = 0
        self._lock = asyncio.Lock()

    async def fence(self, subject: str) -> None:
        """End the publications of all former drivers. ``subject``: one of the stream."""
        await self._authority.confirm()
        self._last = await self._stream.publish(subject, b"")

    async def publish(self, messages: Sequence[api.OutgoingMessage]) -> None:
        """Store messages with ids, in order; those that are stored already are skipped."""
        async with self._lock:
            for batch in _batches(messages):
                await self._store(batch)

    async def _store(self, batch: Sequence[api.OutgoingMessage]) -> None:
        for _ in range(ATTEMPTS):
            self._authority.check()
            try:
                if len(batch) > 1:
                    self._last = await self._stream.publish_batch([self._expecting(batch[0]), *batch[1:]])
                else:
                    stored = await self._stream.publish_batch([self._expecting(batch[0])])
                    if not isinstance(stored, api.Duplicate):
                        self._last = stored
                return
            except errors.AlreadyExists:  # some were stored by an interrupted attempt
                for message in batch:
                    await self._store([message])
                return
            except errors.Conflict:
                await self._read_last()
        raise errors.Unavailable(f"the stream {self._stream.name!r} has another writer")

    def _expecting(self, message: api.OutgoingMessage) -> api.OutgoingMessage:
        return api.OutgoingMessage(
            message.subject, message.data, message_id=message.message_id, expected_last_sequence=self._last
        )

    async def _read_last(self) -> None:
        """Not the other way round: a driver that took over after the check advances the sequence again."""
        last = (await self._stream.state()).last_sequence
        await self._authority.confirm()
        self._last = last


def _batches(messages: Sequence[api.OutgoingMessage]) -> list[list[api.OutgoingMessage]]:
    """In order; no id occurs twice in a batch, because the broker would refuse it."""
    batches: list[list[api.OutgoingMessage]] = []
    ids: set[str | None] = set()
    size = 0
    for message in messages:
        full = not batches or len(batches[-1]) >= BATCH or size + len(message.data) > BATCH_BYTES
        if full or message.message_id in ids:
            batches.append([])
            ids, size = set(), 0
        batches[-1].append(message)
        ids.add(message.message_id)
        size += len(message.data)
    return batches
