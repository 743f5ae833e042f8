"""Lists and cancels messages with a delivery time in the future."""

from __future__ import annotations

import asyncio
import functools
import heapq
from typing import Final

from muster.core import errors
from muster.message import destinations, listings, messages, protocol
from muster.message.dispatcher import delayed_messages, rights
from muster.message.dispatcher.log import journal, ledger, message_log

LIST_MAX: Final = 1000  # messages of one reply; each is read from the log
STEP: Final = 10_000  # messages compared at one time


class ScheduledMessages:
    def __init__(
        self,
        log: message_log.MessageLog,
        message_rights: rights.MessageRights,
        delays: delayed_messages.DelayedMessages,
    ) -> None:
        self._log = log
        self._rights = message_rights
        self._delays = delays

    async def rows(self, reader: str, request: protocol.ListScheduled) -> protocol.DispatcherReply:
        rows: list[listings.ScheduledRow] = []
        after, limit = request.after, min(max(request.limit, 1), LIST_MAX)
        only = request.destination and destinations.Destination.parse(request.destination)
        while not rows and (places := await self._visible(reader, only or None, after, limit)):
            for due_ms, number in places:
                after = (due_ms, self._public_number(number))
                if (entry := await self._get(number)) is not None:
                    rows.append(_row(self._public_number(number), *entry))
        return protocol.DispatcherReply(scheduled=rows)

    async def _visible(
        self, reader: str, only: destinations.Destination | None, after: tuple[int, int], limit: int
    ) -> list[tuple[int, int]]:
        """Delivery time and number of the next messages that the reader may see, from memory."""

        @functools.cache
        def is_selected(destination: str) -> bool:
            return only is None or destinations.Destination.parse(destination) == only

        @functools.cache
        def may_see(destination: str) -> bool:
            return self._may_see(reader, destinations.Destination.parse(destination))

        visible = []
        for at, (due_ms, number) in enumerate(self._delays.waiting(), 1):
            if at % STEP == 0:
                await asyncio.sleep(0)  # other requests have their turn
            header = self._delays.header(number)
            if (
                header is not None
                and (due_ms, self._public_number(number)) > after
                and is_selected(header.destination)
                and (header.sender == reader or may_see(header.destination))
            ):
                visible.append((due_ms, number))
        return heapq.nsmallest(limit, visible)

    def _public_number(self, number: int) -> int:
        """The number for users: unique in all partitions, in the same order in this one."""
        return number * self._log.partition_count + self._log.partition

    async def _get(self, number: int) -> tuple[messages.MessageMeta, int] | None:
        """The header and the size of the body; None if it was released meanwhile."""
        held = await self._log.reader.message(self._log.subjects.delay, number)
        if held is None:
            return None
        meta = messages.decode_meta(held.raw)
        return meta, meta.large.size if meta.large is not None else len(held.data)

    def _may_see(self, reader: str, destination: destinations.Destination) -> bool:
        if destination.is_queue:
            return self._rights.may_browse(reader, destination.name)
        return not destination.is_temporary and self._rights.may_subscribe(reader, destination.name)

    async def cancel(self, caller: str, request: protocol.CancelScheduled) -> protocol.DispatcherReply:
        if bool(request.id) == bool(request.number):
            raise errors.InvalidInput("a scheduled message is named by its number or its id")
        count = 0
        for number, header in await self._matching(request):
            self._check_may_cancel(caller, header)
            entry = await self._get(number)
            if entry is None or not self._delays.withdraw(number):
                continue  # it is due
            try:
                record = ledger.LogRecord(acked={ledger.DELAY_KEY: [number]})
                await self._log.store(journal.JournalItem([], record))
            except errors.MusterError:
                self._delays.add(entry[0], number)
                raise
            await self._delays.delete([number])
            count += 1
        return protocol.DispatcherReply(count=count)

    async def _matching(
        self, request: protocol.CancelScheduled
    ) -> list[tuple[int, delayed_messages.DelayedHeader]]:
        matching = []
        if request.number:
            number, partition = divmod(request.number, self._log.partition_count)
            if partition == self._log.partition and (header := self._delays.header(number)) is not None:
                matching.append((number, header))
            return matching
        for at, (_, number) in enumerate(self._delays.waiting(), 1):
            if at % STEP == 0:
                await asyncio.sleep(0)
            header = self._delays.header(number)
            if header is not None and header.id == request.id:
                matching.append((number, header))
        return matching

    def _check_may_cancel(self, caller: str, header: delayed_messages.DelayedHeader) -> None:
        if header.sender == caller:
            return
        destination = destinations.Destination.parse(header.destination)
        if destination.is_queue:
            self._rights.check_queue(caller, "admin", destination.name)
        elif not self._rights.may(caller, "subscriptions", "end"):
            raise errors.Forbidden(f"{caller} may not cancel messages that another identity scheduled")


def _row(number: int, meta: messages.MessageMeta, size: int) -> listings.ScheduledRow:
    return listings.ScheduledRow(
        number=number,
        id=meta.message_id,
        destination=meta.destination or "",
        delivery_time_ms=meta.delivery_time_ms,
        timestamp_ms=meta.timestamp_ms,
        expiration_ms=meta.expiration_ms,
        priority=meta.priority,
        bytes=size,
        properties=meta.properties,
    )
