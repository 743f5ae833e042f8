"""The active dispatcher, from the time it acquires the log until it loses it.

It receives requests, consults the `ledger` and the `backlog` concerned, writes through the `journal`, and
sends deliveries in batches. State that it holds in memory only (connections, consumers, credit, held
messages) is also known to its clients, which register with the next dispatcher. This module contains the life
cycle, connections and requests; see `works`, `delivery`, `attachments`, `delayed_messages`, `topic_capture`,
`checkpoints` and `admin` for the rest, `transfers` and `transactions` for what concerns other partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from muster.bus import api, leases
from muster.bus.rpc import admission, requests
from muster.core import errors, subjects
from muster.core.telemetry import log
from muster.message import destinations, partitions, producer_holds, protocol, settings
from muster.message import errors as message_errors
from muster.message.dispatcher import (
    attachments,
    clients,
    delivery,
    lifetime,
    rights,
    topic_capture,
    works,
)
from muster.message.dispatcher.admin import admin_requests, queue_admin, scheduled
from muster.message.dispatcher.log import checkpoints, compaction, message_log
from muster.message.dispatcher.peers import peer_protocol, peer_requests
from muster.supervision import tasks

events = log.EventLog("message")

#: Called with a registered connection or the name of an identity, the request, and where the reply goes.
Handler = Callable[[Any, Any, lifetime.ReplyCallback], None]

RECORDS_BYTES: Final = 64 << 20  # bytes between checkpoints, a limit on what a successor has to read
NOTIFY: Final = ("notify",)
WATCH_S = 1.0
SWEEP_S = 30.0  # interval between searches for expired messages
CROWDED: Final = 0.5  # a log that is so full is packed


class Dispatcher:
    def __init__(
        self,
        bus: api.Bus,
        stream: api.Stream,
        epoch: int,
        message_settings: settings.MessageSettings,
        may: rights.May = rights.allow_all,
        max_bytes: int = 1 << 30,
        on_refused: Callable[[str], None] = lambda reason: None,
        holds: producer_holds.HoldBudgets | None = None,
        *,
        on_dropped: Callable[[str], None] = lambda reason: None,
        partition: int = partitions.HOME,
        partition_count: int = 1,
    ) -> None:
        self._bus = bus
        self._settings = message_settings
        self._log = message_log.MessageLog(
            stream,
            epoch,
            message_settings,
            max_bytes=max_bytes,
            partition=partition,
            partition_count=partition_count,
        )
        self._ledger = self._log.ledger
        self._rights = rights.MessageRights(may, message_settings)
        self._clients = clients.ClientTable(self._ledger.depths, message_settings.queues_per_identity)
        self._lifetime = lifetime.DispatcherLifetime()
        self._delivery = delivery.DeliveryQueue(
            bus, self._log, self._lifetime, self._clients, message_settings
        )
        self._capture = topic_capture.TopicCapture(bus, self._log, self._delivery, on_dropped)
        self._attachments = attachments.Attachments(
            self._log, self._clients, self._rights, message_settings, self._delivery, self._capture
        )
        self._admin = queue_admin.QueueAdmin(
            self._log, self._rights, self._clients, message_settings, self._delivery
        )
        self._scheduled = scheduled.ScheduledMessages(self._log, self._rights, self._delivery.delays)
        self._admin_requests = admin_requests.AdminRequests(
            bus, self._log, self._rights, message_settings, self._admin, self._scheduled
        )
        self._works = works.Works(
            bus,
            self._log,
            self._lifetime,
            self._clients,
            self._rights,
            message_settings,
            self._delivery,
            self._is_gone,
        )
        self._peers = peer_requests.PeerRequests(self._log, self._lifetime, self._delivery, self._works)
        self.refused: Counter[str] = Counter()  # messages that are not valid requests, by reason
        self._on_refused = on_refused  # called with the reason when a connection is rejected
        self._holds = holds or producer_holds.HoldBudgets()
        self._connected: Counter[str] = Counter()  # number of connections by identity
        # Connections, by the bus connection that they use: a gateway's may share one
        self._names_at: dict[api.ConnectionId, dict[str, None]] = {}
        self._checkpoint_bytes = 0  # size of the log after the last checkpoint
        self._checkpointing = asyncio.Lock()
        self._packed_bytes = 0.0  # size of the log above which it is packed again
        self._crowded = asyncio.Event()
        self._disconnected = False
        self._started_at = self._lifetime.loop.time()
        self._lost_at: dict[str, float] = {}  # connections that may return, and when they were lost
        self._of_connections, self._of_identities = self._handlers()

    # Life cycle.

    async def run(self) -> None:
        """Run until an error or cancellation. Nothing of it is left then, even if it was still starting:
        its subscriptions would receive requests that are meant for the next one."""
        bus, ends = self._bus, contextlib.AsyncExitStack()
        end_state = bus.on_state(self._bus_changed)
        ends.push_async_callback(self._admin_requests.server.close)
        ends.push_async_callback(self._stop)
        ends.push_async_callback(self._capture.stop)
        ends.callback(self._delivery.delays.stop)
        ends.callback(self._delivery.stop_retries)
        try:
            await self._dispatch(bus, ends)
        finally:
            end_state()
            await tasks.finish(ends.aclose())

    async def _stop(self) -> None:
        await self._lifetime.tasks.close()
        self._log.journal.abandon(errors.NotConnected("the dispatcher has stopped"))

    def _bus_changed(self, state: api.ConnectionState) -> None:
        """Deliveries in transit when the connection broke may be lost: a new epoch repeats them."""
        if state is not api.ConnectionState.CONNECTED:
            self._disconnected = True
        elif self._disconnected and not self._lifetime.failure.done():
            self._lifetime.failure.set_exception(
                errors.NotConnected("the connection to the brokers was lost")
            )

    async def _dispatch(self, bus: api.Bus, ends: contextlib.AsyncExitStack) -> None:
        await checkpoints.recover(self._log)
        await self._delivery.delays.recover()
        await self._delivery.transfers.recover()
        self._delivery.cache.start = self._ledger.end
        self._capture.patterns_changed.set()

        async def subscribe(pattern: str, handler: Callable[[api.Message], None]) -> None:
            subscription = await bus.subscribe(pattern, handler=handler)
            ends.push_async_callback(subscription.close)

        level = partitions.level(self._log.partition)
        for kind in (("request",), NOTIFY, protocol.READ):
            pattern = subjects.from_identity(protocol.PART, "*", *kind, *level)
            await subscribe(pattern, functools.partial(self._receive, pattern, kind))
        started = protocol.started_subject(self._log.partition)
        await subscribe(started, self._other_started)
        if self._log.partition_count > 1:
            pattern = peer_protocol.peer_subject("*", self._log.partition)
            await subscribe(pattern, functools.partial(self._receive_from_peer, pattern))
        try:
            await subscribe(leases.DISCONNECTED, self._connection_closed)
        except errors.Forbidden:
            events.info("disconnect-events-unavailable", identity=bus.identity)
        loop = functools.partial(self._lifetime.tasks.loop, on_failure=tasks.OnFailure.FATAL)
        loop("journal", self._log.journal.run)
        loop("delivery", self._delivery.send)
        loop("watch", self._watch)
        loop("sweep", self._sweep)
        loop("capture", self._capture.run)
        loop("bodies", self._delivery.bodies.run)
        loop("transactions", self._works.transactions.run)
        self._works.transactions.complete_all()
        await bus.publish(started, protocol.encode(protocol.DispatcherStarted(self._log.epoch)))
        events.info(
            "dispatcher-started",
            partition=self._log.partition,
            epoch=self._log.epoch,
            head=self._log.journal.head,
            subscriptions=len(self._ledger.subscriptions),
            queues=len(self._ledger.depths),
        )
        await self._lifetime.failure

    def _other_started(self, message: api.Message) -> None:
        """A successor started. Stop now: until the lease or the log reveals it, clients would receive replies
        from this dispatcher.
        """
        epoch, ours = protocol.decode_started(message.data).epoch, self._log.epoch
        if epoch > ours and not self._lifetime.failure.done():
            error = errors.StaleEpoch("another dispatcher has started", epoch=ours, current=epoch)
            self._lifetime.failure.set_exception(error)

    async def _watch(self) -> None:
        """Detect silent connections, update rates and write checkpoints."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = self._lifetime.loop.time()
            oldest = now - self._settings.connection_timeout_s
            for connection in [
                client for client in self._clients.connections.values() if client.last_seen < oldest
            ]:
                events.info("connection-silent", connection=connection.name, identity=connection.identity)
                self._connection_lost(connection)
            self._attachments.drop_orphans(self._is_gone)
            self._lost_at = {name: at for name, at in self._lost_at.items() if at >= oldest}
            self._delivery.unload_idle(now)
            self._admin.update_rates(now)
            await self._admin.forget_idle_queues(now)
            await self._checkpoint_if_due()

    async def _sweep(self) -> None:
        """Remove expired messages, and pack the log when it becomes crowded."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_S):
                    await self._crowded.wait()
            is_short = self._log.is_short_of_room(SWEEP_S)
            with contextlib.suppress(errors.LimitExceeded):  # the log is full: retry next time
                await self._admin.expire_messages(everywhere=is_short)
                if is_short or self._crowded.is_set():
                    await compaction.pack(self._log, self._write_checkpoint)
                    used, most = (await self._log.stream.state()).bytes, self._log.max_bytes
                    self._log.used_bytes = used
                    self._packed_bytes = used + max((message_log.FULL * most - used) / 2, most / 64)
            self._crowded.clear()

    async def _checkpoint_if_due(self) -> None:
        here = self._log
        await compaction.delete_foreign(here)
        here.used_bytes = (await here.stream.state()).bytes
        if self._is_crowded():
            self._crowded.set()
        if (
            here.is_short_of_room(2 * WATCH_S)
            or here.records >= self._settings.checkpoint_records
            or here.used_bytes - self._checkpoint_bytes > RECORDS_BYTES
        ):
            try:
                await self._write_checkpoint()
            except errors.LimitExceeded as error:  # the log is full: acknowledgements will make room
                events.warning("checkpoint-rejected", error=error)

    def _is_crowded(self) -> bool:
        """Whether the log is packed now: packing it earlier would free too little to read it completely."""
        return self._log.used_bytes > max(CROWDED * self._log.max_bytes, self._packed_bytes)

    async def _write_checkpoint(self) -> None:
        async with self._checkpointing:
            try:
                await checkpoints.write(self._log)
            finally:
                self._log.used_bytes = self._checkpoint_bytes = (await self._log.stream.state()).bytes

    # Requests.

    def _receive(self, pattern: str, kind: tuple[str, ...], message: api.Message) -> None:
        caller = requests.accept(
            message, pattern, self.refused, needs_reply=kind != NOTIFY, admit=self._admin_requests.admit
        )
        if caller is None:
            return
        subject = message.reply

        def reply(result: protocol.DispatcherReply) -> None:
            if subject is not None and kind != NOTIFY:
                self._delivery.send_reply(subject, result)

        try:
            try:
                request = protocol.decode_request(message.data)
            except errors.InvalidInput:
                self._admin_requests.server.charge(caller.identity, admission.MALFORMED)
                raise
            if kind == NOTIFY and isinstance(request, protocol.COUNTED):
                self._require_connection(caller.identity, request.connection).notified += 1
            if kind == protocol.READ and not isinstance(request, protocol.READS):
                raise errors.Forbidden("this request is not read-only: send it as a request")
            handle = functools.partial(self._handle, caller.identity, request, reply)
            if isinstance(request, protocol.TRAFFIC):
                handle()
            elif not self._admin_requests.submit(caller, request):
                self._admin_requests.server.measure(caller.identity, handle)
        except errors.MusterError as error:
            reply(protocol.failed(error))

    def _receive_from_peer(self, pattern: str, message: api.Message) -> None:
        caller = requests.accept(message, pattern, self.refused, needs_reply=True)
        subject = message.reply
        if caller is None or subject is None:
            return
        try:
            request = peer_protocol.decode_request(message.data)
            self._peers.handle(request, lambda result: self._delivery.send_reply(subject, result))
        except errors.MusterError as error:
            self._delivery.send_reply(subject, protocol.failed(error))

    def _handle(
        self, sender: str, request: protocol.DispatcherRequest, reply: lifetime.ReplyCallback
    ) -> None:
        kind = type(request)
        if (of_connection := self._of_connections.get(kind)) is not None:
            connection = self._require_connection(sender, request.connection)  # type: ignore[union-attr]
            of_connection(connection, request, reply)
        elif (of_identity := self._of_identities.get(kind)) is not None:
            of_identity(sender, request, reply)

    def _handlers(self) -> tuple[dict[type, Handler], dict[type, Handler]]:
        """What to do for requests of a registered connection, and of any identity. `admin_requests` has the
        others.
        """
        works_, attached, bodies = self._works, self._attachments, self._delivery.bodies
        later = self._lifetime.reply_when_done
        return {
            protocol.Ping: self._ping,
            protocol.StageMessages: _done_by(works_.stage),
            protocol.StoreChunk: lambda of, request, reply: later(bodies.store(request, of.identity), reply),
            protocol.CommitWork: works_.commit,
            protocol.SharedWork: works_.share,
            protocol.AttachConsumer: attached.attach,
            protocol.GrantCredit: lambda of, request, _: attached.credit(of, request.consumer, request.more),
            protocol.SlowConsumer: lambda of, request, _: self._broadcast_slow(of, request),
            protocol.StopDelivery: _done_by(attached.stop),
            protocol.ReleaseMessages: _done_by(self._delivery.release),
            protocol.DetachConsumer: _done_by(
                lambda of, request: attached.detach(of, request.consumer, request.seen)
            ),
            protocol.EndSubscription: attached.unsubscribe,
        }, {
            protocol.ClientHello: _done_by(self._hello),
            protocol.Disconnect: _done_by(self._disconnect),
            protocol.ReleaseBody: lambda _, request, reply: bodies.release(request.body),
            protocol.ReadChunk: lambda _, request, reply: later(bodies.read(request), reply),
            protocol.DeleteTemporary: attached.delete_temporary,
            protocol.CheckTemporary: _done_by(
                lambda _, request: works_.check_exists(destinations.Destination.parse(request.destination))
            ),
            protocol.CountPartitions: lambda _, request, reply: reply(
                protocol.DispatcherReply(owner=partitions.owner())
            ),
            protocol.CancelScheduled: lambda sender, request, reply: later(
                self._scheduled.cancel(sender, request), reply
            ),
        }

    def _ping(
        self, connection: clients.ClientConnection, request: protocol.Ping, reply: lifetime.ReplyCallback
    ) -> None:
        keys = {connection.consumers.get(number, "") for number in request.consumers}

        def answer() -> None:
            counts = protocol.DispatcherReply(delivered=connection.delivered, notified=connection.notified)
            reply(counts)

        backlogs = [self._ledger.backlogs[key] for key in keys if key in self._ledger.backlogs]
        self._delivery.reader.when_read(backlogs, answer)

    def _disconnect(self, sender: str, request: protocol.Disconnect) -> None:
        if request.connection in self._clients.connections:
            connection = self._require_connection(sender, request.connection)
            self._remove_connection(connection, None if request.lost else request.seen)

    # Connections.

    def _hello(self, sender: str, hello: protocol.ClientHello) -> None:
        if hello.version != protocol.VERSION:
            raise errors.InvalidInput(
                f"version {hello.version} of the protocol is not supported: use {protocol.VERSION}"
            )
        # Other clients see the name in temporary queues, and must not use it while the connection is lost.
        owner, _, suffix = hello.connection.rpartition("-")
        if owner != sender:
            raise errors.Forbidden(f"the connection {hello.connection[:300]!r} does not belong to {sender}")
        existing = self._clients.connections.get(hello.connection)
        if hello.client_id:
            self._check_client_id(sender, hello.client_id, hello.connection)
        if existing is None and self._connected[sender] >= self._settings.connections_per_identity:
            self._on_refused("identity")
            raise errors.LimitExceeded(
                f"{sender} has {self._connected[sender]} connections: "
                "the limit is `message.connections_per_identity`"
            )
        at = api.ConnectionId(hello.broker, hello.number) if hello.broker else None
        if existing is not None:
            if hello.client_id and existing.client_id is None and not existing.consumers:
                existing.client_id = hello.client_id
        else:
            subjects.token(suffix)
            existing = self._clients.connections[hello.connection] = clients.ClientConnection(
                hello.connection,
                sender,
                hello.client_id,
                self._lifetime.loop.time(),
            )
            self._connected[sender] += 1
        self._set_at(existing, at)  # it may have moved to another broker
        if existing.client_id:
            self._clients.names[existing.origin] = existing.name
        existing.registration = hello.registration
        existing.delivered = existing.notified = 0
        existing.last_seen = self._lifetime.loop.time()
        self._lost_at.pop(existing.name, None)

    def _check_client_id(self, identity: str, client_id: str, connection: str) -> None:
        size = len(client_id.encode())
        if size > protocol.CLIENT_ID_BYTES_MAX:
            self._on_refused("client-id")
            raise message_errors.InvalidClientId(
                f"a client id has at most {protocol.CLIENT_ID_BYTES_MAX} bytes, not {size}"
            )
        if self._log.partition != partitions.HOME:
            return  # one partition decides to which connection it belongs
        other = self._clients.names.get(protocol.origin(identity, client_id))
        if other is not None and other != connection:
            raise message_errors.InvalidClientId(
                f"the client id {client_id!r} is in use by another connection"
            )

    def _require_connection(self, sender: str, name: str) -> clients.ClientConnection:
        connection = self._clients.connections.get(name)
        if connection is None or connection.identity != sender:
            raise errors.NotConnected(f"the connection {name!r} is not registered: send a hello first")
        connection.last_seen = self._lifetime.loop.time()
        return connection

    def _set_at(self, connection: clients.ClientConnection, at: api.ConnectionId | None) -> None:
        """Set the bus connection of a client connection; None: it is removed, or not known."""
        if connection.at is not None:
            names = self._names_at[connection.at]
            del names[connection.name]
            if not names:
                del self._names_at[connection.at]
        connection.at = at
        if at is not None:
            self._names_at.setdefault(at, {})[connection.name] = None

    def _remove_connection(
        self, connection: clients.ClientConnection, seen: dict[str, list[int]] | None
    ) -> None:
        """``seen``: see `protocol.DetachConsumer`; None: the connection is lost."""
        for number in list(connection.consumers):
            self._attachments.detach(connection, number, seen)
        if self._clients.connections.pop(connection.name, None) is not None:
            self._set_at(connection, None)
            self._connected[connection.identity] -= 1
            if not self._connected[connection.identity]:
                del self._connected[connection.identity]
        if connection.client_id:
            self._clients.names.pop(connection.origin, None)

    def _connection_closed(self, message: api.Message) -> None:
        """A broker reports a closed connection."""
        try:
            report = json.loads(message.data)
            at = api.ConnectionId(report["server"]["id"], int(report["client"]["id"]))
            names = list(self._names_at.get(at, ()))
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        for name in names:
            self._connection_lost(self._clients.connections[name])

    def _connection_lost(self, connection: clients.ClientConnection) -> None:
        """Release the messages it held at once. Its temporary queues remain for a while, because it may
        return.
        """
        self._remove_connection(connection, None)
        self._lost_at[connection.name] = self._lifetime.loop.time()

    def _is_gone(self, name: str) -> bool:
        """Whether a connection is gone for good.

        Connections of an earlier dispatcher have the same time to return, from the start of this one.
        """
        if name in self._clients.connections:
            return False
        away_s = self._lifetime.loop.time() - self._lost_at.get(name, self._started_at)
        return away_s > self._settings.connection_timeout_s

    def _broadcast_slow(self, connection: clients.ClientConnection, report: protocol.SlowConsumer) -> None:
        """Broadcast a slow consumer, if the client may subscribe to the topic and producers have not waited
        for its identity too long.
        """
        if self._log.partition != partitions.HOME:  # one dispatcher counts how long producers wait
            raise errors.InvalidInput("slow consumers are reported to the first partition")
        if not self._rights.may_subscribe(connection.identity, report.topic):
            return
        decision = self._holds.report(
            connection.identity, report.topic, self._lifetime.loop.time(), recovered=report.recovered
        )
        if decision is producer_holds.HoldDecision.BROADCAST:
            self._delivery.announce(protocol.SLOW, protocol.encode(report))


def _done_by(act: Callable[[Any, Any], None]) -> Handler:
    """A handler that replies when ``act`` has returned."""

    def handle(sender: Any, request: Any, reply: lifetime.ReplyCallback) -> None:
        act(sender, request)
        reply(protocol.DispatcherReply())

    return handle
