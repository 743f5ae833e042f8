"""What a connection says itself, over a bus that does not hear itself: so no copy comes back to be dropped.

The dispatcher stores such a message of a topic and leaves the saying to its sender: at once when it is
stored, or, if its delivery is delayed, when the dispatcher tells that its time has come.  Until then it is
kept here, if there is room.  What is not kept the dispatcher says, and then the copy travels.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final

import msgspec

from muster.core import errors
from muster.message import destinations, messages, protocol

if TYPE_CHECKING:
    from muster.message.client import dispatcher_connection as connection_

RETAINED_MAX: Final = 1000  # delayed messages of one connection,
RETAINED_BYTES_MAX: Final = 1 << 20  # and their bytes
LATE_MS: Final = 60_000  # the dispatcher has said it by then

Delayed = dict[
    str, tuple[int, protocol.SendMessage]
]  # by the mark in its header: when it is due, and what it is


class TopicPublisher:
    def __init__(self, connection: connection_.DispatcherConnection) -> None:
        self._connection = connection
        self._retained: Delayed = {}
        self._retained_bytes = 0

    def prepare(self, sends: list[protocol.SendMessage]) -> tuple[list[protocol.SendMessage], Delayed]:
        """What is to be stored, and of that what may be said later."""
        without_echo = self._connection.without_echo
        to_store: list[protocol.SendMessage] = []
        later: Delayed = {}
        for send in sends:
            delayed = messages.MAY_BE_DELAYED in send.meta
            if (without_echo or delayed) and not destinations.Destination.parse(send.destination).is_queue:
                meta = messages.decode_meta(send.meta)
                if meta.delivery_time_ms:
                    mark = meta.mark = secrets.token_hex(8)
                    send = msgspec.structs.replace(send, meta=messages.encode_meta(meta).decode())
                    later[mark] = (meta.delivery_time_ms, send)
                elif without_echo:
                    send = msgspec.structs.replace(send, published_by_sender=True)
            to_store.append(send)
        return to_store, later

    async def publish_stored(self, sends: list[protocol.SendMessage], later: Delayed) -> None:
        for mark, (due_ms, send) in later.items():
            self._retain(mark, due_ms, send)
        for send in sends:
            if send.published_by_sender:
                try:
                    await self._publish(send)
                except errors.MusterError as error:  # it is stored, so it was accepted
                    self._connection.report(error)

    async def publish_due(self, number: int, mark: str) -> None:
        """The time of a delayed message has come: say it, or tell that we do not have it."""
        published = False
        if (retained := self._discard(mark)) is not None and self._connection.without_echo:
            try:
                await self._publish(retained)
                published = True
            except errors.MusterError as error:
                self._connection.report(error)
        await self._connection.notify(protocol.DelayedPublished(self._connection.name, number, published))

    async def _publish(self, send: protocol.SendMessage) -> None:
        subject = destinations.Destination.parse(send.destination).subject
        headers = {messages.HEADER: send.meta, protocol.LOGGED: "0"}
        await self._connection.publish_bus.publish(subject, send.data, headers=headers)

    def _retain(self, mark: str, due_ms: int, send: protocol.SendMessage) -> None:
        if len(self._retained) >= RETAINED_MAX or self._retained_bytes >= RETAINED_BYTES_MAX:
            oldest_ms = time.time_ns() // 1_000_000 - LATE_MS
            for other in [other for other, (due, _) in self._retained.items() if due < oldest_ms]:
                self._discard(other)
        if len(self._retained) < RETAINED_MAX and self._retained_bytes + len(send.data) <= RETAINED_BYTES_MAX:
            self._retained[mark] = (due_ms, send)
            self._retained_bytes += len(send.data)

    def _discard(self, mark: str) -> protocol.SendMessage | None:
        _, send = self._retained.pop(mark, (0, None))
        if send is not None:
            self._retained_bytes -= len(send.data)
        return send
