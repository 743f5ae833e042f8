"""Links on which clients receive: from a queue or subscription, from a topic, or as a browser.

A link is notified when its client grants credit, drains or closes it, and passes messages to the connection
to transmit.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import proton

from muster.bus import api
from muster.core import errors
from muster.gateways.amqp.protocol import engine, frames
from muster.message import destinations, messages, protocol, selectors
from muster.message import errors as message_errors
from muster.message.amqp_format import amqp_types, fast_path, message_codec
from muster.message.client import bodies, dispatcher_connection, flow_control, topic_listeners
from muster.message.dispatcher.log import ledger

if TYPE_CHECKING:
    from muster.gateways.amqp import connection as amqp_connection


_DEAD_LETTERS: Final = ledger.queue_key(destinations.DEAD_LETTERS)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _encoded(
    meta: messages.MessageMeta, delivery: protocol.MessageDelivery, *, fallback_to_bytes: bool
) -> bytes:
    """``fallback_to_bytes``: encode a message that does not match its type as bytes."""
    try:
        if meta.large is not None:
            return message_codec.encode_large(meta, delivery.count, _now_ms())
        return message_codec.encode(meta, delivery.data, delivery.count, _now_ms())
    except errors.MusterError:
        if not fallback_to_bytes:
            raise
        return message_codec.encode(messages.unreadable(meta), delivery.data, delivery.count, _now_ms())


class OutgoingLink:
    """A link without a message source, and the base of the others."""

    def __init__(
        self, owner: amqp_connection.AmqpConnection, amqp_engine: engine.AmqpEngine, wrapper: Any
    ) -> None:
        self.connection = owner
        self.engine = amqp_engine
        self.wrapper = wrapper
        self.link = amqp_engine.link_of(wrapper)
        self.closed = False
        self.presettled = wrapper.remote_snd_settle_mode == proton.Link.SND_SETTLED

    async def open(self) -> None:
        pass

    def listen_for_credit(self) -> None:
        """The link is open: from now on it receives credit changes."""
        self.link.on_credit = self.on_credit

    def on_credit(self) -> None:
        """The client's credit has changed."""
        self.connection.spawn(self.flow())

    async def flow(self) -> None:
        self._drained()

    def _is_closed(self) -> bool:
        return self.closed

    def _drained(self) -> None:
        if not self.closed:
            self.engine.drained(self.link)

    async def stream(self, data: message_codec.LargeMessage, key: str = "", number: int = 0) -> None:
        """Send a large message in parts. Raises `errors.NotFound` if its body is not stored any more."""
        parts = self._parts(data)
        part, following = await anext(parts), await anext(parts, None)  # before the message begins
        if self.closed or self.link.credit <= 0:
            raise errors.Conflict("the client cannot receive the message any more")
        place = self.connection.begin_transmit(self, data, key, number)
        while True:
            while not self._is_closed() and not self.engine.has_room(self.link):
                await self._wait_for_room()
            if self._is_closed():
                return
            more = following is not None
            self.engine.send_part(self.link, place, part, settled=self.presettled, more=more)
            self.connection.flush_soon()
            if following is None:
                break
            try:
                part, following = following, await anext(parts, None)
            except errors.NotFound as error:
                self.connection.close_outgoing(self, "amqp:internal-error", error.message)
                return
        self.connection.end_transmit(self, key, number)

    async def _parts(self, data: message_codec.LargeMessage) -> AsyncIterator[bytes]:
        assert data.meta.large is not None
        chunks = bodies.download(self.connection.jms, data.meta.large)
        if data:
            yield bytes(data)
            async for chunk in chunks:
                yield chunk
            return
        payload = b"".join([chunk async for chunk in chunks])
        meta = msgspec.structs.replace(data.meta, large=None)
        encoded = message_codec.encode(meta, payload, data.deliveries, _now_ms())
        for at in range(0, len(encoded), protocol.CHUNK_BYTES):
            yield encoded[at : at + protocol.CHUNK_BYTES]

    async def _wait_for_room(self) -> None:
        room = asyncio.Event()
        self.link.session.on_room.append(room.set)
        with contextlib.suppress(TimeoutError):  # a closed link gets no report
            await asyncio.wait_for(room.wait(), 1.0)

    def returned(self, number: int, data: bytes, code: int, state: bytes | None) -> None:
        """The client did not accept a message that belongs to no backlog."""

    def revoked(self) -> None:
        """A new dispatcher gave the place of this consumer to another client."""
        self.connection.close_outgoing(self, "amqp:resource-locked", "another client consumes from it now")

    async def close(self, *, destroy: bool) -> None:
        self.closed = True


