"""The state of the log: the sum of its records, without the messages.

Pure. The dispatcher appends a `LogRecord` with every batch it stores, and periodically a `LogCheckpoint`, the
sum of all earlier records. A new dispatcher reads the last checkpoint and the records after it. From these it
knows every subscription, how far each backlog is done, and which works must not be executed again. Messages
are read later, by position, as consumers need them.

Records and checkpoints refer to messages by their numbers (`pages`), which increase along the log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from muster.core import topics
from muster.message import messages, partitions, retries, settings
from muster.message.dispatcher import backlog

# Connections whose last work is known, so that no earlier one is executed again.
WORKS_KEPT = 20_000  # equivalent: any bound of this order serves
ACK_BYTES = 10
CHANNELS_KEPT = 1_000  # one for each start of a dispatcher of another partition
CHUNK_BYTES = 400 << 10  # equivalent (400 -> 401): about, of one message of a checkpoint
SPANS = 10_000  # of what a backlog has done, in one; equivalent: any bound of this order serves


class DurableSubscription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``client_id`` None: shared by all identities that may subscribe to the topic.

    ``identity`` created it, and may end it.
    """

    key: str
    name: str
    topic: str
    identity: str
    client_id: str | None = None
    selector: str | None = None
    no_local: str | None = None  # the origin whose messages it excludes
    shared: bool = False

    @property
    def pattern(self) -> topics.TopicPattern:
        return topics.TopicPattern.parse(self.topic)


class PreparedAcks(msgspec.Struct, frozen=True):
    """Messages that an attempt to commit a transaction of another partition acknowledges."""

    attempt: str
    coordinator: int
    connection: str
    acks: dict[str, list[int]]


class LogRecord(msgspec.Struct, omit_defaults=True):
    acked: dict[str, list[int]] = {}
    stored: dict[str, int] = {}  # messages by queue
    subscribed: list[DurableSubscription] = []
    unsubscribed: list[str] = []
    last_works: dict[str, int] = {}  # by connection: number of the last work
    consumed: list[str] = []  # backlogs that have consumers from here on
    idle: list[str] = []
    dropped: list[str] = []  # queues
    bodies: list[str] = []  # large bodies that begin here
    deleted_bodies: list[str] = []
    transferred: dict[int, int] = {}  # by partition: the last message that it has stored
    received: dict[str, int] = {}  # by channel of another partition: the last message stored here
    prepared: list[PreparedAcks] = []
    resolved: list[str] = []  # attempts that were prepared
    decided: dict[str, list[int]] = {}  # committed attempts, and the partitions that prepared them
    completed: list[str] = []  # decided attempts that all partitions have resolved


def estimate_bytes(record: LogRecord) -> int:
    """An upper estimate of the size in the log."""
    size = 0
    for key, sequences in record.acked.items():
        size += len(key) + ACK_BYTES * (len(sequences) + 1)
    for subscription in record.subscribed:
        size += _about_bytes(subscription)
    for entry in record.prepared:
        size += _prepared_bytes(entry)
    size += ACK_BYTES * 2 * len(record.transferred)
    for keys in (
        record.received,
        record.resolved,
        record.decided,
        record.completed,
        record.stored,
        record.last_works,
        record.unsubscribed,
        record.consumed,
        record.idle,
        record.dropped,
        record.bodies,
        record.deleted_bodies,
    ):
        if keys:  # most are empty
            size += sum(len(key) + ACK_BYTES for key in keys)
    return size


def _prepared_bytes(entry: PreparedAcks) -> int:
    acks = sum(len(key) + ACK_BYTES * (len(numbers) + 1) for key, numbers in entry.acks.items())
    return len(entry.attempt) + len(entry.connection) + acks + 100


def _about_bytes(subscription: DurableSubscription) -> int:
    texts = (
        subscription.key,
        subscription.key,
        subscription.name,
        subscription.topic,
        subscription.identity,
        subscription.selector or "",
    )
    return sum(map(len, texts)) + 200


