"""Consumers of topics, which receive from the bus what is published while they are open."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from muster.core import errors
from muster.message import codec, destinations, protocol, selectors
from muster.message.client import consumers, flow_control, topic_listeners

if TYPE_CHECKING:
    from muster.message.client import api


class TopicConsumer(consumers.Consumer):
    """Subscribes to a topic on the bus and receives what is published meanwhile.

    ``shared``: the name under which it shares the messages with other consumers; the dispatcher stores it.
    """

    def __init__(
        self,
        session: api.Session,
        destination: destinations.Destination,
        selector: str | None,
        *,
        no_local: bool = False,
        shared: str | None = None,
    ) -> None:
        super().__init__(session, destination)
        connection = session.connection
        self.number = connection.next_number()
        self._shared = shared
        self._selector = selector
        self._matches = selectors.compiled(selector) if selector else None
        self._excluded_origin = connection.origin if no_local else None
        self._group: str | None = None
        self._key: object = None
        self._listeners: topic_listeners.TopicListeners[topic_listeners.TopicMessage] | None = None
        self._bytes = 0
        self._is_dropping = False
        self.dropped = 0  # because it was too slow

    async def open(self) -> None:
        connection, name = self.session.connection, self.destination.name
        if self._shared is not None:
            await connection.attach(self)
            self._group = topic_listeners.group(connection.bus.identity, connection.client_id, self._shared)
        # Consumers that share a subscription with others must not share a listener.
        self._key = (name, self._group, id(self) if self._group else None)
        try:
            self._listeners = connection.listeners
            await self._listeners.add(self._key, name, self._group, self)
            connection.prepare_slow_reports()
        except BaseException:
            await self.close()
            raise

    def attach_request(self) -> protocol.AttachConsumer:
        return protocol.AttachConsumer(
            self.session.connection.name,
            self.number,
            str(self.destination),
            subscription=self._shared,
            shared=True,
            selector=self._selector,
        )

    @property
    def owner(self) -> object:
        return self.session

    def drop_waiting(self) -> None:
        """What waits here came from the bus, and is not repeated."""

    def deliver(self, delivery: protocol.MessageDelivery) -> None:
        raise errors.InvariantViolation("the dispatcher does not deliver to topic consumers")

    def offer(self, topic_message: topic_listeners.TopicMessage) -> None:
        meta, size = topic_message.meta, topic_message.message.size
        if (self._excluded_origin is not None and meta.origin == self._excluded_origin) or (
            self._matches is not None and not self._matches(meta.lookup())
        ):
            return
        message = codec.message_from_meta(meta, topic_message.message.data)
        if len(self._arrived) > flow_control.WAITING_SLOW or self._bytes > flow_control.WAITING_SLOW_BYTES:
            self.session.connection.report_slow(self)
            while (
                len(self._arrived) >= flow_control.WAITING_MAX
                or self._bytes + size > flow_control.WAITING_BYTES_MAX
            ):
                self._bytes -= self._arrived.popleft().sequence
                self._drop()
        else:
            self._is_dropping = False
        message.delivery_count = 1
        self._bytes += size
        self._put(consumers.ReceivedDelivery(message, self, "", size))

    def _drop(self) -> None:
        self.dropped += 1
        if not self._is_dropping:
            self._is_dropping = True
            self.session.connection.report(
                errors.Overloaded(
                    f"the consumer of {self.destination} is too slow: its oldest messages are dropped",
                    retry_after_s=0.0,
                )
            )

    def is_slow(self) -> bool:
        return not self.closed and (
            len(self._arrived) > flow_control.WAITING_SLOW // 2
            or self._bytes > flow_control.WAITING_SLOW_BYTES // 2
        )

    def _on_popped(self, received: consumers.ReceivedDelivery) -> None:
        self._bytes -= received.sequence

    def _push_front(self, received: consumers.ReceivedDelivery) -> None:
        super()._push_front(received)
        self._bytes += received.sequence

    async def give_back(self, received: list[consumers.ReceivedDelivery], error: str = "") -> None:
        await super().give_back(received, error)
        self._bytes += sum(delivery.sequence for delivery in received)
        if self.closed and self._listeners is not None:  # it was closed before the application failed
            self._pass_on(self._listeners)

    def revoked(self) -> None:
        super().revoked()
        if self._listeners is not None:
            self.session.connection.spawn(self._listeners.remove(self._key, self))

    async def close(self) -> None:
        if not self.closed:
            super().revoked()
            if self._listeners is not None:
                await self._listeners.remove(self._key, self)
                self._pass_on(self._listeners)
            if self._shared is not None:
                await self.session.connection.detach(self.number, {})

    def _pass_on(self, listeners: topic_listeners.TopicListeners[topic_listeners.TopicMessage]) -> None:
        """Those that share the subscription over this connection receive what waits here. Consumers of other
        connections cannot: they could not know that these are messages of the topic."""
        others = listeners.sharing(self._group) if self._group is not None else []
        for received, other in zip(self._arrived, itertools.cycle(others)):
            assert isinstance(other, TopicConsumer)
            other._push_back(received)
        self._arrived.clear()

    def _push_back(self, received: consumers.ReceivedDelivery) -> None:
        self._bytes += received.sequence
        self._put(consumers.ReceivedDelivery(received.message, self, "", received.sequence))
