"""State that the modules of a dispatcher share: the log, the ledger, the client connections and the tasks."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from muster.bus import api
from muster.core import errors, queue_names, quotas
from muster.message import destinations, messages, partitions, protocol, selectors, settings
from muster.message.dispatcher import backlog
from muster.message.dispatcher.log import journal, ledger, log_reader, pages, shared_pages
from muster.supervision import tasks

FULL: Final = 0.8
DELETED_MAX: Final = 10_000  # deleted temporary destinations that a connection's entry contains

#: Whether an identity may publish on (``"pub"``) or subscribe to (``"sub"``) a users' subject, use a queue
#: (``"send"``, ``"receive"``, ``"browse"``, ``"admin"``), or manage durable subscriptions of other identities
#: (``"subscriptions"``: ``"list"``, ``"end"``).
May = Callable[[str, str, str], bool]
ReplyCallback = Callable[[protocol.DispatcherReply], None]


_VERBS: Final = {"send": "send to", "receive": "receive from", "admin": "administer"}


def allow_all(identity: str, action: str, subject: str) -> bool:
    return True


@dataclass(slots=True)
class StagedWork:
    """Messages that wait for the rest of their work. A connection has one work in progress at a time."""

    work: int
    sends: list[protocol.SendMessage] = field(default_factory=list)
    bytes: int = 0


@dataclass(slots=True)
class ClientConnection:
    name: str
    identity: str
    client_id: str | None
    last_seen: float
    at: api.ConnectionId | None = None
    consumers: dict[int, str] = field(default_factory=dict)  # consumer number -> backlog
    outbox: list[protocol.MessageDelivery] = field(default_factory=list)
    registration: int = 0  # of its last hello
    delivered: int = 0  # deliveries sent since then
    notified: int = 0  # notifications from it since then
    due: list[tuple[int, str]] = field(default_factory=list)  # its own messages that it has to publish
    without_echo: bool = False
    staged: StagedWork | None = None
    # Its deleted temporary destinations, latest last
    deleted: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def add_deleted(self, name: str) -> None:
        self.deleted[name] = None
        if len(self.deleted) > DELETED_MAX:
            self.deleted.popitem(last=False)

    @property
    def origin(self) -> str:
        return protocol.origin(self.identity, self.client_id) if self.client_id else self.name


class DispatcherState:
    def __init__(
        self,
        bus: api.Bus,
        stream: api.Stream,
        epoch: int,
        message_settings: settings.MessageSettings,
        may: May = allow_all,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        *,
        max_bytes: int = 1 << 30,
        partition: int = 0,
        partition_count: int = 1,
    ) -> None:
        self.partition = partition
        self.partition_count = partition_count
        self.owner = f"{socket.gethostname()}:{os.getpid()}"
        self.subjects = partitions.LogSubjects(partition)
        self.bus = bus
        self.stream = stream
        self.epoch = epoch
        self.settings = message_settings
        self.may = may
        self.now_ms = now_ms
        self.loop = asyncio.get_running_loop()
        self.ledger = ledger.Ledger(
            lambda key: self.queue_settings(key).retry(message_settings.max_deliveries)
        )
        self.shared_pages = shared_pages.SharedPages(self.subjects.group)
        self.journal = journal.Journal(stream, 0, self._applied, self.subjects, self.shared_pages)
        self.log = log_reader.LogReader(stream, self.subjects, self.shared_pages, lambda: self.journal.head)
        self.connections: dict[str, ClientConnection] = {}
        self._created: dict[str, set[str]] = {}  # keys of queues by the identity that created them
        self.clients: dict[str, str] = {}  # origin of connections with a client id -> connection
        self.patterns = ledger.TopicPatternIndex()
        self.indexes: dict[str, selectors.SelectorIndex[str]] = {}  # live subscriptions by topic pattern
        self.records = 0  # records since the last checkpoint
        self.checkpoint_head = 0  # the last checkpoint is the sum up to here
        self.max_bytes = max_bytes
        self.used_bytes = 0  # size of the log when last read, plus later sends
        self.refused_at = -math.inf  # last time a message was rejected for lack of room
        # Called when messages are in the log
        self.on_stored: Callable[[journal.Placed], None] = lambda _: None
        self.on_record: Callable[[ledger.LogRecord], None] = lambda _: None
        self.on_ended: Callable[[backlog.Backlog], None] = lambda _: None  # it was replaced or deleted
        self.failure: asyncio.Future[None] = self.loop.create_future()
        self.tasks = tasks.TaskSupervisor(
            "dispatcher", on_fatal=self._end_with, handles=self._is_interruption
        )

    def queue_settings(self, key: str) -> settings.QueueSettings:
        """The settings for a backlog. Durable subscriptions have the defaults."""
        is_queue = key.startswith(ledger.QUEUE_MARK)
        return self.settings.queue(key.removeprefix(ledger.QUEUE_MARK) if is_queue else "")

    def check_is_here(self, queue: str) -> None:
        if partitions.of_queue(queue, self.partition_count) != self.partition:
            raise errors.InvalidInput(f"the queue {queue!r} is in another partition")

    def is_short_of_room(self, within_s: float) -> bool:
        """Whether the log is full, or a message was recently rejected for lack of room."""
        return not self.has_room() or self.loop.time() - self.refused_at < within_s

    def has_room(self, size: int = 0) -> bool:
        """Whether there is room for messages. They are rejected before the log is full, because
        acknowledgements need room too.
        """
        return self.used_bytes + size <= FULL * self.max_bytes

    def create_queues(self, identity: str, keys: Iterable[str]) -> None:
        """Note that an identity sends to these; `errors.LimitExceeded` if it has created too many."""
        temporary = ledger.queue_key(queue_names.TEMPORARY)
        new = {key for key in keys if key not in self.ledger.depths and not key.startswith(temporary)}
        if not new:
            return
        own, most = self._created.get(identity, set()) | new, self.settings.queues_per_identity
        if len(own) > most:  # some may not exist any more
            own = {key for key in own if key in self.ledger.depths} | new
        if len(own) > most:
            raise quotas.exceeded(identity, len(own - new), "queues", most, "message.queues_per_identity")
        self._created[identity] = own

    def check_may_send(self, identity: str, destination: destinations.Destination) -> None:
        if destination.is_queue:
            self.check_queue(identity, "send", destination.name)
        elif not self.may(identity, "pub", destination.subject):
            raise errors.Forbidden(f"{identity} may not publish on {destination.name!r}")

    def may_subscribe(self, identity: str, topic: str) -> bool:
        return all(self.may(identity, "sub", subject) for subject in destinations.topic(topic).patterns)

    def check_may_subscribe(self, identity: str, topic: str) -> None:
        if not self.may_subscribe(identity, topic):
            raise errors.Forbidden(f"{identity} may not subscribe to {topic!r}")

    def check_queue(self, identity: str, right: str, queue: str) -> None:
        if not self.may(identity, right, queue):
            raise errors.Forbidden(
                f"{identity} may not {_VERBS.get(right, right)} the queue {queue!r}",
                hint=f"`muster creds show {identity}` lists its rights; `creds issue --queue` grants them",
            )
        if right != "admin":
            self.settings.check_exists(queue)

    def may_browse(self, identity: str, queue: str) -> bool:
        """Every identity may browse its own temporary queues."""
        if queue.startswith(destinations.TEMPORARY):
            owner, _, _ = destinations.queue(queue).owner.rpartition("-")
            if owner == identity:
                return True
        return self.may(identity, "browse", queue)

    def sender_without_echo(self, meta: messages.MessageMeta) -> ClientConnection | None:
        """The sender of a delayed message, if it can publish it without receiving it."""
        if meta.mark is None or meta.origin is None:
            return None
        sender = self.connections.get(self.clients.get(meta.origin, meta.origin))
        return sender if sender is not None and sender.without_echo and sender.origin == meta.origin else None

    def _applied(self, record: ledger.LogRecord | None, sequence: int, placed: journal.Placed) -> None:
        end, before = pages.end(sequence), self.ledger.end
        if record is not None:
            # Not `-` of two keys(), which visits all backlogs for each batch
            new_queues = [key for key in record.stored if key not in self.ledger.backlogs]
            ended = self.ledger.apply(record, end)
            self.on_record(record)
            for source in ended:
                self.on_ended(source)
            self.records += 1
            for key in new_queues:  # the log contains no earlier messages of it
                self.ledger.backlogs[key].start_empty(before)
        self.ledger.reach(sequence, end)
        self.on_stored(placed)

    # Tasks. The first failure ends the dispatcher.

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.tasks.spawn("task", work, on_failure=tasks.OnFailure.FATAL)

    def _end_with(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def _is_interruption(self, error: BaseException) -> bool:
        """Such as a lost connection or a new owner of the log: the next dispatcher reads the log again."""
        if isinstance(error, errors.MusterError):
            self._end_with(error)
            return True
        return False

    async def stop(self) -> None:
        await self.tasks.close()
        self.journal.abandon(errors.NotConnected("the dispatcher has stopped"))

    def reply_when_done(
        self, work: Coroutine[Any, Any, protocol.DispatcherReply], reply: ReplyCallback
    ) -> None:
        """Reply with the result of ``work``, or with its error."""

        async def run() -> None:
            try:
                reply(await work)
            except errors.MusterError as error:
                reply(protocol.failed(error))

        self.spawn(run()).add_done_callback(lambda _: work.close())  # it may be cancelled before it begins

    async def store(self, item: journal.JournalItem) -> list[int]:
        """Add an item to the log and wait until it is stored; returns the number of each copy."""
        done: asyncio.Future[list[int]] = self.loop.create_future()

        def stored(numbers: list[int]) -> None:
            if not done.done():
                done.set_result(numbers)

        def failed(error: errors.MusterError) -> None:
            if not done.done():  # this task may be cancelled when the dispatcher stops
                done.set_exception(error)

        item.stored, item.failed = stored, failed
        self.journal.add(item)
        return await done