class DispatcherLink(OutgoingLink):
    """Receives from the dispatcher, as far as the client's credit allows."""

    def __init__(
        self,
        owner: amqp_connection.AmqpConnection,
        amqp_engine: engine.AmqpEngine,
        wrapper: Any,
        attach: protocol.AttachConsumer,
    ) -> None:
        super().__init__(owner, amqp_engine, wrapper)
        self.number = attach.consumer
        self._attach = attach
        self._granted = 0  # credit granted to the dispatcher, including messages that wait here
        self._waiting: deque[tuple[str, int, bytes, int]] = deque()  # backlog, number, message, expiry
        self._streaming = False  # a large message is being sent
        self.expired = 0

    def attach_request(self) -> protocol.AttachConsumer:
        """The request to attach. A new dispatcher does not know earlier deliveries, so those that wait here
        are dropped: they would be delivered twice.
        """
        self._waiting.clear()
        self._granted = 0 if self.closed else self.link.credit
        return msgspec.structs.replace(self._attach, credit=self._granted)

    async def open(self) -> None:
        await self.connection.jms.attach(self)

    def deliver(self, delivery: protocol.MessageDelivery) -> None:
        jms = self.connection.jms
        if self.closed or (delivery.count and self.connection.has_unsettled(delivery.key, delivery.sequence)):
            self._granted -= 1  # a new dispatcher repeats a message that the client has
            self.on_credit()
            return
        meta = messages.decode_meta(delivery.meta)
        try:
            data = _encoded(meta, delivery, fallback_to_bytes=delivery.key == _DEAD_LETTERS)
        except errors.MusterError as error:
            release = protocol.ReleaseMessages(
                jms.name, {delivery.key: [delivery.sequence]}, reason=error.message
            )
            self.connection.spawn(jms.notify(release))
            self._granted -= 1
            self.on_credit()
            return
        self._waiting.append((delivery.key, delivery.sequence, data, meta.expiration_ms))
        self._pump()

    def _pump(self) -> None:
        expired: dict[str, list[int]] = {}
        if self.link.handle is None:
            return  # the first message may arrive before the link is open
        while self._waiting and self._may_send():
            key, number, data, expires_ms = self._waiting.popleft()
            self._granted -= 1
            if expires_ms and expires_ms <= _now_ms():
                expired.setdefault(key, []).append(number)
                self.expired += 1
            elif isinstance(data, message_codec.LargeMessage):
                self._streaming = True
                self.connection.spawn(self._stream(data, key, number))
            else:
                self.connection.transmit(self, data, key, number)
        if expired:
            jms = self.connection.jms
            release = protocol.ReleaseMessages(jms.name, expired, reason=messages.EXPIRED)
            self.connection.spawn(jms.notify(release))
            self.connection.call_soon(self.on_credit)  # the client's credit for them is free again

    def _may_send(self) -> bool:
        return not self.closed and not self._streaming and self.engine.may_send(self.link)

    async def _stream(self, data: message_codec.LargeMessage, key: str, number: int) -> None:
        jms = self.connection.jms
        try:
            await self.stream(data, key, number)
        except errors.Conflict:
            await jms.notify(protocol.ReleaseMessages(jms.name, {key: [number]}, counted=False))
        except (errors.NotFound, message_errors.FormatError) as error:
            if key == _DEAD_LETTERS and self.link.credit > 0:  # so that it can be inspected and removed
                rest = message_codec.encode(messages.unreadable(data.meta), b"", 0, _now_ms())
                self.connection.transmit(self, rest, key, number)
            else:
                await jms.notify(protocol.ReleaseMessages(jms.name, {key: [number]}, reason=error.message))
        finally:
            self._streaming = False
        if not self._is_closed():
            self.on_credit()

    async def flow(self) -> None:
        jms = self.connection.jms
        if self.closed or self._streaming:
            return
        self._pump()
        if self.link.credit < self._granted:
            await self._return_excess()
        more = self.link.credit - self._granted
        if more > 0:
            self._granted += more
            await jms.notify(protocol.GrantCredit(jms.name, self.number, more))
        if self.link.drain and not self._is_closed():
            await jms.request(protocol.Ping(jms.name, [self.number]))
            await jms.request(protocol.StopDelivery(jms.name, [self.number]))
            self._granted = len(self._waiting)
            if not self._waiting and not self._streaming:
                self._drained()

    async def _return_excess(self) -> None:
        """The client reduced its credit: release the messages in excess of it."""
        jms = self.connection.jms
        await jms.request(protocol.StopDelivery(jms.name, [self.number]))
        back: dict[str, list[int]] = {}
        while len(self._waiting) > self.link.credit:
            key, number, _, _ = self._waiting.pop()
            back.setdefault(key, []).append(number)
        self._granted = len(self._waiting)
        if back:
            await jms.request(protocol.ReleaseMessages(jms.name, back, counted=False))

    async def close(self, *, destroy: bool) -> None:
        self.closed = True
        jms = self.connection.jms
        # Acknowledgements go before the detach
        await jms.outbox.wait_idle(dispatcher_connection.CLOSE_S)
        await jms.detach(self.number, {})
        if destroy and self._attach.durable and not self._attach.shared:
            await jms.request(protocol.EndSubscription(jms.name, self._attach.subscription or ""))
        if destroy and self.wrapper.remote_source.dynamic:
            await self.connection.link_factory.drop(destinations.Destination.parse(self._attach.destination))


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
                self._amqp = message_codec.encode_large(self.meta, 0, _now_ms())
            elif raw is None:
                self._amqp = message_codec.encode(self.meta, data, 0, _now_ms())
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
                self._expires_ms = amqp_types.expires_ms(self.amqp, _now_ms())
        return self._expires_ms

    def has_expired(self) -> bool:
        try:
            return 0 < self.expires_ms <= _now_ms()
        except (errors.MusterError, ValueError):
            return False  # decoding will report the error


