"""From the log to the consumers: stored messages enter backlogs, and the messages these hand out are sent.

Everything is sent in a fixed order, once per iteration of the event loop: first deliveries, one message for
each connection, then messages to topic subscribers, then replies. A reply therefore follows the deliveries
that were decided before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from muster.core import errors, topics
from muster.message import destinations, messages, protocol, selectors
from muster.message.dispatcher import backlog, delayed_messages, state
from muster.message.dispatcher.log import journal, ledger, pages, tail

BATCH_BYTES: Final = 512 << 10
PUBLISH_S: Final = 2.0  # how long to wait for a sender to publish a due message
RETRY_S: Final = 1.0  # before a retry after the log had no room


class DeliveryQueue:
    def __init__(self, shared: state.DispatcherState) -> None:
        self._state = shared
        self._ledger = shared.ledger
        self.delays = delayed_messages.DelayedMessages(shared, self)
        self.tail = tail.LogTail()
        self._loading: set[str] = set()
        self._load_callbacks: list[tuple[set[str], Callable[[], None]]] = []
        self._published_counts: dict[str, int] = {}  # published messages by topic pattern
        self._live_since: dict[str, tuple[int, int]] = {}  # by subscription: published and matched until then
        self._dirty: set[str] = set()
        self._publications: list[tuple[str, bytes, dict[str, str]]] = []
        self._replies: list[tuple[str, protocol.DispatcherReply]] = []
        self._awaiting_sender: dict[int, tuple[str, journal.JournalMessage, asyncio.TimerHandle]] = {}
        self._last_due_number = 0
        self._flush = asyncio.Event()
        shared.on_stored = self._stored

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
        """``republish``: topic subscribers have not received it. ``due``: ignore the delivery time."""
        subject: str | None
        if not due and meta.delivery_time_ms > self._state.now_ms():
            subject = protocol.DELAY
        elif destination.is_queue:
            subject = protocol.queue_subject(destination.name)
        else:
            topic = destination.topic
            kept = not destination.is_temporary and self._state.patterns.matching(topic)
            subject = protocol.topic_subject(topic.subject) if kept else None
        return journal.JournalMessage(destination, meta, raw, data, subject, republish)

    def _stored(self, placed: journal.Placed) -> None:
        """A batch is in the log: pass its messages to the backlogs.

        Backlogs receive messages in log order, the order in which they also read them. Messages of a batch
        are numbered by topic, not in the order in which they were sent.
        """
        touched: dict[str, backlog.Backlog] = {}
        for copy, number in sorted(placed, key=_number):
            if not number:
                continue
            if copy.subject == protocol.DELAY:
                self.delays.add(copy.meta.delivery_time_ms, number)
            elif copy.subject != protocol.CHECKPOINT:
                self.tail.add(number, copy)
                for target in self._targets(copy):
                    if self._arrived(target, number, copy):
                        touched[target.key] = target
        for copy, _ in placed:
            if copy.republish and copy.subject != protocol.DELAY and not copy.destination.is_queue:
                self._publish(copy)
        for target in touched.values():
            self.pump(target)

    def _targets(self, copy: journal.JournalMessage) -> Iterable[backlog.Backlog]:
        """The backlogs that receive a message: that of a queue, or those of matching live subscriptions."""
        if copy.destination.is_queue:
            return (self._ledger.queue(copy.destination.name),)
        targets: list[backlog.Backlog] = []
        for pattern in self._state.patterns.matching(copy.destination.topic):
            self._published_counts[pattern] = self._published_counts.get(pattern, 0) + 1
            if index := self._state.indexes.get(pattern):
                keys = [key for key in index.matching(copy.meta) if self._ledger.wants(key, copy.meta)]
                targets += [self._ledger.backlogs[key] for key in keys]
        return targets

    def _publish(self, copy: journal.JournalMessage) -> None:
        """Publish to topic subscribers. A delayed message is published by its sender if that does not receive
        its own messages.
        """
        if (sender := self._state.sender_without_echo(copy.meta)) is None:
            self._publish_directly(copy)
            return
        number = self._last_due_number = self._last_due_number + 1
        alarm = self._state.loop.call_later(PUBLISH_S, self._publish_overdue, number)
        self._awaiting_sender[number] = (sender.name, copy, alarm)
        sender.due.append((number, copy.meta.mark or ""))
        self._dirty.add(sender.name)
        self._flush.set()

    def delayed_published(self, sender: state.ClientConnection, report: protocol.DelayedPublished) -> None:
        name, _, alarm = self._awaiting_sender.get(report.number, ("", None, None))
        if name != sender.name or alarm is None:
            return
        alarm.cancel()
        if report.published:
            del self._awaiting_sender[report.number]
        else:
            self._publish_overdue(report.number)

    def _publish_overdue(self, number: int) -> None:
        self._publish_directly(self._awaiting_sender.pop(number)[1])  # a duplicate is better than a loss

    def _publish_directly(self, copy: journal.JournalMessage) -> None:
        headers = {messages.HEADER: copy.raw, protocol.LOGGED: "0"}
        self._publications.append((copy.destination.subject, copy.data, headers))
        self._flush.set()

    def _arrived(self, target: backlog.Backlog, number: int, copy: journal.JournalMessage) -> bool:
        if not target.live:
            return False
        if target.room <= 0:
            target.overflow(number)
            self.set_live(target, live=False)
            if target.key in self._ledger.subscriptions:
                target.rejected -= 1  # this message is examined again when it is loaded
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
                index = self._state.indexes.setdefault(subscription.topic, selectors.SelectorIndex())
                index.add(target.key, subscription.selector)
                self._live_since[target.key] = (
                    self._published_counts.get(subscription.topic, 0),
                    target.matched,
                )
            elif subscription.topic in self._state.indexes:
                self._state.indexes[subscription.topic].remove(target.key)

    def retain_only(self, patterns: set[str]) -> None:
        for pattern in self._published_counts.keys() - patterns:
            del self._published_counts[pattern]
        for pattern in self._state.indexes.keys() - patterns:
            del self._state.indexes[pattern]

    def rejected(self, source: backlog.Backlog) -> int:
        """Number of messages that the selector rejected.

        The index returns matching subscriptions only, so a live subscription has rejected what was published
        on its topic and did not arrive.
        """
        subscription = self._ledger.subscriptions.get(source.key)
        if subscription is None or source.key not in self._live_since:
            return source.rejected
        published, matched = self._live_since[source.key]
        return (
            source.rejected
            + self._published_counts.get(subscription.topic, 0)
            - published
            - (source.matched - matched)
        )

    # Out of backlogs.

    def pump(self, source: backlog.Backlog) -> None:
        self.execute(source, source.pump(self._state.now_ms()))

    def execute(self, source: backlog.Backlog, instructions: list[backlog.Instruction]) -> None:
        expired: list[int] = []
        for instruction in instructions:
            entry = instruction.entry
            match instruction:
                case backlog.DeliverMessage(consumer=(name, number)):
                    self._state.connections[name].outbox.append(
                        protocol.MessageDelivery(
                            number, source.key, entry.sequence, entry.count, entry.raw, entry.data
                        )
                    )
                    self._dirty.add(name)
                    self._flush.set()
                case backlog.ExpireMessage():
                    expired.append(entry.sequence)
                case backlog.DeadLetterMessage(reason=reason):
                    self._dead_letter(source, entry, reason)
        if expired:
            record = ledger.LogRecord(acked={source.key: expired})
            self._state.journal.add(
                journal.JournalItem(
                    [], record, lambda _: self.refill(source.key), lambda _: source.cancel_finish(expired)
                )
            )

    def _dead_letter(self, source: backlog.Backlog, entry: backlog.BacklogEntry, reason: str) -> None:
        meta = messages.to_dead_letter(entry.meta, reason, self._origin(source, entry))
        raw = messages.encode_meta(meta).decode()
        target = destinations.queue(destinations.DEAD_LETTERS)
        copies = [self.copy_to(target, meta, raw, entry.data, due=True)]
        record = ledger.LogRecord(acked={source.key: [entry.sequence]}, stored=journal.count_by_queue(copies))

        def stored(_: list[int]) -> None:
            self.refill(source.key)

        def failed(error: errors.MusterError) -> None:
            if isinstance(error, errors.Refused):  # the log is full; otherwise a new dispatcher starts
                self._state.spawn(self._dead_letter_later(source, entry, reason))

        self._state.journal.add(journal.JournalItem(copies, record, stored, failed))

    async def _dead_letter_later(
        self, source: backlog.Backlog, entry: backlog.BacklogEntry, reason: str
    ) -> None:
        """The log has no room: keep the message undelivered, and try again later."""
        await asyncio.sleep(RETRY_S)
        self._dead_letter(source, entry, reason)

    def _origin(self, source: backlog.Backlog, entry: backlog.BacklogEntry) -> str:
        """The original destination, even of a message that becomes a dead letter again."""
        before = entry.meta.properties.get(messages.DEAD_FROM) or entry.meta.destination
        return str(before or destinations.queue(source.key.removeprefix(ledger.QUEUE_MARK)))

    # Out of the log.

    def refill(self, key: str) -> None:
        target = self._ledger.backlogs.get(key)
        if target and target.consumers and not target.live and target.is_low and key not in self._loading:
            self._loading.add(key)
            self._state.spawn(self._load(target))

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
            awaited, self._load_callbacks = self._load_callbacks, []
            for keys, act in awaited:
                self.when_loaded(keys, act)

    def when_loaded(self, keys: set[str], act: Callable[[], None]) -> None:
        """Call ``act`` when none of these backlogs is being loaded from the log."""
        if self._loading.isdisjoint(keys):
            act()
        else:
            self._load_callbacks.append((keys, act))

    def _catch_up(self, target: backlog.Backlog) -> None:
        """Load the rest of the log from memory in one step; the backlog is live if there was room."""
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
        """Load messages up to ``end``; True if there was not enough room."""
        subscription = self._ledger.subscriptions.get(target.key)
        if subscription is None:
            subject = protocol.queue_subject(target.key.removeprefix(ledger.QUEUE_MARK))
        else:
            subject = protocol.topic_subject(subscription.pattern.cover)
        async for page in self._state.read(pages.sequence_of(target.position + 1), subject):
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

    # Sending.

    def announce(self, subject: str, data: bytes) -> None:
        self._publications.append((subject, data, {}))
        self._flush.set()

    def send_reply(self, subject: str, result: protocol.DispatcherReply) -> None:
        result.epoch = self._state.epoch
        self._replies.append((subject, result))
        self._flush.set()

    async def send(self) -> None:
        """Send everything that waits, once per iteration of the event loop. Runs until cancelled."""
        publish = self._state.bus.publish
        while True:
            await self._flush.wait()
            self._flush.clear()
            dirty, self._dirty = self._dirty, set()
            published, self._publications = self._publications, []
            replies, self._replies = self._replies, []
            for name in dirty:
                connection = self._state.connections.get(name)
                if connection is None:
                    continue
                waiting, connection.outbox = connection.outbox, []
                due, connection.due = connection.due, []
                subject = protocol.deliver_subject(connection.identity, name)
                for batch in _split(waiting):
                    await publish(subject, protocol.encode(protocol.DeliveryBatch(self._state.epoch, batch)))
                if due:
                    await publish(
                        subject, protocol.encode(protocol.DeliveryBatch(self._state.epoch, [], due))
                    )
            for subject, data, headers in published:
                await publish(subject, data, headers=headers)
            for subject, result in replies:
                await publish(subject, protocol.encode(result))


def _number(placed: tuple[journal.JournalMessage, int]) -> int:
    return placed[1]


def _split(deliveries: list[protocol.MessageDelivery]) -> Iterable[list[protocol.MessageDelivery]]:
    """Split into batches that fit into a bus message."""
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
