"""Links on which clients receive: from a queue or durable subscription, or as a browser.

A link is notified when its client grants credit, drains or closes it, and passes messages to the connection
to transmit.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import proton

from muster.core import errors
from muster.message import codec, destinations, messages, protocol
from muster.message import errors as message_errors
from muster.message.amqp_format import message_codec
from muster.message.client import bodies, dispatcher_connection
from muster.message.dispatcher.log import ledger

if TYPE_CHECKING:
    from muster.gateways.amqp import connection


_DEAD_LETTERS: Final = ledger.queue_key(destinations.DEAD_LETTERS)
AHEAD_MAX: Final = 1000  # messages that the dispatcher may deliver to a link before the client receives them
AHEAD_BYTES_MAX: Final = 8 << 20  # approximate bytes of these
AHEAD_MIN: Final = 10


def _encoded(
    meta: messages.MessageMeta, delivery: protocol.MessageDelivery, *, fallback_to_bytes: bool
) -> bytes:
    """``fallback_to_bytes``: encode a message that does not match its type as bytes."""
    try:
        if meta.large is not None:
            return message_codec.encode_large(meta, delivery.count, messages.now_ms())
        return message_codec.encode(meta, delivery.data, delivery.count, messages.now_ms())
    except errors.MusterError:
        if not fallback_to_bytes:
            raise
        return message_codec.encode(codec.unreadable(meta), delivery.data, delivery.count, messages.now_ms())


class OutgoingLink:
    """A link without a message source, for a dynamic node, and the base of the others."""

    retained: set[tuple[str, int]]  # while it is suspended: the messages that the client has not settled

    def __init__(self, owner: connection.AmqpConnection, wrapper: Any) -> None:
        self.connection = owner
        self.engine = owner.running
        self.wrapper = wrapper
        self.link = owner.running.link_of(wrapper)
        self.closed = False
        self.temporary: destinations.Destination | None = None  # made for this link, and deleted with it
        self.presettled = wrapper.remote_snd_settle_mode == proton.Link.SND_SETTLED
        self._bytes_max = wrapper.remote_max_message_size or sys.maxsize

    def check_size(self, data: bytes) -> None:
        """Reject a message that the client does not accept."""
        size = len(data)
        if isinstance(data, message_codec.LargeMessage) and data.meta.large is not None:
            size += data.meta.large.size
        if size > self._bytes_max:
            raise errors.LimitExceeded(
                f"{size} bytes: the consumer's link accepts messages of at most {self._bytes_max}"
            )

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
        place = self.connection.outcomes.begin_transmit(self, data, key, number)
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
                self.connection.link_factory.close_outgoing(self, "amqp:internal-error", error.message)
                return
        self.connection.outcomes.end_transmit(self, key, number)

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
        encoded = message_codec.encode(meta, payload, data.deliveries, messages.now_ms())
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
        self.connection.link_factory.close_outgoing(
            self, "amqp:resource-locked", "another client consumes from it now"
        )

    @property
    def may_suspend(self) -> bool:
        """Whether the client may settle messages while the link is detached."""
        return False

    async def suspend(self) -> None:
        """The client has detached the link, and receives nothing more."""
        self.closed = True

    async def close(self, *, destroy: bool) -> None:
        self.closed = True


class DispatcherLink(OutgoingLink):
    """Receives from the dispatcher, as far as the client's credit allows, and not much more than the client
    takes: what waits here costs memory, and no other consumer gets it.
    """

    def __init__(
        self,
        owner: connection.AmqpConnection,
        wrapper: Any,
        attach: protocol.AttachConsumer,
    ) -> None:
        super().__init__(owner, wrapper)
        self.number = attach.consumer
        self._attach = attach
        self._granted = 0  # credit granted to the dispatcher, including messages that wait here
        self._waiting: deque[tuple[str, int, bytes, int]] = deque()  # backlog, number, message, expiry
        self._streaming = False  # a large message is being sent
        self._mean_bytes = 65536.0  # of a message, approximately; at first they may be large
        self._flowing = asyncio.Lock()
        self._flow_due = False

    def drop_waiting(self) -> None:
        self._waiting.clear()

    def _window(self) -> int:
        """The credit that the dispatcher has at most."""
        fits = int(AHEAD_BYTES_MAX / max(1.0, self._mean_bytes))
        return min(self.link.credit, AHEAD_MAX, max(AHEAD_MIN, fits))

    def attach_request(self) -> protocol.AttachConsumer:
        """The request to attach. A new dispatcher does not know earlier deliveries, so those that wait here
        are dropped: they would be delivered twice.
        """
        self.drop_waiting()
        self._granted = 0 if self.closed else self._window()
        return msgspec.structs.replace(self._attach, credit=self._granted)

    async def open(self) -> None:
        await self.connection.jms.attach(self)

    def deliver(self, delivery: protocol.MessageDelivery) -> None:
        jms = self.connection.jms
        if self.closed or (
            delivery.count and self.connection.outcomes.has_unsettled(delivery.key, delivery.sequence)
        ):
            self._granted -= 1  # a new dispatcher repeats a message that the client has
            self.on_credit()
            return
        meta = messages.decode_meta(delivery.meta)
        try:
            data = _encoded(meta, delivery, fallback_to_bytes=delivery.key == _DEAD_LETTERS)
            self.check_size(data)
        except errors.MusterError as error:
            release = protocol.ReleaseMessages(
                jms.name, {delivery.key: [delivery.sequence]}, reason=error.message
            )
            self.connection.spawn(jms.notify(release))
            self._granted -= 1
            self.on_credit()
            return
        self._mean_bytes += (len(data) - self._mean_bytes) / 8
        self._waiting.append((delivery.key, delivery.sequence, data, meta.expiration_ms))
        self._pump()
        is_low = self._granted < self.link.credit and self._granted <= self._window() // 2
        if is_low and not self._flow_due:
            self._flow_due = True
            self.on_credit()

    def _pump(self) -> None:
        expired: dict[str, list[int]] = {}
        if self.link.handle is None:
            return  # the first message may arrive before the link is open
        while self._waiting and self._may_send():
            key, number, data, expires_ms = self._waiting.popleft()
            self._granted -= 1
            if expires_ms and expires_ms <= messages.now_ms():
                expired.setdefault(key, []).append(number)
            elif isinstance(data, message_codec.LargeMessage):
                self._streaming = True
                self.connection.spawn(self._stream(data, key, number))
            else:
                self.connection.outcomes.transmit(self, data, key, number)
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
                rest = message_codec.encode(codec.unreadable(data.meta), b"", 0, messages.now_ms())
                self.connection.outcomes.transmit(self, rest, key, number)
            else:
                await jms.notify(protocol.ReleaseMessages(jms.name, {key: [number]}, reason=error.message))
        finally:
            self._streaming = False
        if not self._is_closed():
            self.on_credit()

    async def flow(self) -> None:
        async with self._flowing:  # a grant must not overtake a reduction
            self._flow_due = False
            await self._flow()

    async def _flow(self) -> None:
        jms = self.connection.jms
        while not self._is_closed() and not self._streaming:
            self._pump()
            if self.link.credit < self._granted:
                await self._return_excess()
            more = self._window() - self._granted
            if more > 0:
                self._granted += more
                await jms.notify(protocol.GrantCredit(jms.name, self.number, more))
            if not self.link.drain or self._is_closed():
                return
            # Messages arrive in parts, however large the credit is: the last one does not use all of its own.
            await jms.request(protocol.Ping(jms.name, [self.number]))
            is_last = self._granted > len(self._waiting) or not self.link.credit
            await jms.request(protocol.StopDelivery(jms.name, [self.number]))
            self._granted = len(self._waiting)
            if self._waiting or self._streaming:
                return  # it continues when these have been sent
            if is_last:
                self._drained()
                return

    @property
    def may_suspend(self) -> bool:
        return not self._attach.durable and not self._streaming

    async def suspend(self) -> None:
        with contextlib.suppress(TimeoutError):  # a new dispatcher gives it no credit
            async with asyncio.timeout(dispatcher_connection.CLOSE_S), self._flowing:
                await self._return_excess()
        self.closed = True

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


class BrowserLink(OutgoingLink):
    """A snapshot of a queue, read page by page."""

    def __init__(
        self,
        owner: connection.AmqpConnection,
        wrapper: Any,
        queue: str,
        selector: str | None,
    ) -> None:
        super().__init__(owner, wrapper)
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
            while not self._waiting and not self._ended:
                request = protocol.BrowseQueue(self._queue, self._selector, self._after)
                page = await self.connection.jms.request(request)
                self._after = page.continue_after
                self._ended = not self._after
                for delivery in page.messages:
                    meta = messages.decode_meta(delivery.meta)
                    self._waiting.append(
                        (_encoded(meta, delivery, fallback_to_bytes=True), meta.expiration_ms)
                    )
            if not self._waiting or self.closed:
                break
            data, expires_ms = self._waiting.popleft()
            if expires_ms and expires_ms <= messages.now_ms():
                continue
            with contextlib.suppress(errors.LimitExceeded):
                self.check_size(data)
                await self._show(data)
        self._drained()

    async def _show(self, data: bytes) -> None:
        if isinstance(data, message_codec.LargeMessage):
            with contextlib.suppress(errors.NotFound, errors.Conflict, message_errors.FormatError):
                await self.stream(data)
        else:
            self.connection.outcomes.transmit(self, data)


class UnsubscribeLink(OutgoingLink):
    """A link to a durable subscription that the client wants to end: closing it ends the subscription."""

    def __init__(
        self,
        owner: connection.AmqpConnection,
        wrapper: Any,
        name: str,
        *,
        without_client_id: bool,
    ) -> None:
        super().__init__(owner, wrapper)
        self._name = name
        self._without_client_id = without_client_id

    async def close(self, *, destroy: bool) -> None:
        if destroy:
            jms = self.connection.jms
            await jms.request(protocol.EndSubscription(jms.name, self._name, self._without_client_id))