class TopicLink(OutgoingLink):
    """Receives from a topic on the bus."""

    def __init__(
        self,
        owner: amqp_connection.AmqpConnection,
        amqp_engine: engine.AmqpEngine,
        wrapper: Any,
        destination: destinations.Destination,
        attach: protocol.AttachConsumer,
    ) -> None:
        super().__init__(owner, amqp_engine, wrapper)
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
        self.rejected = 0
        self.dropped = 0
        self.expired = 0

    async def open(self) -> None:
        name, group, _ = self._key
        if self._attach.shared:
            await self.connection.jms.attach(self)
        try:
            self._listeners = await self.connection.listeners_for(no_local=self._excluded_origin is not None)
            await self._listeners.add(self._key, name, group, self)
        except BaseException:
            await self.close(destroy=False)
            raise

    def attach_request(self) -> protocol.AttachConsumer:
        return self._attach

    @property
    def owner(self) -> object:
        return self.connection

    def deliver(self, delivery: protocol.MessageDelivery) -> None:
        raise errors.InvariantViolation("the dispatcher does not deliver to topic links")

    def offer(self, message: EncodedTopicMessage) -> None:
        if self.closed:
            return
        if (self._excluded_origin is not None and message.origin == self._excluded_origin) or (
            self._matches is not None and not message.matches(self._matches)
        ):
            self.rejected += 1
            return
        data = message.amqp
        if self._streaming or self._waiting or self._returned or not self.engine.may_send(self.link):
            self._wait(data, message.expires_ms)
        else:
            self._transmit(data)

    def _wait(self, data: bytes, expires_ms: int) -> None:
        self._waiting.append((data, expires_ms))
        self._bytes += len(data)
        if len(self._waiting) > flow_control.WAITING_SLOW or self._bytes > flow_control.WAITING_SLOW_BYTES:
            self.connection.jms.report_slow(self)
            if len(self._waiting) > flow_control.WAITING_MAX or self._bytes > flow_control.WAITING_BYTES_MAX:
                self._bytes -= len(self._waiting.popleft()[0])
                self.dropped += 1

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
            self.dropped += 1
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
                expires_ms = amqp_types.expires_ms(data, _now_ms())
            elif self._waiting:
                data, expires_ms = self._waiting.popleft()
                self._bytes -= len(data)
            else:
                return
            if expires_ms and expires_ms <= _now_ms():
                self.expired += 1
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
        if self._attach.shared:
            await self.connection.jms.detach(self.number, {})


