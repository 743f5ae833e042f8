"""From the log to the consumers: what is stored arrives in backlogs, and what they hand out is sent.

Everything that goes out leaves in one order, at the end of a turn of the loop: deliveries, one message for
each connection; then what those hear who listen to topics; then answers, which therefore come after the
deliveries that were decided before them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from muster.core import errors, topics
from muster.message import destinations, messages, protocol, selectors
from muster.message.dispatcher import backlog, delayed_messages, state
from muster.message.dispatcher.log import journal, ledger, pages, tail

REASON: Final = "JMS_MUSTER_DEAD_REASON"
FROM: Final = "JMS_MUSTER_DEAD_FROM"
BATCH_BYTES: Final = 512 << 10
SAY_S: Final = 2.0  # a sender that has not said its due message by then does not
AGAIN_S: Final = 1.0  # until what the log had no room for is tried again


class DeliveryQueue:
    def __init__(self, over: state.DispatcherState) -> None:
        self._desk = over
        self._ledger = over.ledger
        self.delays = delayed_messages.DelayedMessages(over, self)
        self.tail = tail.LogTail()
        self._loading: set[str] = set()
        self._awaited: list[tuple[set[str], Callable[[], None]]] = []
        self._heard_of: dict[str, int] = {}  # messages by the pattern of subscriptions
        self._live_since: dict[str, tuple[int, int]] = {}  # by subscription: heard and matched till then
        self._dirty: set[str] = set()
        self._heard: list[tuple[str, bytes, dict[str, str]]] = []
        self._answers: list[tuple[str, protocol.DispatcherReply]] = []
        self._unsaid: dict[int, tuple[str, journal.JournalMessage, asyncio.TimerHandle]] = {}
        self._last_unsaid = 0
        self._flush = asyncio.Event()
        over.on_stored = self._stored

    # Into the log.

    def copy_to(
        self,
        destination: destinations.Destination,
        meta: messages.MessageMeta,
        raw: str,
        data: bytes,
        *,
        republish: bool = False,
        due: bool = False,
    ) -> journal.JournalMessage:
        """``republish``: those who listen to the topic have not heard it. ``due``: at once, in any case."""
        subject: str | None
        if not due and meta.delivery_time_ms > self._desk.now_ms():
            subject = protocol.DELAY
        elif destination.is_queue:
            subject = protocol.queue_subject(destination.name)
        else:
            topic = destination.topic
            kept = not destination.is_temporary and self._desk.patterns.matching(topic)
            subject = protocol.topic_subject(topic.subject) if kept else None
        return journal.JournalMessage(destination, meta, raw, data, subject, republish)

    def _stored(self, placed: journal.Placed) -> None:
        """A batch is in the log: to those who wait for its messages.

        Backlogs take them in the order of the log, in which they also read them: the messages of a batch are
        numbered by topic, not in the order in which they were sent.
        """
        touched: dict[str, backlog.Backlog] = {}
        for copy, number in sorted(placed, key=_number):
            if not number:
                continue
            if copy.subject == protocol.DELAY:
                self.delays.add(copy.meta.delivery_time_ms, number)
            elif copy.subject != protocol.CHECKPOINT:
                self.tail.add(number, copy)
                for target in self._takers(copy):
                    if self._arrived(target, number, copy):
                        touched[target.key] = target
        for copy, _ in placed:
            if copy.republish and copy.subject != protocol.DELAY and not copy.destination.is_queue:
                self._say(copy)
        for target in touched.values():
            self.pump(target)

    def _takers(self, copy: journal.JournalMessage) -> Iterable[backlog.Backlog]:
        """The backlogs to which it goes: a queue's, or those of live subscriptions that want it."""
        if copy.destination.is_queue:
            return (self._ledger.queue(copy.destination.name),)
        targets: list[backlog.Backlog] = []
        for pattern in self._desk.patterns.matching(copy.destination.topic):
            self._heard_of[pattern] = self._heard_of.get(pattern, 0) + 1
            if index := self._desk.indexes.get(pattern):
                keys = [key for key in index.matching(copy.meta) if self._ledger.wants(key, copy.meta)]
                targets += [self._ledger.backlogs[key] for key in keys]
        return targets

    def _say(self, copy: journal.JournalMessage) -> None:
        """To those who listen; a delayed message by its sender, if that would only drop it from us."""
        if (sender := self._desk.quiet_sender(copy.meta)) is None:
            self._say_ourselves(copy)
            return
        number = self._last_unsaid = self._last_unsaid + 1
        alarm = self._desk.loop.call_later(SAY_S, self._not_said, number)
        self._unsaid[number] = (sender.name, copy, alarm)
        sender.due.append((number, copy.meta.mark or ""))
        self._dirty.add(sender.name)
        self._flush.set()

    def said(self, sender: state.ClientConnection, report: protocol.DelayedPublished) -> None:
        name, _, alarm = self._unsaid.get(report.number, ("", None, None))
        if name != sender.name or alarm is None:
            return
        alarm.cancel()
        if report.said:
            del self._unsaid[report.number]
        else:
            self._not_said(report.number)

    def _not_said(self, number: int) -> None:
        self._say_ourselves(self._unsaid.pop(number)[1])  # twice rather than not at all

    def _say_ourselves(self, copy: journal.JournalMessage) -> None:
        headers = {messages.HEADER: copy.raw, protocol.LOGGED: "0"}
        self._heard.append((copy.destination.subject, copy.data, headers))
        self._flush.set()

    def _arrived(self, target: backlog.Backlog, number: int, copy: journal.JournalMessage) -> bool:
        if not target.live:
            return False
        if target.room <= 0:
            target.overflow(number)
            self.set_live(target, live=False)
            if target.key in self._ledger.subscriptions:
                target.rejected -= 1  # this one: it is looked at again when it is loaded
            return False
        target.arrive(number, copy.meta, copy.raw, copy.data)
        target.matched += target.key in self._ledger.subscriptions
        return True

    def set_live(self, target: backlog.Backlog, *, live: bool) -> None:
        target.live = live
        if subscription := self._ledger.subscriptions.get(target.key):
            target.rejected = self.rejected(target)
            self._live_since.pop(target.key, None)
            if live:
                index = self._desk.indexes.setdefault(subscription.topic, selectors.SelectorIndex())
                index.add(target.key, subscription.selector)
                self._live_since[target.key] = (self._heard_of.get(subscription.topic, 0), target.matched)
            elif subscription.topic in self._desk.indexes:
                self._desk.indexes[subscription.topic].remove(target.key)

    def forget_all_but(self, patterns: set[str]) -> None:
        for pattern in self._heard_of.keys() - patterns:
            del self._heard_of[pattern]
        for pattern in self._desk.indexes.keys() - patterns:
            del self._desk.indexes[pattern]

    def rejected(self, source: backlog.Backlog) -> int:
        """How many it was not given for what they are.

        Who does not select a message is not asked about it: a live subscription has rejected what was said
        on its topic and did not arrive.
        """
        subscription = self._ledger.subscriptions.get(source.key)
        if subscription is None or source.key not in self._live_since:
            return source.rejected
        published, matched = self._live_since[source.key]
        return (
            source.rejected
            + self._heard_of.get(subscription.topic, 0)
            - published
            - (source.matched - matched)
        )

    # Out of backlogs.

    def pump(self, source: backlog.Backlog) -> None:
        self.obey(source, source.pump(self._desk.now_ms()))

    def obey(self, source: backlog.Backlog, instructions: list[backlog.Instruction]) -> None:
        expired: list[int] = []
        for instruction in instructions:
            entry = instruction.entry
            match instruction:
                case backlog.DeliverMessage(consumer=(name, number)):
                    self._desk.connections[name].outbox.append(
                        protocol.MessageDelivery(
                            number, source.key, entry.sequence, entry.count, entry.raw, entry.data
                        )
                    )
                    self._dirty.add(name)
                    self._flush.set()
                case backlog.ExpireMessage():
                    expired.append(entry.sequence)
                case backlog.DeadLetterMessage(reason=reason):
                    self._bury(source, entry, reason)
        if expired:
            record = ledger.LogRecord(acked={source.key: expired})
            self._desk.journal.add(
                journal.JournalItem(
                    [], record, lambda _: self.refill(source.key), lambda _: source.cancel_finish(expired)
                )
            )

    def _bury(self, source: backlog.Backlog, entry: backlog.BacklogEntry, reason: str) -> None:
        meta = msgspec.structs.replace(
            entry.meta,
            expiration_ms=0,
            destination=None,
            amqp=None,
            properties=entry.meta.properties | {REASON: reason, FROM: self._origin(source, entry)},
        )
        raw = messages.encode_meta(meta).decode()
        target = destinations.queue(destinations.DEAD_LETTERS)
        copies = [self.copy_to(target, meta, raw, entry.data, due=True)]
        record = ledger.LogRecord(acked={source.key: [entry.sequence]}, stored=journal.count_by_queue(copies))

        def stored(_: list[int]) -> None:
            self.refill(source.key)

        def failed(error: errors.MusterError) -> None:
            if isinstance(error, errors.Refused):  # by a full log; otherwise a new dispatcher begins anew
                self._desk.spawn(self._bury_later(source, entry, reason))

        self._desk.journal.add(journal.JournalItem(copies, record, stored, failed))

    async def _bury_later(self, source: backlog.Backlog, entry: backlog.BacklogEntry, reason: str) -> None:
        """The log has no room: until it has, nobody gets what nobody could take."""
        await asyncio.sleep(AGAIN_S)
        self._bury(source, entry, reason)

    def _origin(self, source: backlog.Backlog, entry: backlog.BacklogEntry) -> str:
        """Where it was to go, also if it dies a second time."""
        before = entry.meta.properties.get(FROM) or entry.meta.destination
        return str(before or destinations.queue(source.key.removeprefix(ledger.QUEUE_MARK)))

    # Out of the log.

    def refill(self, key: str) -> None:
        target = self._ledger.backlogs.get(key)
        if target and target.consumers and not target.live and target.is_low and key not in self._loading:
            self._loading.add(key)
            self._desk.spawn(self._load(target))

    async def _load(self, target: backlog.Backlog) -> None:
        generation = target.generation
        try:
            while target.consumers and target.room > 0:
                if self.tail.covers(target.position):
                    self._catch_up(target)
                    self.pump(target)
                    break
                end = self._ledger.end
                full = await self._load_until(target, end, generation)
                if target.generation != generation:
                    return
                if not full:
                    target.position = max(target.position, end)
                self.pump(target)
        finally:
            self._loading.discard(target.key)
            if target.generation != generation:
                self.refill(target.key)
            awaited, self._awaited = self._awaited, []
            for keys, act in awaited:
                self.when_loaded(keys, act)

    def when_loaded(self, keys: set[str], act: Callable[[], None]) -> None:
        """Act when none of these backlogs is being read from the log."""
        if self._loading.isdisjoint(keys):
            act()
        else:
            self._awaited.append((keys, act))

    def _catch_up(self, target: backlog.Backlog) -> None:
        """Take in what is left of the log, in one step; then it is live, if there was room."""
        subscription = self._ledger.subscriptions.get(target.key)
        for number, copy in self.tail.after(target.position):
            if subscription is None:
                matches = copy.destination.is_queue and ledger.queue_key(copy.destination.name) == target.key
            elif copy.destination.is_queue or not subscription.pattern.matches(copy.destination.topic):
                matches = False
            else:
                matches = self._ledger.wants(target.key, copy.meta) and selectors.accepts(
                    subscription.selector, copy.meta
                )
                target.rejected += not matches
            if matches:
                if target.room <= 0:
                    return
                target.matched += subscription is not None
                target.arrive(number, copy.meta, copy.raw, copy.data)
            target.position = number
        target.position = max(target.position, self._ledger.end)
        self.set_live(target, live=True)

    async def _load_until(self, target: backlog.Backlog, end: int, generation: int) -> bool:
        """Take in what there is up to ``end``; True if there was no room for all of it."""
        subscription = self._ledger.subscriptions.get(target.key)
        if subscription is None:
            subject = protocol.queue_subject(target.key.removeprefix(ledger.QUEUE_MARK))
        else:
            subject = protocol.topic_subject(subscription.pattern.cover)
        async for page in self._desk.read(pages.sequence_of(target.position + 1), subject):
            if subscription is not None:
                topic = topics.Topic.from_subject(page.subject.removeprefix(protocol.topic_subject("")))
                if not subscription.pattern.matches(topic):
                    continue
            for number, held in pages.read(page.sequence, page.data):
                if target.generation != generation:
                    return False
                if number <= target.position:
                    continue
                if target.room <= 0:
                    return True
                if number > end:
                    return False
                meta = messages.decode_meta(held.raw)
                if subscription is not None and not (
                    self._ledger.wants(target.key, meta) and selectors.accepts(subscription.selector, meta)
                ):
                    target.rejected += 1
                    target.position = number
                    continue
                target.matched += subscription is not None
                target.arrive(number, meta, held.raw, held.data)
        return False

    # Out of the door.

    def announce(self, subject: str, data: bytes) -> None:
        self._heard.append((subject, data, {}))
        self._flush.set()

    def answer(self, reply: str, result: protocol.DispatcherReply) -> None:
        result.epoch = self._desk.epoch
        self._answers.append((reply, result))
        self._flush.set()

    async def send(self) -> None:
        """Without end: what there is to send, at each turn of the loop."""
        publish = self._desk.bus.publish
        while True:
            await self._flush.wait()
            self._flush.clear()
            dirty, self._dirty = self._dirty, set()
            published, self._heard = self._heard, []
            answers, self._answers = self._answers, []
            for name in dirty:
                connection = self._desk.connections.get(name)
                if connection is None:
                    continue
                waiting, connection.outbox = connection.outbox, []
                due, connection.due = connection.due, []
                subject = protocol.deliver_subject(connection.identity, name)
                for batch in _split(waiting):
                    await publish(subject, protocol.encode(protocol.DeliveryBatch(self._desk.epoch, batch)))
                if due:
                    await publish(subject, protocol.encode(protocol.DeliveryBatch(self._desk.epoch, [], due)))
            for subject, data, headers in published:
                await publish(subject, data, headers=headers)
            for reply, result in answers:
                await publish(reply, protocol.encode(result))


def _number(placed: tuple[journal.JournalMessage, int]) -> int:
    return placed[1]


def _split(deliveries: list[protocol.MessageDelivery]) -> Iterable[list[protocol.MessageDelivery]]:
    """In batches that fit into a message of the bus."""
    batch: list[protocol.MessageDelivery] = []
    total = 0
    for delivery in deliveries:
        size = len(delivery.data) + len(delivery.meta) + 64
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(delivery)
        total += size
    if batch:
        yield batch
