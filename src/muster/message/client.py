"""JMS for Python: connections, sessions, producers, consumers.

    factory = client.ConnectionFactory("nats://127.0.0.1:4222")
    async with await factory.connect(client_id="billing") as connection:
        async with connection.session() as session:
            await session.producer(destinations.topic("orders/new")).send("four chairs")
            async with await session.consumer(destinations.queue("orders"), "amount > 100") as orders:
                async for message in orders:
                    ...

Sessions acknowledge in one of four modes (`Mode`).  Non-persistent messages of topics go straight through
the bus and are lost where nobody listens; everything else is accepted when ``send`` returns, and then
survives whatever dies.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Self

from muster import connecting
from muster.bus import api
from muster.core import errors, topics
from muster.message import connection as connection_
from muster.message import destinations, faults, messages, protocol, selectors, values

PREFETCH = 200
LAZY_ACKS = 100


class Mode(enum.Enum):
    AUTO = "auto"  # when the message has been handed over
    DUPS_OK = "dups-ok"  # the same, in batches
    CLIENT = "client"  # when the client says so, for all it has got
    TRANSACTED = "transacted"  # with the commit


class ConnectionFactory:
    """Makes connections: to ``servers``, or to what a ``locator`` finds best; see `muster.connect`."""

    def __init__(
        self,
        servers: str | Iterable[str] | None = None,
        *,
        locator: str | Iterable[str] | None = None,
        **options: Any,
    ) -> None:
        self._servers = servers
        self._locator = locator
        self._options = options

    async def connect(self, *, client_id: str | None = None) -> Connection:
        bus = await connecting.connect(self._servers, locator=self._locator, **self._options)
        return Connection(bus, client_id=client_id, owns_bus=True)


class Connection(connection_.Connection):
    def session(self, mode: Mode = Mode.AUTO) -> Session:
        return Session(self, mode)


Body = str | bytes | Mapping[str, values.Value] | list[values.Value] | messages.Message | None


def message_of(body: Body) -> messages.Message:
    match body:
        case messages.Message():
            return body
        case str():
            return messages.TextMessage(body)
        case bytes():
            return messages.BytesMessage(body)
        case None:
            return messages.Message()
        case list():
            return messages.StreamMessage(body)
        case _:
            return messages.MapMessage(body)


class Session:
    """One thread of messages: they are acknowledged, committed and rolled back together."""

    def __init__(self, connection: Connection, mode: Mode) -> None:
        self.connection = connection
        self.mode = mode
        self.closed = False
        self._consumers: list[Consumer] = []
        self._unacknowledged: list[Received] = []
        self._sends: list[protocol.Send] = []
        self._published: list[tuple[str, bytes, dict[str, str]]] = []
        self._lazy: dict[str, list[int]] = {}
        self._lazy_count = 0
        self._temporary: list[destinations.Destination] = []
        connection.on_close(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """What a transaction has not committed is rolled back."""
        if self.closed:
            return
        self.closed = True
        self._flush_lazy()
        await self.connection.idle(connection_.CLOSE_S)
        for consumer in list(self._consumers):
            await consumer.close()
        for destination in self._temporary:
            await self._drop(destination)

    def check_open(self) -> None:
        self.connection.check_open()
        if self.closed:
            raise faults.IllegalState("the session is closed")

    # What a session makes.

    def producer(self, destination: destinations.Destination | None = None, **options: Any) -> Producer:
        self.check_open()
        return Producer(self, destination, **options)

    async def consumer(
        self,
        destination: destinations.Destination,
        selector: str | None = None,
        *,
        no_local: bool = False,
        prefetch: int = PREFETCH,
    ) -> Consumer:
        if destination.is_queue:
            return await self._fed(destination, selector, prefetch=prefetch)
        return await self._tap(destination, selector, no_local=no_local)

    async def shared_consumer(
        self, destination: destinations.Destination, name: str, selector: str | None = None
    ) -> Consumer:
        """Consumers of one name share the messages; the subscription ends with the last of them."""
        scope = self.connection.client_id
        group = destinations.token(f"{scope}:{name}" if scope else f":{name}")
        return await self._tap(destination, selector, group=group)

    async def durable_consumer(
        self,
        destination: destinations.Destination,
        name: str,
        selector: str | None = None,
        *,
        no_local: bool = False,
        prefetch: int = PREFETCH,
    ) -> Consumer:
        if self.connection.client_id is None:
            raise faults.IllegalState("an unshared durable subscription needs a client id")
        return await self._fed(destination, selector, name=name, no_local=no_local, prefetch=prefetch)

    async def shared_durable_consumer(
        self,
        destination: destinations.Destination,
        name: str,
        selector: str | None = None,
        *,
        prefetch: int = PREFETCH,
    ) -> Consumer:
        return await self._fed(destination, selector, name=name, shared=True, prefetch=prefetch)

    async def unsubscribe(self, name: str) -> None:
        """End a durable subscription."""
        self.check_open()
        await self.connection.ask(protocol.Unsubscribe(self.connection.name, name))

    async def browse(
        self, queue: destinations.Destination, selector: str | None = None
    ) -> AsyncIterator[messages.Message]:
        """What waits in a queue; nothing is taken."""
        self.check_open()
        after = 0
        while True:
            found = await self.connection.ask(protocol.Browse(queue.name, selector, after))
            for one in found.messages:
                yield messages.rebuild(messages.decode_meta(one.meta), one.data, queue)
                after = one.sequence
            if not found.messages:
                return

    async def temporary_queue(self) -> destinations.Destination:
        """A queue of this connection; only it may consume, anybody may send. It ends with the session."""
        self.check_open()
        name = f"{destinations.TEMPORARY}{self.connection.name}:{self.connection.next_number()}"
        found = destinations.Destination(destinations.Kind.TEMPORARY_QUEUE, name)
        self._temporary.append(found)
        return found

    async def temporary_topic(self) -> destinations.Destination:
        self.check_open()
        name = f"path:{destinations.TEMPORARY}{self.connection.name}/{self.connection.next_number()}"
        return destinations.Destination(destinations.Kind.TEMPORARY_TOPIC, name)

    async def _drop(self, destination: destinations.Destination) -> None:
        try:
            await self.connection.ask(protocol.DropQueue(destination.name), timeout_s=2)
        except errors.MusterError:
            return  # the dispatcher forgets it with the connection

    async def _fed(
        self,
        destination: destinations.Destination,
        selector: str | None,
        *,
        name: str | None = None,
        shared: bool = False,
        no_local: bool = False,
        prefetch: int = PREFETCH,
    ) -> Consumer:
        self.check_open()
        if selector:
            selectors.compiled(selector)
        consumer = FedConsumer(
            self,
            destination,
            prefetch=prefetch,
            selector=selector,
            name=name,
            shared=shared,
            no_local=no_local,
        )
        await self.connection.attach(consumer)
        self._consumers.append(consumer)
        return consumer

    async def _tap(
        self,
        destination: destinations.Destination,
        selector: str | None,
        *,
        no_local: bool = False,
        group: str | None = None,
    ) -> Consumer:
        self.check_open()
        if selector:
            selectors.compiled(selector)
        consumer = TapConsumer(self, destination, selector, no_local=no_local)
        await consumer.open(group)
        self._consumers.append(consumer)
        return consumer

    # Acknowledgement.

    def _handed(self, received: Received) -> None:
        """The application has it."""
        match self.mode:
            case Mode.AUTO:
                if received.key:
                    self.connection.submit([], {received.key: [received.sequence]})
            case Mode.DUPS_OK:
                if received.key:
                    self._lazy.setdefault(received.key, []).append(received.sequence)
                    self._lazy_count += 1
                    if self._lazy_count >= LAZY_ACKS:
                        self._flush_lazy()
            case Mode.CLIENT:
                self._unacknowledged.append(received)
                received.message._acknowledge = self._acknowledge
            case Mode.TRANSACTED:
                self._unacknowledged.append(received)

    def _flush_lazy(self) -> None:
        if self._lazy:
            lazy, self._lazy, self._lazy_count = self._lazy, {}, 0
            self.connection.submit([], lazy)

    async def _acknowledge(self) -> None:
        self.check_open()
        received, self._unacknowledged = self._unacknowledged, []
        if acks := _by_key(received):
            await self.connection.submit([], acks)

    async def commit(self) -> None:
        """All that was sent and received since the last one: as a whole, or `TransactionRolledBack`."""
        self._check_transacted()
        sends, self._sends = self._sends, []
        received, self._unacknowledged = self._unacknowledged, []
        acks = _by_key(received)
        if not sends and not acks:
            return
        try:
            await self.connection.submit(sends, acks, alone=True)
        except errors.MusterError as error:
            self._unacknowledged = received
            await self._give_back()
            if isinstance(error, faults.TransactionRolledBack):
                raise
            raise faults.TransactionRolledBack(f"the commit failed: {error.message}") from error

    async def rollback(self) -> None:
        self._check_transacted()
        self._sends.clear()
        await self._give_back()

    async def recover(self) -> None:
        """Deliver again, in order and marked as redelivered, what is not acknowledged."""
        self.check_open()
        if self.mode is Mode.TRANSACTED:
            raise faults.IllegalState("a transacted session rolls back instead")
        await self._give_back()

    def _check_transacted(self) -> None:
        self.check_open()
        if self.mode is not Mode.TRANSACTED:
            raise faults.IllegalState("only a transacted session commits and rolls back")

    async def _give_back(self) -> None:
        received, self._unacknowledged = self._unacknowledged, []
        for consumer in self._consumers:
            await consumer.take_back([one for one in received if one.consumer is consumer])


def _by_key(received: Iterable[Received]) -> dict[str, list[int]]:
    acks: dict[str, list[int]] = {}
    for one in received:
        if one.key:
            acks.setdefault(one.key, []).append(one.sequence)
    return acks


class Producer:
    """``ttl_s`` 0: messages do not expire. ``delay_s``: they are delivered no earlier than that."""

    def __init__(
        self,
        session: Session,
        destination: destinations.Destination | None,
        *,
        persistent: bool = True,
        priority: int = messages.DEFAULT_PRIORITY,
        ttl_s: float = 0.0,
        delay_s: float = 0.0,
    ) -> None:
        self._session = session
        self._connection = session.connection
        self.destination = destination
        self.persistent = persistent
        self.priority = priority
        self.ttl_s = ttl_s
        self.delay_s = delay_s
        self._subject = destination.subject if destination and not destination.is_queue else None

    async def send(self, body: Body, *, to: destinations.Destination | None = None, **options: Any) -> None:
        """Accepted when this returns; in a transacted session, with its commit. Options as in `Producer`."""
        await self._connection.room()
        straight, future = self._send(body, to, options)
        if straight is not None:
            subject, data, headers = straight
            await self._connection.bus.publish(subject, data, headers=headers)
        elif future is not None and options.get("persistent", self.persistent):
            await future

    def submit(
        self, body: Body, *, to: destinations.Destination | None = None, **options: Any
    ) -> Awaitable[None]:
        """Send without waiting: the answer says later whether it was accepted. Order is kept."""
        straight, future = self._send(body, to, options)
        if straight is not None:
            subject, data, headers = straight
            return self._connection.spawn(self._connection.bus.publish(subject, data, headers=headers))
        if future is None:
            future = asyncio.get_running_loop().create_future()
            future.set_result(None)
        return future

    def _send(
        self, body: Body, to: destinations.Destination | None, options: dict[str, Any]
    ) -> tuple[tuple[str, bytes, dict[str, str]] | None, asyncio.Future[None] | None]:
        session = self._session
        session.check_open()
        if self.destination is not None and to is not None:
            raise faults.IllegalState("this producer has its destination")
        destination = to or self.destination
        if destination is None:
            raise faults.InvalidDestination("where to? this producer has no destination of its own")
        message = message_of(body)
        self._stamp(message, destination, **options)
        meta, data = message.meta()
        raw = messages.encode_meta(meta).decode()
        straight = not destination.is_queue and not message.persistent and not meta.delivery_time_ms
        if straight and session.mode is not Mode.TRANSACTED:
            subject = self._subject or destination.subject
            return (subject, data, {messages.HEADER: raw}), None
        send = protocol.Send(str(destination), raw, data)
        if session.mode is Mode.TRANSACTED:
            if len(session._sends) >= protocol.SENDS_MAX:
                raise errors.LimitExceeded(f"a transaction holds at most {protocol.SENDS_MAX} messages")
            session._sends.append(send)
            return None, None
        return None, self._connection.submit([send])

    def _stamp(
        self,
        message: messages.Message,
        destination: destinations.Destination,
        *,
        persistent: bool | None = None,
        priority: int | None = None,
        ttl_s: float | None = None,
        delay_s: float | None = None,
    ) -> None:
        now_ms = time.time_ns() // 1_000_000
        ttl_s = self.ttl_s if ttl_s is None else ttl_s
        delay_s = self.delay_s if delay_s is None else delay_s
        message.destination = destination
        message.persistent = self.persistent if persistent is None else persistent
        message.priority = self.priority if priority is None else priority
        if not 0 <= message.priority <= 9:
            raise errors.InvalidInput(f"a priority is 0 to 9, not {message.priority}")
        message.message_id = self._connection.next_message_id()
        message.timestamp_ms = now_ms
        message.delivery_time_ms = now_ms + round(delay_s * 1000) if delay_s else 0
        message.expiration_ms = now_ms + round((ttl_s + delay_s) * 1000) if ttl_s else 0
        message.origin = self._connection.origin


class Received:
    """A message in the application's hands, and how to acknowledge it. Without a key there is nothing to."""

    __slots__ = ("consumer", "key", "message", "sequence")

    def __init__(self, message: messages.Message, consumer: Consumer, key: str, sequence: int) -> None:
        self.message = message
        self.consumer = consumer
        self.key = key
        self.sequence = sequence