class LogExtent(msgspec.Struct, array_like=True):
    floor: int
    done: list[tuple[int, int]]
    depth: int
    created: int = 0


class SortedPage(msgspec.Struct, frozen=True, array_like=True):
    """``count`` messages of a group that were in other pages, with numbers from ``first`` to ``last``."""

    group: str
    first: int
    last: int
    sequence: int
    count: int


class LogCheckpoint(msgspec.Struct, omit_defaults=True):
    """One of ``chunks`` consecutive messages in the log. An extent may be split over several."""

    chunks: int
    head: int  # records up to here are included
    extents: dict[str, LogExtent] = {}
    subscriptions: list[DurableSubscription] = []
    last_works: dict[str, int] = {}
    consumed: list[str] = []
    bodies: list[str] = []
    transferred: dict[int, int] = {}
    received: dict[str, int] = {}
    prepared: list[PreparedAcks] = []
    decided: dict[str, list[int]] = {}
    sorted_to: int | None = None  # None: there were no shared pages up to the head
    sorted_pages: list[SortedPage] = []


Ended = list[backlog.Backlog]


def settings_of(message_settings: settings.MessageSettings, key: str) -> settings.QueueSettings:
    """The settings for a backlog. Durable subscriptions have the defaults."""
    return message_settings.queue(key.removeprefix(QUEUE_MARK) if key.startswith(QUEUE_MARK) else "")


