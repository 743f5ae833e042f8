"""Messages with a delivery time: stored separately in the log, and moved to their destination when due.

They are released in the order of their delivery times, then of their arrival, one batch at a time. A message
that is due when it arrives, or arrives while earlier ones cannot be released, therefore overtakes none.

The bodies stay in the log. The data that decide which identity may list or cancel a message are in memory, so
a request reads only messages that the caller may see.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from muster.core import errors
from muster.message import destinations, messages
from muster.message.dispatcher import lifetime as lifetime_
from muster.message.dispatcher.log import journal, ledger, message_log, pages

if TYPE_CHECKING:
    from muster.message.dispatcher import delivery

BATCH_MESSAGES: Final = 500  # released at one time
BATCH_BYTES: Final = 1 << 20  # bytes stored at one time
RETRY_MS: Final = 1000
LOOK_S: Final = 30.0  # between looks at the wall clock, which may be set meanwhile


class DelayedHeader(msgspec.Struct, frozen=True):
    destination: str
    sender: str  # the identity
    id: str | None

    @classmethod
    def from_meta(cls, meta: messages.MessageMeta) -> DelayedHeader:
        # An origin is that of a client id, or that of a connection.
        identity, colon, _ = (meta.origin or "").partition(":")
        sender = identity if colon else identity.rpartition("-")[0]
        return cls(sys.intern(meta.destination or ""), sys.intern(sender), meta.message_id)


class DelayedMessages:
    def __init__(
        self,
        log: message_log.MessageLog,
        lifetime: lifetime_.DispatcherLifetime,
        delivery_queue: delivery.DeliveryQueue,
    ) -> None:
        self._log = log
        self._lifetime = lifetime
        self._delivery = delivery_queue
        self._waiting: list[tuple[int, int]] = []  # delivery time, number
        self._headers: dict[int, DelayedHeader] = {}  # by number
        self._timer: asyncio.TimerHandle | None = None
        self._is_releasing = False
        self._retry_at_ms = 0  # nothing is released before, because the log was full

    async def recover(self) -> None:
        """Read the delayed messages from the log."""
        done = self._log.ledger.delayed_done
        async for together in self._log.reader.read(self._log.subjects.delay):
            for number, _, held in together:
                if number in done:
                    await self.delete([number])
                else:
                    self._insert(messages.decode_meta(held.raw), number)
        done.difference_update([number for number in done if not number & pages.SHARED])
        self._schedule()

    def add(self, meta: messages.MessageMeta, number: int) -> None:
        self._insert(meta, number)
        self._schedule()

    def _insert(self, meta: messages.MessageMeta, number: int) -> None:
        heapq.heappush(self._waiting, (meta.delivery_time_ms, number))
        self._headers[number] = DelayedHeader.from_meta(meta)

    def waiting(self) -> list[tuple[int, int]]:
        """Delivery time and number of each message, in any order."""
        return self._waiting.copy()

    def header(self, number: int) -> DelayedHeader | None:
        """None: it was released or cancelled."""
        return self._headers.get(number)

    def withdraw(self, number: int) -> bool:
        """Remove a message that is not due yet. The caller records that in the log."""
        left = [entry for entry in self._waiting if entry[1] != number]
        was_waiting = len(left) < len(self._waiting)
        if was_waiting:
            heapq.heapify(left)
            self._waiting = left
            del self._headers[number]
            self._schedule()
        return was_waiting

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self.stop()
        if self._waiting and not self._is_releasing:
            wait_ms = max(self._waiting[0][0], self._retry_at_ms) - messages.now_ms()
            self._timer = self._lifetime.loop.call_later(
                min(max(0.0, wait_ms / 1000), LOOK_S), self._start_release
            )

    def _start_release(self) -> None:
        self._is_releasing = True
        self._lifetime.spawn(self._release())

    async def _release(self) -> None:
        while batch := await self._take_due():
            if not await self._store_copies(batch):
                self._retry_at_ms = messages.now_ms() + RETRY_MS
                for entry in batch:
                    heapq.heappush(self._waiting, entry)
                break
            for _, number in batch:
                del self._headers[number]
            self._lifetime.spawn(self.delete([number for _, number in batch]))
        self._is_releasing = False
        self._schedule()

    async def _take_due(self) -> dict[tuple[int, int], journal.JournalMessage | None]:
        """The messages to release next, with the copies to store, limited to one batch."""
        batch: dict[tuple[int, int], journal.JournalMessage | None] = {}
        total = 0
        while (
            self._waiting
            and self._waiting[0][0] <= messages.now_ms()
            and len(batch) < BATCH_MESSAGES
            and total <= BATCH_BYTES
        ):
            due_ms, number = heapq.heappop(self._waiting)
            held = await self._log.reader.message(self._log.subjects.delay, number)
            total += len(held.data) if held is not None else 0
            batch[due_ms, number] = self._copy(number, held) if held is not None else None
        return batch

    def _copy(self, number: int, held: pages.PagedMessage) -> journal.JournalMessage | None:
        meta = messages.decode_meta(held.raw)
        if meta.destination is None:
            return None
        meta.sequence = number  # subscriptions created later do not receive it
        raw = messages.encode_meta(meta).decode()
        target = destinations.Destination.parse(meta.destination)
        return self._delivery.copy_to(target, meta, raw, held.data, republish=True, due=True)

    async def delete(self, released: list[int]) -> None:
        """The messages that Muster 0.1 has stored are in pages of their own. Checkpoints delete others."""
        for number in released:
            if not number & pages.SHARED:
                await self._log.stream.delete(pages.sequence_of(number))
                self._log.ledger.delayed_done.discard(number)

    async def _store_copies(self, batch: dict[tuple[int, int], journal.JournalMessage | None]) -> bool:
        """Whether there was room for them."""
        copies = [copy for copy in batch.values() if copy is not None]
        record = ledger.LogRecord(
            acked={ledger.DELAY_KEY: [number for _, number in batch]}, stored=journal.count_by_queue(copies)
        )
        try:
            await self._log.store(journal.JournalItem(copies, record))
        except errors.LimitExceeded:  # the log is full
            return False
        return True
