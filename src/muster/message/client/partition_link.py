"""The link of a registrant to the dispatcher of one partition.

When a dispatcher starts, or does not know this registrant, all consumers are attached again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from muster.bus import api
from muster.bus.rpc import client, error_replies, requests
from muster.core import errors
from muster.core.telemetry import log
from muster.message import errors as message_errors
from muster.message import protocol

if TYPE_CHECKING:
    from muster.message.client import registrant

events = log.EventLog("message")

PING_S = 4.0
REQUEST_S = 5.0
CLOSE_S = 3.0  # maximum wait for a dispatcher when closing
#: Not repeated when another dispatcher starts: the new one would find nothing to do.
_ONCE = (protocol.EndSubscription, protocol.DeleteTemporary, protocol.PurgeQueue, protocol.MoveMessages)


class DeliveryTarget(Protocol):
    """A consumer that is attached at the dispatcher."""

    @property
    def number(self) -> int: ...
    def attach_request(self) -> protocol.AttachConsumer: ...
    def deliver(self, delivery: protocol.MessageDelivery) -> None: ...
    def drop_waiting(self) -> None:
        """Drop deliveries that the application does not have yet: they are repeated, perhaps to others."""

    def revoked(self) -> None:
        """A dispatcher rejected the consumer: another client has its place, or it is not allowed any more."""


class PartitionLink:
    def __init__(self, connection: registrant.Registrant, partition: int) -> None:
        self.connection = connection
        self.partition = partition
        self.bus = connection.bus
        self._loop = asyncio.get_running_loop()
        self._registered = False
        self._epoch = 0  # of the dispatcher where this connection is registered
        self._highest_epoch = 0  # highest epoch seen since the bus connected
        # Requests that wait for a reply, with the dispatcher's epoch
        self._pending: dict[asyncio.Timeout, int] = {}
        # Deliveries and notifications since the hello with this number: the dispatcher counts them as well
        self._registration_number = self._delivered_count = self._notified = 0
        self._registration = asyncio.Lock()
        self._subscriptions: list[api.Subscription] = []
        self._end_state_callback: Callable[[], None] = lambda: None
        self._known = False  # to the dispatcher, before the last hello: consumers may be attached there
        self._stale: set[int] = set()  # consumers to attach again; their deliveries are repeated
        self._greeted = False  # a hello was sent: the dispatcher may know this connection
        self._preparing: asyncio.Task[None] | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._consumers: dict[int, DeliveryTarget] = {}
        self._attached: set[int] = set()

    @property
    def _is_closed(self) -> bool:
        return self.connection.closed

    async def disconnect(self, *, lost: bool) -> None:
        """The connection is closed."""
        self._end_state_callback()
        disconnect = protocol.Disconnect(self.connection.name, lost, self.connection.seen_with([]))
        with contextlib.suppress(errors.MusterError):
            if self._registered:
                await self.request_once(disconnect)
            elif self._greeted:  # without a reply, which the hello did not get either
                subject = protocol.notify_subject(self.bus.identity, self.partition)
                await self.bus.publish(subject, protocol.encode(disconnect))
        for subscription in self._subscriptions:
            await subscription.close()

    @property
    def is_registered(self) -> bool:
        return self._registered

    async def register(self) -> None:
        """Register with the dispatcher, and attach the consumers that are not attached."""
        async with self._registration:
            self.connection.check_open()
            if len(self._subscriptions) < 2:
                await self._subscribe()
            if not self._registered:
                self._drop_waiting()
                at = self.bus.connection
                self._registration_number += 1
                hello = protocol.ClientHello(
                    self.connection.name,
                    self.connection.client_id,
                    broker=at.broker if at else "",
                    number=at.number if at else 0,
                    registration=self._registration_number,
                )
                self._delivered_count = self._notified = 0
                self._greeted = True
                epoch = (await self.request_once(hello)).epoch
                self._known, self._epoch = epoch == self._epoch, epoch
                self._registered = True
                self._attached.clear()
            for number, consumer in list(self._consumers.items()):
                if number not in self._attached and number in self._consumers:  # not closed meanwhile
                    await self._attach_again(number, consumer)

    async def move(self, bus: api.Bus) -> None:
        """Use another bus connection of the same login from now on. The consumers stay behind."""
        self._end_requests(list(self._pending))
        async with self._registration:
            self._end_state_callback()
            former, self._subscriptions, self.bus = self._subscriptions, [], bus
            self._discard_registration()
        for subscription in former:
            await subscription.close()

    async def _subscribe(self) -> None:
        """An earlier attempt may have failed, or been cancelled, after the first subscription."""
        deliver = protocol.deliver_subject(self.bus.identity, self.connection.name, self.partition)
        started = protocol.started_subject(self.partition)
        handlers = ((deliver, self._delivered), (started, self._dispatcher_started))
        for subject, handler in handlers[len(self._subscriptions) :]:
            self._subscriptions.append(await self.bus.subscribe(subject, handler=handler))
        self._end_state_callback = self.bus.on_state(self._bus_changed)
        if self._pinging is None:
            self._pinging = self.connection.supervisor.loop("ping", self._ping)

    async def _attach_again(self, number: int, consumer: DeliveryTarget) -> None:
        request = consumer.attach_request()  # from here on, no earlier delivery is passed on
        if self._known:  # what was delivered since and not received is delivered again
            await self.request_once(
                protocol.DetachConsumer(self.connection.name, number, self.connection.seen_by_application())
            )
        self._stale.discard(number)
        try:
            await self.request_once(request)
        except (message_errors.IllegalState, errors.Forbidden, errors.InvalidInput) as error:
            self._consumers.pop(number, None)
            consumer.revoked()
            self.connection.report(error)
        except errors.MusterError as error:  # no reply, or no room in the log: start again
            self._registered = False
            raise errors.Unavailable(f"a consumer could not be attached again: {error.message}") from error
        else:
            self._attached.add(number)

    def _bus_changed(self, state: api.ConnectionState) -> None:
        """After a disconnect, deliveries and credit may be lost: attach again, so that they are repeated."""
        if state is not api.ConnectionState.CONNECTED:
            self._discard_registration()
            self._highest_epoch = 0  # brokers restored from a backup have a lower epoch
        elif not self._registered and not self._is_closed:
            self.connection.spawn(self._register_again())

    def _discard_registration(self) -> None:
        self._registered = False
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        """Drop what waits for the application, and what still arrives: it must not overtake the former."""
        self._stale.update(self._consumers)
        for consumer in self._consumers.values():
            consumer.drop_waiting()

    def _recover_lost(self, what: str) -> None:
        """Messages between the dispatcher and this client were lost although both are connected, for example
        by a connection between two brokers. Attach again, as after a disconnect.
        """
        if self._registered and not self._is_closed:
            events.warning("messages-lost", connection=self.connection.name, lost=what)
            self._discard_registration()
            self.connection.spawn(self._register_again())

    async def request(
        self, request: protocol.DispatcherRequest, *, timeout_s: float | None = None
    ) -> protocol.DispatcherReply:
        """Send a request and retry until there is a reply: a failed dispatcher has a successor.

        A request that must not be executed twice is repeated to the same dispatcher only, which recognizes
        it. If another dispatcher is active, `errors.TimedOut` reports that the request may have been
        executed.
        """
        deadline = self._loop.time() + (self.connection.in_doubt_s if timeout_s is None else timeout_s)
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
                return await self.request_once(request, id)
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
                if self._is_closed or self._loop.time() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    async def request_once(
        self, request: protocol.DispatcherRequest, id: str | None = None
    ) -> protocol.DispatcherReply:
        identity, registration, notified = self.bus.identity, self._registration_number, self._notified
        looks = isinstance(request, protocol.READS)  # viewers may send these only
        make_subject = protocol.read_subject if looks else protocol.request_subject
        subject = make_subject(identity, self.partition)
        until = asyncio.timeout(None)
        try:
            async with until:
                if not isinstance(request, _ONCE):
                    self._pending[until] = self._epoch
                response = await client.exchange_once(
                    self.bus,
                    subject,
                    protocol.encode(request),
                    headers={requests.REQUEST_ID: id} if id else None,
                    timeout_s=REQUEST_S,
                )
        except TimeoutError:
            raise errors.NotConnected(
                "another dispatcher or bus connection is used now: repeat the request"
            ) from None
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
        self.connection.set_partition_count(reply.partitions)
        if reply.error is not None:
            error = error_replies.from_error_reply(reply.error)
            if isinstance(error, errors.NotConnected):
                self._registered = False
            raise error
        if isinstance(request, protocol.Ping) and registration == self._registration_number:
            if reply.delivered > self._delivered_count:
                self._recover_lost("deliveries")
            elif 0 <= reply.notified < notified:
                self._recover_lost("notifications")
        return reply

    async def notify(self, request: protocol.DispatcherRequest) -> None:
        if self._registered and not self._is_closed:
            await self.bus.publish(
                protocol.notify_subject(self.bus.identity, self.partition), protocol.encode(request)
            )
            self._notified += isinstance(request, protocol.COUNTED)

    async def attach(self, consumer: DeliveryTarget) -> None:
        await self.ensure_registered()
        self._consumers[consumer.number] = consumer
        try:
            await self.request(consumer.attach_request())
        except BaseException:
            self._consumers.pop(consumer.number, None)
            self._stale.discard(consumer.number)
            # It may be attached nevertheless, and would then receive deliveries.
            self.connection.spawn(self.notify(protocol.DetachConsumer(self.connection.name, consumer.number)))
            raise
        self._attached.add(consumer.number)

    async def ensure_registered(self) -> None:
        """Retries: a domain that has just started has no dispatcher yet."""
        if not self._registered:
            await self.request(protocol.Ping(self.connection.name))

    async def detach(self, number: int, seen: dict[str, list[int]]) -> None:
        if self._consumers.pop(number, None) is not None:
            self._attached.discard(number)
            self._stale.discard(number)
            with contextlib.suppress(errors.Unavailable):
                await self.request(
                    protocol.DetachConsumer(self.connection.name, number, seen), timeout_s=CLOSE_S
                )

    def _delivered(self, message: api.Message) -> None:
        batch = protocol.decode_deliveries(message.data)
        if batch.epoch != self._epoch:
            self._observe_epoch(batch.epoch)
            return  # the current dispatcher delivers the same messages
        if batch.registration == self._registration_number:
            if batch.before < self._delivered_count:
                return  # repeated by the network
            if batch.before > self._delivered_count:
                self._recover_lost("deliveries")
                return
            self._delivered_count += len(batch.deliveries)
        for delivery in batch.deliveries:
            consumer = self._consumers.get(delivery.consumer)
            if consumer is not None and delivery.consumer not in self._stale:
                consumer.deliver(delivery)

    def register_soon(self) -> None:
        """Register in the background, unless that is under way already: other requests wait for it."""
        if not self._registered and (self._preparing is None or self._preparing.done()):
            self._preparing = self.connection.spawn(self._register_if_possible())

    async def _register_if_possible(self) -> None:
        """A connection that cannot register now does so with its first request, which reports the error."""
        with contextlib.suppress(errors.MusterError):
            await self.register()

    async def notify_registered(self, request: protocol.DispatcherRequest) -> None:
        """Register if necessary, and notify the dispatcher, if there is one."""
        with contextlib.suppress(errors.Unavailable):
            if not self._registered:
                await self.register()
            await self.notify(request)

    def _dispatcher_started(self, message: api.Message) -> None:
        started = protocol.decode_started(message.data).epoch
        if started < self._highest_epoch:
            return  # it has been replaced already
        self._end_requests([until for until, epoch in self._pending.items() if epoch != started])
        if self._registered and started == self._epoch:
            return  # already registered there
        self._highest_epoch = started
        self._registered = False
        if not self._is_closed:
            self.connection.spawn(self._register_again())

    def _end_requests(self, pending: list[asyncio.Timeout]) -> None:
        """No reply to these will arrive, because the dispatcher has stopped or the bus connection is lost."""
        for until in pending:
            del self._pending[until]
            until.reschedule(self._loop.time())

    def _observe_epoch(self, epoch: int) -> None:
        """A dispatcher of this epoch is active. If it is new, this connection has to register there."""
        self._highest_epoch = max(self._highest_epoch, epoch)
        if self._registered and epoch > self._epoch:
            self._registered = False
            if not self._is_closed:
                self.connection.spawn(self._register_again())

    async def _register_again(self) -> None:
        with contextlib.suppress(errors.Unavailable):  # the next ping retries
            await self.request(protocol.Ping(self.connection.name), timeout_s=REQUEST_S)

    async def _ping(self) -> None:
        is_reported = False
        while True:
            await asyncio.sleep(PING_S)
            try:
                await self.request(protocol.Ping(self.connection.name), timeout_s=PING_S)
                is_reported = False
            except errors.Unavailable:
                pass
            except errors.MusterError as error:  # a limit was reached: a later ping may succeed
                if not is_reported:
                    self.connection.report(error)
                is_reported = True
