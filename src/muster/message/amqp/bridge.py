"""One AMQP connection: its engine, its JMS connection, and what passes between them.

The engine has no socket: bytes go in, events come out, answers are bytes again.  Events are handled where
they come; what has to wait for the dispatcher is a task, and whatever changed the engine ends with a
`flush`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import proton

from muster.core import errors, log
from muster.message import client, destinations, faults, messages, protocol, selectors
from muster.message.amqp import codec, links, sasl

if TYPE_CHECKING:
    from muster.message.amqp import server

events = log.Events("message")

CREDIT: Final = 500
MESSAGE_BYTES_MAX: Final = 900 << 10  # of an AMQP message: it has to fit into one of the bus
SESSION_BYTES_MAX: Final = 64 << 20
IDLE_S: Final = 30.0
_DECLARE, _DISCHARGE, _DECLARED, _TRANSACTIONAL = 0x31, 0x32, 0x33, 0x34
_ACCEPTED: Final = proton.Described(proton.ulong(0x24), [])
_CAPABILITIES: Final = ("sole-connection-for-container", "DELAYED_DELIVERY", "ANONYMOUS-RELAY", "SHARED-SUBS")


def condition(error: errors.MusterError) -> proton.Condition:
    """The AMQP condition from which a JMS client makes the right exception."""
    match error:
        case errors.Unauthorized() | errors.Forbidden():
            name = "amqp:unauthorized-access"
        case errors.LimitExceeded() | errors.Overloaded():
            name = "amqp:resource-limit-exceeded"
        case errors.NotFound():
            name = "amqp:not-found"
        case faults.FormatError():
            name = "amqp:decode-error"
        case faults.IllegalState():
            name = "amqp:resource-locked"
        case errors.InvalidInput():
            name = "amqp:invalid-field"
        case _:
            name = "amqp:internal-error"
    return proton.Condition(name, error.message)


@dataclass(slots=True)
class Transaction:
    sends: list[protocol.Send] = field(default_factory=list)
    acks: dict[str, list[int]] = field(default_factory=dict)
    error: errors.MusterError | None = None


class Bridge(asyncio.Protocol):
    def __init__(self, gateway: server.Gateway) -> None:
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self._socket: asyncio.Transport
        self._sasl = sasl.Server(gateway.verifiers, anonymous=gateway.anonymous)
        self._early = b""
        self._engine: proton.Transport | None = None
        self._paused = False
        self._flushing = False
        self._opened = asyncio.Event()
        self._transactions: dict[bytes, Transaction] = {}
        self._outlets: dict[int, links.Outlet] = {}
        self._numbers = 0
        self._tags = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._logging_in: asyncio.Task[None] | None = None
        self._straight: deque[tuple[Any, str, bytes, str]] = deque()
        self._straight_wake = asyncio.Event()
        self._ended = False
        self.jms: client.Connection
        self.unsettled: dict[tuple[str, int], int] = {}  # by link

    # The socket.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        self._gateway.bridges.add(self)
        self._login_alarm = self._loop.call_later(IDLE_S, self.connection_aborted)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gateway.bridges.discard(self)
        self._login_alarm.cancel()
        self._gateway.spawn(self.end(lost=True))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._engine is not None:
            self._push(data)
            return
        self._early += data
        if len(self._early) > 1 << 20:
            self.connection_aborted()
        elif self._logging_in is None:
            self._logging_in = self._spawn_task(self._log_in())

    def connection_aborted(self) -> None:
        self._socket.abort()

    async def _log_in(self) -> None:
        """Checking a password takes long on purpose, so not in the loop."""
        try:
            while self._early and self._sasl.login is None and not self._sasl.failed:
                data, self._early = self._early, b""
                self._socket.write(await asyncio.to_thread(self._sasl.receive, data))
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
            self._begin()
            rest, self._early = self._sasl.rest + self._early, b""
            if rest:
                self._push(rest)

    # The engine.

    def _begin(self) -> None:
        self._connection = proton.Connection()
        self._collector = proton.Collector()
        self._connection.collect(self._collector)
        self._engine = proton.Transport(proton.Transport.SERVER)
        self._engine.max_frame_size = 1 << 20
        self._engine.idle_timeout = IDLE_S
        self._engine.bind(self._connection)
        self.spawn(self._tick())
        self.spawn(self._publish_straight())

    async def _tick(self) -> None:
        while self._engine is not None and not self._engine.closed:
            self._engine.tick(self._loop.time())
            self.flush()
            await asyncio.sleep(IDLE_S / 4)

    def _push(self, data: bytes) -> None:
        assert self._engine is not None
        try:
            while data:
                room = self._engine.capacity()
                if room <= 0:
                    break
                self._engine.push(data[:room])
                data = data[room:]
                self._process()
        except proton.TransportException as error:
            events.info("malformed-amqp", error=str(error))
        self._process()
        self.flush()

    def _give_up(self) -> None:
        """Nothing more is to come: the peer has closed, or broke the protocol and has been told so."""
        self.flush()
        self._socket.close()

    def flush(self) -> None:
        self._flushing = False
        if self._engine is None or self._paused or self._socket.is_closing():
            return
        while (size := self._engine.pending()) > 0:
            data = self._engine.peek(size)
            if not data:
                break
            self._socket.write(data)
            self._engine.pop(len(data))
        if size < 0:
            self._socket.close()

    def _process(self) -> None:
        event = self._collector.peek()
        while event is not None:
            self._handle(event)
            self._collector.pop()
            event = self._collector.peek()

    def _handle(self, event: Any) -> None:
        kinds = proton.Event
        match event.type:
            case kinds.DELIVERY:
                if event.link.is_receiver:
                    self._arrived(event.link, event.delivery)
                else:
                    self._settled(event.delivery)
            case kinds.LINK_FLOW:
                if event.link.is_sender and (outlet := self._outlet(event.link)) is not None:
                    self.spawn(outlet.flow())
            case kinds.CONNECTION_REMOTE_OPEN:
                self.spawn(self._open())
            case kinds.SESSION_REMOTE_OPEN:
                event.session.incoming_capacity = SESSION_BYTES_MAX
                event.session.open()
            case kinds.SESSION_REMOTE_CLOSE:
                for number, outlet in list(self._outlets.items()):
                    if outlet.link is not None and outlet.link.session == event.session:
                        self._forget(number)
                        self.spawn(outlet.close(destroy=False))
                event.session.close()
            case kinds.LINK_REMOTE_OPEN:
                self.spawn(self._attach(event.link))
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
                self._fail(error)
            self.flush()

        self._spawn_task(run())

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _fail(self, error: errors.MusterError) -> None:
        """Something that no link can be blamed for: the connection ends, and the client turns elsewhere."""
        if self._engine is not None and not self._ended:
            self._connection.condition = proton.Condition("amqp:connection:forced", error.message)
            self._connection.close()

    async def end(self, *, lost: bool) -> None:
        if self._ended:
            return
        self._ended = True
        current = asyncio.current_task()
        for task in list(self._tasks):
            if task is not current:
                task.cancel()
        await asyncio.gather(*(task for task in self._tasks if task is not current), return_exceptions=True)
        for outlet in list(self._outlets.values()):
            outlet.link = None
            if isinstance(outlet, links.Tap):
                await outlet.close(destroy=False)
        self._outlets.clear()
        if self._opened.is_set():
            await self.jms.close(lost=lost)

    # Connections.

    async def _open(self) -> None:
        login = self._sasl.login
        assert login is not None
        connection = self._connection
        connection.container = self._gateway.name
        connection.offered_capabilities = proton.SymbolList(list(_CAPABILITIES), raise_on_error=False)
        bus = await self._gateway.connect(login)
        jms = client.Connection(bus, client_id=connection.remote_container or None, owns_bus=True)
        try:
            await jms.__aenter__()
        except faults.InvalidClientId as error:
            connection.properties = {proton.symbol("amqp:connection-establishment-failed"): True}
            connection.open()
            connection.condition = proton.Condition(
                "amqp:invalid-field",
                error.message,
                {proton.symbol("invalid-field"): proton.symbol("container-id")},
            )
            connection.close()
            return
        except errors.MusterError as error:
            connection.open()
            connection.condition = condition(error)
            connection.close()
            return
        self.jms = jms
        connection.open()
        self._opened.set()

    async def _closed(self) -> None:
        self._connection.close()
        self.flush()
        await self.end(lost=False)

    # Links.

    def _outlet(self, link: Any) -> links.Outlet | None:
        return self._outlets.get(getattr(link, "muster", 0))

    async def _attach(self, link: Any) -> None:
        await self._opened.wait()
        try:
            if link.is_sender:
                await self._attach_outlet(link)
            else:
                self._attach_inlet(link)
        except errors.MusterError as error:
            self._refuse(link, error)

    def _refuse(self, link: Any, error: errors.MusterError) -> None:
        link.source.type = link.target.type = proton.Terminus.UNSPECIFIED
        link.open()
        link.condition = condition(error)
        link.close()

    def _add(self, link: Any, outlet: links.Outlet) -> None:
        self._numbers += 1
        link.muster = self._numbers
        self._outlets[self._numbers] = outlet

    def _attach_inlet(self, link: Any) -> None:
        """The client sends."""
        target = link.remote_target
        link.source.copy(link.remote_source)
        link.target.copy(target)
        capabilities = _symbols(target.capabilities)
        if target.dynamic:
            number = self.jms.next_number()
            if "temporary-topic" in capabilities:
                name = f"path:{destinations.TEMPORARY}{self.jms.name}/{number}"
                made = destinations.Destination(destinations.Kind.TEMPORARY_TOPIC, name)
            else:
                name = f"{destinations.TEMPORARY}{self.jms.name}:{number}"
                made = destinations.Destination(destinations.Kind.TEMPORARY_QUEUE, name)
            link.target.address = made.name
            link.target.dynamic = True
            link.destination = made
            self._add(link, links.Temporary(self, link, made))
        elif target.type == proton.Terminus.COORDINATOR:
            link.coordinator = True
        else:
            found = codec.address(target.address, capabilities) if target.address else None
            if found is not None and not found.is_queue:
                _ = found.subject  # refuses what is no topic now, not with the first message
            link.destination = found
        link.max_message_size = MESSAGE_BYTES_MAX
        link.open()
        link.flow(CREDIT)

    async def _attach_outlet(self, link: Any) -> None:
        """The client receives."""
        source = link.remote_source
        name, bar, rest = link.name.partition("|")
        everyone = bar == "|" and rest.startswith("global")
        if source.type == proton.Terminus.UNSPECIFIED:
            await self._attach_ending(link, name, everyone=everyone)
            return
        capabilities = _symbols(source.capabilities)
        selector, no_local = _filters(source.filter)
        if selector:
            selectors.compiled(selector)
        durable = source.durability != proton.Terminus.NONDURABLE
        if source.dynamic:
            temporary = f"{destinations.TEMPORARY}{self.jms.name}:{self.jms.next_number()}"
            destination = destinations.Destination(destinations.Kind.TEMPORARY_QUEUE, temporary)
        else:
            destination = codec.address(source.address or "", capabilities)
        outlet: links.Outlet
        if destination.is_queue and source.distribution_mode == proton.Terminus.DIST_MODE_COPY:
            outlet = links.Browser(self, link, destination.name, selector)
        elif destination.is_queue or durable:
            outlet = links.Fed(
                self,
                link,
                protocol.Attach(
                    self.jms.name,
                    self.jms.next_number(),
                    str(destination),
                    subscription=None if destination.is_queue else name,
                    durable=not destination.is_queue,
                    shared="shared" in capabilities,
                    selector=selector,
                    no_local=no_local,
                    everyone=everyone,
                ),
            )
        else:
            group = None
            if "shared" in capabilities:
                group = destinations.token(f":{name}" if everyone else f"{self.jms.client_id}:{name}")
            outlet = links.Tap(self, link, destination, selector=selector, no_local=no_local, group=group)
        await outlet.open()
        link.source.copy(source)
        link.target.copy(link.remote_target)
        if source.dynamic:
            link.source.address = destination.name
        link.snd_settle_mode = link.remote_snd_settle_mode
        self._add(link, outlet)
        link.open()
        await outlet.flow()

    async def _attach_ending(self, link: Any, name: str, *, everyone: bool) -> None:
        rows = (await self.jms.ask(protocol.ListSubscriptions())).rows
        client_id = None if everyone else self.jms.client_id
        for row in rows:
            if row["subscription"] == name and row["client_id"] == client_id:
                link.source.type = proton.Terminus.SOURCE
                link.source.address = str(row["topic"])
                link.source.durability = proton.Terminus.DELIVERIES
                link.source.expiry_policy = proton.Terminus.EXPIRE_NEVER
                self._add(link, links.Ending(self, link, name, everyone=everyone))
                link.open()
                return
        raise faults.InvalidDestination(f"there is no durable subscription {name!r}")

    def _forget(self, number: int) -> links.Outlet | None:
        """What its client had and did not settle comes again, to whomever."""
        self.unsettled = {key: one for key, one in self.unsettled.items() if one != number}
        return self._outlets.pop(number, None)

    async def _detach(self, link: Any, *, destroy: bool) -> None:
        outlet = self._forget(getattr(link, "muster", 0))
        try:
            if outlet is not None:
                await outlet.close(destroy=destroy)
        except errors.MusterError as error:
            link.condition = condition(error)
        if destroy:
            link.close()
        else:
            link.detach()

    # Messages to the client.

    def transmit(self, link: Any, data: bytes, key: tuple[str, int] | None) -> None:
        self._tags += 1
        delivery = link.delivery(str(self._tags))
        link.stream(data)
        link.advance()
        if link.snd_settle_mode == proton.Link.SND_SETTLED:
            delivery.settle()
            if key is not None:
                self.jms.submit([], {key[0]: [key[1]]})
        else:
            delivery.muster = key
            if key is not None:
                self.unsettled[key] = link.muster
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def _settled(self, delivery: Any) -> None:
        """The client says what became of a message."""
        if not delivery.updated:
            return
        key = getattr(delivery, "muster", None)
        state = delivery.remote_state
        if key is not None:
            self.unsettled.pop(key, None)
            if state == _TRANSACTIONAL:
                transaction = self._transactions.get(bytes(delivery.remote.data[0]))
                if transaction is not None:
                    transaction.acks.setdefault(key[0], []).append(key[1])
            elif state == proton.Delivery.ACCEPTED:
                self.jms.submit([], {key[0]: [key[1]]})
            else:
                counted, reason = False, None
                if state == proton.Delivery.REJECTED:
                    reason = "rejected by its consumer"
                elif state == proton.Delivery.MODIFIED:
                    counted = delivery.remote.failed
                    if delivery.remote.undeliverable:
                        reason = "undeliverable at its consumer"
                release = protocol.Release(self.jms.name, {key[0]: [key[1]]}, counted=counted, reason=reason)
                self.spawn(self.jms.tell(release))
        delivery.settle()

    # Messages from the client.

    def _arrived(self, link: Any, delivery: Any) -> None:
        if not delivery.readable or delivery.partial:
            return
        data = link.recv(delivery.pending) if delivery.pending else b""
        settled = delivery.settled
        state = delivery.remote_state
        transaction_id = bytes(delivery.remote.data[0]) if state == _TRANSACTIONAL else None
        link.advance()
        try:
            if getattr(link, "coordinator", False):
                self._coordinate(delivery, data)
            else:
                self._take(link, delivery, data, transaction_id, settled=settled)
        except errors.MusterError as error:
            self._reject(delivery, error)
        if link.credit < CREDIT // 2 and len(self._straight) < CREDIT:
            link.flow(CREDIT - link.credit)

    def _take(
        self, link: Any, delivery: Any, data: bytes, transaction_id: bytes | None, *, settled: bool
    ) -> None:
        if len(data) > MESSAGE_BYTES_MAX:
            raise errors.LimitExceeded(f"a message of {len(data)} bytes: the most is {MESSAGE_BYTES_MAX}")
        now_ms = time.time_ns() // 1_000_000
        message, destination = codec.decode(data, getattr(link, "destination", None), now_ms)
        message.origin = self.jms.origin
        meta, body = message.meta()
        raw = messages.encode_meta(meta).decode()
        send = protocol.Send(str(destination), raw, body)
        if transaction_id is not None:
            transaction = self._transactions.get(transaction_id)
            if transaction is None:
                raise errors.InvalidInput("there is no such transaction")
            transaction.sends.append(send)
            if not settled:
                delivery.local.data = [transaction_id, _ACCEPTED]
                delivery.update(_TRANSACTIONAL)
            delivery.settle()
            return
        if not destination.is_queue and not message.persistent and meta.delivery_time_ms <= now_ms:
            self._straight.append((delivery, destination.subject, body, raw))
            self._straight_wake.set()
            return
        future = self.jms.submit([send])
        future.add_done_callback(lambda done: self._accept(delivery, done.exception()))

    async def _publish_straight(self) -> None:
        """Non-persistent messages of topics, in order."""
        while True:
            await self._straight_wake.wait()
            self._straight_wake.clear()
            await self._opened.wait()
            while self._straight:
                delivery, subject, body, raw = self._straight.popleft()
                try:
                    await self.jms.bus.publish(subject, body, headers={messages.HEADER: raw})
                except errors.MusterError as error:
                    self._reject(delivery, error)
                else:
                    delivery.update(proton.Delivery.ACCEPTED)
                    delivery.settle()
            self.flush()

    def _accept(self, delivery: Any, error: BaseException | None) -> None:
        if self._ended:
            return
        if isinstance(error, errors.MusterError):
            self._reject(delivery, error)
        else:
            delivery.update(proton.Delivery.ACCEPTED)
            delivery.settle()
        self.flush()

    def _reject(self, delivery: Any, error: errors.MusterError) -> None:
        if self._ended:
            return
        delivery.local.condition = condition(error)
        delivery.update(proton.Delivery.REJECTED)
        delivery.settle()
        self.flush()

    # Transactions.

    def _coordinate(self, delivery: Any, data: bytes) -> None:
        said = proton.Message()
        said.decode(data)
        body = said.body
        code = int(body.descriptor) if isinstance(body, proton.Described) else 0
        if code == _DECLARE:
            made = secrets.token_bytes(8)
            self._transactions[made] = Transaction()
            delivery.local.data = [made]
            delivery.update(_DECLARED)
            delivery.settle()
        elif code == _DISCHARGE:
            transaction = self._transactions.pop(bytes(body.value[0]), None)
            if transaction is None:
                raise errors.InvalidInput("there is no such transaction")
            failed = len(body.value) > 1 and bool(body.value[1])
            self.spawn(self._discharge(delivery, transaction, commit=not failed))
        else:
            raise errors.InvalidInput("a coordinator takes declare and discharge")

    async def _discharge(self, delivery: Any, transaction: Transaction, *, commit: bool) -> None:
        error: errors.MusterError | None = None
        if commit and (transaction.sends or transaction.acks):
            try:
                await self.jms.submit(transaction.sends, transaction.acks, alone=True)
            except errors.MusterError as found:
                error = found
        if (error is not None or not commit) and transaction.acks:
            with contextlib.suppress(errors.Unavailable):
                await self.jms.ask(protocol.Release(self.jms.name, transaction.acks, counted=True))
        if error is not None:
            # Any condition but amqp:transaction:rollback tells the Java client that it was rolled back.
            delivery.local.condition = proton.Condition("amqp:internal-error", error.message)
            delivery.update(proton.Delivery.REJECTED)
        else:
            delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()


def _object(data: Any) -> Any:
    data.rewind()
    return data.get_object() if data.next() else None


def _symbols(data: Any) -> frozenset[str]:
    found = _object(data)
    if isinstance(found, proton.Array):
        found = list(found.elements)
    if found is None:
        return frozenset()
    return frozenset(map(str, found if isinstance(found, list) else [found]))


def _filters(data: Any) -> tuple[str | None, bool]:
    """Selector and no-local."""
    selector, no_local = None, False
    for name, value in (_object(data) or {}).items():
        said = getattr(value, "descriptor", "")
        descriptor = str(int(said)) if isinstance(said, int) else str(said)
        if descriptor in ("apache.org:selector-filter:string", str(0x0000468C00000004)):
            selector = str(value.value)
        elif descriptor in ("apache.org:no-local-filter:list", str(0x0000468C00000003)) or name == "no-local":
            no_local = True
    return selector, no_local
