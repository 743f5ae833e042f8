"""Links on which clients send, and the path of their messages.

Credit is granted in windows, and withheld while earlier messages are in transit; this slows a client down. A
simple non-persistent topic message takes the fast path: it is forwarded without decoding
(`fast_path.locate_body`) and accepted when it is on the bus. Other messages are decoded, sent to the
dispatcher, and accepted when they are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from muster.core import errors
from muster.core import messages as core_messages
from muster.gateways.amqp.links import large_messages
from muster.gateways.amqp.protocol import conditions, frames
from muster.message import destinations, messages, protocol
from muster.message import errors as message_errors
from muster.message.amqp_format import fast_path, message_codec

if TYPE_CHECKING:
    from muster.gateways.amqp import connection

CREDIT: Final = 1000


# Link, delivery number, settled, subject, body, header.
_Forwarded: TypeAlias = "tuple[ProducerLink, int, bool, str, bytes, str]"


class ProducerLink:
    """``destination`` None: each message has its own address. ``coordinator``: the link controls
    transactions.
    """

    def __init__(
        self,
        owner: connection.AmqpConnection,
        wrapper: Any,
        destination: destinations.Destination | None,
        *,
        coordinator: bool = False,
    ) -> None:
        self._connection = owner
        self._engine = owner.running
        self.link = owner.running.link_of(wrapper)
        self._destination = destination
        self._coordinator = coordinator
        direct = destination is not None and destination.is_direct and not coordinator
        self._subject = destination.subject if destination is not None and direct else None
        self._fast_path = fast_path.FastPath()
        self.under_way = 0
        self._latest: asyncio.Future[None] | None = None  # of the messages that are being stored
        self.link.on_message = self.arrived
        self.link.on_large = self._begin_large
        self.link.on_budget_exceeded = self._too_much
        self.link.bytes_max = owner.gateway.max_message_bytes
        self.link.on_oversize = self._oversize
        self.link.on_aborted = self.grant  # it used credit as well
        self.grant()

    def grant(self) -> None:
        """Grant a new window of credit, if half of the last one is used and not too much is in transit."""
        credit = self.link.credit
        if (
            credit <= CREDIT // 2
            and self.under_way <= CREDIT // 2
            and not self._connection.is_held(self._destination)
        ):
            self._engine.grant(self.link, CREDIT - credit)

    def _too_much(self) -> None:
        self._connection.close_link(
            self.link,
            "amqp:resource-limit-exceeded",
            "this connection, or its login, has too many bytes of incomplete messages",
        )

    def _oversize(self, state: bytes | None) -> None:
        error = core_messages.MessageTooLarge(f"a message has at most {self.link.bytes_max} bytes")
        self._mark_failed(state, error)
        self._connection.close_link(
            self.link, "amqp:link:message-size-exceeded", conditions.description(error)
        )

    def _mark_failed(self, state: bytes | None, error: errors.MusterError) -> None:
        if frames.code_of(state) == frames.TRANSACTIONAL:
            self._connection.transactions.mark_failed(state, error)

    def arrived(self, number: int, data: bytes, settled: bool, state: bytes | None) -> None:
        tag = self.link.identity[0]
        if not self._connection.large_messages:
            self._forward(number, data, settled, state, tag)
            return
        try:
            later = functools.partial(self._forward, number, data, settled, state, tag)
            self._connection.large_messages.defer(later, len(data))
        except errors.LimitExceeded as error:
            self.refuse(number, settled, state, error, tag)

    def _forward(
        self, number: int, data: bytes, settled: bool, state: bytes | None, tag: bytes | None
    ) -> None:
        link = self.link
        if self._subject is not None and state is None:
            plain = self._fast_path(data)
            if plain is not None:
                at, start, kind = plain
                raw = fast_path.foreign_header(data, at, kind, self._connection.origin_token)
                self._connection.forwarder.add(self, number, settled, self._subject, data[start:], raw)
                if link.credit <= CREDIT // 2:
                    self.grant()
                return
        try:
            self._forward_decoded(number, data, settled, state)
        except errors.MusterError as error:
            self.refuse(number, settled, state, error, tag)
        if link.credit <= CREDIT // 2:
            self.grant()

    def refuse(
        self,
        number: int,
        settled: bool,
        state: bytes | None,
        error: errors.MusterError,
        tag: bytes | None = None,
    ) -> None:
        """Reject a message, or end its link if no transaction can have it. The sender of one that is settled
        expects no outcome, but has to learn of errors of transactions, and of addresses of messages: the link
        ends."""
        self._mark_failed(state, error)
        is_unknown = isinstance(error, message_errors.UnknownTransaction)
        if self._coordinator or is_unknown:
            self._connection.transactions.refuse(self.link, number, settled or not self._coordinator, error)
        elif not settled:
            self._connection.reject(self.link, number, error, state, tag)
        elif self._destination is None and frames.code_of(state) != frames.TRANSACTIONAL:
            condition, why = conditions.name(error), conditions.description(error)
            self._connection.close_link(self.link, condition, why, tag)

    def _begin_large(self, number: int, data: bytes) -> large_messages.IncomingLargeMessage:
        begin: tuple[messages.MessageMeta, bytes] | errors.MusterError
        try:
            if self._coordinator:
                raise errors.LimitExceeded("a coordinator does not accept large messages")
            now_ms = messages.now_ms()
            meta, at, destination = message_codec.decode_large(data, self._destination, now_ms)
            meta.destination = str(self._checked(destination))
            begin = meta, data[at:]
        except errors.MusterError as error:
            begin = error
        identity = number, self.link.identity[0]
        made = large_messages.IncomingLargeMessage(self, self._connection, identity, begin)
        self._connection.large_messages.start(made)
        return made

    def forward_large(
        self,
        number: int,
        meta: messages.MessageMeta,
        settled: bool,
        state: bytes | None,
        tag: bytes | None,
    ) -> None:
        destination = destinations.Destination.parse(meta.destination or "")
        try:
            self._route(number, destination, meta, b"", settled, state)
        except errors.MusterError as error:
            self.refuse(number, settled, state, error, tag)
        if self.link.credit <= CREDIT // 2:
            self.grant()

    def _checked(self, destination: destinations.Destination | None) -> destinations.Destination:
        if destination is None:
            raise message_errors.InvalidDestination("neither the message nor its link has a valid address")
        if self._destination is None:
            self._connection.link_factory.check_may_send(destination)
        return destination

    def _forward_decoded(self, number: int, data: bytes, settled: bool, state: bytes | None) -> None:
        if self._coordinator:
            if settled:
                raise errors.InvalidInput("a message to a coordinator must not be settled")
            self._connection.transactions.coordinate(self.link, number, data)
            return
        if not data:
            raise message_errors.FormatError("not an AMQP message: a transfer without a payload")
        now_ms = messages.now_ms()
        meta, body, destination = message_codec.decode(data, self._destination, now_ms)
        self._route(number, self._checked(destination), meta, body, settled, state)

    def _route(
        self,
        number: int,
        destination: destinations.Destination,
        meta: messages.MessageMeta,
        body: bytes,
        settled: bool,
        state: bytes | None,
    ) -> None:
        transactions = self._connection.transactions
        meta.origin = self._connection.jms.origin
        raw = messages.encode_meta(meta).decode()
        send = protocol.SendMessage(str(destination), raw, body)
        if frames.code_of(state) == frames.TRANSACTIONAL:
            outcome = transactions.send(state, send)
            if not settled:
                self._settle_in_order(number, outcome)
            return
        if destination.is_direct and not meta.persistent and not meta.delivery_time_ms:
            if meta.large is not None:
                release = protocol.ReleaseBody(meta.large.id, meta.large.partition)
                self._connection.spawn(self._connection.jms.notify(release))
            self._connection.forwarder.add(self, number, settled, destination.subject, body, raw)
            return
        future = self._latest = self._connection.jms.submit([send])
        self.started(len(body))
        future.add_done_callback(lambda done: self._stored(number, settled, len(body), done))

    def _settle_in_order(self, number: int, outcome: bytes) -> None:
        """Send an outcome after those of earlier messages, which may be in no transaction."""

        def settle(_: asyncio.Future[None] | None) -> None:
            if not self._connection.ended:
                self._engine.settle(self.link, number, outcome)
                self._connection.flush_soon()

        if self._latest is None or not self.under_way:
            settle(None)
        else:
            self._latest.add_done_callback(settle)

    def _stored(self, number: int, settled: bool, size: int, done: asyncio.Future[None]) -> None:
        if done.cancelled() or self._connection.ended:
            return
        self.done(number, settled, size, done.exception())

    def started(self, size: int) -> None:
        """A message is in transit."""
        self.under_way += 1
        self._connection.add_in_transit(size)

    def done(self, number: int, settled: bool, size: int, error: BaseException | None) -> None:
        """A message in transit was stored or published, or failed."""
        self.under_way -= 1
        self._connection.add_in_transit(-size)
        self.send_outcome(number, settled, error)
        if self.link.credit <= CREDIT // 2:
            self.grant()
        self._connection.flush_soon()

    def send_outcome(self, number: int, settled: bool, error: BaseException | None = None) -> None:
        if settled:
            return  # the client expects no outcome
        if isinstance(error, errors.Unavailable) and not isinstance(error, errors.Overloaded):
            self._connection.fail(error)
        elif isinstance(error, errors.MusterError):
            self._connection.reject(self.link, number, error)
        else:
            self._engine.accept(self.link, number)


class TopicForwarder:
    """Publishes non-persistent topic messages in order: immediately, or when the bus has room."""

    def __init__(self, owner: connection.AmqpConnection) -> None:
        self._connection = owner
        self.incoming: list[_Forwarded] = []  # from the current read
        self._waiting: list[_Forwarded] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # nothing waits
        self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def add(
        self, producer: ProducerLink, number: int, settled: bool, subject: str, body: bytes, raw: str
    ) -> None:
        self.incoming.append((producer, number, settled, subject, body, raw))

    def forward(self) -> None:
        """Publish all messages of one read."""
        incoming, self.incoming = self.incoming, []
        if self._idle.is_set():
            sent = False
            with contextlib.suppress(errors.MusterError):  # then each is published alone
                sent = self._connection.jms.bus.publish_now(
                    [(subject, body, {messages.HEADER: raw}) for _, _, _, subject, body, raw in incoming]
                )
            if sent:
                for producer, number, settled, _, _, _ in incoming:
                    producer.send_outcome(number, settled)
                return
        self._idle.clear()
        for producer, _, _, _, body, _ in incoming:
            producer.started(len(body))
        self._waiting += incoming
        self._wake.set()

    async def run(self) -> None:
        jms = self._connection.jms
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                for producer, number, settled, subject, body, raw in waiting:
                    error: errors.MusterError | None = None
                    try:
                        await jms.bus.publish(subject, body, headers={messages.HEADER: raw})
                    except errors.MusterError as failure:
                        error = failure
                    producer.done(number, settled, len(body), error)
            self._idle.set()
