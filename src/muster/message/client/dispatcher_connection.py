"""A JMS connection: a bus connection that is registered under one name with the dispatchers it uses.

It routes every request and message to the right partition. Connections that share a bus connection, and
therefore a login, share the outboxes for what they send and acknowledge (`login_outbox`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

from muster.bus import api
from muster.message import destinations, partitions, protocol
from muster.message.client import (
    flow_control,
    login_outbox,
    outbox,
    partition_link,
    registrant,
    routes,
    topic_listeners,
)

CLOSE_S = partition_link.CLOSE_S


class DispatcherConnection(registrant.Registrant):
    """``client_id`` identifies the client that owns the durable subscriptions. No two connections of an
    identity have the same client id.
    """

    def __init__(
        self,
        bus: api.Bus,
        *,
        client_id: str | None = None,
        owns_bus: bool = False,
    ) -> None:
        super().__init__(bus, client_id)
        self._owns_bus = owns_bus
        self._subscriptions: list[api.Subscription] = []
        self._unacknowledged: list[Callable[[], dict[str, list[int]]]] = []
        self._follows_slow = False
        self._consumers: dict[int, int] = {}  # the partitions of the attached consumers
        self._numbers = 0
        self._message_number = 0
        self._id_head = f"ID:{self._unique}-"
        self._closers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._shared: login_outbox.LoginOutboxes | None = None
        self.outbox = outbox.ConnectionOutbox(self)
        self._slow_reports = flow_control.SlowConsumerReports(self._report_slow, self.spawn)
        self.holds = flow_control.ProducerHolds(self._holds_released)
        self.listeners = topic_listeners.TopicListeners(bus, topic_listeners.TopicMessage)
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
        await self.unregister(lost=lost)
        self.outbox.abandon()
        if self._shared is not None:
            await self._shared.leave(self.bus)
        for subscription in self._subscriptions:
            await subscription.close()
        if self._owns_bus:
            await self.bus.close()

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
        task.add_done_callback(lambda _: (outcome.cancel(), work.close()))
        await outcome

    # The dispatchers.

    def set_partition_count(self, count: int) -> None:
        super().set_partition_count(count)
        self.outbox.submit_early(count)

    async def link_to(self, destination: destinations.Destination) -> partition_link.PartitionLink:
        return self.link(partitions.of_destination(destination, await self.partition_count()))

    async def own_temporary(self, destination: destinations.Destination) -> None:
        """The dispatcher has to know the owner of a temporary destination: otherwise it counts as deleted."""
        await (await self.link_to(destination)).ensure_registered()

    def seen_by_application(self) -> dict[str, list[int]]:
        return self.seen_with([holder() for holder in self._unacknowledged])

    def seen_with(self, held: list[dict[str, list[int]]]) -> dict[str, list[int]]:
        seen: dict[str, list[int]] = {}
        for acks in (*self.outbox.pending_acks(), *held):
            for key, sequences in acks.items():
                seen.setdefault(key, []).extend(sequences)
        return seen

    async def request(
        self, request: protocol.DispatcherRequest, *, timeout_s: float | None = None
    ) -> protocol.DispatcherReply:
        """Send a request and retry until there is a reply; see `partition_link.PartitionLink.request`."""
        if self._partition_count == 1:
            return await self.home.request(request, timeout_s=timeout_s)
        if not self._partition_count:
            if isinstance(request, protocol.READS):  # viewers do not register
                await self.home.request(protocol.CountPartitions(), timeout_s=timeout_s)
            else:
                await self.home.request(protocol.Ping(self.name), timeout_s=timeout_s)
        replies = [
            await self.link(partition).request(part, timeout_s=timeout_s)
            for partition, part in routes.route(request, self._partition_count, self._consumers)
        ]
        return routes.merge(request, replies) if replies else protocol.DispatcherReply()

    async def notify(self, request: protocol.DispatcherRequest) -> None:
        for partition, part in routes.route(request, self._partition_count or 1, self._consumers):
            await self.link(partition).notify(part)

    async def attach(self, consumer: partition_link.DeliveryTarget) -> None:
        self.check_open()
        request = consumer.attach_request()
        link = await self.link_to(destinations.Destination.parse(request.destination))
        self._consumers[consumer.number] = link.partition
        try:
            await link.attach(consumer)
        except BaseException:
            self._consumers.pop(consumer.number, None)
            raise

    async def detach(self, number: int, held: dict[str, list[int]]) -> None:
        """``held``: messages that the application received and did not acknowledge."""
        partition = self._consumers.pop(number, None)
        if partition is not None:
            await self.link(partition).detach(number, self.seen_with([held]))

    async def subscribe_slow_reports(self) -> None:
        """From now on, hold back messages to slow consumers of topics. Producers call this first."""
        if not self._follows_slow:
            self._follows_slow = True
            try:
                subscription = await self.bus.subscribe(protocol.SLOW, handler=self._slow_report)
            except BaseException:
                self._follows_slow = False
                raise
            self._subscriptions.append(subscription)

    def _slow_report(self, message: api.Message) -> None:
        self.holds.on_report(protocol.decode_slow(message.data))

    def prepare_slow_reports(self) -> None:
        """Register with the dispatcher already now: when a consumer is slow, the reply to a registration
        comes after all messages that are on their way, and producers would be held too late."""
        self.home.register_soon()

    def report_slow(self, consumer: flow_control.SlowableConsumer) -> None:
        """Report that this consumer of a topic cannot keep up."""
        self._slow_reports.add(consumer)

    async def _report_slow(self, topic: str, recovered: bool) -> None:
        await self.home.notify_registered(protocol.SlowConsumer(self.name, topic, recovered))

    def _holds_released(self) -> None:
        if self.on_released is not None:
            self.on_released()

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
        if not self._partition_count and (count := self.shared.known_partition_count):
            self.set_partition_count(count)
        return self.outbox.submit(sends, acks or {}, atomic=atomic, count=self._partition_count)

    @property
    def shares_works(self) -> bool:
        """Whether messages and acknowledgements may be stored together with those of other connections."""
        return self.in_doubt_s == registrant.IN_DOUBT_S

    @property
    def shared(self) -> login_outbox.LoginOutboxes:
        """The outboxes of this login, which the connection uses until it is closed."""
        if self._shared is None:
            self._shared = login_outbox.join(self.bus)
        return self._shared
