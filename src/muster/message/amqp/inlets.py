"""Where clients send: the ends of their links, and the way of a message from there.

Credit is given in windows and withheld while what came before is still on its way; that slows a client
down.  A light message of a topic goes `codec.quick`'s way, unread, and is accepted when the bus has it.
Others are read in full, go to the dispatcher, and are accepted when it says so.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from muster.core import errors
from muster.message import destinations, faults, messages, protocol
from muster.message.amqp import codec, engine

if TYPE_CHECKING:
    from muster.message.amqp import bridge

CREDIT: Final = 1000
MESSAGE_BYTES_MAX: Final = 900 << 10  # of an AMQP message: it has to fit into one of the bus


class Inlet:
    """``destination`` None: each message says where it goes. ``coordinator``: of transactions."""

    def __init__(
        self,
        owner: bridge.Bridge,
        link: Any,
        destination: destinations.Destination | None,
        *,
        coordinator: bool = False,
    ) -> None:
        self._bridge = owner
        self._wrapper = link
        self.pointer: engine.Pointer = link._impl
        self._destination = destination
        self._coordinator = coordinator
        straight = destination is not None and not destination.is_queue and not coordinator
        self._subject = destination.subject if destination is not None and straight else None
        self._quick = codec.Quick()
        self._credit = 0
        self.under_way = 0
        self.grant()

    def grant(self) -> None:
        """A new window of credit, if half of the last is used and not too much is under way."""
        if (
            self._credit <= CREDIT // 2
            and self.under_way <= CREDIT // 2
            and not self._bridge.slowed(self._destination)
        ):
            engine.link_flow(self.pointer, CREDIT - self._credit)
            self._credit = CREDIT

    def arrived(self, delivery: engine.Pointer) -> None:
        data = engine.receive(self.pointer, delivery)
        if data is None:
            if engine.pending_bytes(delivery) > 4 * MESSAGE_BYTES_MAX:  # it would fill the session's window
                self._bridge.close_link(
                    self._wrapper,
                    "amqp:link:message-size-exceeded",
                    f"the most is {MESSAGE_BYTES_MAX} bytes",
                )
            return
        self._credit -= 1
        state = engine.remote_state(delivery)
        if self._subject is not None and state != engine.TRANSACTIONAL and len(data) <= MESSAGE_BYTES_MAX:
            plain = self._quick(data)
            if plain is not None:
                at, start, kind = plain
                raw = codec.foreign(data, at, kind, self._bridge.origin_token)
                self.under_way += 1
                self._bridge.straight.add(self, delivery, self._subject, data[start:], raw)
                return
        try:
            self._long_way(delivery, data, state)
        except errors.MusterError as error:
            if state == engine.TRANSACTIONAL:
                self._bridge.transactions.spoil(delivery, error)
            self._bridge.reject(delivery, error)
        if self._credit <= CREDIT // 2:
            self.grant()

    def _long_way(self, delivery: engine.Pointer, data: bytes, state: int) -> None:
        if len(data) > MESSAGE_BYTES_MAX:
            raise errors.LimitExceeded(f"a message of {len(data)} bytes: the most is {MESSAGE_BYTES_MAX}")
        transactions = self._bridge.transactions
        if self._coordinator:
            transactions.coordinate(delivery, data)
            return
        now_ms = time.time_ns() // 1_000_000
        meta, body, destination = codec.decode(data, self._destination, now_ms)
        if destination is None:
            raise faults.InvalidDestination("the message says no address, and its link has none")
        if self._destination is None:
            self._bridge.check_may_send(destination)
        meta.origin = self._bridge.jms.origin
        raw = messages.encode_meta(meta).decode()
        send = protocol.Send(str(destination), raw, body)
        if state == engine.TRANSACTIONAL:
            transactions.send(delivery, send)
            return
        self.under_way += 1
        if not destination.is_queue and not meta.persistent and meta.delivery_time_ms <= now_ms:
            self._bridge.straight.add(self, delivery, destination.subject, body, raw)
            return
        future = self._bridge.jms.submit([send])
        future.add_done_callback(lambda done: self._stored(delivery, done))

    def _stored(self, delivery: engine.Pointer, done: asyncio.Future[None]) -> None:
        if done.cancelled() or self._bridge.ended:
            return
        error = done.exception()
        if isinstance(error, errors.MusterError):
            self._bridge.reject(delivery, error)
        else:
            engine.accept(delivery)
        self.passed()

    def passed(self) -> None:
        """One that was under way has arrived."""
        self.under_way -= 1
        if self._credit <= CREDIT // 2:
            self.grant()
        self._bridge.flush_soon()


class Straight:
    """Non-persistent messages of topics, on their way to the bus in order."""

    def __init__(self, owner: bridge.Bridge) -> None:
        self._bridge = owner
        self._waiting: list[tuple[Inlet, engine.Pointer, str, bytes, str]] = []
        self._wake = asyncio.Event()

    def add(self, inlet: Inlet, delivery: engine.Pointer, subject: str, body: bytes, raw: str) -> None:
        self._waiting.append((inlet, delivery, subject, body, raw))
        self._wake.set()

    async def run(self) -> None:
        publish = self._bridge.jms.bus.publish
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            for inlet, delivery, subject, body, raw in waiting:
                try:
                    await publish(subject, body, headers={messages.HEADER: raw})
                except errors.MusterError as error:
                    self._bridge.reject(delivery, error)
                else:
                    engine.accept(delivery)
                inlet.under_way -= 1
            for inlet in {one[0] for one in waiting}:
                inlet.grant()
            self._bridge.flush_soon()
