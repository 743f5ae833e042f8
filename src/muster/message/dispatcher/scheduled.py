"""Lists and cancels messages with a delivery time in the future."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from muster.core import errors
from muster.message import destinations, listings, messages, protocol
from muster.message.dispatcher import delayed_messages, state
from muster.message.dispatcher.log import journal, ledger, pages

LIST_MAX: Final = 1000


class ScheduledMessages:
    def __init__(self, shared: state.DispatcherState, delays: delayed_messages.DelayedMessages) -> None:
        self._state = shared
        self._delays = delays

    async def rows(self, reader: str, request: protocol.ListScheduled) -> protocol.DispatcherReply:
        only = request.destination and destinations.Destination.parse(request.destination)
        rows: list[listings.ScheduledRow] = []
        after_ms, after_number = request.after
        for due_ms, number in self._delays.after((after_ms, 0)):
            if (due_ms, self._public_number(number)) <= (after_ms, after_number):
                continue
            if len(rows) >= min(max(request.limit, 1), LIST_MAX):
                break
            entry = await self._get(number)
            if entry is None:
                continue
            meta, size = entry
            destination = destinations.Destination.parse(meta.destination or "")
            if (not only or destination == only) and self._may_see(reader, meta, destination):
                rows.append(_row(self._public_number(number), meta, size))
        return protocol.DispatcherReply(scheduled=rows)

    def _public_number(self, number: int) -> int:
        """The number for users: unique in all partitions, in the same order in this one."""
        return number * self._state.partition_count + self._state.partition

    async def _get(self, number: int) -> tuple[messages.MessageMeta, int] | None:
        """The header and the size of the body; None if it was released meanwhile."""
        sequence = pages.sequence_of(number)
        try:
            page = await self._state.stream.get(sequence)
        except errors.NotFound:
            return None
        held = dict(pages.read(sequence, page.data))[number]
        meta = messages.decode_meta(held.raw)
        return meta, meta.large.size if meta.large is not None else len(held.data)

    def _may_see(
        self, reader: str, meta: messages.MessageMeta, destination: destinations.Destination
    ) -> bool:
        if _sender(meta) == reader:
            return True
        if destination.is_queue:
            return self._state.may_browse(reader, destination.name)
        return not destination.is_temporary and self._state.may_subscribe(reader, destination.name)

    async def cancel(self, caller: str, request: protocol.CancelScheduled) -> protocol.DispatcherReply:
        if bool(request.id) == bool(request.number):
            raise errors.InvalidInput("a scheduled message is named by its number or its id")
        count = 0
        async for number, meta in self._matching(request):
            destination = destinations.Destination.parse(meta.destination or "")
            self._check_may_cancel(caller, meta, destination)
            if not self._delays.withdraw(number):
                continue  # it is due
            try:
                record = ledger.LogRecord(acked={ledger.DELAY_KEY: [number]})
                await self._state.store(journal.JournalItem([], record))
            except errors.MusterError:
                self._delays.add(meta.delivery_time_ms, number)
                raise
            await self._state.stream.delete(pages.sequence_of(number))
            self._state.ledger.delayed_done.discard(number)
            count += 1
        return protocol.DispatcherReply(count=count)

    async def _matching(
        self, request: protocol.CancelScheduled
    ) -> AsyncIterator[tuple[int, messages.MessageMeta]]:
        for _, number in self._delays.after((0, 0)):
            if request.number and self._public_number(number) != request.number:
                continue
            entry = await self._get(number)
            if entry is not None and (request.number or entry[0].message_id == request.id):
                yield number, entry[0]

    def _check_may_cancel(
        self, caller: str, meta: messages.MessageMeta, destination: destinations.Destination
    ) -> None:
        if _sender(meta) == caller:
            return
        if destination.is_queue:
            self._state.check_queue(caller, "admin", destination.name)
        elif not self._state.may(caller, "subscriptions", "end"):
            raise errors.Forbidden(f"{caller} may not cancel messages that another identity scheduled")


def _sender(meta: messages.MessageMeta) -> str:
    """The identity in an origin: that of a client id, or that of a connection."""
    identity, colon, _ = (meta.origin or "").partition(":")
    return identity if colon else identity.rpartition("-")[0]


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
