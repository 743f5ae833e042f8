"""Publishes a connection's own topic messages over a bus connection without echo, so that no copy comes back.

The dispatcher stores such a message and leaves the publishing to its sender: as soon as it is stored or, if
its delivery is delayed, when the dispatcher reports that it is due. Until then it is retained here, if there
is room. The dispatcher publishes messages that are not retained, and then the copy does come back.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final

import msgspec

from muster.core import errors
from muster.message import destinations, messages, protocol

if TYPE_CHECKING:
    from muster.message.client import dispatcher_connection

RETAINED_MAX: Final = 1000  # delayed messages of a connection
RETAINED_BYTES_MAX: Final = 1 << 20  # bytes of these
LATE_MS: Final = 60_000  # the dispatcher has published it by then

Delayed = dict[str, tuple[int, protocol.SendMessage]]  # by the mark in the header: delivery time and message


def may_retain(send: protocol.SendMessage) -> bool:
    """Whether it is a delayed topic message, which its connection may have to publish when it is due."""
    return (
        messages.MAY_BE_DELAYED in send.meta and not destinations.Destination.parse(send.destination).is_queue
    )


class TopicPublisher:
    def __init__(self, connection: dispatcher_connection.DispatcherConnection) -> None:
        self._connection = connection
        self._retained: Delayed = {}
        self._retained_bytes = 0

    def prepare(self, sends: list[protocol.SendMessage]) -> tuple[list[protocol.SendMessage], Delayed]:
        """The messages to store, and those of them to retain until they are due."""
        without_echo = self._connection.without_echo
        to_store: list[protocol.SendMessage] = []
        later: Delayed = {}
        for send in sends:
            if may_retain(send) or (
                without_echo and not destinations.Destination.parse(send.destination).is_queue
            ):
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
                except errors.MusterError as error:  # stored, so it is accepted
                    self._connection.report(error)

    async def publish_due(self, number: int, mark: str) -> None:
        """A delayed message is due: publish it, or report that it is not retained."""
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
