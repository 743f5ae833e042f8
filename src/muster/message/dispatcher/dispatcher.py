"""The dispatcher at work, between taking over the log and losing it.

It hears requests, asks the `ledger` and the `backlog` concerned, writes through the `journal`, and sends out
deliveries in batches.  Everything it keeps in memory only (connections, consumers, credit, what is in whose
hands) its clients know as well and tell the next one.  Here are its life, its connections and what they ask;
the rest of it is beside this file: `delivering`, `attaching`, `delays`, `capturing`, `checkpoints`, `caring`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable
from typing import Final

from muster.bus import api, leases
from muster.bus.rpc import requests
from muster.core import errors, subjects
from muster.core.telemetry import log
from muster.message import destinations, messages, protocol, settings
from muster.message import errors as message_errors
from muster.message.dispatcher import admin, admin_requests, attachments, delivery, topic_capture
from muster.message.dispatcher import state as dispatcher_state
from muster.message.dispatcher.log import checkpoints, journal, ledger

events = log.EventLog("message")

RECORDS_BYTES: Final = 64 << 20  # a checkpoint after so many bytes, so that a successor reads no more
TELL: Final = ("tell",)
WATCH_S = 1.0
SWEEP_S = 30.0  # between looks at a full log for what has expired


class Dispatcher:
    def __init__(
        self,
        bus: api.Bus,
        stream: api.Stream,
        epoch: int,
        message_settings: settings.MessageSettings,
        may: dispatcher_state.May = dispatcher_state.allow_all,
        max_bytes: int = 1 << 30,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._desk = dispatcher_state.DispatcherState(
            bus, stream, epoch, message_settings, may, max_bytes=max_bytes
        )
        self._ledger = self._desk.ledger
        self._deliver = delivery.DeliveryQueue(self._desk)
        self._capture = topic_capture.TopicCapture(self._desk, self._deliver)
        self._attaching = attachments.Attachments(self._desk, self._deliver, self._capture)
        self._caring = admin.QueueAdmin(self._desk, self._deliver)
        self._administrating = admin_requests.AdminRequests(self._desk, self._caring)
        self.refused: Counter[str] = Counter()  # messages that are no requests, by reason
        self._on_refused = on_refused  # called with the reason for which a connection is refused
        self._connected: Counter[str] = Counter()  # connections by identity
        self._settings = message_settings
        self._checkpoint_bytes = 0  # the log's size after the last checkpoint
        self._working: dict[tuple[str, int], list[dispatcher_state.Answer]] = {}
        self._cut_off = False
        self._began_at = self._desk.loop.time()
        self._lost_at: dict[str, float] = {}  # connections that may come back, and since when they are away

    # Life.

    async def run(self) -> None:
        """Until it fails or is cancelled."""
        bus = self._desk.bus
        end_state = bus.on_state(self._bus_changed)
        try:
            await self._dispatch(bus)
        finally:
            end_state()

    def _bus_changed(self, state: api.ConnectionState) -> None:
        """Deliveries on their way when the connection broke may be lost: a new epoch sends them again."""
        if state is not api.ConnectionState.CONNECTED:
            self._cut_off = True
        elif self._cut_off and not self._desk.failure.done():
            self._desk.failure.set_exception(errors.NotConnected("the connection to the brokers was lost"))

    async def _dispatch(self, bus: api.Bus) -> None:
        await checkpoints.recover(self._desk)
        await self._deliver.delays.recover()
        self._deliver.tail.start = self._ledger.end
        self._capture.wanted.set()
        hearing = []
        for kind in (("ask",), TELL, protocol.READ):
            pattern = subjects.from_identity(protocol.PART, "*", *kind)
            hearing.append(await bus.subscribe(pattern, handler=functools.partial(self._hear, pattern, kind)))
        hearing.append(await bus.subscribe(protocol.BEGAN, handler=self._other_began))
        try:
            hearing.append(await bus.subscribe(leases.DISCONNECTED, handler=self._closed))
        except errors.Forbidden:
            events.info("closed-connections-unheard", identity=bus.identity)
        try:
            for work in (
                self._desk.journal.run(),
                self._deliver.send(),
                self._watch(),
                self._sweep(),
                self._capture.run(),
            ):
                self._desk.spawn(work)
            await bus.publish(protocol.BEGAN, protocol.encode(protocol.DispatcherStarted(self._desk.epoch)))
            events.info(
                "dispatcher-began",
                epoch=self._desk.epoch,
                head=self._desk.journal.head,
                subscriptions=len(self._ledger.subscriptions),
                queues=len(self._ledger.depths),
            )
            await self._desk.failure
        finally:
            for subscription in hearing:
                await subscription.close()
            self._deliver.delays.stop()
            await self._capture.stop()
            await self._desk.stop()
            await self._administrating.server.close()

    def _other_began(self, message: api.Message) -> None:
        """A successor: before our lease or the log says so, clients would go on getting answers from us."""
        epoch, ours = protocol.decode_began(message.data).epoch, self._desk.epoch
        if epoch > ours and not self._desk.failure.done():
            error = errors.StaleEpoch("another dispatcher has begun", epoch=ours, current=epoch)
            self._desk.failure.set_exception(error)

    async def _watch(self) -> None:
        """Connections that fell silent, rates, and checkpoints."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = self._desk.loop.time()
            oldest = now - self._settings.connection_timeout_s
            for connection in [
                client for client in self._desk.connections.values() if client.heard_at < oldest
            ]:
                events.info("connection-silent", connection=connection.name, identity=connection.identity)
                self._lose(connection)
            self._attaching.drop_orphans(self._is_gone)
            self._lost_at = {name: at for name, at in self._lost_at.items() if at >= oldest}
            self._caring.count(now)
            await self._caring.forget(now)
            await self._look_at_the_log()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._desk.was_short(SWEEP_S):
                with contextlib.suppress(errors.LimitExceeded):  # not a byte more fits: the next time
                    await self._caring.sweep()
                    await checkpoints.delete_unused_pages(self._desk)

    async def _look_at_the_log(self) -> None:
        here = self._desk
        here.used_bytes = (await here.stream.state()).bytes
        if (
            here.was_short(2 * WATCH_S)
            or here.records >= self._settings.checkpoint_records
            or here.used_bytes - self._checkpoint_bytes > RECORDS_BYTES
        ):
            try:
                await checkpoints.write(here)
            except errors.LimitExceeded as error:  # not a byte more fits: what is acknowledged makes room
                events.warning("checkpoint-refused", error=error)
            here.used_bytes = self._checkpoint_bytes = (await here.stream.state()).bytes

    # Requests.

    def _hear(self, pattern: str, kind: tuple[str, ...], message: api.Message) -> None:
        caller = requests.accept(message, pattern, self.refused, needs_reply=kind != TELL)
        if caller is None:
            return
        reply = message.reply

        def answer(result: protocol.DispatcherReply) -> None:
            if reply is not None and kind != TELL:
                self._deliver.answer(reply, result)

        try:
            request = protocol.decode_ask(message.data)
            if kind == protocol.READ and not isinstance(request, protocol.READS):
                raise errors.Forbidden("that changes something: ask, do not read")
            if isinstance(request, protocol.PurgeQueue | protocol.MoveMessages):
                self._administrating.submit(caller, request)
            else:
                self._handle(caller.identity, request, answer)
        except errors.MusterError as error:
            answer(protocol.failed(error))

    def _handle(self, sender: str, request: protocol.Ask, answer: dispatcher_state.Answer) -> None:
        match request:
            case protocol.ClientHello():
                self._hello(sender, request)
                answer(protocol.DispatcherReply(epoch=self._desk.epoch))
            case protocol.Ping():
                connection = self._known(sender, request.connection)
                keys = {connection.consumers.get(number, "") for number in request.consumers}
                self._deliver.when_loaded(
                    keys, lambda: answer(protocol.DispatcherReply(epoch=self._desk.epoch))
                )
            case protocol.EchoOff():
                self._known(sender, request.connection).quiet = True
            case protocol.DelayedPublished():
                self._deliver.said(self._known(sender, request.connection), request)
            case protocol.StageMessages():
                self._stage(self._known(sender, request.connection), request)
                answer(protocol.DispatcherReply())
            case protocol.CommitWork():
                self._work(self._known(sender, request.connection), request, answer)
            case protocol.AttachConsumer():
                self._attaching.attach(self._known(sender, request.connection), request, answer)
            case protocol.GrantCredit():
                connection = self._known(sender, request.connection)
                if source := self._ledger.backlogs.get(connection.consumers.get(request.consumer, "")):
                    source.credit((connection.name, request.consumer), request.more)
                    self._deliver.pump(source)
            case protocol.SlowConsumer():
                self._slow(self._known(sender, request.connection), request)
            case protocol.StopDelivery():
                connection = self._known(sender, request.connection)
                for number in request.consumers:
                    if source := self._ledger.backlogs.get(connection.consumers.get(number, "")):
                        source.stop((connection.name, number))
                answer(protocol.DispatcherReply())
            case protocol.ReleaseMessages():
                connection = self._known(sender, request.connection)
                for key, sequences in request.deliveries.items():
                    if source := self._ledger.backlogs.get(key):
                        self._deliver.obey(
                            source,
                            source.release(
                                sequences, connection.name, counted=request.counted, reason=request.reason
                            ),
                        )
                        self._deliver.pump(source)
                answer(protocol.DispatcherReply())
            case protocol.DetachConsumer():
                connection = self._known(sender, request.connection)
                self._attaching.detach(connection, request.consumer, request.seen)
                answer(protocol.DispatcherReply())
            case protocol.Disconnect():
                if request.connection in self._desk.connections:
                    self._forget(
                        self._known(sender, request.connection), None if request.lost else request.seen
                    )
                answer(protocol.DispatcherReply())
            case protocol.EndSubscription():
                self._attaching.unsubscribe(self._known(sender, request.connection), request, answer)
            case protocol.DeleteQueue():
                self._attaching.drop_queue(sender, request.name, answer)
            case protocol.ListQueues():
                answer(protocol.DispatcherReply(rows=self._caring.queue_rows(sender)))
            case protocol.ListSubscriptions():
                answer(protocol.DispatcherReply(rows=self._caring.subscription_rows(sender)))
            case protocol.BrowseQueue():
                if not self._desk.may_browse(sender, request.queue):
                    self._desk.check_queue(sender, "browse", request.queue)
                self._desk.answering(self._caring.browse(request), answer)

    # Connections.

    def _hello(self, sender: str, hello: protocol.ClientHello) -> None:
        if hello.version != protocol.VERSION:
            raise errors.InvalidInput(
                f"version {hello.version} of the protocol is not spoken here: {protocol.VERSION} is"
            )
        # Others know the name from its temporary queues, and must not take it over while it is away.
        owner, _, suffix = hello.connection.rpartition("-")
        if owner != sender:
            raise errors.Forbidden(f"the connection {hello.connection[:300]!r} is not one of {sender}")
        known = self._desk.connections.get(hello.connection)
        if hello.client_id:
            self._check_client_id(sender, hello.client_id, hello.connection)
        if known is None and self._connected[sender] >= self._settings.connections_per_identity:
            self._on_refused("identity")
            raise errors.LimitExceeded(
                f"{sender} has {self._connected[sender]} connections: "
                "`message.connections_per_identity` allows no more"
            )
        at = api.ConnectionId(hello.broker, hello.number) if hello.broker else None
        if known is not None:
            known.at, known.quiet = at, hello.quiet  # it may have roamed
            if hello.client_id and known.client_id is None and not known.consumers:
                known.client_id = hello.client_id
        else:
            subjects.token(suffix)
            known = self._desk.connections[hello.connection] = dispatcher_state.ClientConnection(
                hello.connection, sender, hello.client_id, self._desk.loop.time(), at, quiet=hello.quiet
            )
            self._connected[sender] += 1
        if known.client_id:
            self._desk.clients[known.origin] = known.name
        known.heard_at = self._desk.loop.time()
        self._lost_at.pop(known.name, None)

    def _check_client_id(self, identity: str, client_id: str, connection: str) -> None:
        size = len(client_id.encode())
        if size > protocol.CLIENT_ID_BYTES_MAX:
            self._on_refused("client-id")
            raise message_errors.InvalidClientId(
                f"a client id has at most {protocol.CLIENT_ID_BYTES_MAX} bytes, not {size}"
            )
        other = self._desk.clients.get(protocol.origin(identity, client_id))
        if other is not None and other != connection:
            raise message_errors.InvalidClientId(
                f"the client id {client_id!r} is in use by another connection"
            )

    def _known(self, sender: str, name: str) -> dispatcher_state.ClientConnection:
        connection = self._desk.connections.get(name)
        if connection is None or connection.identity != sender:
            raise errors.NotConnected(f"the connection {name!r} is not known: say hello first")
        connection.heard_at = self._desk.loop.time()
        return connection

    def _forget(
        self, connection: dispatcher_state.ClientConnection, seen: dict[str, list[int]] | None
    ) -> None:
        """``seen``: as with `protocol.Detach`; None: the connection is lost."""
        for number in list(connection.consumers):
            self._attaching.detach(connection, number, seen)
        if self._desk.connections.pop(connection.name, None) is not None:
            self._connected[connection.identity] -= 1
            if not self._connected[connection.identity]:
                del self._connected[connection.identity]
        if connection.client_id:
            self._desk.clients.pop(connection.origin, None)

    def _closed(self, message: api.Message) -> None:
        """A broker's report of a closed connection."""
        try:
            report = json.loads(message.data)
            at = api.ConnectionId(report["server"]["id"], int(report["client"]["id"]))
        except (ValueError, KeyError, TypeError):
            return
        for connection in [client for client in self._desk.connections.values() if client.at == at]:
            self._lose(connection)

    def _lose(self, connection: dispatcher_state.ClientConnection) -> None:
        """What it held goes to others at once. Its temporary queues stay a while: it may come back."""
        self._forget(connection, None)
        self._lost_at[connection.name] = self._desk.loop.time()

    def _is_gone(self, name: str) -> bool:
        """Whether a connection is, for good.

        Those of a dispatcher before us have as long to come back from our beginning on.
        """
        if name in self._desk.connections:
            return False
        away_s = self._desk.loop.time() - self._lost_at.get(name, self._began_at)
        return away_s > self._settings.connection_timeout_s

    def _slow(self, connection: dispatcher_state.ClientConnection, report: protocol.SlowConsumer) -> None:
        """Pass it on, from those who may listen to the topic."""
        if self._desk.may_subscribe(connection.identity, report.topic):
            self._deliver.announce(protocol.SLOW, protocol.encode(report))

    # Work.

    def _stage(self, connection: dispatcher_state.ClientConnection, stage: protocol.StageMessages) -> None:
        staged = connection.staged
        if staged is None or staged.work != stage.work:
            staged = connection.staged = dispatcher_state.StagedWork(stage.work)
        if len(staged.sends) >= stage.after + len(stage.sends):
            return  # it was asked twice
        if len(staged.sends) != stage.after:
            raise errors.Conflict(f"{len(staged.sends)} messages are here, not {stage.after}: begin again")
        size = sum(len(send.data) + len(send.meta) for send in stage.sends)
        total = own = 0
        for other in self._desk.connections.values():
            if other.staged is not None:
                total += other.staged.bytes
                own += other.staged.bytes if other.identity == connection.identity else 0
        if staged.bytes + size > protocol.WORK_BYTES_MAX:
            raise errors.LimitExceeded(f"a transaction has at most {protocol.WORK_BYTES_MAX} bytes")
        # One identity cannot take the room of all others by transactions that it does not commit.
        if total + size > journal.QUEUED_BYTES_MAX or own + size > journal.QUEUED_BYTES_MAX // 2:
            raise errors.Overloaded("too much waits to be stored already", retry_after_s=0.1)
        staged.sends += stage.sends
        staged.bytes += size

    def _work(
        self,
        connection: dispatcher_state.ClientConnection,
        work: protocol.CommitWork,
        answer: dispatcher_state.Answer,
    ) -> None:
        key = (connection.name, work.number)
        if work.number <= self._ledger.last_works.get(connection.name, 0):
            answer(protocol.DispatcherReply())
            return
        if key in self._working:
            self._working[key].append(answer)
            return
        sends = work.sends
        if work.staged:
            staged = connection.staged
            if staged is None or staged.work != work.number or len(staged.sends) != work.staged:
                raise errors.Conflict(f"the first {work.staged} messages are not here: begin again")
            sends = staged.sends + sends
        if len(sends) > protocol.SENDS_MAX:
            raise errors.LimitExceeded(
                f"{len(sends)} messages in one transaction: the most is {protocol.SENDS_MAX}"
            )
        size = sum(len(send.data) + len(send.meta) for send in sends)
        if sends and not self._desk.has_room(size):
            self._desk.refused_at = self._desk.loop.time()
            raise message_errors.LogFull(
                "the log of messages is full: consume some, or raise retention.messages.max_bytes"
            )
        if sends and self._desk.journal.is_full:
            raise errors.Overloaded("too much waits to be stored already", retry_after_s=0.1)
        acked = self._acknowledged(connection, work)
        copies = [self._copy(connection, send) for send in sends]
        connection.staged = None
        self._desk.used_bytes += size
        if not copies and not acked:
            answer(protocol.DispatcherReply())
            return
        answers = self._working[key] = [answer]

        def finish(result: protocol.DispatcherReply) -> None:
            self._working.pop(key, None)
            for tell in answers:
                tell(result)

        def stored(_: list[int]) -> None:
            for where in acked:
                self._deliver.refill(where)
            finish(protocol.DispatcherReply())

        def failed(error: errors.MusterError) -> None:
            for source, sequences in finishing:
                source.cancel_finish(sequences)
                self._deliver.pump(source)
            finish(protocol.failed(error))

        record = ledger.LogRecord(
            acked=acked, stored=journal.count_by_queue(copies), last_works={connection.name: work.number}
        )
        finishing = [(self._ledger.backlogs[where], sequences) for where, sequences in acked.items()]
        for source, sequences in finishing:
            source.start_finish(sequences)
        self._desk.journal.add(journal.JournalItem(copies, record, stored, failed))

    def _acknowledged(
        self, connection: dispatcher_state.ClientConnection, work: protocol.CommitWork
    ) -> dict[str, list[int]]:
        """What is not done yet, and the connection's to acknowledge.

        A consumer may have got a message from a dispatcher before us, and another one since from us.  The
        first's word counts, unless it is part of a transaction: then the whole is undone.
        """
        acked: dict[str, list[int]] = {}
        consumes = set(connection.consumers.values())
        for key, sequences in work.acks.items():
            source = self._ledger.backlogs.get(key)
            if source is None or not (key in consumes or self._may_consume(connection, key)):
                mine = []
            elif key in consumes and not work.strict:
                mine = [number for number in sequences if not source.is_done(number)]
            else:
                mine = [number for number in sequences if source.holds(number, connection.name)]
            if work.strict and len(mine) != len(sequences):
                raise message_errors.TransactionRolledBack(
                    "a message that the transaction acknowledges has gone to somebody else meanwhile"
                )
            if mine:
                acked[key] = mine
        return acked

    def _may_consume(self, connection: dispatcher_state.ClientConnection, key: str) -> bool:
        """Whether it may acknowledge what it got when it still had a consumer there."""
        if (subscription := self._ledger.subscriptions.get(key)) is not None:
            owned = subscription.client_id is None or (
                (subscription.identity, subscription.client_id) == (connection.identity, connection.client_id)
            )
            return owned and self._desk.may_subscribe(connection.identity, subscription.topic)
        queue = destinations.queue(key.removeprefix(ledger.QUEUE_MARK))
        if queue.is_temporary:
            return queue.owner == connection.name
        return self._desk.may(connection.identity, "receive", queue.name)

    def _copy(
        self, connection: dispatcher_state.ClientConnection, send: protocol.SendMessage
    ) -> journal.JournalMessage:
        destination = destinations.Destination.parse(send.destination)
        meta, raw = messages.decode_meta(send.meta), send.meta
        if destination.is_temporary and destination.is_queue and self._is_gone(destination.owner):
            raise message_errors.InvalidDestination(f"the temporary queue {destination.name!r} is no more")
        self._desk.check_may_send(connection.identity, destination)
        if meta.delivery_time_ms and meta.destination != send.destination:
            meta.destination = send.destination  # by which it goes there later, unasked
            raw = messages.encode_meta(meta).decode()
        return self._deliver.copy_to(destination, meta, raw, send.data, republish=not send.spoken)