class Ledger:
    """``head`` is the sequence of the last page of the log, ``end`` the highest number up to there."""

    def __init__(self, policy_of: Callable[[str], retries.Retry] = lambda _: retries.AT_ONCE) -> None:
        self._policy_of = policy_of  # by key of the backlog
        self.head = 0
        self.end = 0
        self.backlogs: dict[str, backlog.Backlog] = {}
        self.depths: dict[str, int] = {}
        self.subscriptions: dict[str, DurableSubscription] = {}
        self.created: dict[str, int] = {}  # the number after which a subscription receives
        self.last_works: OrderedDict[str, int] = OrderedDict()  # by connection, the latest last
        self.consumed: set[str] = set()
        self.delayed_done: set[int] = set()
        self.dropped: set[str] = set()  # deleted queues, until the log is trimmed
        self.stored: dict[str, int] = {}  # messages by queue since the start
        self.bodies: set[str] = set()  # large bodies in the log
        # See `LogRecord`
        self.transferred: dict[int, int] = {}
        self.received: OrderedDict[str, int] = OrderedDict()
        self.prepared: dict[str, PreparedAcks] = {}
        self.decided: dict[str, list[int]] = {}

    def queue(self, name: str) -> backlog.Backlog:
        return self.backlog(queue_key(name))

    def backlog(self, key: str, floor: int = 0) -> backlog.Backlog:
        existing = self.backlogs.get(key)
        if existing is None:
            existing = self.backlogs[key] = backlog.Backlog(key, floor=floor, policy=self._policy_of(key))
        return existing

    def reach(self, head: int, end: int) -> None:
        self.head, self.end = head, end

    def apply(self, record: LogRecord, end: int) -> Ended:
        """``end`` is the last number of the record's page: a subscription receives what comes after it.
        Returns the backlogs that were replaced or deleted.
        """
        ended = [self.backlogs.pop(subscription.key, None) for subscription in record.subscribed]
        for subscription in record.subscribed:
            self.subscriptions[subscription.key] = subscription
            self.backlog(subscription.key, floor=end)
            self.created[subscription.key] = end
        for key, count in record.stored.items():
            self.backlog(key)
            self.depths[key] = self.depths.get(key, 0) + count
            self.stored[key] = self.stored.get(key, 0) + count
        for key, sequences in record.acked.items():
            if key == DELAY_KEY:
                self.delayed_done.update(sequences)
            elif key in self.backlogs:
                for number in sequences:
                    if self.backlogs[key].finish(number) and key in self.depths:
                        self.depths[key] -= 1
        for key in record.unsubscribed:
            self.subscriptions.pop(key, None)
            ended.append(self.backlogs.pop(key, None))
            self.created.pop(key, None)
            self.consumed.discard(key)
        for key in record.dropped:
            ended.append(self.backlogs.get(key))
            self.forget(key)
            self.dropped.add(key)
        self.consumed.update(record.consumed)
        self.consumed.difference_update(record.idle)
        self.bodies.update(record.bodies)
        self.bodies.difference_update(record.deleted_bodies)
        self._did(record.last_works)
        self.transferred.update(record.transferred)
        self._receive(record.received)
        self.prepared.update((entry.attempt, entry) for entry in record.prepared)
        for attempt in record.resolved:
            self.prepared.pop(attempt, None)
        self.decided.update(record.decided)
        for attempt in record.completed:
            self.decided.pop(attempt, None)
        return [source for source in ended if source is not None]

    def forget(self, key: str) -> None:
        """Forget a queue. If the log still contains messages of it, all would be delivered again."""
        self.backlogs.pop(key, None)
        self.depths.pop(key, None)
        self.stored.pop(key, None)
        self.consumed.discard(key)

    def _did(self, works: dict[str, int]) -> None:
        for connection, number in works.items():
            self.last_works[connection] = max(number, self.last_works.get(connection, 0))
            self.last_works.move_to_end(connection)
        while len(self.last_works) > WORKS_KEPT:
            self.last_works.popitem(last=False)

    def _receive(self, numbers: dict[str, int]) -> None:
        for channel, number in numbers.items():
            self.received[channel] = max(number, self.received.get(channel, 0))
            self.received.move_to_end(channel)
        while len(self.received) > CHANNELS_KEPT:
            self.received.popitem(last=False)

    def checkpoint(
        self, sorted_to: int | None = None, sorted_pages: Iterable[SortedPage] = ()
    ) -> list[LogCheckpoint]:
        chunks: list[LogCheckpoint] = []
        used = 0

        def chunk(size: int) -> LogCheckpoint:
            """The chunk that has room for this many bytes."""
            nonlocal used
            if not chunks or used + size > CHUNK_BYTES:
                chunks.append(
                    LogCheckpoint(chunks=0, head=self.head, sorted_to=sorted_to)  # chunks: see below
                )
                used = 0
            used += size
            return chunks[-1]

        chunk(0).transferred = dict(self.transferred)  # there is always one chunk
        for channel, number in self.received.items():
            chunk(len(channel) + 2 * ACK_BYTES).received[channel] = number
        for entry in self.prepared.values():
            chunk(_prepared_bytes(entry)).prepared.append(entry)
        for attempt, participants in self.decided.items():
            chunk(len(attempt) + (len(participants) + 1) * ACK_BYTES).decided[attempt] = participants
        for connection, number in self.last_works.items():
            chunk(len(connection) + 2 * ACK_BYTES).last_works[connection] = number
        for page in sorted_pages:
            chunk(len(page.group) + 4 * ACK_BYTES).sorted_pages.append(page)
        for body in sorted(self.bodies):
            chunk(len(body) + ACK_BYTES).bodies.append(body)
        delayed = [(done_number, done_number) for done_number in sorted(self.delayed_done)]
        for at in range(0, len(delayed), SPANS):
            part = delayed[at : at + SPANS]
            extents = chunk(len(part) * 4 * ACK_BYTES).extents
            nothing_else = LogExtent(0, [], 0)  # equivalent: of delayed messages only what is done is read
            extents.setdefault(DELAY_KEY, nothing_else).done.extend(part)
        for key, source in self.backlogs.items():
            floor, done = source.settle(self.end), list(source.done)
            for at in range(0, len(done) or 1, SPANS):  # equivalent (1 -> 2): one step either way
                part = done[at : at + SPANS]
                depth, created = self.depths.get(key, 0), self.created.get(key, 0)
                extents = chunk(len(key) + (len(part) + 2) * 4 * ACK_BYTES).extents
                extents.setdefault(key, LogExtent(floor, [], depth, created)).done.extend(part)
            if key in self.consumed:
                chunk(len(key) + ACK_BYTES).consumed.append(key)
            if (subscription := self.subscriptions.get(key)) is not None:
                chunk(_about_bytes(subscription)).subscriptions.append(subscription)
        for one_of_them in chunks:
            one_of_them.chunks = len(chunks)
        return chunks

    def restore(self, chunks: Iterable[LogCheckpoint]) -> None:
        for chunk in chunks:
            for subscription in chunk.subscriptions:
                self.subscriptions[subscription.key] = subscription
            for key, extent in chunk.extents.items():
                if key == DELAY_KEY:
                    self.delayed_done.update(number for number, _ in extent.done)
                    continue
                restored = self.backlog(key, extent.floor)
                for span in extent.done:
                    restored.done.add(*span)
                if extent.created:
                    self.created[key] = extent.created
                if key.startswith(QUEUE_MARK):
                    self.depths[key] = extent.depth
            self._did(chunk.last_works)
            self.consumed.update(chunk.consumed)
            self.bodies.update(chunk.bodies)
            self.transferred.update(chunk.transferred)
            self._receive(chunk.received)
            self.prepared.update((entry.attempt, entry) for entry in chunk.prepared)
            self.decided.update(chunk.decided)

    def wants(self, key: str, meta: messages.MessageMeta) -> bool:
        """Whether a subscription receives a message, apart from its selector.

        It does not receive messages of its own connection with no-local, nor delayed messages that were sent
        before it was created.
        """
        subscription = self.subscriptions[key]
        if subscription.no_local is not None and subscription.no_local == meta.origin:
            return False
        return not meta.sequence or meta.sequence > self.created.get(key, 0)

    def suspect(self) -> None:
        """A new dispatcher starts: backlogs with consumers may have delivered everything in the log."""
        for key in self.consumed:
            if key in self.backlogs:
                self.backlogs[key].suspect = self.end

    def reserve_prepared(self) -> None:
        """No consumer receives messages that a transaction has prepared, until it is resolved."""
        for entry in self.prepared.values():
            for key, numbers in entry.acks.items():
                self.backlog(key).start_finish(numbers)

    def floor_of_topics(self) -> int:
        """Up to here no subscription needs the log."""
        return min((self.backlogs[key].floor for key in self.subscriptions), default=self.end)


