"""One AMQP connection: its protocol engine, its JMS connection, and the traffic between them.

The engine has no socket: it takes bytes, produces events, and returns bytes. Events are handled
synchronously; whatever has to wait for the dispatcher is a task. After every change of the engine, `flush` is
called.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import proton

from muster.core import errors
from muster.core.telemetry import log
from muster.gateways.amqp import bus_connections, memory_budget, read_schedule
from muster.gateways.amqp.links import (
    attach,
    consumers,
    large_messages,
    outcomes,
    producers,
    topics,
    transactions,
)
from muster.gateways.amqp.protocol import conditions, endpoints, engine, frames, sasl
from muster.message import destinations
from muster.message import errors as message_errors
from muster.message.amqp_format import amqp_types, fast_path
from muster.message.client import api, topic_listeners
from muster.trust.login import passwords

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway

events = log.EventLog("message")

# For the window of the first frame of a session. Proton computes in 32 bits; the first flow has the rest.
SESSION_BYTES_MAX: Final = min(endpoints.WINDOW * engine.FRAME_BYTES_MAX, 0xFFFFFFFF)
EARLY_BYTES_MAX: Final = 64 << 10  # before the client has logged in
IN_TRANSIT_BYTES_MAX: Final = 16 << 20
# Beyond this, nothing is read from the socket: windows count frames, and all sessions together may send more.
PAUSE_BYTES: Final = 32 << 20
UNSENT_BYTES: Final = 128 << 10
TURN_DELIVERIES: Final = 50
HEARTBEAT_MIN_S: Final = 0.2  # the shortest idle-time-out of a client
LAST_MESSAGES_S: Final = 10.0  # how long messages that arrived before the close may take to be passed on
PENDING_MAX: Final = 1000  # waiting topic messages
PENDING_BYTES_MAX: Final = 8 << 20  # bytes of these
_CAPABILITIES: Final = ("sole-connection-for-container", "DELAYED_DELIVERY", "ANONYMOUS-RELAY", "SHARED-SUBS")


class AmqpConnection(asyncio.Protocol):
    def __init__(self, gateway: amqp_gateway.AmqpGateway) -> None:
        self.gateway = gateway
        self._loop = asyncio.get_running_loop()
        self._socket: asyncio.Transport
        self._sasl: sasl.SaslServer
        self._early = b""
        self._engine: engine.AmqpEngine | None = None
        self._paused = False
        self._flushing = False  # there is output
        self._queued = False  # it is scheduled
        self._pending: deque[tuple[Sequence[topics.TopicLink], topics.EncodedTopicMessage]] = deque()
        self._pending_bytes = 0
        self._delayed = False  # topic messages have waited for more than one iteration
        self.opened = asyncio.Event()
        self.producer_links: dict[Any, producers.ProducerLink] = {}
        self.outgoing_links: dict[Any, consumers.OutgoingLink] = {}
        self.outcomes = outcomes.Outcomes(self)
        self._in_transit_bytes = 0
        self._reading_paused = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._logging_in: asyncio.Task[None] | None = None
        self._login: str | None = None
        self._budget: memory_budget.ConnectionBudget | None = None
        self.ended = False
        self._login_revoked = False
        self._ending: asyncio.Task[None] | None = None
        self._client_closed = False
        self.jms: api.Connection
        self.shared_connection: bus_connections.SharedConnection | None = None
        self.origin_token = ""
        self.forwarder = producers.TopicForwarder(self)
        self.transactions = transactions.TransactionCoordinator(self)
        self.link_factory = attach.LinkFactory(self)
        self.large_messages = large_messages.LargeMessages(self)

    # The socket.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)  # that of uvloop is not a subclass
        address = str((transport.get_extra_info("peername") or ("-",))[0])
        self._sasl = sasl.SaslServer(
            self.gateway.verifiers, address=address, anonymous=self.gateway.anonymous
        )
        self._login_alarm = self._loop.call_later(self.gateway.idle_s, self.abort)
        if not self.gateway.admit(self, address):
            self._socket.abort()  # before the login, the protocol cannot report a reason
            return
        # Data in the socket's send buffer cannot expire any more.
        under = transport.get_extra_info("socket")
        under.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._read_observer = read_schedule.ReadObserver(self.gateway.read_schedule, self._socket)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gateway.forget(self)
        self._login_alarm.cancel()
        if not self._client_closed:  # else `_closed` ends it, after the client's last messages
            self.gateway.spawn(self.end(lost=True))

    def pause_writing(self) -> None:
        self._paused = True
        if self._engine is not None:
            self._engine.stop()

    def resume_writing(self) -> None:
        self._paused = False
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._engine is not None:
            self._push(self._engine, data)
            return
        self._early += data
        if len(self._early) > EARLY_BYTES_MAX:
            self.abort()
        elif self._logging_in is None:
            self._logging_in = self._spawn_task(self._log_in())

    def abort(self) -> None:
        self._socket.abort()

    @property
    def login(self) -> passwords.PasswordLogin | None:
        return self._sasl.login

    def revoke_login(self) -> None:
        """The login is no longer valid: report it to the client once, and close."""
        if self._login_revoked or self._engine is None:
            self.abort()
            return
        self._login_revoked = True
        self._engine.connection.condition = conditions.condition_of(
            errors.Unauthorized("the password of this login was changed or removed")
        )
        self._engine.connection.close()
        self._close_socket()

    async def _log_in(self) -> None:
        try:
            while self._early and self._sasl.login is None and not self._sasl.failed:
                data, self._early = self._early, b""
                self._socket.write(await self._sasl.receive(data))
        except errors.InvalidInput as error:
            events.info("protocol-mismatch", error=error)
            self._socket.write(sasl.HEADER)  # the protocol header that the gateway expects
            self._socket.close()
            return
        finally:
            self._logging_in = None
        if self._sasl.failed:
            self._socket.close()
        elif self._sasl.login is not None:
            self._login_alarm.cancel()
            self._login = self._sasl.login.name
            self._budget = self.gateway.open_budget(self._login)
            self._engine = engine.AmqpEngine(
                self.gateway.idle_s,
                self.outcomes.settled,
                self._handle,
                self._budget,
                self.outcomes.confirm_when_stored,
                self.transactions.retire,
                self.link_factory.release_stolen,
            )
            self._engine.connection.container = self.gateway.name
            self.spawn(self._tick(self._engine, self.gateway.idle_s / 4))
            rest, self._early = self._sasl.rest + self._early, b""
            if rest:
                self._push(self._engine, rest)

    # The engine.

    @property
    def running(self) -> engine.AmqpEngine:
        assert self._engine is not None, "no client has logged in"
        return self._engine

    async def _tick(self, amqp_engine: engine.AmqpEngine, period_s: float) -> None:
        """Send heartbeats, and detect a peer that sends none."""
        while not amqp_engine.closed:
            amqp_engine.tick(self._loop.time())
            self.flush()
            await asyncio.sleep(period_s)

    def _push(self, amqp_engine: engine.AmqpEngine, data: bytes) -> None:
        try:
            valid = amqp_engine.push(data)
        except Exception as error:  # noqa: BLE001  (an internal error closes this connection only)
            events.error("amqp-failed", login=self._login, error=error)
            self._fail_internally()
            valid = False
        if not valid:
            events.info("malformed-amqp", login=self._login)
            self._loop.call_soon(self._close_socket)
        if self.forwarder.incoming:
            self.forwarder.forward()
        if self.outcomes:
            self.outcomes.acknowledge()
        else:
            self._read_observer.on_read(amqp_engine.accepted)
        if amqp_engine.has_output:
            self.flush()

    def _fail_internally(self) -> None:
        if self._engine is not None and not self.ended:
            self._engine.fail("amqp:internal-error", "internal error of the gateway")

    def _close_socket(self) -> None:
        """Nothing more is expected: the peer has closed, or violated the protocol."""
        self.flush()
        self._socket.close()

    def flush(self) -> None:
        self._flushing = False
        if self._engine is None or self._paused or self._socket.is_closing():
            return
        data, more = self._engine.pull()
        if data:
            self._socket.write(data)
        if not more:
            self._socket.close()
        elif self._engine.stopped and not self._paused:
            self._engine.resume()

    def enqueue_topic_message(
        self, links: Sequence[topics.TopicLink], message: topics.EncodedTopicMessage
    ) -> None:
        """For topic links, when this connection is scheduled: all connections are treated equally."""
        self._pending.append((links, message))
        self._pending_bytes += len(message.message.data)
        if len(self._pending) > PENDING_MAX or self._pending_bytes > PENDING_BYTES_MAX:
            self.deliver_pending(1)
        self.flush_soon()

    def deliver_pending(self, deliveries: int) -> None:
        """Deliver waiting topic messages, approximately this many deliveries."""
        pending = self._pending
        while pending and deliveries > 0:
            links, message = pending.popleft()
            self._pending_bytes -= len(message.message.data)
            deliveries -= len(links)
            if self._delayed and message.has_expired():
                self.gateway.dropped.add(len(links), reason="expired")
            else:
                topic_listeners.enqueue(links, message)

    def process_pending(self) -> bool:
        """Whether more is waiting."""
        if self._pending or self._flushing:
            self.deliver_pending(TURN_DELIVERIES)
            self.flush()
        self._queued = self._delayed = bool(self._pending)
        return self._delayed

    def call_soon(self, act: Callable[[], None]) -> None:
        self._loop.call_soon(act)

    def flush_soon(self) -> None:
        self._flushing = True
        if not self._queued:
            self._queued = True
            self.gateway.flush_soon(self)

    def _handle(self, event: Any) -> None:
        kinds = proton.Event
        match event.type:
            case kinds.CONNECTION_REMOTE_OPEN:
                self.spawn(self._open())
            case kinds.SESSION_REMOTE_OPEN:
                self.spawn(self._begin(event.session))
            case kinds.SESSION_REMOTE_CLOSE:
                self.link_factory.session_closed(event.session)
                for pointer, outgoing in list(self.outgoing_links.items()):
                    if outgoing.wrapper.session == event.session:
                        self.link_factory.forget(pointer)
                        self.link_factory.release(outgoing, with_session=True)
                for pointer, producer in list(self.producer_links.items()):
                    if producer.link.wrapper.session == event.session:
                        self.link_factory.forget(pointer)
                event.session.close()
            case kinds.LINK_REMOTE_OPEN:
                self.link_factory.link_opened(event.link)
            case kinds.LINK_REMOTE_DETACH:
                self.link_factory.detached(event.link, destroy=False)
            case kinds.LINK_REMOTE_CLOSE:
                self.link_factory.detached(event.link, destroy=True)
            case kinds.TRANSPORT_ERROR | kinds.TRANSPORT_TAIL_CLOSED if not self._client_closed:
                self._loop.call_soon(self._close_socket)
            case kinds.CONNECTION_REMOTE_CLOSE:
                self._client_closed = True
                self.gateway.spawn(self._closed())

    # Tasks.

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        """Run in the background, and flush afterwards."""

        async def run() -> None:
            try:
                await work
            except errors.MusterError as error:
                events.warning("amqp-connection-error", error=error)
                self.fail(error)
            except Exception:  # the client would wait for an answer
                self._fail_internally()
                self.flush()
                raise
            self.flush()

        task = self._spawn_task(run())
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled at once never awaits it
        return task

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.gateway.tasks.spawn("connection", work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def fail(self, error: errors.MusterError) -> None:
        """Close the connection after an error that does not belong to a link; the client reconnects.

        This is also used when the outcome of a message is unknown: any outcome sent to the client would be
        taken as certain. Without an outcome when its connection ends, the client treats it as unknown.
        """
        if self._engine is not None and not self.ended:
            self._engine.connection.condition = proton.Condition("amqp:connection:forced", error.message)
            self._engine.connection.close()

    async def end(self, *, lost: bool) -> None:
        """The first caller decides whether the connection was ``lost``; all callers wait for the end."""
        if self._ending is None:
            self.ended = True
            self._ending = self._loop.create_task(self._end(lost=lost))
        await asyncio.shield(self._ending)

    async def _end(self, *, lost: bool) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for outgoing in list(self.outgoing_links.values()):
            outgoing.closed = True
            if isinstance(outgoing, topics.TopicLink):
                await outgoing.close(destroy=False)
        self.outgoing_links.clear()
        self.producer_links.clear()
        self._pending.clear()
        if self.opened.is_set():
            await self.jms.close(lost=lost)
        if self._budget is not None and self._login is not None:
            self.gateway.close_budget(self._login, self._budget)
        if self.shared_connection is not None:
            await self.gateway.shared_connections.leave(self.shared_connection)

    # Connections.

    async def _open(self) -> None:
        login = self._sasl.login
        assert login is not None
        connection = self.running.connection
        connection.offered_capabilities = proton.SymbolList(list(_CAPABILITIES), raise_on_error=False)
        idle_s = self.running.transport.remote_idle_timeout
        if 0 < idle_s < HEARTBEAT_MIN_S:
            why = f"an idle-time-out of {idle_s:g} s: at least {HEARTBEAT_MIN_S:g} s is supported"
            self._refuse_open(proton.Condition("amqp:invalid-field", why))
            return
        try:
            self.gateway.check_login(login.name)
            self.shared_connection = await self.gateway.shared_connections.join(login)
            jms = api.Connection(self.shared_connection.bus, client_id=connection.remote_container or None)
            try:
                await jms.__aenter__()
                await jms.subscribe_slow_reports()
            except BaseException:
                await jms.close()
                raise
        except message_errors.InvalidClientId as error:
            field = {proton.symbol("invalid-field"): proton.symbol("container-id")}
            self._refuse_open(proton.Condition("amqp:invalid-field", error.message, field))
            return
        except errors.MusterError as error:
            self._refuse_open(conditions.condition_of(error))
            return
        self.jms = jms
        self.origin_token = fast_path.origin_token(jms.origin)
        jms.on_released = self._on_released
        jms.add_unacknowledged(self.outcomes.unsettled_by_backlog)
        connection.open()
        self.opened.set()
        self.spawn(self.forwarder.run())
        if 0 < idle_s < self.gateway.idle_s:  # a frame is due after half of it, too early for the other tick
            self.spawn(self._tick(self.running, idle_s / 3))

    def _refuse_open(self, condition: proton.Condition) -> None:
        """The client has to close the connection now; otherwise it is aborted later."""
        connection = self.running.connection
        connection.properties = {proton.symbol("amqp:connection-establishment-failed"): True}
        connection.open()
        connection.condition = condition
        connection.close()
        self._login_alarm = self._loop.call_later(self.gateway.idle_s, self.abort)

    async def _begin(self, session: Any) -> None:
        """Wait for the own open: the client may send frames directly after its open."""
        await self.opened.wait()
        session.incoming_capacity = SESSION_BYTES_MAX
        session.open()

    async def _closed(self) -> None:
        """The client has closed: pass on what it sent completely, which may be settled, then confirm."""
        for producer in self.producer_links.values():
            producer.link.detach()  # none of its incomplete messages will be completed
        _, late = await asyncio.wait({self._spawn_task(self._pass_on())}, timeout=LAST_MESSAGES_S)
        if late:
            events.warning("amqp-messages-lost", login=self._login)
        self.running.connection.close()
        self._close_socket()
        await self.end(lost=False)

    async def _pass_on(self) -> None:
        await self.large_messages.wait_idle()
        await self.forwarder.wait_idle()

    @property
    def listeners(self) -> topic_listeners.TopicListeners[topics.EncodedTopicMessage]:
        """The subscriptions that all connections of this login share."""
        assert self.shared_connection is not None
        assert self.shared_connection.listeners is not None
        return self.shared_connection.listeners

    @property
    def is_qpid_jms(self) -> bool:
        """Whether the client is Qpid JMS, which takes a rollback by the gateway for an unknown outcome."""
        properties = self.running.connection.remote_properties
        return isinstance(properties, dict) and properties.get("product") == "QpidJMS"

    # Links.

    def close_link(
        self, link: endpoints.AmqpLink, condition: str, why: str, tag: bytes | None = None
    ) -> None:
        self.producer_links.pop(link.wrapper, None)
        self.running.close(link, condition, why, tag)

    # Messages.

    def reject(
        self,
        link: endpoints.AmqpLink,
        number: int,
        error: errors.MusterError,
        state: bytes | None = None,
        tag: bytes | None = None,
    ) -> None:
        """Reject a message with this ``state`` and tag. A link that knows no rejection ends instead."""
        if self._engine is None or self.ended:
            return
        condition, why = conditions.name(error), conditions.description(error)
        if not link.can_reject:
            self.close_link(link, condition, why, tag)
        else:
            outcome = frames.rejected(condition, why, tag)
            if frames.code_of(state) == frames.TRANSACTIONAL:
                with contextlib.suppress(*amqp_types.MALFORMED):
                    outcome = frames.transactional(frames.transaction_of(state), outcome)
            self._engine.settle(link, number, outcome)
        self.flush_soon()

    # Back-pressure.

    def add_in_transit(self, size: int) -> None:
        """Change the number of bytes in transit to the bus or the dispatcher."""
        self._in_transit_bytes += size
        self.running.hold(self.is_holding)
        if self._in_transit_bytes > PAUSE_BYTES:
            self._reading_paused = True
            self._socket.pause_reading()
        elif self._reading_paused and not self.is_holding:
            self._reading_paused = False
            self._socket.resume_reading()
        if size > 0 and self.is_holding:
            self.large_messages.store_parts()

    @property
    def is_holding(self) -> bool:
        """Whether too much is in transit, so that the client may not send more."""
        return self._in_transit_bytes > IN_TRANSIT_BYTES_MAX

    def is_held(self, destination: destinations.Destination | None) -> bool:
        return self.jms.holds.is_held(destination)

    def _on_released(self) -> None:
        for producer in self.producer_links.values():
            producer.grant()
        self.flush_soon()
