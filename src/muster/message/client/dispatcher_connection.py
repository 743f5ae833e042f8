"""A JMS connection: a bus connection that is registered with the dispatcher under one name.

Everything it sends and acknowledges goes through its `outbox`. When a dispatcher starts, or does not know
this connection, all consumers are attached again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, Self

import msgspec

from muster.bus import api
from muster.bus.rpc import error_replies, requests
from muster.core import errors
from muster.core.telemetry import log
from muster.message import errors as message_errors
from muster.message import protocol
from muster.message.client import flow_control, outbox, topic_listeners
from muster.supervision import tasks

events = log.EventLog("message")

PING_S = 4.0
REQUEST_S = 5.0
CLOSE_S = 3.0  # maximum wait for a dispatcher when closing
#: Not repeated when another dispatcher starts: the new one would find nothing to do.
_ONCE = (protocol.EndSubscription, protocol.DeleteTemporary, protocol.PurgeQueue, protocol.MoveMessages)
IN_DOUBT_S = 60.0  # how long a work is retried before its outcome counts as unknown


class DeliveryTarget(Protocol):
    """A consumer that is attached at the dispatcher."""

    @property
    def number(self) -> int: ...
    def attach_request(self) -> protocol.AttachConsumer: ...
    def deliver(self, delivery: protocol.MessageDelivery) -> None: ...
    def revoked(self) -> None:
        """A new dispatcher rejected the consumer: another client has its place."""


class DispatcherConnection:
    """``client_id`` identifies the client that owns the durable subscriptions. No two connections of an
    identity have the same client id.

    ``connect_without_echo`` opens another bus connection that does not receive its own messages. Consumers
    with no-local subscribe there, and from the first of them on the connection also publishes there, so that
    no copy is transferred only to be dropped. Without it, such consumers drop the messages themselves.
    """

    def __init__(
        self,
        bus: api.Bus,
        *,
        client_id: str | None = None,
        owns_bus: bool = False,
        connect_without_echo: Callable[[], Awaitable[api.Bus]] | None = None,
    ) -> None:
        self.bus = bus
        self.publish_bus = bus  # for messages published directly to topics
        self.client_id = client_id
        unique = secrets.token_hex(8)
        self.name = f"{bus.identity}-{unique}"
        self.closed = False
        self.in_doubt_s = IN_DOUBT_S
        self.on_error: Callable[[errors.MusterError], None] | None = None
        self._owns_bus = owns_bus
        self._loop = asyncio.get_running_loop()
        self._registered = False
        self._epoch = 0  # of the dispatcher where this connection is registered
        self._highest_epoch = 0  # highest epoch seen since the bus connected
        # Requests that wait for a reply, with the dispatcher's epoch
        self._pending: dict[asyncio.Timeout, int] = {}
        self._registration = asyncio.Lock()
        self._subscriptions: list[api.Subscription] = []
        self._end_state_callback: Callable[[], None] = lambda: None
        self._disconnected = False  # since all consumers were last attached
        self._stale: set[int] = set()  # consumers to attach again; their deliveries are repeated
        self._unacknowledged: list[Callable[[], dict[str, list[int]]]] = []
        self._subscribed = False
        self._follows_slow = False
        self._consumers: dict[int, DeliveryTarget] = {}
        self._attached: set[int] = set()
        self._numbers = 0
        self._message_number = 0
        self._id_head = f"ID:{unique}-"
        self._tasks = tasks.TaskSupervisor(f"JMS connection {self.name}", handles=self._handle_error)
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.outbox = outbox.Outbox(self)
        self._slow_reports = flow_control.SlowConsumerReports(self._report_slow, self.spawn)
        self.holds = flow_control.ProducerHolds(self._holds_released)
        self.listeners = topic_listeners.TopicListeners(bus, topic_listeners.TopicMessage)
        self._connect_without_echo = connect_without_echo
        self._echo_free_listeners: topic_listeners.TopicListeners[topic_listeners.TopicMessage] | None = None
        self._echo_lock = asyncio.Lock()
        self.on_released: Callable[[], None] | None = None

    @property
    def origin(self) -> str:
        """The sender of this connection's messages, for consumers with no-local."""
        return protocol.origin(self.bus.identity, self.client_id) if self.client_id else self.name

    async def __aenter__(self) -> Self:
        try:
            if self.client_id is not None:
                await self.request(protocol.Ping(self.name))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def on_close(self, closer: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._closers.append(closer)

    def add_unacknowledged(self, holder: Callable[[], dict[str, list[int]]]) -> None:
        """``holder`` returns the unacknowledged messages of the application, by backlog."""
        self._unacknowledged.append(holder)

    def forget_session(
        self, closer: Callable[[], Coroutine[Any, Any, None]], holder: Callable[[], dict[str, list[int]]]
    ) -> None:
        """Remove the callbacks of a closed session."""
        self._closers.remove(closer)
        self._unacknowledged.remove(holder)

    async def close(self, *, lost: bool = False) -> None:
        """``lost``: the client behind the connection is gone, so the messages it held count as delivered."""
        if self.closed:
            return
        for closer in list(reversed(self._closers)):
            await closer()
        await self.outbox.wait_idle(CLOSE_S)
        self.closed = True
        self._end_state_callback()
        if self._registered:
            with contextlib.suppress(errors.MusterError):
                await self._request_once(protocol.Disconnect(self.name, lost, self._seen_with([])))
        await self._tasks.close()
        self.outbox.abandon(errors.NotConnected("the connection was closed before the message was stored"))
        for subscription in self._subscriptions:
            await subscription.close()
        if self.without_echo:
            await self.publish_bus.close()
        if self._owns_bus:
            await self.bus.close()

    def check_open(self) -> None:
        if self.closed:
            raise message_errors.IllegalState("the connection is closed")

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def next_message_id(self) -> str:
        self._message_number += 1
        return f"{self._id_head}{self._message_number}"

    async def run_shielded(
        self, work: Coroutine[Any, Any, None], on_end: Callable[[], None] = lambda: None
    ) -> None:
        """Run a coroutine to its end, or to that of the connection, even if the caller is cancelled.

        A commit or release changes the state of several objects; stopping halfway would leave them
        inconsistent.
        """
        outcome: asyncio.Future[None] = self._loop.create_future()

        async def run() -> None:
            try:
                await work
            except Exception as error:
                if outcome.done():  # the caller no longer sees its failure
                    raise
                outcome.set_exception(error)
            else:
                if not outcome.done():
                    outcome.set_result(None)
            finally:
                on_end()

        task = self.spawn(run())
        task.add_done_callback(lambda _: outcome.cancel())
        await outcome

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.spawn("task", work)

    def _handle_error(self, error: BaseException) -> bool:
        """Errors of requests are reported to the user of the connection."""
        if isinstance(error, errors.MusterError):
            self.report(error)
            return True
        return False

    def report(self, error: errors.MusterError) -> None:
        if self.on_error is not None:
            self.on_error(error)
        else:
            events.warning("connection-error", connection=self.name, error=error)

    @property
    def without_echo(self) -> bool:
        """Whether the connection does not receive its own messages."""
        return self.publish_bus is not self.bus

    async def publish_without_echo(self, bus: api.Bus) -> None:
        await self.bus.flush()  # earlier messages on the other bus connection go first
        self.publish_bus = bus
        await self.notify(protocol.EchoOff(self.name))

    async def listeners_for(
        self, *, no_local: bool
    ) -> topic_listeners.TopicListeners[topic_listeners.TopicMessage]:
        if not no_local or self._connect_without_echo is None:
            return self.listeners
        async with self._echo_lock:
            if self._echo_free_listeners is None:
                made = await self._connect_without_echo()
                await self.publish_without_echo(made)
                self._echo_free_listeners = topic_listeners.TopicListeners(made, topic_listeners.TopicMessage)
            return self._echo_free_listeners

    # The dispatcher.

    async def register(self) -> None:
        """Register with the dispatcher, and attach the consumers that are not attached."""
        async with self._registration:
            self.check_open()
            if not self._subscribed:
                self._subscribed = True
                deliver = protocol.deliver_subject(self.bus.identity, self.name)
                self._subscriptions.append(await self.bus.subscribe(deliver, handler=self._delivered))
                self._subscriptions.append(
                    await self.bus.subscribe(protocol.STARTED, handler=self._dispatcher_started)
                )
                self._end_state_callback = self.bus.on_state(self._bus_changed)
                self._tasks.loop("ping", self._ping)
            if not self._registered:
                at = self.bus.connection
                hello = protocol.ClientHello(
                    self.name,
                    self.client_id,
                    broker=at.broker if at else "",
                    number=at.number if at else 0,
                    without_echo=self.without_echo,
                )
                self._epoch = (await self._request_once(hello)).epoch
                self._registered = True
                self._attached.clear()
            for number, consumer in list(self._consumers.items()):
                if number not in self._attached:
                    await self._attach_again(number, consumer)
            if self._registered:
                self._disconnected = False

    async def _attach_again(self, number: int, consumer: DeliveryTarget) -> None:
        request = consumer.attach_request()  # from here on, no earlier delivery is passed on
        if self._disconnected:
            await self._request_once(protocol.DetachConsumer(self.name, number, self._seen_by_application()))
        self._stale.discard(number)
        try:
            await self._request_once(request)
        except (message_errors.IllegalState, errors.Forbidden) as error:
            self._consumers.pop(number, None)
            consumer.revoked()
            self.report(error)
        except errors.MusterError as error:  # no reply, or no room in the log: start again
            self._registered = False
            raise errors.Unavailable(f"a consumer could not be attached again: {error.message}") from error
        else:
            self._attached.add(number)

    def _bus_changed(self, state: api.ConnectionState) -> None:
        """After a disconnect, deliveries and credit may be lost: attach again, so that they are repeated."""
        if state is not api.ConnectionState.CONNECTED:
            self._registered, self._disconnected = False, True
            self._highest_epoch = 0  # brokers restored from a backup have a lower epoch
            self._stale.update(self._consumers)
        elif self._disconnected and not self.closed:
            self.spawn(self._register_again())

    def _seen_by_application(self) -> dict[str, list[int]]:
        """Messages the application received, by backlog: unacknowledged, or being acknowledged."""
        return self._seen_with([holder() for holder in self._unacknowledged])

    def _seen_with(self, held: list[dict[str, list[int]]]) -> dict[str, list[int]]:
        """Acknowledgements in progress, which may not be stored, together with ``held``."""
        seen: dict[str, list[int]] = {}
        for acks in (*self.outbox.pending_acks(), *held):
            for key, sequences in acks.items():
                seen.setdefault(key, []).extend(sequences)
        return seen

    async def request(
        self, request: protocol.DispatcherRequest, *, timeout_s: float | None = None
    ) -> protocol.DispatcherReply:
        """Send a request and retry until there is a reply: a failed dispatcher has a successor.

        A request that must not be executed twice is repeated to the same dispatcher only, which recognizes
        it. If another dispatcher is active, `errors.TimedOut` reports that the request may have been
        executed.
        """
        deadline = self._loop.time() + (self.in_doubt_s if timeout_s is None else timeout_s)
        pause_s = 0.05
        times = 0
        id = (
            secrets.token_hex(16)
            if isinstance(request, protocol.PurgeQueue | protocol.MoveMessages)
            else None
        )
        while True:
            try:
                if not self._registered and not isinstance(request, protocol.READS):
                    await self.register()
                if isinstance(request, protocol.PurgeQueue | protocol.MoveMessages) and not times:
                    request = msgspec.structs.replace(request, epoch=self._epoch)
                times += 1
                return await self._request_once(request, id)
            except errors.StaleEpoch as error:
                if times > 1:
                    raise errors.TimedOut(f"the request may have been executed: {error.message}") from error
                times = 0
                self._registered = False
            except message_errors.InvalidDestination:
                if times > 1 and isinstance(request, protocol.EndSubscription):
                    return protocol.DispatcherReply()  # the first attempt succeeded
                raise
            except errors.Unavailable:
                if self.closed or self._loop.time() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    async def _request_once(
        self, request: protocol.DispatcherRequest, id: str | None = None
    ) -> protocol.DispatcherReply:
        identity = self.bus.identity
        looks = isinstance(request, protocol.READS)  # viewers may send these only
        subject = protocol.read_subject(identity) if looks else protocol.request_subject(identity)
        until = asyncio.timeout(None)
        try:
            async with until:
                if not isinstance(request, _ONCE):
                    self._pending[until] = self._epoch
                response = await self.bus.request(
                    subject,
                    protocol.encode(request),
                    headers={requests.REQUEST_ID: id} if id else None,
                    timeout_s=REQUEST_S,
                )
        except TimeoutError:
            raise errors.NotConnected("another dispatcher has started: repeat the request") from None
        except errors.Forbidden as forbidden:
            raise errors.Forbidden(
                f"{identity} may not {'read' if looks else 'send or receive'} messages",
                hint=f"`muster creds show {identity}` lists its permissions",
            ) from forbidden
        finally:
            self._pending.pop(until, None)
        reply = protocol.decode_reply(response.data)
        if reply.epoch < self._highest_epoch:
            raise errors.NotConnected("the reply came from a dispatcher that has been replaced")
        self._observe_epoch(reply.epoch)
        if reply.error is not None:
            error = error_replies.from_error_reply(reply.error)
            if isinstance(error, errors.NotConnected):
                self._registered = False
            raise error
        return reply

    async def notify(self, request: protocol.DispatcherRequest) -> None:
        if self._registered and not self.closed:
            await self.bus.publish(protocol.notify_subject(self.bus.identity), protocol.encode(request))

    async def attach(self, consumer: DeliveryTarget) -> None:
        self.check_open()
        if not self._registered:
            await self._register_with_retry()
        self._consumers[consumer.number] = consumer
        try:
            await self.request(consumer.attach_request())
        except BaseException:
            self._consumers.pop(consumer.number, None)
            # It may be attached nevertheless, and would then receive deliveries.
            self.spawn(self.notify(protocol.DetachConsumer(self.name, consumer.number)))
            raise
        self._attached.add(consumer.number)

    async def _register_with_retry(self) -> None:
        """Retry: a domain that has just started has no dispatcher yet."""
        await self.request(protocol.Ping(self.name))

    async def detach(self, number: int, held: dict[str, list[int]]) -> None:
        """``held``: messages that the application received and did not acknowledge."""
        seen = self._seen_with([held])
        if self._consumers.pop(number, None) is not None:
            self._attached.discard(number)
            self._stale.discard(number)
            with contextlib.suppress(errors.Unavailable):
                await self.request(protocol.DetachConsumer(self.name, number, seen), timeout_s=CLOSE_S)

    def _delivered(self, message: api.Message) -> None:
        batch = protocol.decode_deliveries(message.data)
        if batch.epoch != self._epoch:
            self._observe_epoch(batch.epoch)
            return  # the current dispatcher delivers the same messages
        for delivery in batch.deliveries:
            consumer = self._consumers.get(delivery.consumer)
            if consumer is not None and delivery.consumer not in self._stale:
                consumer.deliver(delivery)
        for number, mark in batch.due:
            self.spawn(self.outbox.publisher.publish_due(number, mark))

    async def subscribe_slow_reports(self) -> None:
        """From now on, hold back messages to slow consumers of topics. Producers call this first."""
        if not self._follows_slow:
            self._follows_slow = True
            self._subscriptions.append(await self.bus.subscribe(protocol.SLOW, handler=self._slow_report))

    def _slow_report(self, message: api.Message) -> None:
        self.holds.on_report(protocol.decode_slow(message.data))

    def report_slow(self, consumer: flow_control.SlowableConsumer) -> None:
        """Report that this consumer of a topic cannot keep up."""
        self._slow_reports.add(consumer)

    async def _report_slow(self, topic: str, recovered: bool) -> None:
        with contextlib.suppress(errors.Unavailable):
            if not self._registered:
                await self.register()
            await self.notify(protocol.SlowConsumer(self.name, topic, recovered))

    def _holds_released(self) -> None:
        if self.on_released is not None:
            self.on_released()

    def _dispatcher_started(self, message: api.Message) -> None:
        started = protocol.decode_started(message.data).epoch
        if started < self._highest_epoch:
            return  # it has been replaced already
        for until in [until for until, epoch in self._pending.items() if epoch != started]:
            del self._pending[until]  # that dispatcher has stopped
            until.reschedule(self._loop.time())
        if self._registered and started == self._epoch:
            return  # already registered there
        self._highest_epoch = started
        self._registered = False
        if not self.closed:
            self.spawn(self._register_again())

    def _observe_epoch(self, epoch: int) -> None:
        """A dispatcher of this epoch is active. If it is new, this connection has to register there."""
        self._highest_epoch = max(self._highest_epoch, epoch)
        if self._registered and epoch > self._epoch:
            self._registered = False
            if not self.closed:
                self.spawn(self._register_again())

    async def _register_again(self) -> None:
        with contextlib.suppress(errors.Unavailable):  # the next ping retries
            await self.request(protocol.Ping(self.name), timeout_s=REQUEST_S)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            try:
                await self.request(protocol.Ping(self.name), timeout_s=PING_S)
            except errors.Unavailable:
                pass
            except errors.MusterError as error:  # a limit was reached: the next ping may succeed
                self.report(error)

    def submit(
        self,
        sends: list[protocol.SendMessage],
        acks: dict[str, list[int]] | None = None,
        *,
        atomic: bool = False,
    ) -> asyncio.Future[None]:
        """Send and acknowledge; the future completes when it is stored. ``atomic``: a transaction, stored by
        itself.

        A sender should first wait for room in the outbox; one that does not is eventually rejected with
        `errors.Overloaded`.
        """
        self.check_open()
        return self.outbox.submit(sends, acks or {}, atomic=atomic)
