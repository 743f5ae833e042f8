"""JMS for Python: connections, sessions, producers, consumers.

    bus = await muster.connect("nats://127.0.0.1:4222")
    async with api.Connection(bus, client_id="billing", owns_bus=True) as connection:
        async with connection.session() as session:
            await session.producer(destinations.topic("orders/new")).send("four chairs")
            async with await session.consumer(destinations.queue("orders"), "amount > 100") as orders:
                async for message in orders:
                    ...

A session acknowledges in one of four modes (`AcknowledgeMode`). Non-persistent topic messages go directly
through the bus and are lost if nothing is subscribed. Every other message is accepted when ``send`` returns,
and then survives the failure of any process.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from muster.core import errors, lifecycle
from muster.message import codec, destinations, messages, protocol, selectors
from muster.message import errors as message_errors
from muster.message.client import bodies, consumers, dispatcher_connection, producers, topic_consumers

PREFETCH = 200
LAZY_ACKS = 100
BROWSE_PAGE = 1000  # messages requested at one time


class AcknowledgeMode(enum.Enum):
    """When a session acknowledges the messages that it has received."""

    AUTO = "auto"  # when the application receives the message
    DUPS_OK = "dups-ok"  # like AUTO, in batches
    CLIENT = "client"  # on request, for all messages received so far
    TRANSACTED = "transacted"  # on commit


class Connection(dispatcher_connection.DispatcherConnection):
    """A client of the dispatcher. ``client_id``: the owner of durable subscriptions."""

    def session(self, mode: AcknowledgeMode = AcknowledgeMode.AUTO) -> Session:
        """A session; its mode determines when received messages are acknowledged."""
        return Session(self, AcknowledgeMode(mode))


class Session(lifecycle.ClosingContext):
    """A sequence of messages that are acknowledged, committed and rolled back together."""

    def __init__(self, connection: Connection, mode: AcknowledgeMode) -> None:
        self.connection = connection
        self.mode = mode
        self.transacted = mode is AcknowledgeMode.TRANSACTED
        # Received messages, until they are acknowledged
        self.holds_received = mode in (AcknowledgeMode.CLIENT, AcknowledgeMode.TRANSACTED)
        self.closed = False
        self.consumers: list[consumers.Consumer] = []
        self.closing: list[consumers.DispatchedConsumer] = []  # closed, but with unacknowledged messages
        self.unacknowledged: consumers.Held = {}
        #: Deliveries whose acknowledgement or return is in progress, or whose return failed.
        self._ending: consumers.Held = {}
        #: The last publication that direct ones have to follow, and the last that takes a longer way.
        self.ahead: asyncio.Future[None] | None = None
        self.ahead_stored: asyncio.Future[None] | None = None
        self.sends: list[protocol.SendMessage] = []
        self._lazy: dict[str, list[int]] = {}
        self._lazy_count = 0
        self._ended = asyncio.Event()  # the last acknowledgement, commit or rollback has ended
        self._ended.set()
        connection.on_close(self.close)
        connection.add_unacknowledged(self._held)

    async def close(self) -> None:
        """Close the session and its consumers. An open transaction is rolled back."""
        if self.closed:
            return
        self.closed = True
        self.flush_lazy()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(dispatcher_connection.CLOSE_S):
                await self._ended.wait()
        await self.connection.outbox.wait_idle(dispatcher_connection.CLOSE_S)
        for consumer in list(self.consumers):
            await consumer.close()
        closing, self.closing = self.closing, []
        for dispatched in closing:
            await dispatched.detach()
        self.connection.forget_session(self.close, self._held)

    def check_open(self) -> None:
        """Raise `message.errors.IllegalState` if the session or its connection is closed."""
        self.connection.check_open()
        if self.closed:
            raise message_errors.IllegalState("the session is closed")

    # Producers and consumers.

    def queue(self, name: str) -> destinations.Destination:
        """The queue of this name."""
        return destinations.queue(name)

    def topic(self, name: str) -> destinations.Destination:
        """The topic of this name, or a pattern of topics for a consumer."""
        return destinations.topic(name)

    def producer(
        self, destination: destinations.Destination | None = None, **options: Any
    ) -> producers.Producer:
        """A producer for a destination; without one, each `send` names it. Options: `producers.Producer`."""
        self.check_open()
        return producers.Producer(self, destination, **options)

    async def consumer(
        self,
        destination: destinations.Destination,
        selector: str | None = None,
        *,
        no_local: bool = False,
        prefetch: int = PREFETCH,
    ) -> consumers.Consumer:
        """A consumer of a queue, or of a topic while it is open."""
        if destination.is_queue:
            return await self._dispatched_consumer(destination, selector, prefetch=prefetch)
        return await self._topic_consumer(destination, selector, no_local=no_local)

    async def shared_consumer(
        self, destination: destinations.Destination, name: str, selector: str | None = None
    ) -> consumers.Consumer:
        """Consumers of the same name share the messages; the subscription ends with the last of them.

        The dispatcher checks that they have the same topic and selector.
        """
        return await self._topic_consumer(destination, selector, shared=name)

    async def durable_consumer(
        self,
        destination: destinations.Destination,
        name: str,
        selector: str | None = None,
        *,
        no_local: bool = False,
        prefetch: int = PREFETCH,
    ) -> consumers.Consumer:
        """A consumer of a durable subscription, which stores messages while it has none."""
        if self.connection.client_id is None:
            raise message_errors.IllegalState("an unshared durable subscription needs a client id")
        return await self._dispatched_consumer(
            destination, selector, name=name, no_local=no_local, prefetch=prefetch
        )

    async def shared_durable_consumer(
        self,
        destination: destinations.Destination,
        name: str,
        selector: str | None = None,
        *,
        prefetch: int = PREFETCH,
    ) -> consumers.Consumer:
        """One of several consumers that share the messages of a durable subscription."""
        return await self._dispatched_consumer(
            destination, selector, name=name, shared=True, prefetch=prefetch
        )

    async def unsubscribe(self, name: str) -> None:
        """End a durable subscription."""
        self.check_open()
        await self.connection.request(protocol.EndSubscription(self.connection.name, name))

    async def browse(
        self, queue: destinations.Destination, selector: str | None = None, *, must_exist: bool = False
    ) -> AsyncIterator[messages.JmsMessage]:
        """Iterate over the messages waiting in a queue, without consuming them.

        ``must_exist``: `InvalidDestination` for a queue that no client has used, which is empty otherwise.
        """
        self.check_open()
        await self.connection.outbox.wait_idle()  # earlier sends and acknowledgements take effect first
        after = 0
        while True:
            request = protocol.BrowseQueue(queue.name, selector, after, BROWSE_PAGE, must_exist)
            page = await self.connection.request(request)
            for delivery in page.messages:
                meta = messages.decode_meta(delivery.meta)
                try:
                    message = codec.message_from_meta(meta, delivery.data, queue)
                    message = await bodies.load(self.connection, message)
                except (errors.NotFound, errors.InvalidInput):
                    message = codec.message_from_meta(codec.unreadable(meta), delivery.data, queue)
                yield message
            after = page.continue_after
            if not after:
                return

    async def temporary_queue(self) -> destinations.Destination:
        """A queue of this connection, deleted when the connection closes. Only this connection may consume
        from it; any client may send to it.
        """
        self.check_open()
        name = f"{destinations.TEMPORARY}{self.connection.name}:{self.connection.next_number()}"
        queue = destinations.Destination(destinations.DestinationKind.TEMPORARY_QUEUE, name)
        await self.connection.own_temporary(queue)
        return queue

    async def temporary_topic(self) -> destinations.Destination:
        """A topic of this connection. Only this connection may consume from it; every identity with topics
        may send to it.
        """
        self.check_open()
        topic = destinations.temporary_topic(self.connection.name, self.connection.next_number())
        await self.connection.own_temporary(topic)
        return topic

    async def delete_temporary(self, destination: destinations.Destination) -> None:
        """Delete a temporary destination before its connection closes. It must have no consumers."""
        self.check_open()
        await self.connection.request(protocol.DeleteTemporary(str(destination)))

    async def _dispatched_consumer(
        self,
        destination: destinations.Destination,
        selector: str | None,
        *,
        name: str | None = None,
        shared: bool = False,
        no_local: bool = False,
        prefetch: int = PREFETCH,
    ) -> consumers.Consumer:
        self.check_open()
        if selector:
            selectors.compiled(selector)
        consumer = consumers.DispatchedConsumer(
            self,
            destination,
            prefetch=prefetch,
            selector=selector,
            name=name,
            shared=shared,
            no_local=no_local,
        )
        await self.connection.attach(consumer)
        self.consumers.append(consumer)
        return consumer

    async def _topic_consumer(
        self,
        destination: destinations.Destination,
        selector: str | None,
        *,
        no_local: bool = False,
        shared: str | None = None,
    ) -> consumers.Consumer:
        self.check_open()
        destination.check_consumer(self.connection.name)
        if selector:
            selectors.compiled(selector)
        consumer = topic_consumers.TopicConsumer(
            self, destination, selector, no_local=no_local, shared=shared
        )
        await consumer.open()
        self.consumers.append(consumer)
        return consumer

    # Acknowledgement.

    def mark_received(self, received: consumers.ReceivedDelivery) -> None:
        """The application has received the delivery."""
        match self.mode:
            case AcknowledgeMode.AUTO:
                if received.key:
                    self.connection.submit([], {received.key: [received.sequence]})
            case AcknowledgeMode.DUPS_OK:
                if received.key:
                    self._lazy.setdefault(received.key, []).append(received.sequence)
                    self._lazy_count += 1
                    if self._lazy_count >= LAZY_ACKS:
                        self.flush_lazy()
            case AcknowledgeMode.CLIENT:
                self.unacknowledged[received.place] = received
                received.message._acknowledge = self.acknowledge
            case AcknowledgeMode.TRANSACTED:
                self.unacknowledged[received.place] = received

    def forget_received(self, received: consumers.ReceivedDelivery) -> bool:
        """Whether this delivery was still unacknowledged; a later one of the same message is another."""
        if self.unacknowledged.get(received.place) is not received:
            return False
        del self.unacknowledged[received.place]
        return True

    def held_by(self, consumer: consumers.Consumer) -> list[consumers.ReceivedDelivery]:
        """What the application received from this consumer and has not acknowledged."""
        return [delivery for delivery in self._all_held() if delivery.consumer is consumer]

    def has(self, key: str, sequence: int) -> bool:
        """Whether the application received this message and has not acknowledged it."""
        return (key, sequence) in self.unacknowledged or (key, sequence) in self._ending

    def _all_held(self) -> list[consumers.ReceivedDelivery]:
        return [*self._ending.values(), *self.unacknowledged.values()]

    def _held(self) -> dict[str, list[int]]:
        held = consumers.by_key(self._all_held())
        for key, sequences in self._lazy.items():
            held.setdefault(key, []).extend(sequences)
        return held

    def flush_lazy(self) -> None:
        """Send the acknowledgements that wait, in the mode DUPS_OK."""
        if self._lazy:
            lazy, self._lazy, self._lazy_count = self._lazy, {}, 0
            self.connection.submit([], lazy)

    async def acknowledge(self) -> None:
        """In CLIENT mode: acknowledge all messages that the session has received."""
        self.check_open()
        await self._end(self._acknowledge_all)

    async def _acknowledge_all(self, received: list[consumers.ReceivedDelivery]) -> None:
        if acks := consumers.by_key(received):
            try:
                await self.connection.submit([], acks)
            except errors.MusterError:
                self._remove_ending(received)
                # So that it can be retried or redelivered
                self.unacknowledged = {entry.place: entry for entry in received} | self.unacknowledged
                raise
        self._remove_ending(received)
        await self._detach_closing()

    async def commit(self) -> None:
        """Commit everything sent and received since the last commit, atomically; otherwise
        `TransactionRolledBack`.

        `errors.Unavailable`: no dispatcher replied in time, and the outcome is unknown. It is also unknown to
        a caller that is cancelled while it waits.
        """
        self._check_transacted()
        sends, self.sends = self.sends, []
        await self._end(functools.partial(self._commit, sends))

    async def _commit(
        self, sends: list[protocol.SendMessage], received: list[consumers.ReceivedDelivery]
    ) -> None:
        acks = consumers.by_key(received)
        try:
            if sends or acks:
                await self.connection.submit(sends, acks, atomic=True)
        except errors.MusterError as error:
            with contextlib.suppress(errors.Unavailable):  # they can be rolled back later
                await self._return_ending()
            if isinstance(error, message_errors.TransactionRolledBack | errors.Unavailable):
                raise
            raise message_errors.TransactionRolledBack(f"the commit failed: {error.message}") from error
        self._remove_ending(received)
        if self._ending:  # of an earlier commit that failed, while no dispatcher answered
            with contextlib.suppress(errors.Unavailable):
                await self._return_ending()
        await self._detach_closing()

    async def rollback(self) -> None:
        """Undo everything sent and received since the last commit; received messages are delivered again."""
        self._check_transacted()
        self.sends.clear()
        await self._end(self._return_ending)

    async def recover(self) -> None:
        """Deliver all unacknowledged messages again, in order and marked as redelivered."""
        self.check_open()
        if self.mode is AcknowledgeMode.TRANSACTED:
            raise message_errors.IllegalState("a transacted session must use rollback")
        await self._end(self._return_ending)

    async def _end(
        self, work: Callable[[list[consumers.ReceivedDelivery]], Coroutine[Any, Any, None]]
    ) -> None:
        """Run ``work`` with what the application has received until now, after earlier works have ended.

        A caller can stop waiting for a commit, receive more and commit again: what it received after a commit
        began is not part of it, whatever becomes of that commit.
        """
        covered = self.unacknowledged.copy()
        former, self._ended = self._ended, asyncio.Event()

        async def run() -> None:
            await former.wait()
            # A message that has come again since then is another delivery.
            ending = {
                place: entry for place, entry in self.unacknowledged.items() if covered.get(place) is entry
            }
            for place in ending:
                del self.unacknowledged[place]
            self._ending |= ending
            await work(list(ending.values()))

        await self.connection.run_shielded(run(), self._ended.set)

    def _check_transacted(self) -> None:
        self.check_open()
        if self.mode is not AcknowledgeMode.TRANSACTED:
            raise message_errors.IllegalState("only a transacted session can commit or roll back")

    def _remove_ending(self, received: Iterable[consumers.ReceivedDelivery]) -> None:
        for delivery in received:
            self._ending.pop(delivery.place, None)

    async def _detach_closing(self) -> None:
        """Detach closed consumers of which the application holds nothing any more."""
        for consumer in list(self.closing):
            if not self.held_by(consumer):
                self.closing.remove(consumer)
                await consumer.detach()

    async def _return_ending(self, _: object = None) -> None:
        """Return what is in `_ending`. What cannot be returned stays there, and is tried again later."""
        everyone = (*self.consumers, *self.closing)
        try:
            for consumer in everyone:  # a message may return through another consumer of the session
                await consumer.pause()
            for consumer in everyone:
                received = [entry for entry in self._ending.values() if entry.consumer is consumer]
                await consumer.give_back(received)
                self._remove_ending(received)
        finally:
            for consumer in everyone:
                await consumer.resume()
        self._ending.clear()  # of closed consumers of topics: there is nothing to return
        await self._detach_closing()
