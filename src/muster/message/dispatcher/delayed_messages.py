"""Messages whose time has not come: they stand aside in the log, and go to their destination when it has."""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Final

from muster.core import errors
from muster.message import destinations, messages, protocol
from muster.message.dispatcher import state
from muster.message.dispatcher.log import journal, ledger, pages

if TYPE_CHECKING:
    from muster.message.dispatcher import delivery

TOGETHER: Final = 500  # due at one time,
TOGETHER_BYTES: Final = 1 << 20  # and stored at one time
AGAIN_MS: Final = 1000


class DelayedMessages:
    def __init__(self, over: state.DispatcherState, deliver: delivery.DeliveryQueue) -> None:
        self._desk = over
        self._deliver = deliver
        self._waiting: list[tuple[int, int]] = []  # due, number
        self._alarm: asyncio.TimerHandle | None = None
        self._turn = asyncio.Lock()

    async def recover(self) -> None:
        """What waits in the log. What a dispatcher before us released and did not delete goes now."""
        done = self._desk.ledger.delayed_done
        async for page in self._desk.read(1, protocol.DELAY):
            for number, held in pages.read(page.sequence, page.data):
                if number in done:
                    await self._desk.stream.delete(page.sequence)
                else:
                    due = messages.decode_meta(held.raw).delivery_time_ms
                    heapq.heappush(self._waiting, (due, number))
        done.clear()
        self._set_alarm()

    def add(self, due_ms: int, number: int) -> None:
        heapq.heappush(self._waiting, (due_ms, number))
        self._set_alarm()

    def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set_alarm(self) -> None:
        self.stop()
        if self._waiting:
            wait_s = max(0.0, (self._waiting[0][0] - self._desk.now_ms()) / 1000)
            self._alarm = self._desk.loop.call_later(wait_s, self._due)

    def _due(self) -> None:
        now = self._desk.now_ms()
        due: list[int] = []
        while self._waiting and self._waiting[0][0] <= now and len(due) < TOGETHER:
            due.append(heapq.heappop(self._waiting)[1])
        if due:
            self._desk.spawn(self._release(due))
        self._set_alarm()

    async def _release(self, due: list[int]) -> None:
        """Those that came due before go first: a session's messages keep their order."""
        done: list[int] = []
        async with self._turn:
            while due:
                released = await self._read(due)
                del due[: len(released)]
                if await self._pass_on(released):
                    done += released
        for number in done:
            await self._desk.stream.delete(pages.sequence_of(number))
            self._desk.ledger.delayed_done.discard(number)

    async def _read(self, due: list[int]) -> dict[int, journal.JournalMessage | None]:
        """Of the first of them, as many as are stored at one time, what goes where."""
        copies: dict[int, journal.JournalMessage | None] = {}
        total = 0
        for number in due:
            sequence = pages.sequence_of(number)
            page = await self._desk.stream.get(sequence)
            held = dict(pages.read(sequence, page.data))[number]
            meta = messages.decode_meta(held.raw)
            copies[number] = None
            if meta.destination is not None:
                meta.sequence = number  # subscriptions made since do not get it
                raw = messages.encode_meta(meta).decode()
                target = destinations.Destination.parse(meta.destination)
                copies[number] = self._deliver.copy_to(target, meta, raw, held.data, republish=True, due=True)
            total += len(held.data)
            if total > TOGETHER_BYTES:
                break
        return copies

    async def _pass_on(self, released: dict[int, journal.JournalMessage | None]) -> bool:
        """Whether there was room for them."""
        copies = [copy for copy in released.values() if copy is not None]
        record = ledger.LogRecord(
            acked={ledger.DELAY_KEY: list(released)}, stored=journal.count_by_queue(copies)
        )
        try:
            await self._desk.store(journal.JournalItem(copies, record))
        except errors.LimitExceeded:  # not a byte more fits
            for number in released:
                self.add(self._desk.now_ms() + AGAIN_MS, number)
            return False
        return True
