"""Large messages: passed on in parts, so that a gateway holds a small part of each at a time.

While a large message arrives, its body is stored in chunks. Everything that the client sends meanwhile waits
until it is complete, so that the order of messages is preserved.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from muster.core import errors
from muster.message import destinations, messages, protocol
from muster.message.client import bodies

if TYPE_CHECKING:
    from collections.abc import Callable

    from muster.gateways.amqp import connection
    from muster.gateways.amqp.links import producers


class IncomingLargeMessage:
    """A large message that is arriving. ``identity``: its number and tag. ``begin``: its meta and the
    beginning of its body, or why it is refused.
    """

    def __init__(
        self,
        producer: producers.ProducerLink,
        owner: connection.AmqpConnection,
        identity: tuple[int, bytes | None],
        begin: tuple[messages.MessageMeta, bytes] | errors.MusterError,
    ) -> None:
        self._producer = producer
        self._connection = owner
        self._number, self._tag = identity
        self._upload: bodies.BodyUpload | None = None
        self._waiting = bytearray()  # not stored yet
        self._ended: tuple[bool, bytes | None] | None = None  # settled, state
        self._aborted = False
        self._wake = asyncio.Event()
        self._error: errors.MusterError | None = None
        self.stored = asyncio.Event()
        if isinstance(begin, errors.MusterError):
            self._error = begin
        else:
            self._meta, first = begin
            self._put(first)

    def add(self, part: bytes) -> None:
        if self._error is None:
            self._put(part)

    def _put(self, part: bytes) -> None:
        self._waiting += part
        self._connection.add_in_transit(len(part))
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def end(self, settled: bool, state: bytes | None, *, aborted: bool) -> None:
        """The last part has arrived, or none will follow."""
        self._ended, self._aborted = (settled, state), aborted
        self._wake.set()

    async def run(self) -> None:
        """Store the body while it arrives."""
        try:
            while self._ended is None or (self._waiting and not self._aborted):
                # Many incomplete messages hold the connection: then each is stored as far as it has arrived.
                least = 1 if self._connection.is_holding else protocol.CHUNK_BYTES
                if self._ended is None and len(self._waiting) < least:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    await self._store()
        finally:
            self._connection.add_in_transit(-len(self._waiting))
            self.stored.set()

    async def _store(self) -> None:
        size = len(self._waiting)
        if self._ended is None and size > protocol.CHUNK_BYTES:
            size -= size % protocol.CHUNK_BYTES
        data = bytes(memoryview(self._waiting)[:size])
        del self._waiting[:size]
        try:
            if self._error is None:
                if self._upload is None:
                    destination = destinations.Destination.parse(self._meta.destination or "")
                    self._upload = bodies.BodyUpload(await self._connection.jms.link_to(destination))
                await self._upload.add(data)
        except errors.MusterError as error:
            self._error = error
        finally:
            self._connection.add_in_transit(-len(data))

    def send(self) -> None:
        """Send the message, after its body is stored, or refuse it."""
        if self._upload is not None and (self._error is not None or self._aborted):
            body = self._upload.body
            release = protocol.ReleaseBody(body.id, body.partition)
            self._connection.spawn(self._connection.jms.notify(release))
        if self._aborted or self._ended is None:
            return
        settled, state = self._ended
        if self._error is None:
            assert self._upload is not None
            self._meta.large = self._upload.body
            self._producer.forward_large(self._number, self._meta, settled, state, self._tag)
        else:
            self._producer.refuse(self._number, settled, state, self._error, self._tag)


class LargeMessages:
    """The large messages of a connection that are arriving, and what waits for them. All of it is sent in the
    order in which it began to arrive.
    """

    def __init__(self, owner: connection.AmqpConnection) -> None:
        self._connection = owner
        self._arriving: set[IncomingLargeMessage] = set()
        self._turns: deque[tuple[asyncio.Event | None, Callable[[], None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def start(self, message: IncomingLargeMessage) -> None:
        self._arriving.add(message)
        self._connection.spawn(self._store(message))
        self._add(message.stored, message.send)

    async def _store(self, message: IncomingLargeMessage) -> None:
        try:
            await message.run()
        finally:
            self._arriving.discard(message)

    def store_parts(self) -> None:
        """The connection holds too much: store incomplete messages as far as they have arrived."""
        for message in self._arriving:
            message.wake()

    def defer(self, act: Callable[[], None], size: int) -> None:
        """Call ``act``, for a message of ``size`` bytes, after the messages that are arriving."""
        budget = self._connection.running.budget
        fits = budget.add_unfinished(size)
        if not fits:
            budget.remove_unfinished(size)
            raise errors.LimitExceeded("too many bytes wait for a large message of this connection")

        def take_turn() -> None:
            budget.remove_unfinished(size)
            act()

        self._add(None, take_turn)

    async def wait_idle(self) -> None:
        """Wait until everything that has arrived is passed on."""
        if self._turns:
            passed_on = asyncio.Event()
            self._add(None, passed_on.set)
            await passed_on.wait()

    def _add(self, ready: asyncio.Event | None, act: Callable[[], None]) -> None:
        self._turns.append((ready, act))
        if len(self._turns) == 1:
            self._connection.spawn(self._run())

    async def _run(self) -> None:
        while self._turns:
            ready, act = self._turns[0]
            if ready is not None:
                await ready.wait()
            act()
            self._turns.popleft()
            if self._connection.forwarder.incoming:
                self._connection.forwarder.forward()
            self._connection.flush_soon()