class Consumer:
    """Iterate it, or `receive`."""

    def __init__(self, session: Session, destination: destinations.Destination) -> None:
        self.session = session
        self.destination = destination
        self.closed = False
        self._arrived: deque[Received] = deque()
        self._wake = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> messages.Message:
        found = await self.receive()
        if found is None:
            raise StopAsyncIteration
        return found

    async def receive(self, timeout_s: float | None = None) -> messages.Message | None:
        """The next message; None when ``timeout_s`` passed, or when the consumer was closed."""
        if self.closed:
            raise faults.IllegalState("the consumer is closed")
        if not self._arrived:
            try:
                async with asyncio.timeout(timeout_s):
                    while not self._arrived and not self.closed:
                        self._wake.clear()
                        await self._wake.wait()
            except TimeoutError:
                pass
        return self._next()

    async def receive_nowait(self) -> messages.Message | None:
        """What is there now, at the dispatcher as well."""
        if not self._arrived:
            await self._look()
        return self._next()

    async def listen(self, handler: Callable[[messages.Message], Awaitable[None]]) -> None:
        """Hand each message to ``handler``, one after the other. One that it fails with comes again."""
        while (received := await self._take()) is not None:
            try:
                await handler(received.message)
            except Exception as error:  # noqa: BLE001 - whatever it is, the message is not acknowledged
                connection_.events.warning("listener-failed", error=error)
                await self.take_back([received])
            else:
                self.session._handed(received)

    async def _take(self) -> Received | None:
        while not self._arrived and not self.closed:
            self._wake.clear()
            await self._wake.wait()
        return self._pop()

    def _next(self) -> messages.Message | None:
        received = self._pop()
        if received is None:
            return None
        self.session._handed(received)
        return received.message

    def _pop(self) -> Received | None:
        now_ms = time.time_ns() // 1_000_000
        while self._arrived:
            received = self._arrived.popleft()
            self._consumed()
            if received.message.expiration_ms and received.message.expiration_ms <= now_ms:
                self._expired(received)
                continue
            return received
        return None

    def _put(self, received: Received) -> None:
        self._arrived.append(received)
        self._wake.set()

    def _consumed(self) -> None:
        pass

    def _expired(self, received: Received) -> None:
        pass

    async def _look(self) -> None:
        pass

    async def take_back(self, received: list[Received]) -> None:
        """The application gives these back: they come again."""
        for one in reversed(received):
            one.message.redelivered = True
            one.message.delivery_count += 1
            self._arrived.appendleft(one)
        if received:
            self._wake.set()

    async def close(self) -> None:
        self.closed = True
        self._wake.set()
        if self in self.session._consumers:
            self.session._consumers.remove(self)