def forward_to_links(
    links: Sequence[topic_listeners.TopicReceiver[EncodedTopicMessage]], message: EncodedTopicMessage
) -> None:
    """The links of one connection receive the message when that is scheduled."""
    ours: Sequence[TopicLink] = links  # type: ignore[assignment]
    ours[0].connection.enqueue_topic_message(ours, message)


class BrowserLink(OutgoingLink):
    """A snapshot of a queue, read page by page."""

    def __init__(
        self,
        owner: amqp_connection.AmqpConnection,
        amqp_engine: engine.AmqpEngine,
        wrapper: Any,
        queue: str,
        selector: str | None,
    ) -> None:
        super().__init__(owner, amqp_engine, wrapper)
        self._queue = queue
        self._selector = selector
        self._after = 0
        self._waiting: deque[tuple[bytes, int]] = deque()  # and when it expires
        self._ended = False
        self._paging = asyncio.Lock()

    async def flow(self) -> None:
        async with self._paging:
            await self._send()

    async def _send(self) -> None:
        while not self.closed and self.engine.may_send(self.link):
            if not self._waiting and not self._ended:
                request = protocol.BrowseQueue(self._queue, self._selector, self._after)
                page = (await self.connection.jms.request(request)).messages
                self._ended = not page
                for delivery in page:
                    self._after = delivery.sequence
                    meta = messages.decode_meta(delivery.meta)
                    self._waiting.append(
                        (_encoded(meta, delivery, fallback_to_bytes=True), meta.expiration_ms)
                    )
            if not self._waiting or self.closed:
                break
            data, expires_ms = self._waiting.popleft()
            if expires_ms and expires_ms <= _now_ms():
                continue
            if isinstance(data, message_codec.LargeMessage):
                with contextlib.suppress(errors.NotFound, errors.Conflict, message_errors.FormatError):
                    await self.stream(data)
            else:
                self.connection.transmit(self, data)
        self._drained()


class UnsubscribeLink(OutgoingLink):
    """A link to a durable subscription that the client wants to end: closing it ends the subscription."""

    def __init__(
        self,
        owner: amqp_connection.AmqpConnection,
        amqp_engine: engine.AmqpEngine,
        wrapper: Any,
        name: str,
        *,
        without_client_id: bool,
    ) -> None:
        super().__init__(owner, amqp_engine, wrapper)
        self._name = name
        self._without_client_id = without_client_id

    async def close(self, *, destroy: bool) -> None:
        if destroy:
            jms = self.connection.jms
            await jms.request(protocol.EndSubscription(jms.name, self._name, self._without_client_id))


class TemporaryQueueLink(OutgoingLink):
    """A temporary destination exists as long as the link that created it."""

    def __init__(
        self,
        owner: amqp_connection.AmqpConnection,
        amqp_engine: engine.AmqpEngine,
        wrapper: Any,
        destination: destinations.Destination,
    ) -> None:
        super().__init__(owner, amqp_engine, wrapper)
        self._destination = destination

    async def close(self, *, destroy: bool) -> None:
        await self.connection.link_factory.drop(self._destination)
