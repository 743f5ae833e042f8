"""The dispatcher at work, between taking over the log and losing it.

It hears requests, asks the `ledger` and the `backlog` concerned, writes through the `journal`, and sends out
deliveries in batches, one for each connection and turn of the loop.  Everything it keeps in memory only
(connections, consumers, credit, what is in whose hands) its clients know as well and tell the next one.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import json
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from muster.bus import api, leases
from muster.core import errors, log, subjects, topics
from muster.message import (
    backlog,
    destinations,
    faults,
    journal,
    ledger,
    messages,
    protocol,
    selectors,
    settings,
)

events = log.Events("message")

FULL: Final = 0.8
LOAD: Final = 500  # messages read from the log at a time
REASON: Final = "JMS_MUSTER_DEAD_REASON"
FROM: Final = "JMS_MUSTER_DEAD_FROM"

#: Whether an identity may publish on, or subscribe to (``"sub"``), a users' subject.
May = Callable[[str, str, str], bool]


def anything(identity: str, action: str, subject: str) -> bool:
    return True


@dataclass(slots=True)
class Connection:
    name: str
    identity: str
    client_id: str | None
    heard_at: float
    at: api.ConnectionId | None
    consumers: dict[int, str] = field(default_factory=dict)  # number -> backlog
    outbox: list[protocol.Delivery] = field(default_factory=list)

    @property
    def origin(self) -> str:
        return self.client_id or self.name


class Dispatcher:
    def __init__(
        self,
        bus: api.Bus,
        stream: api.Stream,
        epoch: int,
        wanted: settings.Message,
        may: May = anything,
        max_bytes: int = 1 << 30,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._epoch = epoch
        self._settings = wanted
        self._may = may
        self._max_bytes = max_bytes
        self._used_bytes = 0  # of the log: as it was last seen, and what was sent since
        self._now_ms = now_ms
        self._loop = asyncio.get_running_loop()
        self._ledger = ledger.Ledger(window=wanted.window, max_deliveries=wanted.max_deliveries)
        self._journal = journal.Journal(stream, 0, self._applied)
        self._connections: dict[str, Connection] = {}
        self._clients: dict[str, str] = {}  # client id -> connection
        self._patterns = ledger.Patterns()
        self._indexes: dict[str, selectors.Index[str]] = {}  # live subscriptions by pattern
        self._captured: dict[str, api.Subscription] = {}  # by subject
        self._capture_wanted = asyncio.Event()
        self._working: dict[str, list[Callable[[protocol.Answer], None]]] = {}
        self._loading: set[str] = set()
        self._delayed: list[tuple[int, int]] = []  # due, sequence
        self._delay_alarm: asyncio.TimerHandle | None = None
        self._dirty: set[str] = set()
        self._answers: list[tuple[str, protocol.Answer]] = []
        self._flush = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._since_checkpoint = 0
        self._began_at = self._loop.time()
        self.dropped = 0

    # Life.

    async def run(self) -> None:
        """Until it fails or is cancelled."""
        await self._recover()
        hearing = [
            await self._bus.subscribe(subjects.said_by(protocol.PART, "*", kind), handler=self._hear)
            for kind in ("ask", "tell", "read")
        ]
        try:
            hearing.append(await self._bus.subscribe(leases.DISCONNECTED, handler=self._closed))
        except errors.Forbidden:
            events.info("closed-connections-unheard", identity=self._bus.identity)
        try:
            for work in (self._journal.run(), self._send(), self._watch(), self._capture()):
                self._spawn(work)
            await self._bus.publish(protocol.BEGAN, protocol.encode(protocol.Began(self._epoch)))
            events.info(
                "dispatcher-began",
                epoch=self._epoch,
                head=self._journal.head,
                subscriptions=len(self._ledger.subscriptions),
                queues=len(self._ledger.depths),
            )
            await self._failure
        finally:
            for one in (*hearing, *self._captured.values()):
                await one.close()
            if self._delay_alarm is not None:
                self._delay_alarm.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._journal.abandon(errors.NotConnected("the dispatcher has stopped"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._failure.done():
            self._failure.set_exception(error)

    async def _recover(self) -> None:
        state = await self._stream.state()
        last = await self._stream.last_for(protocol.CHECKPOINT)
        start = 1
        if last is not None:
            chunks = msgspec.json.decode(last.data, type=ledger.Checkpoint).chunks
            found = [
                msgspec.json.decode(one.data, type=ledger.Checkpoint)
                async for one in self._read(last.sequence - chunks + 1, protocol.CHECKPOINT)
            ]
            self._ledger.restore(found)
            start = found[0].head + 1
        async for one in self._read(start, protocol.RECORD):
            self._ledger.apply(msgspec.json.decode(one.data, type=ledger.Record), one.sequence)
        async for one in self._read(1, protocol.DELAY):
            if one.sequence not in self._ledger.delayed_done:
                due = messages.decode_meta(one.headers[messages.HEADER]).delivery_time_ms
                heapq.heappush(self._delayed, (due, one.sequence))
        self._journal.head = self._ledger.head = state.last_sequence
        self._ledger.suspect()
        for subscription in self._ledger.subscriptions.values():
            self._patterns.add(subscription.topic)
        self._capture_wanted.set()
        self._set_delay_alarm()

    async def _read(self, first: int, subject: str) -> Any:
        state = await self._stream.state()
        first = max(first, state.first_sequence)
        if first <= state.last_sequence:
            async for one in self._stream.read(first, state.last_sequence, subject=subject):
                yield one

    # Requests.

    def _hear(self, message: api.Message) -> None:
        sender = subjects.sender_of(message.subject)
        reply = message.reply
        if reply is not None and not reply.startswith(subjects.inbox(sender) + "."):
            return  # an answer there would be forged

        def answer(found: protocol.Answer) -> None:
            if reply is not None:
                self._answers.append((reply, found))
                self._flush.set()

        try:
            asked = protocol.decode_ask(message.data)
            if message.subject.endswith(".read") and not isinstance(asked, protocol.READS):
                raise errors.Forbidden("that changes something: ask, do not read")
            self._handle(sender, asked, answer)
        except errors.MusterError as error:
            answer(_failed(error))

    def _handle(self, sender: str, asked: protocol.Ask, answer: Callable[[protocol.Answer], None]) -> None:
        match asked:
            case protocol.Hello():
                self._hello(sender, asked)
                answer(protocol.Answer(epoch=self._epoch))
            case protocol.Ping():
                self._known(sender, asked.connection)
                answer(protocol.Answer(epoch=self._epoch))
            case protocol.Work():
                self._work(self._known(sender, asked.connection), asked, answer)
            case protocol.Attach():
                self._attach(self._known(sender, asked.connection), asked, answer)
            case protocol.Credit():
                connection = self._known(sender, asked.connection)
                if one := self._ledger.backlogs.get(connection.consumers.get(asked.consumer, "")):
                    one.credit((connection.name, asked.consumer), asked.more)
                    self._pump(one)
            case protocol.Stop():
                connection = self._known(sender, asked.connection)
                for number in asked.consumers:
                    if one := self._ledger.backlogs.get(connection.consumers.get(number, "")):
                        one.stop((connection.name, number))
                answer(protocol.Answer())
            case protocol.Release():
                connection = self._known(sender, asked.connection)
                for key, sequences in asked.deliveries.items():
                    if one := self._ledger.backlogs.get(key):
                        self._obey(
                            one,
                            one.release(
                                sequences, connection.name, counted=asked.counted, reason=asked.reason
                            ),
                        )
                        self._pump(one)
                answer(protocol.Answer())
            case protocol.Detach():
                connection = self._known(sender, asked.connection)
                self._detach(connection, asked.consumer, asked.seen)
                answer(protocol.Answer())
            case protocol.Bye():
                if asked.connection in self._connections:
                    self._forget(self._known(sender, asked.connection), clean=not asked.lost)
                answer(protocol.Answer())
            case protocol.Unsubscribe():
                self._unsubscribe(self._known(sender, asked.connection), asked, answer)
            case protocol.DropQueue():
                self._drop_queue(sender, asked.name, answer)
            case protocol.ListQueues():
                answer(protocol.Answer(rows=self._queue_rows()))
            case protocol.ListSubscriptions():
                answer(protocol.Answer(rows=self._subscription_rows()))
            case protocol.Browse():
                self._answering(self._browse(asked), answer)
            case protocol.Purge():
                self._answering(self._purge(asked), answer)
            case protocol.Move():
                self._answering(self._move(asked), answer)

    def _answering(
        self, work: Coroutine[Any, Any, protocol.Answer], answer: Callable[[protocol.Answer], None]
    ) -> None:
        async def run() -> None:
            try:
                answer(await work)
            except errors.MusterError as error:
                answer(_failed(error))

        self._spawn(run())

    # Connections.

    def _hello(self, sender: str, asked: protocol.Hello) -> None:
        if asked.version != protocol.VERSION:
            raise errors.InvalidInput(
                f"version {asked.version} of the protocol is not spoken here: {protocol.VERSION} is"
            )
        other = self._clients.get(asked.client_id) if asked.client_id else None
        if other is not None and other != asked.connection:
            raise faults.InvalidClientId(f"the client id {asked.client_id!r} is in use by another connection")
        known = self._connections.get(asked.connection)
        if known is not None:
            if known.identity != sender:
                raise errors.Forbidden(f"the connection {asked.connection!r} is somebody else's")
            if asked.client_id and known.client_id is None and not known.consumers:
                known.client_id = asked.client_id
        else:
            at = api.ConnectionId(asked.broker, asked.number) if asked.broker else None
            known = self._connections[subjects.token(asked.connection)] = Connection(
                asked.connection, sender, asked.client_id, self._loop.time(), at
            )
        if known.client_id:
            self._clients[known.client_id] = known.name
        known.heard_at = self._loop.time()

    def _known(self, sender: str, name: str) -> Connection:
        found = self._connections.get(name)
        if found is None or found.identity != sender:
            raise errors.NotConnected(f"the connection {name!r} is not known: say hello first")
        found.heard_at = self._loop.time()
        return found

    def _forget(self, connection: Connection, *, clean: bool) -> None:
        for number in list(connection.consumers):
            self._detach(connection, number, {} if clean else None)
        self._connections.pop(connection.name, None)
        if connection.client_id:
            self._clients.pop(connection.client_id, None)

    def _closed(self, message: api.Message) -> None:
        """A broker's report of a closed connection."""
        try:
            report = json.loads(message.data)
            at = api.ConnectionId(report["server"]["id"], int(report["client"]["id"]))
        except (ValueError, KeyError, TypeError):
            return
        for connection in [one for one in self._connections.values() if one.at == at]:
            self._forget(connection, clean=False)

    async def _watch(self) -> None:
        """Connections that fell silent, and checkpoints."""
        while True:
            await asyncio.sleep(1)
            oldest = self._loop.time() - self._settings.connection_timeout_s
            for connection in [one for one in self._connections.values() if one.heard_at < oldest]:
                events.info("connection-silent", connection=connection.name, identity=connection.identity)
                self._forget(connection, clean=False)
            self._drop_orphans()
            # Messages are refused before the log is full: acknowledgements, which empty it, need room in it.
            self._used_bytes = (await self._stream.state()).bytes
            if self._full or self._since_checkpoint >= self._settings.checkpoint_records:
                await self.checkpoint()

    def _drop_orphans(self) -> None:
        """Temporary queues end with their connection; a new dispatcher gives it time to come back."""
        if self._loop.time() - self._began_at < self._settings.connection_timeout_s:
            return
        mark = ledger.queue_key(destinations.TEMPORARY)
        for key in [key for key in self._ledger.backlogs if key.startswith(mark)]:
            if key.removeprefix(mark).split(":")[0] not in self._connections:
                self._drop(key, lambda: None)

    def _drop(self, key: str, then: Callable[[], None]) -> None:
        def stored(_: list[int]) -> None:
            subject = protocol.queue_subject(key.removeprefix(ledger.QUEUE_MARK))
            self._spawn(self._purge_subject(subject))
            then()

        self._journal.add(journal.Item([], ledger.Record(dropped=[key]), stored))

    # Work.

    def _work(
        self, connection: Connection, work: protocol.Work, answer: Callable[[protocol.Answer], None]
    ) -> None:
        if work.id in self._ledger.works:
            answer(protocol.Answer())
            return
        if work.id in self._working:
            self._working[work.id].append(answer)
            return
        if len(work.sends) > protocol.SENDS_MAX:
            raise errors.LimitExceeded(
                f"{len(work.sends)} messages in one transaction: the most is {protocol.SENDS_MAX}"
            )
        if work.sends and self._full:
            raise errors.LimitExceeded("the log of messages is full: consume some, or raise its budget")
        acked: dict[str, list[int]] = {}
        for key, sequences in work.acks.items():
            one = self._ledger.backlogs.get(key)
            mine = [number for number in sequences if one and one.holds(number, connection.name)]
            if work.strict and len(mine) != len(sequences):
                raise faults.TransactionRolledBack(
                    "a message that the transaction acknowledges has gone to somebody else meanwhile"
                )
            if mine:
                acked[key] = mine
        copies = [self._copy(connection, send) for send in work.sends]
        self._used_bytes += sum(len(send.data) + len(send.meta) for send in work.sends)
        if not copies and not acked:
            answer(protocol.Answer())
            return
        answers = self._working[work.id] = [answer]

        def finish(found: protocol.Answer) -> None:
            self._working.pop(work.id, None)
            for one in answers:
                one(found)

        def stored(numbers: list[int]) -> None:
            self._stored(copies, numbers)
            for key in acked:
                self._refill(key)
            finish(protocol.Answer())

        record = ledger.Record(acked=acked, stored=_counts(copies), works=[work.id])
        self._journal.add(journal.Item(copies, record, stored, lambda error: finish(_failed(error))))

    @property
    def _full(self) -> bool:
        return self._used_bytes > FULL * self._max_bytes

    def _copy(self, connection: Connection, send: protocol.Send) -> journal.Copy:
        destination = destinations.Destination.parse(send.destination)
        meta = messages.decode_meta(send.meta)
        if not destination.is_queue and not self._may(connection.identity, "pub", destination.subject):
            raise errors.Forbidden(f"{connection.identity} may not publish on {destination.name!r}")
        return self._copy_to(destination, meta, send.meta, send.data, republish=True)

    def _copy_to(
        self,
        destination: destinations.Destination,
        meta: messages.Meta,
        raw: str,
        data: bytes,
        *,
        republish: bool = False,
        due: bool = False,
    ) -> journal.Copy:
        subject: str | None
        if not due and meta.delivery_time_ms > self._now_ms():
            subject = protocol.DELAY
        elif destination.is_queue:
            subject = protocol.queue_subject(destination.name)
        else:
            topic = topics.Topic.parse(destination.name)
            kept = self._patterns.matching(topic)
            subject = protocol.topic_subject(topic.subject) if kept else None
        return journal.Copy(destination, meta, raw, data, subject, republish)

    def _applied(self, record: ledger.Record, sequence: int) -> None:
        self._ledger.apply(record, sequence)
        self._ledger.head = sequence
        self._since_checkpoint += 1

    def _stored(self, copies: Iterable[journal.Copy], numbers: Iterable[int]) -> None:
        touched: dict[str, backlog.Backlog] = {}
        self._ledger.head = self._journal.head
        for copy, sequence in zip(copies, numbers, strict=True):
            if copy.subject == protocol.DELAY:
                heapq.heappush(self._delayed, (copy.meta.delivery_time_ms, sequence))
                self._set_delay_alarm()
                continue
            if copy.destination.is_queue:
                one = self._ledger.queue(copy.destination.name)
                if self._arrived(one, sequence, copy):
                    touched[one.key] = one
                continue
            topic = topics.Topic.parse(copy.destination.name)
            if sequence:
                for pattern in self._patterns.matching(topic):
                    if index := self._indexes.get(pattern):
                        for key in list(index.matching(copy.meta)):
                            if self._ledger.wants(key, copy.meta):
                                one = self._ledger.backlogs[key]
                                if self._arrived(one, sequence, copy):
                                    touched[key] = one
            if copy.republish:
                self._spawn(
                    self._bus.publish(
                        topic.subject,
                        copy.data,
                        headers={messages.HEADER: copy.raw, protocol.LOGGED: str(sequence)},
                    )
                )
        for one in touched.values():
            self._pump(one)

    def _arrived(self, one: backlog.Backlog, sequence: int, copy: journal.Copy) -> bool:
        if not one.live:
            return False
        if one.room <= 0:
            one.overflow(sequence)
            self._set_live(one, live=False)
            return False
        one.arrive(sequence, copy.meta, copy.raw, copy.data)
        return True

    # Consumers.

    def _attach(
        self, connection: Connection, asked: protocol.Attach, answer: Callable[[protocol.Answer], None]
    ) -> None:
        if asked.selector:
            selectors.compiled(asked.selector)
        destination = destinations.Destination.parse(asked.destination)
        consumer = backlog.Consumer((connection.name, asked.consumer), asked.credit)
        if destination.is_queue:
            owner = destination.name.removeprefix(destinations.TEMPORARY).split(":")[0]
            if destination.is_temporary and owner != connection.name:
                raise errors.Forbidden("only its own connection consumes from a temporary queue")
            consumer.selector = asked.selector or None
            self._begin(connection, self._ledger.queue(destination.name), consumer, answer)
            return
        wanted = self._subscription(connection, asked, destination)
        there = self._ledger.subscriptions.get(wanted.key)
        active = bool(there and self._ledger.backlogs[wanted.key].consumers)
        if active and not (wanted.shared and there == wanted):
            mine = self._ledger.backlogs[wanted.key].consumers.get(consumer.key)
            if mine is None or there != wanted:
                what = "has a consumer" if not wanted.shared else "is in use with another topic or selector"
                raise faults.IllegalState(f"the durable subscription {asked.subscription!r} {what}")
        if there == wanted:
            self._begin(connection, self._ledger.backlogs[wanted.key], consumer, answer)
            return
        if there is not None and there.shared != wanted.shared:
            raise faults.IllegalState(
                f"{asked.subscription!r} is the name of a subscription that is "
                + ("shared" if there.shared else "not shared")
            )

        def stored(_: list[int]) -> None:
            if there is not None:
                self._patterns.remove(there.topic)
            self._begin(connection, self._ledger.backlogs[wanted.key], consumer, answer)

        self._patterns.add(wanted.topic)
        self._capture_wanted.set()
        record = ledger.Record(subscribed=[wanted])
        self._journal.add(journal.Item([], record, stored, lambda error: answer(_failed(error)), alone=True))

    def _subscription(
        self, connection: Connection, asked: protocol.Attach, destination: destinations.Destination
    ) -> ledger.Subscription:
        if not asked.subscription or not asked.durable:
            raise errors.InvalidInput("the dispatcher keeps durable subscriptions only, and they have names")
        if not asked.shared and connection.client_id is None:
            raise faults.IllegalState("an unshared durable subscription needs a client id")
        pattern = topics.Pattern.parse(destination.name)
        for subject in pattern.subjects:
            if not self._may(connection.identity, "sub", subject):
                raise errors.Forbidden(f"{connection.identity} may not subscribe to {destination.name!r}")
        client_id = None if asked.everyone else connection.client_id
        return ledger.Subscription(
            key=ledger.subscription_key(client_id, asked.subscription),
            name=asked.subscription,
            topic=str(pattern),
            client_id=client_id,
            selector=asked.selector or None,
            no_local=connection.origin if asked.no_local and not asked.shared else None,
            shared=asked.shared,
        )

    def _begin(
        self,
        connection: Connection,
        one: backlog.Backlog,
        consumer: backlog.Consumer,
        answer: Callable[[protocol.Answer], None],
    ) -> None:
        if consumer.key in one.consumers:  # it attaches anew without having lost anything
            answer(protocol.Answer(epoch=self._epoch, key=one.key))
            return
        connection.consumers[consumer.key[1]] = one.key

        def go(_: list[int]) -> None:
            if connection.name not in self._connections:
                return
            one.attach(consumer)
            answer(protocol.Answer(epoch=self._epoch, key=one.key))
            self._refill(one.key)
            self._pump(one)

        if one.key in self._ledger.consumed:
            go([])
        else:
            record = ledger.Record(consumed=[one.key])
            self._journal.add(journal.Item([], record, go, lambda error: answer(_failed(error))))

    def _detach(self, connection: Connection, number: int, seen: dict[str, list[int]] | None) -> None:
        """``seen`` None: the connection is lost."""
        key = connection.consumers.pop(number, None)
        one = self._ledger.backlogs.get(key or "")
        if one is None or key is None:
            return
        found = one.detach((connection.name, number), seen=None if seen is None else seen.get(key, []))
        self._obey(one, found)
        if one.consumers:
            self._pump(one)
        else:
            one.settle(self._ledger.head)
            self._set_live(one, live=False)
            one.unload()
            self._journal.add(journal.Item([], ledger.Record(idle=[key])))

    def _set_live(self, one: backlog.Backlog, *, live: bool) -> None:
        one.live = live
        if subscription := self._ledger.subscriptions.get(one.key):
            if live:
                index = self._indexes.setdefault(subscription.topic, selectors.Index())
                index.add(one.key, subscription.selector)
            elif subscription.topic in self._indexes:
                self._indexes[subscription.topic].remove(one.key)

    def _unsubscribe(
        self, connection: Connection, asked: protocol.Unsubscribe, answer: Callable[[protocol.Answer], None]
    ) -> None:
        name = asked.name
        key = ledger.subscription_key(None if asked.everyone else connection.client_id, name)
        found = self._ledger.subscriptions.get(key)
        if found is None:
            raise faults.InvalidDestination(f"there is no durable subscription {name!r}")
        if self._ledger.backlogs[key].consumers:
            raise faults.IllegalState(f"the durable subscription {name!r} has a consumer")

        def stored(_: list[int]) -> None:
            self._patterns.remove(found.topic)
            self._capture_wanted.set()
            answer(protocol.Answer())

        self._journal.add(
            journal.Item([], ledger.Record(unsubscribed=[key]), stored, lambda error: answer(_failed(error)))
        )

    def _drop_queue(self, sender: str, name: str, answer: Callable[[protocol.Answer], None]) -> None:
        owner = self._connections.get(name.removeprefix(destinations.TEMPORARY).split(":")[0])
        if not name.startswith(destinations.TEMPORARY) or owner is None or owner.identity != sender:
            raise errors.Forbidden("only a temporary queue is dropped, and by its own connection")
        key = ledger.queue_key(name)
        if (one := self._ledger.backlogs.get(key)) and one.consumers:
            raise faults.IllegalState("the temporary queue has consumers")
        self._drop(key, lambda: answer(protocol.Answer()))

    async def _purge_subject(self, subject: str) -> None:
        await self._stream.purge(subject=subject)

    # Delivery.

    def _pump(self, one: backlog.Backlog) -> None:
        self._obey(one, one.pump(self._now_ms()))

    def _obey(self, one: backlog.Backlog, found: list[backlog.Instruction]) -> None:
        expired: list[int] = []
        for instruction in found:
            entry = instruction.entry
            match instruction:
                case backlog.Deliver(consumer=(name, number)):
                    self._connections[name].outbox.append(
                        protocol.Delivery(number, one.key, entry.sequence, entry.count, entry.raw, entry.data)
                    )
                    self._dirty.add(name)
                    self._flush.set()
                case backlog.Expired():
                    expired.append(entry.sequence)
                case backlog.DeadLetter(reason=reason):
                    self._bury(one, entry, reason)
        if expired:
            record = ledger.Record(acked={one.key: expired})
            self._journal.add(journal.Item([], record, lambda _: self._refill(one.key)))

    def _bury(self, one: backlog.Backlog, entry: backlog.Entry, reason: str) -> None:
        meta = msgspec.structs.replace(
            entry.meta,
            expiration_ms=0,
            destination=None,
            properties=entry.meta.properties | {REASON: reason, FROM: entry.meta.destination or one.key},
        )
        raw = messages.encode_meta(meta).decode()
        target = destinations.queue(destinations.DEAD_LETTERS)
        copies = [self._copy_to(target, meta, raw, entry.data, due=True)]
        record = ledger.Record(acked={one.key: [entry.sequence]}, stored=_counts(copies))

        def stored(numbers: list[int]) -> None:
            self._stored(copies, numbers)
            self._refill(one.key)

        self._journal.add(journal.Item(copies, record, stored))

    async def _send(self) -> None:
        while True:
            await self._flush.wait()
            self._flush.clear()
            dirty, self._dirty = self._dirty, set()
            answers, self._answers = self._answers, []
            for name in dirty:
                connection = self._connections.get(name)
                if connection is None:
                    continue
                waiting, connection.outbox = connection.outbox, []
                subject = protocol.deliver_subject(connection.identity, name)
                for batch in _split(waiting):
                    await self._bus.publish(subject, protocol.encode(protocol.Deliveries(self._epoch, batch)))
            for reply, found in answers:  # after the deliveries that were decided before them
                await self._bus.publish(reply, protocol.encode(found))

    # Loading from the log.

    def _refill(self, key: str) -> None:
        one = self._ledger.backlogs.get(key)
        if (
            one
            and one.consumers
            and not one.live
            and one.room >= one.window // 2
            and key not in self._loading
        ):
            self._loading.add(key)
            self._spawn(self._load(one))

    async def _load(self, one: backlog.Backlog) -> None:
        generation = one.generation
        try:
            subscription = self._ledger.subscriptions.get(one.key)
            subject = (
                protocol.topic_subject(subscription.pattern.cover)
                if subscription
                else protocol.queue_subject(one.key.removeprefix(ledger.QUEUE_MARK))
            )
            pattern = subscription.pattern if subscription else None
            while one.consumers and one.room > 0:
                if one.position >= self._ledger.head:
                    self._set_live(one, live=True)
                    break
                head, full = self._ledger.head, False
                async for stored in self._read(one.position + 1, subject):
                    if one.generation != generation:
                        return
                    full = one.room <= 0
                    if full or stored.sequence > head:
                        break
                    meta = messages.decode_meta(stored.headers[messages.HEADER])
                    if pattern is not None and subscription is not None:
                        topic = topics.Topic.from_subject(
                            stored.subject.removeprefix(protocol.topic_subject(""))
                        )
                        if (
                            not pattern.matches(topic)
                            or not self._ledger.wants(one.key, meta)
                            or not selectors.accepts(subscription.selector, meta)
                        ):
                            one.position = stored.sequence
                            continue
                    one.arrive(stored.sequence, meta, stored.headers[messages.HEADER], stored.data)
                if one.generation != generation:
                    return
                if not full:
                    one.position = max(one.position, head)
                self._pump(one)
        finally:
            self._loading.discard(one.key)
            if one.generation != generation:
                self._refill(one.key)

    # Messages of plain clients, captured for durable subscriptions.

    async def _capture(self) -> None:
        while True:
            await self._capture_wanted.wait()
            self._capture_wanted.clear()
            wanted = {subject for text in self._patterns for subject in topics.Pattern.parse(text).subjects}
            for subject in wanted - self._captured.keys():
                self._captured[subject] = await self._bus.subscribe(
                    subject, handler=functools.partial(self._overhear, subject)
                )
            for subject in self._captured.keys() - wanted:
                await self._captured.pop(subject).close()

    def _overhear(self, via: str, message: api.Message) -> None:
        if protocol.LOGGED in message.headers:
            return
        try:
            topic = topics.Topic.from_subject(message.subject)
            raw = message.headers.get(messages.HEADER)
            meta = messages.meta_of(message.data, message.headers)
        except errors.MusterError:
            self.dropped += 1
            return
        for other in self._captured:  # patterns may overlap: the first subscription takes it
            if other == via:
                break
            if subjects.matches(other, message.subject):
                return
        if not self._patterns.matching(topic):
            return
        if len(self._journal) > journal.QUEUED_MAX:
            self.dropped += 1
            return
        destination = destinations.topic(str(topic))
        raw = raw or messages.encode_meta(meta).decode()
        copies = [self._copy_to(destination, meta, raw, message.data, due=True)]
        self._journal.add(journal.Item(copies, stored=lambda numbers: self._stored(copies, numbers)))

    # Delayed messages.

    def _set_delay_alarm(self) -> None:
        if self._delay_alarm is not None:
            self._delay_alarm.cancel()
            self._delay_alarm = None
        if self._delayed:
            wait_s = max(0.0, (self._delayed[0][0] - self._now_ms()) / 1000)
            self._delay_alarm = self._loop.call_later(wait_s, self._due)

    def _due(self) -> None:
        now = self._now_ms()
        due: list[int] = []
        while self._delayed and self._delayed[0][0] <= now and len(due) < LOAD:
            due.append(heapq.heappop(self._delayed)[1])
        if due:
            self._spawn(self._release_delayed(due))
        self._set_delay_alarm()

    async def _release_delayed(self, due: list[int]) -> None:
        for sequence in due:
            stored = await self._stream.get(sequence)
            raw = stored.headers[messages.HEADER]
            meta = messages.decode_meta(raw)
            if meta.destination is None:
                continue
            meta.sequence = sequence  # subscriptions made since do not get it
            raw = messages.encode_meta(meta).decode()
            target = destinations.Destination.parse(meta.destination)
            copies = [self._copy_to(target, meta, raw, stored.data, republish=True, due=True)]
            record = ledger.Record(acked={ledger.DELAY_KEY: [sequence]}, stored=_counts(copies))
            done: asyncio.Future[list[int]] = self._loop.create_future()
            self._journal.add(journal.Item(copies, record, done.set_result, done.set_exception))
            self._stored(copies, await done)
            await self._stream.delete(sequence)
            self._ledger.delayed_done.discard(sequence)

    # Checkpoints, and what the log no longer needs.

    async def checkpoint(self) -> None:
        """The sum of all records; then the log is cut where nobody needs it."""
        done: asyncio.Future[list[int]] = self._loop.create_future()
        self._since_checkpoint = 0
        target = destinations.topic("checkpoint")
        head = self._ledger.head
        copies = [
            journal.Copy(target, messages.Meta(), "{}", msgspec.json.encode(chunk), protocol.CHECKPOINT)
            for chunk in self._ledger.checkpoint()
        ]
        self._journal.add(journal.Item(copies, stored=done.set_result, failed=done.set_exception))
        first = (await done)[0]
        await self._stream.purge(subject=protocol.CHECKPOINT, before=first)
        await self._stream.purge(subject=protocol.RECORD, before=head + 1)
        for key, one in list(self._ledger.backlogs.items()):
            if key.startswith(ledger.QUEUE_MARK) and one.floor:
                name = key.removeprefix(ledger.QUEUE_MARK)
                await self._stream.purge(subject=protocol.queue_subject(name), before=one.floor + 1)
        await self._stream.purge(
            subject=protocol.topic_subject(f"{subjects.TOPIC_PREFIX}.>"),
            before=self._ledger.floor_of_topics() + 1,
        )

    # For people.

    def _queue_rows(self) -> list[dict[str, Any]]:
        rows = []
        for key, depth in sorted(self._ledger.depths.items()):
            one = self._ledger.backlogs[key]
            rows.append(
                {
                    "queue": key.removeprefix(ledger.QUEUE_MARK),
                    "depth": depth,
                    "consumers": len(one.consumers),
                    "in_flight": sum(len(consumer.held) for consumer in one.consumers.values()),
                    "delivered": one.delivered,
                    "expired": one.expired,
                    "rejected": one.rejected,
                }
            )
        return rows

    def _subscription_rows(self) -> list[dict[str, Any]]:
        rows = []
        for key, subscription in sorted(self._ledger.subscriptions.items()):
            one = self._ledger.backlogs[key]
            rows.append(
                {
                    "subscription": subscription.name,
                    "client_id": subscription.client_id,
                    "topic": subscription.topic,
                    "selector": subscription.selector,
                    "shared": subscription.shared,
                    "consumers": len(one.consumers),
                    "waiting": len(one.entries),
                    "behind": 0 if one.live else self._ledger.head - one.position,
                    "matched": one.delivered,
                    "rejected": one.rejected,
                }
            )
        return rows

    async def _waiting(
        self, queue: str, selector: str | None, after: int, limit: int
    ) -> list[api.StoredMessage]:
        """What nobody has acknowledged, in the order of the log."""
        one = self._ledger.queue(queue)
        found: list[api.StoredMessage] = []
        async for stored in self._read(max(after, one.floor) + 1, protocol.queue_subject(queue)):
            if stored.sequence in one.done or stored.sequence <= one.floor:
                continue
            meta = messages.decode_meta(stored.headers[messages.HEADER])
            if meta.expiration_ms and meta.expiration_ms <= self._now_ms():
                continue
            if selectors.accepts(selector, meta):
                found.append(stored)
                if len(found) >= limit:
                    break
        return found

    async def _browse(self, asked: protocol.Browse) -> protocol.Answer:
        if asked.selector:
            selectors.compiled(asked.selector)
        limit = min(max(asked.limit, 1), 1000)
        key = ledger.queue_key(asked.queue)
        found: list[protocol.Delivery] = []
        total = 0
        if key in self._ledger.backlogs:
            for one in await self._waiting(asked.queue, asked.selector, asked.after, limit):
                total += len(one.data)
                if found and total > 512 << 10:
                    break
                raw = one.headers[messages.HEADER]
                found.append(protocol.Delivery(0, key, one.sequence, 0, raw, one.data))
        return protocol.Answer(messages=found)

    async def _take_all(
        self,
        queue: str,
        selector: str | None,
        limit: int,
        to: Callable[[api.StoredMessage], list[journal.Copy]],
    ) -> int:
        """Acknowledge what waits and is in nobody's hands, each together with what `to` makes of it."""
        if selector:
            selectors.compiled(selector)
        key = ledger.queue_key(queue)
        if key not in self._ledger.backlogs:
            return 0
        one = self._ledger.backlogs[key]
        count = 0
        for stored in await self._waiting(queue, selector, 0, limit):
            entry = one.entries.get(stored.sequence)
            if entry is not None and entry.holder is not None:
                continue
            copies = to(stored)
            done: asyncio.Future[list[int]] = self._loop.create_future()
            record = ledger.Record(acked={key: [stored.sequence]}, stored=_counts(copies))
            self._journal.add(journal.Item(copies, record, done.set_result, done.set_exception))
            self._stored(copies, await done)
            count += 1
        self._refill(key)
        return count

    async def _purge(self, asked: protocol.Purge) -> protocol.Answer:
        return protocol.Answer(count=await self._take_all(asked.queue, asked.selector, 1 << 30, lambda _: []))

    async def _move(self, asked: protocol.Move) -> protocol.Answer:
        def to(stored: api.StoredMessage) -> list[journal.Copy]:
            meta = messages.decode_meta(stored.headers[messages.HEADER])
            origin = meta.properties.pop(FROM, None)
            meta.properties.pop(REASON, None)
            meta.destination = asked.to or origin
            if meta.destination is None:
                raise errors.InvalidInput("a message that did not die needs a destination to move to")
            target = destinations.Destination.parse(meta.destination)
            raw = messages.encode_meta(meta).decode()
            return [self._copy_to(target, meta, raw, stored.data, republish=True, due=True)]

        return protocol.Answer(count=await self._take_all(asked.queue, asked.selector, asked.limit, to))


def _counts(copies: Iterable[journal.Copy]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for copy in copies:
        if copy.destination.is_queue and copy.subject not in (None, protocol.DELAY):
            key = ledger.queue_key(copy.destination.name)
            counts[key] = counts.get(key, 0) + 1
    return counts


def _split(deliveries: list[protocol.Delivery]) -> Iterable[list[protocol.Delivery]]:
    """In batches that fit into a message of the bus."""
    batch: list[protocol.Delivery] = []
    total = 0
    for one in deliveries:
        size = len(one.data) + len(one.meta) + 64
        if batch and total + size > 512 << 10:
            yield batch
            batch, total = [], 0
        batch.append(one)
        total += size
    if batch:
        yield batch


def _failed(error: errors.MusterError) -> protocol.Answer:
    return protocol.Answer(error=error.code, message=error.message)