class TapConsumer(Consumer):
    """Listens to a topic on the bus itself: what is said while it listens."""

    def __init__(
        self, session: Session, destination: destinations.Destination, selector: str | None, *, no_local: bool
    ) -> None:
        super().__init__(session, destination)
        self._pattern = topics.Pattern.parse(destination.name)
        self._matches = selectors.compiled(selector) if selector else None
        self._not_from = session.connection.origin if no_local else None
        self._subscriptions: list[api.Subscription] = []
        self._several = len(self._pattern.subjects) > 1
        self.rejected = 0
        self.malformed = 0
        self.dropped = 0

    async def open(self, group: str | None) -> None:
        for via, subject in enumerate(self._pattern.subjects):
            self._subscriptions.append(
                await self.session.connection.bus.subscribe(
                    subject, group=group, handler=functools.partial(self._heard, via)
                )
            )

    def _heard(self, via: int, message: api.Message) -> None:
        if len(self._arrived) >= 65_536:
            self.dropped += 1
            return
        if self._several and self._pattern.take(message.subject, via) is None:
            return
        try:
            raw = message.headers.get(messages.HEADER)
            meta = messages.decode_meta(raw) if raw else messages.from_plain(message.data, message.headers)[0]
            if (self._not_from is not None and meta.origin == self._not_from) or (
                self._matches is not None and not self._matches(meta.lookup())
            ):
                self.rejected += 1
                return
            name = meta.destination or str(topics.Topic.from_subject(message.subject))
            found = messages.rebuild(meta, message.data, destinations.Destination.parse(name))
        except errors.MusterError:
            self.malformed += 1
            return
        found.delivery_count = 1
        self._put(Received(found, self, "", 0))

    async def close(self) -> None:
        if not self.closed:
            await super().close()
            for one in self._subscriptions:
                await one.close()


