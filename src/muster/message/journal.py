"""The writer of the log: what is to be stored at one time becomes one atomic batch.

An `Item` is stored as a whole or not at all; as many as fit share a batch, and so one sync.  Each batch
expects the log to end where ours ended: whoever else has written since is the new owner, and our batch is
refused.  That is the fence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from muster.bus import api
from muster.core import errors
from muster.message import destinations, ledger, messages, protocol

BATCH = 1000
BATCH_BYTES = 4 << 20
QUEUED_MAX = 50_000


@dataclass(slots=True)
class Copy:
    """A message on its way into the log. ``subject`` None: only to those who listen now."""

    destination: destinations.Destination
    meta: messages.Meta
    raw: str
    data: bytes
    subject: str | None
    republish: bool = False


@dataclass(slots=True)
class Item:
    copies: list[Copy] = field(default_factory=list)
    record: ledger.Record = field(default_factory=ledger.Record)
    stored: Callable[[list[int]], None] = lambda _: None  # with the sequence of each copy, 0 if not kept
    failed: Callable[[errors.MusterError], None] = lambda _: None
    alone: bool = False  # nothing that was asked for later may stand before its record

    @property
    def size(self) -> int:
        return sum(copy.subject is not None for copy in self.copies)

    @property
    def bytes(self) -> int:
        return sum(len(copy.data) + len(copy.raw) for copy in self.copies)


class Journal:
    """``head`` is the log's last sequence, known because nobody else writes."""

    def __init__(self, stream: api.Stream, head: int, on_batch: Callable[[ledger.Record, int], None]) -> None:
        self._stream = stream
        self._on_batch = on_batch
        self.head = head
        self.batches = 0
        self._items: deque[Item] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item) -> None:
        self._items.append(item)
        self._wake.set()

    def abandon(self, error: errors.MusterError) -> None:
        while self._items:
            self._items.popleft().failed(error)

    async def run(self) -> None:
        """Until the log is no longer ours: then it raises what it heard."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._items:
                await self._store(self._take())

    def _take(self) -> list[Item]:
        taken: list[Item] = []
        size = total = 0
        while self._items:
            item = self._items[0]
            if taken and (size + item.size >= BATCH or total + item.bytes > BATCH_BYTES):
                break
            taken.append(self._items.popleft())
            size += item.size
            total += item.bytes
            if item.alone:
                break
        return taken

    async def _store(self, items: list[Item]) -> None:
        record = _sum([item.record for item in items])
        batch = [
            api.Outgoing(copy.subject, copy.data, {messages.HEADER: copy.raw})
            for item in items
            for copy in item.copies
            if copy.subject is not None
        ]
        if record is not None:
            batch.append(api.Outgoing(protocol.RECORD, msgspec.json.encode(record)))
        try:
            if batch:
                first = batch[0]
                batch[0] = api.Outgoing(
                    first.subject, first.data, first.headers, expected_last_sequence=self.head
                )
                last = await self._stream.publish_batch(batch)
            else:
                last = self.head
        except (errors.LimitExceeded, errors.InvalidInput) as error:
            for item in items:
                item.failed(error)
            return
        except errors.MusterError as error:
            # Refused as no longer ours, or in doubt: whoever comes next reads the log and knows.
            for item in items:
                item.failed(errors.NotConnected(f"the log could not be written: {error.message}"))
            raise
        sequence = last - len(batch)
        self.head = last
        self.batches += 1
        if record is not None:
            self._on_batch(record, last)
        for item in items:
            numbers = []
            for copy in item.copies:
                sequence += copy.subject is not None
                numbers.append(sequence if copy.subject is not None else 0)
            item.stored(numbers)


def _sum(records: list[ledger.Record]) -> ledger.Record | None:
    if len(records) == 1:
        found = records[0]
    else:
        found = ledger.Record()
        found.acked, found.stored = {}, {}
        for record in records:
            for key, sequences in record.acked.items():
                found.acked.setdefault(key, []).extend(sequences)
            for key, count in record.stored.items():
                found.stored[key] = found.stored.get(key, 0) + count
            found.subscribed += record.subscribed
            found.unsubscribed += record.unsubscribed
            found.works += record.works
            found.consumed += record.consumed
            found.idle += record.idle
            found.dropped += record.dropped
    return found if found != ledger.Record() else None