QUEUE_MARK = partitions.QUEUE_MARK
DELAY_KEY = "delay"


def queue_key(name: str) -> str:
    return QUEUE_MARK + name


def subscription_key(identity: str, client_id: str | None, name: str) -> str:
    """A client id is scoped to its identity. Without one, names are common to all identities, as in JMS.

    A colon in a client id is escaped, so that the key is unambiguous.
    """
    if client_id is None:
        return f"g:{name}"
    return f"s:{identity}:{client_id.replace('%', '%25').replace(':', '%3A')}:{name}"


class TopicPatternIndex:
    """Finds the patterns that match a topic. A pattern is counted as often as it was added."""

    def __init__(self) -> None:
        self._patterns: dict[str, tuple[topics.TopicPattern, int]] = {}
        self._found: dict[str, tuple[str, ...]] = {}

    def add(self, text: str) -> None:
        pattern, count = self._patterns.get(text) or (topics.TopicPattern.parse(text), 0)
        self._patterns[text] = (pattern, count + 1)
        self._found.clear()

    def remove(self, text: str) -> None:
        pattern, count = self._patterns[text]
        if count > 1:
            self._patterns[text] = (pattern, count - 1)
        else:
            del self._patterns[text]
        self._found.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._patterns)

    def matching(self, topic: topics.Topic) -> Sequence[str]:
        matches = self._found.get(topic.subject)
        if matches is None:
            if len(self._found) > 10_000:
                self._found.clear()
            matches = tuple(text for text, (pattern, _) in self._patterns.items() if pattern.matches(topic))
            self._found[topic.subject] = matches
        return matches
