"""One AMQP connection: its engine, its JMS connection, and what passes between them.

The engine has no socket: bytes go in, events come out, answers are bytes again.  Events are handled where
they come; what has to wait for the dispatcher is a task, and whatever changed the engine ends with a
`flush`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import proton

from muster.core import errors
from muster.core.telemetry import log
from muster.gateways.amqp import bus_connections, read_schedule
from muster.gateways.amqp import memory_budget as budget_
from muster.gateways.amqp.links import attach, consumers, producers, transactions
from muster.gateways.amqp.protocol import conditions, endpoints, engine, frames, sasl
from muster.gateways.amqp.protocol import proton as protocol_proton
from muster.message import destinations, protocol
from muster.message import errors as message_errors
from muster.message.amqp_format import message_codec
from muster.message.client import api, topic_listeners
from muster.trust.login import passwords

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway

events = log.EventLog("message")

SESSION_BYTES_MAX: Final = endpoints.WINDOW * engine.FRAME_BYTES_MAX
EARLY_BYTES_MAX: Final = 64 << 10  # before a client has logged in
CARRIED_BYTES_MAX: Final = 16 << 20
UNSENT_BYTES: Final = 128 << 10
TURN_DELIVERIES: Final = 50
HEARD_MAX: Final = 1000  # messages that may wait for their turn,
HEARD_BYTES_MAX: Final = 8 << 20  # and how much of them
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
        self._flushing = False  # there is something to say
        self._in_line = False  # it will have a turn
        self._heard: deque[tuple[Sequence[consumers.TopicLink], consumers.EncodedTopicMessage]] = deque()
        self._heard_bytes = 0
        self._late = False  # what was heard has waited for more than a turn
        self.opened = asyncio.Event()
        self.inlets: dict[protocol_proton.Pointer, producers.ProducerLink] = {}
        self.outlets: dict[protocol_proton.Pointer, consumers.OutgoingLink] = {}
        self._unsettled: set[tuple[str, int]] = set()  # what awaits its outcome, by backlog and number
        self._acks: dict[str, list[int]] = {}
        self._carried_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._logging_in: asyncio.Task[None] | None = None
        self._login: str | None = None
        self._budget: budget_.ConnectionBudget | None = None
        self.ended = False
        self._withdrawn = False
        self._ending: asyncio.Task[None] | None = None
        self.jms: api.Connection
        self.trunk: bus_connections.SharedConnection | None = None
        self._quiet_ears: topic_listeners.TopicListeners[consumers.EncodedTopicMessage] | None = None
        self._quieting = asyncio.Lock()
        self.origin_token = ""
        self.straight = producers.TopicForwarder(self)
        self.transactions = transactions.TransactionCoordinator(self)
        self.attaching = attach.LinkFactory(self)

    # The socket.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        address = str((transport.get_extra_info("peername") or ("-",))[0])
        self._sasl = sasl.SaslServer(
            self.gateway.verifiers, address=address, anonymous=self.gateway.anonymous
        )
        self._login_alarm = self._loop.call_later(self.gateway.idle_s, self.connection_aborted)
        if not self.gateway.admit(self, address):
            self._socket.abort()  # before the login there is no way to say why
            return
        # What the system has taken and not sent yet cannot expire any more.
        under = transport.get_extra_info("socket")
        under.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._lull = read_schedule.ReadObserver(self.gateway.lulls, self._socket)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gateway.forget(self)
        self._login_alarm.cancel()
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
            self.connection_aborted()
        elif self._logging_in is None:
            self._logging_in = self._spawn_task(self._log_in())

    def connection_aborted(self) -> None:
        self._socket.abort()

    @property
    def login(self) -> passwords.PasswordLogin | None:
        return self._sasl.login

    def withdraw(self) -> None:
        """Its login does not stand any more: the client hears it once, whether it reads that or not."""
        if self._withdrawn or self._engine is None:
            self.connection_aborted()
            return
        self._withdrawn = True
        self._engine.connection.condition = conditions.condition_of(
            errors.Unauthorized("the password of this login was changed or removed")
        )
        self._engine.connection.close()
        self._give_up()

    async def _log_in(self) -> None:
        try:
            while self._early and self._sasl.login is None and not self._sasl.failed:
                data, self._early = self._early, b""
                self._socket.write(await self._sasl.receive(data))
        except errors.InvalidInput as error:
            events.info("strange-peer", error=error)
            self._socket.write(sasl.HEADER)  # what we would have wanted
            self._socket.close()
            return
        finally:
            self._logging_in = None
        if self._sasl.failed:
            self._socket.close()
        elif self._sasl.login is not None:
            self._login_alarm.cancel()
            self._login = self._sasl.login.name
            self._budget = self.gateway.budget_of(self._login)
            self._engine = engine.AmqpEngine(self.gateway.idle_s, self._settled, self._handle, self._budget)
            self.spawn(self._tick(self._engine))
            rest, self._early = self._sasl.rest + self._early, b""
            if rest:
                self._push(self._engine, rest)

    # The engine.

    @property
    def running(self) -> engine.AmqpEngine:
        assert self._engine is not None, "nobody has logged in"
        return self._engine

    async def _tick(self, over: engine.AmqpEngine) -> None:
        """Our heartbeats, and the end of a peer that sends none."""
        while not over.closed:
            over.tick(self._loop.time())
            self.flush()
            await asyncio.sleep(self.gateway.idle_s / 4)

    def _push(self, over: engine.AmqpEngine, data: bytes) -> None:
        try:
            went_well = over.push(data)
        except Exception as error:  # noqa: BLE001  (a fault of ours costs this connection, and says so)
            events.error("amqp-failed", login=self._login, error=error)
            over.fail("amqp:internal-error", "a fault of the gateway")
            went_well = False
        if not went_well:
            events.info("malformed-amqp", login=self._login)
            self._loop.call_soon(self._give_up)
        if self.straight.fresh:
            self.straight.pass_on()
        if self._acks:
            self._acknowledge()
        else:
            self._lull.heard(over.accepted)
        if over.is_stirred:
            self.flush()

    def _give_up(self) -> None:
        """Nothing more is to come: the peer has closed, or broke the protocol and has been told so."""
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
            self._engine.go_on()

    def hear(self, taps: Sequence[consumers.TopicLink], message: consumers.EncodedTopicMessage) -> None:
        """For its listeners, when it is this connection's turn: all connections wait for theirs alike."""
        self._heard.append((taps, message))
        self._heard_bytes += len(message.message.data)
        if len(self._heard) > HEARD_MAX or self._heard_bytes > HEARD_BYTES_MAX:
            self.tell_listeners(1)
        self.flush_soon()

    def tell_listeners(self, deliveries: int) -> None:
        """What they have to hear, so many deliveries of it or a few more."""
        pending = self._heard
        while pending and deliveries > 0:
            taps, message = pending.popleft()
            self._heard_bytes -= len(message.message.data)
            deliveries -= len(taps)
            if self._late and message.has_expired():
                for tap in taps:
                    tap.expired += 1
            else:
                topic_listeners.enqueue(taps, message)

    def take_turn(self) -> bool:
        """Whether it needs another."""
        if self._heard or self._flushing:
            self.tell_listeners(TURN_DELIVERIES)
            self.flush()
        self._in_line = self._late = bool(self._heard)
        return self._late

    def soon(self, act: Callable[[], None]) -> None:
        self._loop.call_soon(act)

    def flush_soon(self) -> None:
        self._flushing = True
        if not self._in_line:
            self._in_line = True
            self.gateway.flush_soon(self)

    def _handle(self, event: Any) -> None:
        kinds = proton.Event
        match event.type:
            case kinds.CONNECTION_REMOTE_OPEN:
                self.spawn(self._open())
            case kinds.SESSION_REMOTE_OPEN:
                self.spawn(self._begin(event.session))
            case kinds.SESSION_REMOTE_CLOSE:
                self.attaching.all_went(event.session)
                for pointer, outlet in list(self.outlets.items()):
                    if outlet.wrapper.session == event.session:
                        self._forget(pointer)
                        self.spawn(outlet.close(destroy=False))
                for pointer, inlet in list(self.inlets.items()):
                    if inlet.link.wrapper.session == event.session:
                        self._forget(pointer)
                event.session.close()
            case kinds.LINK_REMOTE_OPEN:
                self.attaching.came(event.link)
            case kinds.LINK_REMOTE_DETACH:
                self.spawn(self._detach(event.link, destroy=False))
            case kinds.LINK_REMOTE_CLOSE:
                self.spawn(self._detach(event.link, destroy=True))
            case kinds.TRANSPORT_ERROR | kinds.TRANSPORT_TAIL_CLOSED:
                self._loop.call_soon(self._give_up)
            case kinds.CONNECTION_REMOTE_CLOSE:
                self.spawn(self._closed())

    # Tasks.

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Carry on later; what it changed is flushed."""

        async def run() -> None:
            try:
                await work
            except errors.MusterError as error:
                events.warning("bridge-error", error=error)
                self.fail(error)
            self.flush()

        self._spawn_task(run())

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def fail(self, error: errors.MusterError) -> None:
        """Something that no link can be blamed for: the connection ends, and the client turns elsewhere.

        So does a client that waits for an outcome which is in doubt: any outcome that we could name would be
        taken for the truth.  What it has not heard of when its connection ends, it knows to be unknown.
        """
        if self._engine is not None and not self.ended:
            self._engine.connection.condition = proton.Condition("amqp:connection:forced", error.message)
            self._engine.connection.close()

    async def end(self, *, lost: bool) -> None:
        """Whoever asks for it first decides whether it was ``lost``; all wait until it is over."""
        if self._ending is None:
            self.ended = True
            self._ending = self._loop.create_task(self._end(lost=lost))
        await asyncio.shield(self._ending)

    async def _end(self, *, lost: bool) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for outlet in list(self.outlets.values()):
            outlet.closed = True
            if isinstance(outlet, consumers.TopicLink):
                await outlet.close(destroy=False)
        self.outlets.clear()
        self.inlets.clear()
        self._heard.clear()
        if self.opened.is_set():
            await self.jms.close(lost=lost)
        if self._budget is not None and self._login is not None:
            self.gateway.return_budget(self._login, self._budget)
        if self.trunk is not None:
            await self.gateway.trunks.leave(self.trunk)

    # Connections.

    async def _open(self) -> None:
        login = self._sasl.login
        assert login is not None
        connection = self.running.connection
        connection.container = self.gateway.name
        connection.offered_capabilities = proton.SymbolList(list(_CAPABILITIES), raise_on_error=False)
        try:
            self.gateway.check_login(login.name)
            self.trunk = await self.gateway.trunks.join(login)
            jms = api.Connection(self.trunk.bus, client_id=connection.remote_container or None)
            try:
                await jms.__aenter__()
                await jms.hear_slow()
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
        self.origin_token = message_codec.origin_token(jms.origin)
        jms.on_ease = self._eased
        jms.on_doubt(self._held)
        connection.open()
        self.opened.set()
        self.spawn(self.straight.run())

    def _refuse_open(self, condition: proton.Condition) -> None:
        """The client is to close the connection now; one that does not is cut off."""
        connection = self.running.connection
        connection.properties = {proton.symbol("amqp:connection-establishment-failed"): True}
        connection.open()
        connection.condition = condition
        connection.close()
        self._login_alarm = self._loop.call_later(self.gateway.idle_s, self.connection_aborted)

    async def _begin(self, session: Any) -> None:
        """Not before our own open: what a client says behind its open without waiting, waits here."""
        await self.opened.wait()
        session.incoming_capacity = SESSION_BYTES_MAX
        session.open()

    async def _closed(self) -> None:
        self.running.connection.close()
        self.flush()
        await self.end(lost=False)

    async def ears_for(
        self, *, no_local: bool
    ) -> topic_listeners.TopicListeners[consumers.EncodedTopicMessage]:
        """As `client.Connection.ears_for`."""
        assert self.trunk is not None
        assert self.trunk.ears is not None
        quiet = self.gateway.quiet
        if not no_local or quiet is None:
            return self.trunk.ears
        async with self._quieting:
            if self._quiet_ears is None:
                made = await quiet(self.trunk.login)
                await self.jms.speak_over(made)
                self._quiet_ears = topic_listeners.TopicListeners(
                    made, consumers.EncodedTopicMessage, consumers.forward_to_links
                )
            return self._quiet_ears

    # Links.

    def close_link(self, link: endpoints.AmqpLink, condition: str, why: str) -> None:
        self.inlets.pop(link.wrapper._impl, None)
        self.running.close(link, condition, why)

    def end_outlet(self, outlet: consumers.OutgoingLink, condition: str, why: str) -> None:
        """Its client is told, and asks again or not."""
        self._forget(outlet.wrapper._impl)
        self.spawn(outlet.close(destroy=False))
        self.running.close(outlet.link, condition, why)
        self.flush_soon()

    def _forget(self, pointer: protocol_proton.Pointer) -> consumers.OutgoingLink | None:
        """What its client had and did not settle comes again, to whomever."""
        self.attaching.went(pointer)
        if (inlet := self.inlets.pop(pointer, None)) is not None:
            self.transactions.abandon(inlet.link)
        outlet = self.outlets.pop(pointer, None)
        if outlet is not None:
            session = outlet.link.session
            for place, (holder, key, number, _) in list(session.unsettled.items()):
                if holder is outlet:
                    session.settle(place)
                    self._unsettled.discard((key, number))
            if session.owes_too_much:
                self.running.ease(session)
        return outlet

    async def _detach(self, link: Any, *, destroy: bool) -> None:
        outlet = self._forget(link._impl)
        await self.opened.wait()  # as with what begins
        try:
            if outlet is not None:
                await outlet.close(destroy=destroy)
        except errors.MusterError as error:
            link.condition = conditions.condition_of(error)
        if self.running.has(link):  # its session may have ended meanwhile
            (link.close if destroy else link.detach)()
            self.running.free(link)

    # Messages.

    def transmit(self, outlet: consumers.OutgoingLink, data: bytes, key: str = "", number: int = 0) -> None:
        """To the client; with a ``key``, its outcome is that of a message of this backlog."""
        settled = outlet.presettled
        self.running.send(outlet.link, data, (outlet, key, number, data), settled=settled)
        if key:
            if settled:
                self._acks.setdefault(key, []).append(number)
                self._acknowledge()
            else:
                self._unsettled.add((key, number))
        self.flush_soon()

    def has(self, key: str, number: int) -> bool:
        """Whether the client has this message, and it is not stored yet what became of it."""
        return (key, number) in self._unsettled or self.jms.outbox.acknowledges(key, number)

    def discharged(self, acks: dict[str, list[int]]) -> None:
        """What a transaction acknowledges was its client's until now."""
        self._unsettled.difference_update((key, number) for key in acks for number in acks[key])

    def _held(self) -> dict[str, list[int]]:
        held: dict[str, list[int]] = {}
        for key, number in self._unsettled:
            held.setdefault(key, []).append(number)
        return held

    def _settled(self, token: endpoints.Token, code: int, state: bytes | None) -> None:
        """The client says what became of a message."""
        outlet, key, number, data = token
        if not key:
            outlet.returned(number, data, code, state)
            return
        if code == frames.TRANSACTIONAL and self.transactions.acknowledge(state, key, number):
            return
        self._unsettled.discard((key, number))
        if code == frames.ACCEPTED:
            self._acks.setdefault(key, []).append(number)
        else:
            self.give_back(code, state, key, number)

    def give_back(self, code: int, state: bytes | None, key: str, number: int) -> None:
        counted, reason = False, None
        if code == frames.REJECTED:
            reason = "rejected by its consumer"
        elif code == frames.TRANSACTIONAL:
            counted = True  # its transaction is over, so nothing became of what the client did with it
        elif code == frames.MODIFIED:
            counted, undeliverable = frames.modified(state)
            if undeliverable:
                reason = "undeliverable at its consumer"
        release = protocol.ReleaseMessages(self.jms.name, {key: [number]}, counted=counted, reason=reason)
        self.spawn(self.jms.tell(release))

    def _acknowledge(self) -> None:
        """What was acknowledged in one turn goes to the dispatcher together."""
        if self._acks and not self.ended:
            acks, self._acks = self._acks, {}
            self.jms.submit([], acks)

    def reject(self, link: endpoints.AmqpLink, number: int, error: errors.MusterError) -> None:
        if self._engine is not None and not self.ended:
            state = frames.rejected(conditions.name(error), error.message)
            self._engine.settle(link, number, state)
            self.flush_soon()

    # Back-pressure.

    def carry(self, size: int) -> None:
        """So many bytes more (or fewer) are on their way to the bus or the dispatcher."""
        self._carried_bytes += size
        self.running.hold(self._carried_bytes > CARRIED_BYTES_MAX)

    def slowed(self, destination: destinations.Destination | None) -> bool:
        return self.jms.holds.on(destination)

    def _eased(self) -> None:
        for inlet in self.inlets.values():
            inlet.grant()
        self.flush_soon()
