"""From the log to the consumers: stored messages enter backlogs, and the messages these hand out are sent.

Everything is sent in a fixed order, once per iteration of the event loop: first deliveries, one message for
each connection, then messages to topic subscribers, then replies. A reply therefore follows the deliveries
that were decided before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from muster.bus import api
from muster.core import errors
from muster.message import destinations, messages, moved_messages, protocol, retries, selectors, settings
from muster.message.dispatcher import backlog, backlog_reader, clients, delayed_messages, large_bodies
from muster.message.dispatcher import lifetime as lifetime_
from muster.message.dispatcher.log import journal, ledger, message_cache, message_log
from muster.message.dispatcher.peers import transfers

BATCH_BYTES: Final = 512 << 10
RETRY_S: Final = 1.0  # before a retry after the log had no room
UNSENT_BYTES_MAX: Final = 8 << 20  # of deliveries that wait to be sent, before no more are read from the log
IDLE_S: Final = 30.0  # after this time without consumers, a subscription is no longer indexed


class DeliveryQueue:
    def __init__(
        self,
        bus: api.Bus,
        log: message_log.MessageLog,
        lifetime: lifetime_.DispatcherLifetime,
        client_table: clients.ClientTable,
        message_settings: settings.MessageSettings,
    ) -> None:
        self._bus = bus
        self._log = log
        self._ledger = log.ledger
        self._lifetime = lifetime
        self._clients = client_table
        self._settings = message_settings
        self.delays = delayed_messages.DelayedMessages(log, lifetime, self)
        self.cache = message_cache.MessageCache(message_settings.cache_bytes)
        self.reader = backlog_reader.BacklogReader(
            log, lifetime, self.cache, self.pump, lambda source: self.set_live(source, live=True)
        )
        self._indexes: dict[str, selectors.SelectorIndex[str]] = {}  # live subscriptions by topic pattern
        # Backlogs of subscriptions without consumers that are still indexed
        self._idle_since: dict[backlog.Backlog, float] = {}
        self._unsent_bytes = 0
        self.bodies = large_bodies.LargeBodies(log, lifetime.loop.time, message_settings.max_message_bytes)
        self.transfers = transfers.Transfers(bus, log, lifetime)
        self._published_counts: dict[str, int] = {}  # published messages by topic pattern
        self._live_since: dict[str, tuple[int, int]] = {}  # by subscription: published and matched until then
        self._dirty: set[str] = set()
        self._publications: list[tuple[str, bytes, dict[str, str]]] = []
        self._replies: list[tuple[str, protocol.DispatcherReply]] = []
        self._retries: dict[backlog.Backlog, dict[int, asyncio.TimerHandle]] = {}
        self._flush = asyncio.Event()
        log.on_stored = self._stored
        log.on_ended = self._ended

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
        """``republish``: topic subscribers have not received it. ``due``: its delivery time has been awaited,
        or does not count. All others with a delivery time wait in one order, even if they are due already.
        """
        subject: str | None
        subjects = self._log.subjects
        if self.transfers.is_remote(destination):
            return self.transfers.copy_to(destination, meta, raw, data, republish=republish, due=due)
        if not due and meta.delivery_time_ms:
            return journal.JournalMessage(
                destination, meta, raw, data, subjects.delay, republish, deferred=True
            )
        if destination.is_queue:
            subject = subjects.queue(destination.name)
        else:
            topic = destination.topic
            kept = not destination.is_temporary and self._log.patterns.matching(topic)
            subject = subjects.topic(topic.subject) if kept else None
        return journal.JournalMessage(destination, meta, raw, data, subject, republish)

    def _stored(self, placed: journal.Placed) -> None:
        """A batch is in the log: pass its messages to the backlogs.

        Backlogs receive messages in log order, the order in which they also read them. Messages of a batch
        are numbered by topic, not in the order in which they were sent.
        """
        touched: dict[str, backlog.Backlog] = {}
        log_subjects = self._log.subjects
        for copy, number in sorted(placed, key=_number):
            if copy.meta.large is not None:
                self.bodies.placed(copy, number)
            if not number or copy.subject is None or copy.subject.startswith(log_subjects.body_prefix):
                continue
            if copy.subject == log_subjects.delay:
                self.delays.add(copy.meta, number)
            elif copy.deferred:
                self.transfers.add(copy, number)
            elif copy.subject != log_subjects.checkpoint:
                self.cache.add_stored(number, copy)
                for target in self._targets(copy):
                    if self._arrived(target, number, copy):
                        touched[target.key] = target
        for copy, _ in placed:
            if copy.republish and not copy.deferred and not copy.destination.is_queue:
                self._publish(copy)
        for target in touched.values():
            self.pump(target)

    def _targets(self, copy: journal.JournalMessage) -> Iterable[backlog.Backlog]:
        """The backlogs that receive a message: that of a queue, or those of matching live subscriptions."""
        if copy.destination.is_queue:
            queue = self._ledger.backlogs.get(ledger.queue_key(copy.destination.name))
            return () if queue is None else (queue,)  # it was deleted by the same record
        targets: list[backlog.Backlog] = []
        for pattern in self._log.patterns.matching(copy.destination.topic):
            self._published_counts[pattern] = self._published_counts.get(pattern, 0) + 1
            if index := self._indexes.get(pattern):
                keys = [key for key in index.matching(copy.meta) if self._ledger.wants(key, copy.meta)]
                targets += [self._ledger.backlogs[key] for key in keys]
        return targets

    def _publish(self, copy: journal.JournalMessage) -> None:
        """Publish to topic subscribers."""
        headers = {messages.HEADER: copy.raw, protocol.LOGGED: "0"}
        self._publications.append((copy.destination.subject, copy.data, headers))
        self._flush.set()

    def _arrived(self, target: backlog.Backlog, number: int, copy: journal.JournalMessage) -> bool:
        if not target.live:
            return False
        target.arrive(number, copy.meta)
        target.matched += target.key in self._ledger.subscriptions
        return True

    def set_live(self, target: backlog.Backlog, *, live: bool) -> None:
        target.live = live
        if live and target.key in self._ledger.depths:
            # Before, an acknowledgement could name a message of another queue: only the index shows that.
            self._ledger.depths[target.key] = len(target.pending)
        if subscription := self._ledger.subscriptions.get(target.key):
            target.rejected = self.rejected(target)
            self._live_since.pop(target.key, None)
            if live:
                index = self._indexes.setdefault(subscription.topic, selectors.SelectorIndex())
                index.add(target.key, subscription.selector)
                self._live_since[target.key] = (
                    self._published_counts.get(subscription.topic, 0),
                    target.matched,
                )
            elif subscription.topic in self._indexes:
                self._indexes[subscription.topic].remove(target.key)

    def retain_only(self, patterns: set[str]) -> None:
        for pattern in self._published_counts.keys() - patterns:
            del self._published_counts[pattern]
        for pattern in self._indexes.keys() - patterns:
            del self._indexes[pattern]

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

    def release(self, holder: clients.ClientConnection, request: protocol.ReleaseMessages) -> None:
        reason = request.reason and request.reason[: retries.ERROR_CHARACTERS_MAX]
        for key, sequences in request.deliveries.items():
            if source := self._ledger.backlogs.get(key):
                instructions = source.release(
                    sequences,
                    holder.name,
                    counted=request.counted,
                    reason=reason,
                    elsewhere=request.elsewhere,
                    delay_s=request.delay_s,
                    error=request.error,
                )
                self.execute(source, instructions)
                self.pump(source)

    def pump(self, source: backlog.Backlog) -> None:
        self.execute(source, source.pump(messages.now_ms(), self.cache.get))
        self.reader.start(source)

    def left(self, source: backlog.Backlog) -> None:
        """The backlog has no consumers any more. A queue remains indexed, because its messages are in no
        other index; a subscription for a short time, for clients that connect for a few messages.
        """
        source.settle(self._ledger.end)
        if source.key in self._ledger.subscriptions:
            self._idle_since[source] = self._lifetime.loop.time()

    def unload(self, source: backlog.Backlog) -> None:
        self._ended(source)
        source.settle(self._ledger.end)
        self.set_live(source, live=False)
        source.unload()

    def unload_idle(self, now: float) -> None:
        for source in [source for source, since in self._idle_since.items() if now - since > IDLE_S]:
            del self._idle_since[source]
            if not source.consumers:
                self.unload(source)

    def _ended(self, source: backlog.Backlog) -> None:
        """Nothing is done for the backlog any more."""
        self._idle_since.pop(source, None)
        self._cancel_retries(source)
        self.reader.stop(source)

    def execute(self, source: backlog.Backlog, instructions: list[backlog.Instruction]) -> None:
        expired: list[int] = []
        is_queue = source.key not in self._ledger.subscriptions
        for instruction in instructions:
            match instruction:
                case backlog.DeliverMessage(consumer=(name, consumer), number=number, message=message):
                    connection = self._clients.connections[name]
                    connection.outbox.append(
                        protocol.MessageDelivery(
                            consumer, source.key, number, instruction.count, message.raw, message.data
                        )
                    )
                    self._unsent_bytes += len(message.data)
                    if is_queue and self.cache.read_bytes:
                        self.cache.forget(number)
                    self._dirty.add(name)
                    self._flush.set()
                case backlog.RetryMessage(number=number, delay_s=delay_s):
                    self._retry_later(source, number, delay_s)
                case backlog.ExpireMessage(number=number):
                    expired.append(number)
                case backlog.DeadLetterMessage(number=number, reason=messages.EXPIRED):
                    expired.append(number)
                case backlog.DeadLetterMessage(number=number, reason=reason):
                    target = ledger.settings_of(self._settings, source.key).dead_letters
                    self._lifetime.spawn(self._dead_letter(source, number, reason, target))
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            self.reader.may_read.clear()
        if expired and (target := ledger.settings_of(self._settings, source.key).expired):
            for number in expired:
                self._lifetime.spawn(self._dead_letter(source, number, messages.EXPIRED, target))
        elif expired:
            record = ledger.LogRecord(acked={source.key: expired})
            self._log.journal.add(
                journal.JournalItem([], record, failed=lambda _: source.cancel_finish(expired))
            )

    def _retry_later(self, source: backlog.Backlog, number: int, delay_s: float) -> None:
        timers = self._retries.setdefault(source, {})

        def retry() -> None:
            del timers[number]
            source.retry(number)
            self.pump(source)

        timers[number] = self._lifetime.loop.call_later(delay_s, retry)

    def stop_retries(self) -> None:
        for source in list(self._retries):
            self._cancel_retries(source)

    def _cancel_retries(self, source: backlog.Backlog) -> None:
        for timer in self._retries.pop(source, {}).values():
            timer.cancel()

    async def _dead_letter(self, source: backlog.Backlog, number: int, reason: str, target: str) -> None:
        """Move a message to the queue ``target`` of dead letters or expired messages. While the log has no
        room, it is delivered to no consumer, and the move is retried. An expired one is no dead letter.
        """
        copies: list[journal.JournalMessage] = []
        message = await self.reader.get(source, number)
        if message is not None and reason != messages.EXPIRED:
            expires_ms = message.meta.expiration_ms
            if expires_ms and expires_ms <= messages.now_ms():
                source.expired += 1
                reason, target = (
                    messages.EXPIRED,
                    ledger.settings_of(self._settings, source.key).expired or "",
                )
        if message is not None and target:
            queue = source.key.removeprefix(ledger.QUEUE_MARK)
            copies.append(self.dead_letter(queue, message.meta, message.data, reason, target))
        record = ledger.LogRecord(acked={source.key: [number]}, stored=journal.count_by_queue(copies))
        while True:
            try:
                await self._log.store(journal.JournalItem(copies, record))
                return
            except errors.Refused:  # the log is full
                if self._ledger.backlogs.get(source.key) is not source:
                    return  # it has ended with its messages
                await asyncio.sleep(RETRY_S)
            except errors.MusterError:  # the next dispatcher delivers it again
                return

    def dead_letter(
        self, queue: str, meta: messages.MessageMeta, data: bytes, reason: str, target: str
    ) -> journal.JournalMessage:
        """The copy of a message for the queue ``target`` of dead letters or expired messages. It names the
        original destination, even if it becomes a dead letter again.
        """
        origin = meta.properties.get(messages.DEAD_FROM) or meta.destination or destinations.queue(queue)
        moved = moved_messages.to_dead_letter(meta, reason, str(origin))
        raw = messages.encode_meta(moved).decode()
        return self.copy_to(destinations.queue(target), moved, raw, data, due=True)

    # Sending.

    def announce(self, subject: str, data: bytes) -> None:
        self._publications.append((subject, data, {}))
        self._flush.set()

    def send_reply(self, subject: str, result: protocol.DispatcherReply) -> None:
        result.epoch, result.partitions = self._log.epoch, self._log.partition_count
        self._replies.append((subject, result))
        self._flush.set()

    async def send(self) -> None:
        """Send everything that waits, once per iteration of the event loop. Runs until cancelled."""
        publish = self._bus.publish
        while True:
            await self._flush.wait()
            self._flush.clear()
            dirty, self._dirty = self._dirty, set()
            published, self._publications = self._publications, []
            replies, self._replies = self._replies, []
            self._unsent_bytes = 0
            for name in dirty:
                connection = self._clients.connections.get(name)
                if connection is None:
                    continue
                waiting, connection.outbox = connection.outbox, []
                registration, before = connection.registration, connection.delivered
                connection.delivered += len(waiting)
                subject = protocol.deliver_subject(connection.identity, name, self._log.partition)
                for batch in _split(waiting):
                    message = protocol.DeliveryBatch(self._log.epoch, batch, registration, before)
                    before += len(batch)
                    await publish(subject, protocol.encode(message))
            for subject, data, headers in published:
                await publish(subject, data, headers=headers)
            for subject, result in replies:
                await publish(subject, protocol.encode(result))
            if self._unsent_bytes <= UNSENT_BYTES_MAX:
                self.reader.may_read.set()


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
