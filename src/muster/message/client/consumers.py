"""Consumers: the receiving end of a session.

A `DispatchedConsumer` receives from the dispatcher, a `topic_consumers.TopicConsumer` from the bus. Both have
the same interface for the application.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec

from muster.core import errors, lifecycle
from muster.core.telemetry import log
from muster.message import codec, destinations, messages, protocol, retries
from muster.message import errors as message_errors
from muster.message.client import bodies, dispatcher_connection

if TYPE_CHECKING:
    from muster.message.client import api

events = log.EventLog("message")

T = TypeVar("T")
BURST: Final = 64  # messages received without waiting before the time is checked …
TURN_S: Final = 0.002  # … after which other tasks run


class ReceivedDelivery:
    """A message that the application received, and how to acknowledge it.

    Without a key there is nothing to acknowledge, and ``sequence`` is the size of the message.
    """

    __slots__ = ("consumer", "key", "message", "sequence")

    def __init__(self, message: messages.JmsMessage, consumer: Consumer, key: str, sequence: int) -> None:
        self.message = message
        self.consumer = consumer
        self.key = key
        self.sequence = sequence

    @property
    def place(self) -> object:
        """Identifies the message in its session."""
        return (self.key, self.sequence) if self.key else self


Held = dict[object, ReceivedDelivery]  # by place, in the order of reception


def by_key(received: Iterable[ReceivedDelivery]) -> dict[str, list[int]]:
    acks: dict[str, list[int]] = {}
    for delivery in received:
        if delivery.key:
            acks.setdefault(delivery.key, []).append(delivery.sequence)
    return acks


class Consumer(lifecycle.ClosingContext):
    """Iterate over it, or call `receive`."""

    def __init__(self, session: api.Session, destination: destinations.Destination) -> None:
        self.session = session
        self.destination = destination
        self.closed = False
        self._arrived: deque[ReceivedDelivery] = deque()
        self._loading: set[ReceivedDelivery] = set()  # whose bodies are being read
        self._wake = asyncio.Event()
        self._burst = 0
        self._turn_began_s = 0.0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> messages.JmsMessage:
        message = None if self.closed else await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def receive(self, timeout_s: float | None = None) -> messages.JmsMessage | None:
        """The next message; None after ``timeout_s``, or when the consumer is closed."""
        arrived = self._arrived
        if (
            arrived
            and self._burst < BURST
            and not self.closed
            and not (first := arrived[0].message).expiration_ms
            and first.unloaded is None
        ):
            # Fast path for most messages; the complete one is `_wait`.
            self._burst += 1
            received: ReceivedDelivery | None = arrived.popleft()
            self._on_popped(received)  # type: ignore[arg-type]
        else:
            received = await self._wait(timeout_s)
        if received is None:
            return None
        if received.key or self.session.holds_received:
            self.session.mark_received(received)
        return received.message

    async def receive_nowait(self) -> messages.JmsMessage | None:
        """A message that is available now, here or at the dispatcher."""
        if not self._arrived:
            await self._poll_dispatcher()
        while (received := self._pop()) is not None:
            if await self._load(received):
                self.session.mark_received(received)
                return received.message
        return None

    async def receive_body(self, kind: type[T], timeout_s: float | None = None) -> T | None:
        """The body of the next message, which has to be of type ``kind``; see `receive`."""
        received = await self._wait(timeout_s)
        if received is None:
            return None
        body = received.message.body()
        if not isinstance(body, kind):
            if self.session.holds_received:  # it counts as received
                self.session.mark_received(received)
            else:
                self._push_front(received)
            raise message_errors.FormatError(f"the body is a {type(body).__name__}, not a {kind.__name__}")
        self.session.mark_received(received)
        return body

    async def listen(
        self,
        handler: Callable[[messages.JmsMessage], Awaitable[None]],
        *,
        retry: retries.Retry = retries.AT_ONCE,
    ) -> None:
        """Pass each message to ``handler``, one at a time. A message for which the handler fails is delivered
        again: in a session that holds received messages, after a rollback or recovery. In other sessions the
        handler can call `messages.JmsMessage.ack`, ``nack`` and ``retry``, and ``retry`` limits the attempts.
        """
        session = self.session
        while not self.closed and (received := await self._wait()) is not None:
            if session.holds_received:  # before the handler, which may commit or acknowledge it
                session.mark_received(received)
                settlement = None
            else:
                session.unacknowledged[received.place] = received  # seen, even if the handler never returns
                settlement = received.message._settlement = _Settlement(received)
            try:
                await handler(received.message)
            except Exception as error:  # noqa: BLE001 - after any error, the message is not acknowledged
                name = getattr(handler, "__qualname__", str(handler))
                facts = {"id": received.message.message_id, "attempt": received.message.delivery_count}
                error.add_note(f"in the handler {name}, for the message {facts['id']} of {self.destination}")
                events.error(
                    "handler-failed", error=error, stack=True, handler=name, topic=self.destination, **facts
                )
                if settlement is not None:
                    await settlement.failed(error, retry)
            else:
                if settlement is not None:
                    settlement.ack()

    async def _wait(self, timeout_s: float | None = None) -> ReceivedDelivery | None:
        while (received := await self._wait_for_delivery(timeout_s)) is not None:
            if await self._load(received):
                return received
            if self.closed:
                break
        return None

    async def _load(self, received: ReceivedDelivery) -> bool:
        """Read the body of the message, if it is stored separately. False: it does not exist any more, or
        meanwhile the message expired or was dropped, because it is delivered again.
        """
        if received.message.unloaded is None:
            return True
        self._loading.add(received)
        try:
            received.message = await bodies.load(self.session.connection, received.message)
        except (errors.NotFound, message_errors.FormatError) as error:
            if received in self._loading:
                await self._on_unreadable(received, error)
            return False
        except BaseException:
            if received in self._loading:
                self._push_front(received)
            raise
        finally:
            is_dropped = received not in self._loading
            self._loading.discard(received)
        if is_dropped:
            return False
        if _has_expired(received.message):
            self._on_expired(received)
            return False
        return True

    async def _on_unreadable(self, received: ReceivedDelivery, error: errors.MusterError) -> None:
        """The body of the message cannot be read."""

    async def _wait_for_delivery(self, timeout_s: float | None = None) -> ReceivedDelivery | None:
        if self.closed:
            raise message_errors.IllegalState("the consumer is closed")
        if self._burst >= BURST:
            await self._let_others_run()
        if self._arrived and (received := self._pop()) is not None:
            self._burst += 1
            return received
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    while not self._arrived and not self.closed:
                        self._before_waiting()
                        self._wake.clear()
                        await self._wake.wait()
                    if (received := self._pop()) is not None or self.closed:
                        return received
        except TimeoutError:
            return None

    async def _let_others_run(self) -> None:
        """But not before the end of this consumer's turn. The task that reads the connection takes a thousand
        messages in its turn: a consumer that takes fewer would fall behind, however quick it is."""
        self._burst = 0
        loop = asyncio.get_running_loop()
        if loop.time() - self._turn_began_s >= TURN_S:
            await asyncio.sleep(0)
            self._turn_began_s = loop.time()

    def _pop(self) -> ReceivedDelivery | None:
        while self._arrived:
            received = self._arrived.popleft()
            self._on_popped(received)
            if _has_expired(received.message):
                self._on_expired(received)
                continue
            return received
        return None

    def _push_front(self, received: ReceivedDelivery) -> None:
        """Make it the next delivery again."""
        self._arrived.appendleft(received)

    def _put(self, received: ReceivedDelivery) -> None:
        self._arrived.append(received)
        self._wake.set()

    def _on_popped(self, received: ReceivedDelivery) -> None:
        pass

    def _on_expired(self, received: ReceivedDelivery) -> None:
        pass

    def _before_waiting(self) -> None:
        pass

    async def _poll_dispatcher(self) -> None:
        pass

    async def redeliver(self, received: list[ReceivedDelivery], error: str = "") -> None:
        """Deliver again what the application did not acknowledge."""
        try:
            await self.pause()
            await self.give_back(received, error)
        finally:
            await self.resume()

    async def pause(self) -> None:
        """Receive nothing until `resume`. A message that is given back may return at once, and would be taken
        for one that the application still has.
        """

    async def resume(self) -> None:
        """Receive again after `pause`."""

    async def give_back(self, received: list[ReceivedDelivery], error: str = "") -> None:
        """Return messages, to be delivered again. ``error``: why their delivery failed."""
        for delivery in reversed(received):
            delivery.message.redelivered = True
            delivery.message.delivery_count += 1
            self._arrived.appendleft(delivery)
        if received:
            self._wake.set()

    async def close(self) -> None:
        """Receive no more."""
        self.revoked()

    def revoked(self) -> None:
        """Close without contacting the dispatcher."""
        self.closed = True
        self._wake.set()
        if self in self.session.consumers:
            self.session.consumers.remove(self)


class _Settlement:
    """Ends one message of a listener; see `messages.Settlement`."""

    def __init__(self, received: ReceivedDelivery) -> None:
        self._received = received
        self._session = received.consumer.session
        self._loop = asyncio.get_running_loop()

    def ack(self) -> None:
        def mark_received() -> None:
            self._session.mark_received(self._received)

        self._settle(mark_received)

    def nack(self, reason: str = "") -> None:
        text = retries.described(f"rejected: {reason}" if reason else "rejected")
        self._settle(lambda: self._release(reason=text))

    def retry(self, after_s: float = 0.0) -> None:
        if not 0 <= after_s <= retries.DELAY_S_MAX:
            raise errors.InvalidInput(f"after_s is 0 to {retries.DELAY_S_MAX:g}, not {after_s!r}")
        self._settle(lambda: self._release(delay_s=float(after_s), error="retried by its handler"))

    async def failed(self, error: Exception, retry: retries.Retry) -> None:
        received, session = self._received, self._session
        if not session.forget_received(received):
            return
        text = retries.described(f"{type(error).__name__}: {error}")
        attempt = received.message.delivery_count
        delay_s = retry.delay_after(attempt)
        if retry.attempts and attempt >= retry.attempts and received.key:
            self._release(reason=f"{attempt} attempts; last error: {text}")
        elif delay_s and received.key:
            self._release(delay_s=delay_s, error=text)
        else:
            redelivery = received.consumer.redeliver([received], text)
            await session.connection.run_shielded(redelivery)

    def _settle(self, act: Callable[[], None]) -> None:
        def settle() -> None:
            if self._session.forget_received(self._received):
                act()

        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:  # in the thread of a plain function
            is_here = False
        settle() if is_here else self._loop.call_soon_threadsafe(settle)

    def _release(self, *, reason: str | None = None, delay_s: float = 0.0, error: str = "") -> None:
        received, connection = self._received, self._session.connection
        if received.key:
            release = protocol.ReleaseMessages(
                connection.name,
                {received.key: [received.sequence]},
                reason=reason,
                delay_s=delay_s,
                error=error,
            )
            connection.spawn(connection.notify(release))
        elif reason is None:
            connection.spawn(received.consumer.redeliver([received]))


class DispatchedConsumer(Consumer):
    """Receives from the dispatcher, up to ``prefetch`` messages ahead; 0: when the application waits."""

    def __init__(
        self,
        session: api.Session,
        destination: destinations.Destination,
        *,
        prefetch: int,
        selector: str | None,
        name: str | None,
        shared: bool,
        no_local: bool,
    ) -> None:
        if prefetch < 0:
            raise errors.InvalidInput(f"prefetch is at least 0, not {prefetch}")
        super().__init__(session, destination)
        self.number = session.connection.next_number()
        self._prefetch = prefetch
        self._spent = 0 if prefetch else 1  # credit to grant; without prefetch, when the application waits
        self._paused = False
        self._granting: asyncio.Task[None] | None = None  # the last credit on its way
        self._attach_request = protocol.AttachConsumer(
            session.connection.name,
            self.number,
            str(destination),
            subscription=name,
            durable=name is not None,
            shared=shared,
            selector=selector,
            no_local=no_local,
        )

    def drop_waiting(self) -> None:
        self._arrived.clear()
        self._loading.clear()
        if self._prefetch:
            self._spent = 0

    def attach_request(self) -> protocol.AttachConsumer:
        """The request to attach. A new dispatcher does not know earlier deliveries, so those that wait here
        are dropped: they would be delivered twice.
        """
        self.drop_waiting()
        credit = 0 if self.closed or self._paused else self._prefetch or 1 - self._spent
        return msgspec.structs.replace(self._attach_request, credit=credit)

    def deliver(self, delivery: protocol.MessageDelivery) -> None:
        if delivery.count and self._has(delivery.key, delivery.sequence):
            self._spend()
            return  # a new dispatcher repeats a message that the application has
        meta = messages.decode_meta(delivery.meta)
        try:
            message = codec.message_from_meta(meta, delivery.data, self.destination)
        except errors.MusterError as error:
            if self.destination != destinations.queue(destinations.DEAD_LETTERS):
                self.session.connection.spawn(self._reject(delivery, error.message))
                self._spend()
                return
            message = codec.message_from_meta(codec.unreadable(meta), delivery.data, self.destination)
        message.delivery_count = delivery.count + 1
        message.redelivered = delivery.count > 0
        self._put(ReceivedDelivery(message, self, delivery.key, delivery.sequence))

    def _has(self, key: str, sequence: int) -> bool:
        session = self.session
        return session.connection.outbox.is_acknowledging(key, sequence) or session.has(key, sequence)

    async def _reject(self, delivery: protocol.MessageDelivery, reason: str) -> None:
        connection = self.session.connection
        await connection.notify(
            protocol.ReleaseMessages(connection.name, {delivery.key: [delivery.sequence]}, reason=reason)
        )

    async def _on_unreadable(self, received: ReceivedDelivery, error: errors.MusterError) -> None:
        connection = self.session.connection
        await connection.notify(
            protocol.ReleaseMessages(
                connection.name, {received.key: [received.sequence]}, reason=error.message
            )
        )

    def _on_popped(self, received: ReceivedDelivery) -> None:
        self._spend()

    def _push_front(self, received: ReceivedDelivery) -> None:
        super()._push_front(received)
        self._spent -= 1

    def _spend(self) -> None:
        self._spent += 1
        if not self._prefetch:
            self._wake.set()  # if the application waits, it requests the next
        elif self._spent >= max(1, self._prefetch // 2):
            self._grant()

    def _before_waiting(self) -> None:
        if not self._prefetch:
            self._grant()

    def _grant(self) -> None:
        connection = self.session.connection
        if self._spent and not self._paused:
            credit = protocol.GrantCredit(connection.name, self.number, self._spent)
            self._spent = 0
            self._granting = connection.spawn(connection.notify(credit))

    async def _wait_granted(self) -> None:
        """A request about this consumer must not overtake its credit."""
        if self._granting is not None and not self._granting.done():
            await asyncio.wait((self._granting,))

    def _on_expired(self, received: ReceivedDelivery) -> None:
        connection = self.session.connection
        release = protocol.ReleaseMessages(
            connection.name, {received.key: [received.sequence]}, reason=messages.EXPIRED
        )
        connection.spawn(connection.notify(release))

    async def _poll_dispatcher(self) -> None:
        connection = self.session.connection
        self._grant()
        await self._wait_granted()
        await connection.outbox.wait_idle()  # acknowledgements make room for more
        await connection.request(protocol.Ping(connection.name, [self.number]))

    async def pause(self) -> None:
        await self.session.connection.outbox.wait_idle()
        self._paused = True
        await self._stop()

    async def resume(self) -> None:
        connection = self.session.connection
        if self._paused and not self.closed:
            with contextlib.suppress(errors.Unavailable):  # it is attached again, with its credit
                await connection.notify(protocol.GrantCredit(connection.name, self.number, self._prefetch))
        self._paused = False
        self._wake.set()

    async def give_back(self, received: list[ReceivedDelivery], error: str = "") -> None:
        connection = self.session.connection
        if seen := by_key(received):
            await connection.request(
                protocol.ReleaseMessages(connection.name, seen, counted=True, error=error)
            )

    async def _stop(self, timeout_s: float | None = None) -> None:
        """Stop deliveries, and release prefetched messages to other consumers."""
        connection = self.session.connection
        await self._wait_granted()
        await connection.request(protocol.StopDelivery(connection.name, [self.number]), timeout_s=timeout_s)
        ahead = by_key(self._arrived)
        self._arrived.clear()
        self._spent = 0 if self._prefetch else 1
        if ahead:
            release = protocol.ReleaseMessages(connection.name, ahead, counted=False)
            await connection.request(release, timeout_s=timeout_s)

    async def close(self) -> None:
        """Messages that the session holds remain in the session until acknowledged or released."""
        if self.closed:
            return
        session = self.session
        session.flush_lazy()
        await session.connection.outbox.wait_idle(dispatcher_connection.CLOSE_S)
        await super().close()
        if session.closed or not (session.holds_received and session.held_by(self)):
            await self.detach()
            return
        session.closing.append(self)
        with contextlib.suppress(errors.Unavailable):
            await self._stop(dispatcher_connection.CLOSE_S)

    async def detach(self) -> None:
        self._loading.clear()
        held = self.session.held_by(self)
        for delivery in held:
            self.session.unacknowledged.pop(delivery.place, None)
        await self.session.connection.detach(self.number, by_key(held))


def _has_expired(message: messages.JmsMessage) -> bool:
    return bool(message.expiration_ms) and message.expiration_ms <= messages.now_ms()
