"""Links on which clients receive from a topic on the bus."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from muster.bus import api
from muster.core import errors
from muster.gateways.amqp.links import consumers
from muster.gateways.amqp.protocol import frames
from muster.message import destinations, messages, protocol, selectors
from muster.message import errors as message_errors
from muster.message.amqp_format import amqp_types, fast_path, message_codec
from muster.message.client import flow_control, topic_listeners

if TYPE_CHECKING:
    from muster.gateways.amqp import connection


class EncodedTopicMessage(topic_listeners.TopicMessage):
    """A topic message in AMQP encoding; sections written by an AMQP client are unchanged.

    Several links share it, so results are cached.
    """

    __slots__ = ("_amqp", "_expires_ms", "_matches", "_origin", "_raw")

    def __init__(self, message: api.Message) -> None:
        super().__init__(message)
        self._raw = message.header(messages.HEADER)
        self._amqp: bytes | None = None
        self._origin: str | None = None
        self._expires_ms: int | None = None
        self._matches: dict[selectors.Matches, bool] = {}

    @property
    def _foreign(self) -> str | None:
        """The header, if an AMQP client wrote it."""
        return self._raw if self._raw is not None and self._raw[:1] == messages.FOREIGN else None

    @property
    def origin(self) -> str | None:
        if self._origin is None:
            raw = self._foreign
            self._origin = self.meta.origin if raw is None else fast_path.origin_of(raw)
        return self._origin

    def matches(self, selector: selectors.Matches) -> bool:
        matched = self._matches.get(selector)
        if matched is None:
            matched = self._matches[selector] = selector(self.meta.lookup())
        return matched

    @property
    def amqp(self) -> bytes:
        if self._amqp is None:
            raw, data = self._foreign, self.message.data
            if raw is None and self.meta.large is not None:
                self._amqp = message_codec.encode_large(self.meta, 0, messages.now_ms())
            elif raw is None:
                self._amqp = message_codec.encode(self.meta, data, 0, messages.now_ms())
            else:
                self._amqp = fast_path.unwrap(raw, data)
        return self._amqp

    @property
    def expires_ms(self) -> int:
        """0: never."""
        if self._expires_ms is None:
            if self._foreign is None:
                self._expires_ms = self.meta.expiration_ms
            else:
                self._expires_ms = amqp_types.expires_ms(self.amqp, messages.now_ms())
        return self._expires_ms

    def has_expired(self) -> bool:
        try:
            return 0 < self.expires_ms <= messages.now_ms()
        except (errors.MusterError, ValueError):
            return False  # decoding will report the error


class TopicLink(consumers.OutgoingLink):
    """Receives from a topic on the bus."""

    def __init__(
        self,
        owner: connection.AmqpConnection,
        wrapper: Any,
        destination: destinations.Destination,
        attach: protocol.AttachConsumer,
    ) -> None:
        super().__init__(owner, wrapper)
        self.destination = destination
        self.number = attach.consumer
        self._attach = attach
        self._matches = selectors.compiled(attach.selector) if attach.selector else None
        self._excluded_origin = owner.jms.origin if attach.no_local else None
        group = None
        if attach.shared and attach.subscription:
            client_id = None if attach.without_client_id else owner.jms.client_id
            group = topic_listeners.group(owner.jms.bus.identity, client_id, attach.subscription)
        # Links that share a subscription with others must not share a listener.
        self._key = (destination.name, group, self if group else None)
        self._waiting: deque[tuple[bytes, int]] = deque()  # and when it expires
        self._bytes = 0
        self._listeners: topic_listeners.TopicListeners[EncodedTopicMessage] | None = None
        self._sent = 0
        self._returned: list[tuple[int, bytes]] = []  # returned messages, the first one last
        self._streaming = False  # a large message is being sent

    async def open(self) -> None:
        name, group, _ = self._key
        if self._attach.shared:
            await self.connection.jms.attach(self)
        try:
            self._listeners = self.connection.listeners
            await self._listeners.add(self._key, name, group, self)
            self.connection.jms.prepare_slow_reports()
        except BaseException:
            await self.close(destroy=False)
            raise

    def attach_request(self) -> protocol.AttachConsumer:
        return self._attach

    @property
    def owner(self) -> object:
        return self.connection

    def drop_waiting(self) -> None:
        """What waits here came from the bus, and is not repeated."""

    def deliver(self, delivery: protocol.MessageDelivery) -> None:
        raise errors.InvariantViolation("the dispatcher does not deliver to topic links")

    def offer(self, message: EncodedTopicMessage) -> None:
        if self.closed:
            return
        if (self._excluded_origin is not None and message.origin == self._excluded_origin) or (
            self._matches is not None and not message.matches(self._matches)
        ):
            return
        data = message.amqp
        try:
            self.check_size(data)
        except errors.LimitExceeded:
            self._count_dropped("too-large")
            return
        if self._streaming or self._waiting or self._returned or not self.engine.may_send(self.link):
            self._wait(data, message.expires_ms)
        else:
            self._transmit(data)

    def _count_dropped(self, reason: str) -> None:
        self.connection.gateway.dropped.add(reason=reason)

    def _wait(self, data: bytes, expires_ms: int) -> None:
        self._waiting.append((data, expires_ms))
        self._bytes += len(data)
        if len(self._waiting) > flow_control.WAITING_SLOW or self._bytes > flow_control.WAITING_SLOW_BYTES:
            self.connection.jms.report_slow(self)
            while (
                len(self._waiting) > flow_control.WAITING_MAX or self._bytes > flow_control.WAITING_BYTES_MAX
            ):
                self._bytes -= len(self._waiting.popleft()[0])
                self._count_dropped("slow")

    def _transmit(self, data: bytes) -> None:
        self._sent = number = self._sent + 1
        if isinstance(data, message_codec.LargeMessage):
            self._streaming = True
            self.connection.spawn(self._stream(data, number))
            return
        self.engine.send(self.link, data, (self, "", number, data), settled=self.presettled)

    async def _stream(self, data: message_codec.LargeMessage, number: int) -> None:
        try:
            await self.stream(data, number=number)
        except (errors.NotFound, errors.Conflict, message_errors.FormatError):
            self._count_dropped("unreadable")
        finally:
            self._streaming = False
        if not self._is_closed():
            self.on_credit()

    def returned(self, number: int, data: bytes, code: int, state: bytes | None) -> None:
        if code == frames.TRANSACTIONAL:
            self.connection.transactions.hold(state, self, number, data)
            return
        counted, undeliverable = frames.modified(state) if code == frames.MODIFIED else (False, False)
        if code in (frames.RELEASED, frames.MODIFIED) and not undeliverable:
            self.redeliver(number, data, counted=counted)

    def redeliver(self, number: int, data: bytes, *, counted: bool) -> None:
        """Send a message again, before those that were not sent yet."""
        if not self.closed:
            if not self._returned:
                self.connection.call_soon(self.on_credit)
            self._returned.append((number, message_codec.redelivered(data) if counted else data))
            self._returned.sort(reverse=True)

    def is_slow(self) -> bool:
        return not self.closed and (
            len(self._waiting) > flow_control.WAITING_SLOW // 2
            or self._bytes > flow_control.WAITING_SLOW_BYTES // 2
        )

    def _pump(self) -> None:
        while not self.closed and not self._streaming and self.engine.may_send(self.link):
            if self._returned:
                data = self._returned.pop()[1]
                expires_ms = amqp_types.expires_ms(data, messages.now_ms())
            elif self._waiting:
                data, expires_ms = self._waiting.popleft()
                self._bytes -= len(data)
            else:
                return
            if expires_ms and expires_ms <= messages.now_ms():
                self._count_dropped("expired")
            else:
                self._transmit(data)

    def on_credit(self) -> None:
        self._pump()
        self.connection.flush_soon()
        if not self.closed and self.link.drain:
            self.connection.spawn(self.flow())

    async def flow(self) -> None:
        self._pump()
        if not self.closed and self.link.drain and self._listeners is not None:
            await self._listeners.bus.flush()
            self.connection.deliver_pending(sys.maxsize)
            self._pump()
            if not self._streaming:
                self._drained()

    async def close(self, *, destroy: bool) -> None:
        self.closed = True
        if self._listeners is not None:
            await self._listeners.remove(self._key, self)
            self._pass_on(self._listeners)
        if self._attach.shared:
            await self.connection.jms.detach(self.number, {})

    def _pass_on(self, listeners: topic_listeners.TopicListeners[EncodedTopicMessage]) -> None:
        """Links that share the subscription, over connections of the same identity to this process, receive
        what waits here."""
        group = self._key[1]
        others = listeners.sharing(group) if group is not None else []
        now_ms = messages.now_ms()
        returned = [(data, amqp_types.expires_ms(data, now_ms)) for _, data in reversed(self._returned)]
        for (data, expires_ms), other in zip((*returned, *self._waiting), itertools.cycle(others)):
            assert isinstance(other, TopicLink)
            other._take_over(data, expires_ms)
        self._waiting.clear()
        self._returned.clear()

    def _take_over(self, data: bytes, expires_ms: int) -> None:
        try:
            self.check_size(data)
        except errors.LimitExceeded:
            self._count_dropped("too-large")
            return
        self._wait(data, expires_ms)
        self.connection.call_soon(self.on_credit)


def forward_to_links(
    links: Sequence[topic_listeners.TopicReceiver[EncodedTopicMessage]], message: EncodedTopicMessage
) -> None:
    """The links of one connection receive the message when that is scheduled."""
    ours: Sequence[TopicLink] = links  # type: ignore[assignment]
    ours[0].connection.enqueue_topic_message(ours, message)
