"""Messages with a delivery time: stored separately in the log, and moved to their destination when due."""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Final

from muster.core import errors
from muster.message import destinations, messages
from muster.message.dispatcher import state
from muster.message.dispatcher.log import journal, ledger, pages

if TYPE_CHECKING:
    from muster.message.dispatcher import delivery

BATCH_MESSAGES: Final = 500  # released at one time
BATCH_BYTES: Final = 1 << 20  # bytes stored at one time
RETRY_MS: Final = 1000


class DelayedMessages:
    def __init__(self, shared: state.DispatcherState, delivery_queue: delivery.DeliveryQueue) -> None:
        self._state = shared
        self._delivery = delivery_queue
        self._waiting: list[tuple[int, int]] = []  # delivery time, number
        self._timer: asyncio.TimerHandle | None = None
        self._release_lock = asyncio.Lock()

    async def recover(self) -> None:
        """Read the delayed messages from the log, and delete those that an earlier dispatcher released but
        did not delete.
        """
        done = self._state.ledger.delayed_done
        async for page in self._state.read(1, self._state.subjects.delay):
            for number, held in pages.read(page.sequence, page.data):
                if number in done:
                    await self._state.stream.delete(page.sequence)
                else:
                    due = messages.decode_meta(held.raw).delivery_time_ms
                    heapq.heappush(self._waiting, (due, number))
        done.clear()
        self._schedule()

    def add(self, due_ms: int, number: int) -> None:
        heapq.heappush(self._waiting, (due_ms, number))
        self._schedule()

    def after(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """Delivery time and number of the messages after ``place``, in order."""
        return sorted(entry for entry in self._waiting if entry > place)

    def withdraw(self, number: int) -> bool:
        """Remove a message that is not due yet. The caller records that in the log."""
        left = [entry for entry in self._waiting if entry[1] != number]
        was_waiting = len(left) < len(self._waiting)
        if was_waiting:
            heapq.heapify(left)
            self._waiting = left
            self._schedule()
        return was_waiting

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        self.stop()
        if self._waiting:
            wait_s = max(0.0, (self._waiting[0][0] - self._state.now_ms()) / 1000)
            self._timer = self._state.loop.call_later(wait_s, self._release_due)

    def _release_due(self) -> None:
        now = self._state.now_ms()
        due: list[int] = []
        while self._waiting and self._waiting[0][0] <= now and len(due) < BATCH_MESSAGES:
            due.append(heapq.heappop(self._waiting)[1])
        if due:
            self._state.spawn(self._release(due))
        self._schedule()

    async def _release(self, due: list[int]) -> None:
        """Release in order of delivery time, so that the messages of a session keep their order."""
        done: list[int] = []
        async with self._release_lock:
            while due:
                released = await self._read(due)
                del due[: len(released)]
                if await self._store_copies(released):
                    done += released
        for number in done:
            await self._state.stream.delete(pages.sequence_of(number))
            self._state.ledger.delayed_done.discard(number)

    async def _read(self, due: list[int]) -> dict[int, journal.JournalMessage | None]:
        """The copies to store for the first of them, limited to one batch."""
        copies: dict[int, journal.JournalMessage | None] = {}
        total = 0
        for number in due:
            sequence = pages.sequence_of(number)
            page = await self._state.stream.get(sequence)
            held = dict(pages.read(sequence, page.data))[number]
            meta = messages.decode_meta(held.raw)
            copies[number] = None
            if meta.destination is not None:
                meta.sequence = number  # subscriptions created later do not receive it
                raw = messages.encode_meta(meta).decode()
                target = destinations.Destination.parse(meta.destination)
                copies[number] = self._delivery.copy_to(
                    target, meta, raw, held.data, republish=True, due=True
                )
            total += len(held.data)
            if total > BATCH_BYTES:
                break
        return copies

    async def _store_copies(self, released: dict[int, journal.JournalMessage | None]) -> bool:
        """Whether there was room for them."""
        copies = [copy for copy in released.values() if copy is not None]
        record = ledger.LogRecord(
            acked={ledger.DELAY_KEY: list(released)}, stored=journal.count_by_queue(copies)
        )
        try:
            await self._state.store(journal.JournalItem(copies, record))
        except errors.LimitExceeded:  # the log is full
            for number in released:
                self.add(self._state.now_ms() + RETRY_MS, number)
            return False
        return True
