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

KEPT_MAX: Final = 1000  # delayed messages of one connection,
KEPT_BYTES_MAX: Final = 1 << 20  # and their bytes
LATE_MS: Final = 60_000  # the dispatcher has said it by then

Later = dict[
    str, tuple[int, protocol.SendMessage]
]  # by the mark in its header: when it is due, and what it is


class TopicPublisher:
    def __init__(self, connection: connection_.DispatcherConnection) -> None:
        self._connection = connection
        self._kept: Later = {}
        self._kept_bytes = 0

    def sort(self, sends: list[protocol.SendMessage]) -> tuple[list[protocol.SendMessage], Later]:
        """What is to be stored, and of that what may be said later."""
        quiet = self._connection.is_quiet
        to_store: list[protocol.SendMessage] = []
        later: Later = {}
        for send in sends:
            delayed = messages.MAY_BE_DELAYED in send.meta
            if (quiet or delayed) and not destinations.Destination.parse(send.destination).is_queue:
                meta = messages.decode_meta(send.meta)
                if meta.delivery_time_ms:
                    mark = meta.mark = secrets.token_hex(8)
                    send = msgspec.structs.replace(send, meta=messages.encode_meta(meta).decode())
                    later[mark] = (meta.delivery_time_ms, send)
                elif quiet:
                    send = msgspec.structs.replace(send, spoken=True)
            to_store.append(send)
        return to_store, later

    async def stored(self, sends: list[protocol.SendMessage], later: Later) -> None:
        for mark, (due_ms, send) in later.items():
            self._keep(mark, due_ms, send)
        for send in sends:
            if send.spoken:
                try:
                    await self._say(send)
                except errors.MusterError as error:  # it is stored, so it was accepted
                    self._connection.report(error)

    async def due(self, number: int, mark: str) -> None:
        """The time of a delayed message has come: say it, or tell that we do not have it."""
        published = False
        if (kept := self._drop(mark)) is not None and self._connection.is_quiet:
            try:
                await self._say(kept)
                published = True
            except errors.MusterError as error:
                self._connection.report(error)
        await self._connection.tell(protocol.DelayedPublished(self._connection.name, number, published))

    async def _say(self, send: protocol.SendMessage) -> None:
        subject = destinations.Destination.parse(send.destination).subject
        headers = {messages.HEADER: send.meta, protocol.LOGGED: "0"}
        await self._connection.speaks.publish(subject, send.data, headers=headers)

    def _keep(self, mark: str, due_ms: int, send: protocol.SendMessage) -> None:
        if len(self._kept) >= KEPT_MAX or self._kept_bytes >= KEPT_BYTES_MAX:
            oldest_ms = time.time_ns() // 1_000_000 - LATE_MS
            for other in [other for other, (due, _) in self._kept.items() if due < oldest_ms]:
                self._drop(other)
        if len(self._kept) < KEPT_MAX and self._kept_bytes + len(send.data) <= KEPT_BYTES_MAX:
            self._kept[mark] = (due_ms, send)
            self._kept_bytes += len(send.data)

    def _drop(self, mark: str) -> protocol.SendMessage | None:
        _, send = self._kept.pop(mark, (0, None))
        if send is not None:
            self._kept_bytes -= len(send.data)
        return send