class FedConsumer(Consumer):
    """Fed by the dispatcher, up to ``prefetch`` messages ahead."""

    def __init__(
        self,
        session: Session,
        destination: destinations.Destination,
        *,
        prefetch: int,
        selector: str | None,
        name: str | None,
        shared: bool,
        no_local: bool,
    ) -> None:
        super().__init__(session, destination)
        self.number = session.connection.next_number()
        self._prefetch = prefetch
        self._spent = 0
        self._request = protocol.Attach(
            session.connection.name,
            self.number,
            str(destination),
            subscription=name,
            durable=name is not None,
            shared=shared,
            selector=selector,
            no_local=no_local,
            credit=prefetch,
        )

    def request(self) -> protocol.Attach:
        """Also for a new dispatcher, which knows of no delivery: what waits here would come twice."""
        self._arrived.clear()
        self._spent = 0
        return self._request

    def deliver(self, delivery: protocol.Delivery) -> None:
        for one in self.session._unacknowledged:
            if one.sequence == delivery.sequence and one.key == delivery.key:
                self._consumed()
                return  # a new dispatcher repeats what the application already has
        try:
            message = messages.rebuild(messages.decode_meta(delivery.meta), delivery.data, self.destination)
        except errors.MusterError as error:
            self.session.connection.spawn(self._refuse(delivery, error.message))
            return
        message.delivery_count = delivery.count + 1
        message.redelivered = delivery.count > 0
        self._put(Received(message, self, delivery.key, delivery.sequence))

    async def _refuse(self, delivery: protocol.Delivery, reason: str) -> None:
        connection = self.session.connection
        await connection.tell(
            protocol.Release(connection.name, {delivery.key: [delivery.sequence]}, reason=reason)
        )

    def _consumed(self) -> None:
        self._spent += 1
        if self._spent >= max(1, self._prefetch // 2):
            self._grant()

    def _grant(self) -> None:
        spent, self._spent = self._spent, 0
        connection = self.session.connection
        if spent:
            connection.spawn(connection.tell(protocol.Credit(connection.name, self.number, spent)))

    def _expired(self, received: Received) -> None:
        self.session.connection.submit([], {received.key: [received.sequence]})

    async def _look(self) -> None:
        connection = self.session.connection
        self._grant()
        await connection.ask(protocol.Ping(connection.name))

    async def take_back(self, received: list[Received]) -> None:
        connection = self.session.connection
        await connection.idle()
        await connection.ask(protocol.Stop(connection.name, [self.number]))
        ahead = _by_key(self._arrived)
        self._arrived.clear()
        self._spent = 0
        if ahead:
            await connection.ask(protocol.Release(connection.name, ahead, counted=False))
        if seen := _by_key(received):
            await connection.ask(protocol.Release(connection.name, seen, counted=True))
        await connection.tell(protocol.Credit(connection.name, self.number, self._prefetch))

    async def close(self) -> None:
        if self.closed:
            return
        self.session._flush_lazy()
        await self.session.connection.idle(connection_.CLOSE_S)
        await super().close()
        held = [one for one in self.session._unacknowledged if one.consumer is self]
        self.session._unacknowledged = [
            one for one in self.session._unacknowledged if one.consumer is not self
        ]
        await self.session.connection.detach(self.number, _by_key(held))
