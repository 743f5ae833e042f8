"""Queues are divided into partitions: each has its own log, lease and dispatcher.

The name of a queue determines its partition, so that every process computes it without asking. Temporary
queues are in the partition of the connection that owns them. Topics and durable subscriptions are in
partition 0: a message is stored once for all subscriptions, and in one order.

The number of partitions is fixed when the first dispatcher of a domain creates the log (docs/decisions/0030).
"""

from __future__ import annotations

import functools
import os
import socket
import zlib
from typing import Final

from muster.core import subjects
from muster.message import destinations

PART: Final = "message"
HOME: Final = 0  # topics, durable subscriptions and client ids
PARTITIONS_MAX: Final = 8
QUEUE_MARK: Final = "q:"  # begins the key of the backlog of a queue


def stream(partition: int) -> str:
    return f"messages-{partition}" if partition else "messages"


def lease(partition: int) -> str:
    return f"message.dispatcher.{partition}" if partition else "message.dispatcher"


def level(partition: int) -> tuple[str, ...]:
    """The last level of subjects of a partition."""
    return (str(partition),) if partition else ()


def owner() -> str:
    """This process, as the owner of a partition."""
    return f"{socket.gethostname()}:{os.getpid()}"


@functools.lru_cache(8192)
def of_queue(name: str, count: int) -> int:
    queue = destinations.queue(name)
    return zlib.crc32((queue.owner if queue.is_temporary else name).encode("utf-8", "replace")) % count


def of_destination(destination: destinations.Destination, count: int) -> int:
    return of_queue(destination.name, count) if count > 1 and destination.is_queue else HOME


def of_key(key: str, count: int) -> int:
    """The partition of a backlog."""
    is_queue = count > 1 and key.startswith(QUEUE_MARK)
    return of_queue(key.removeprefix(QUEUE_MARK), count) if is_queue else HOME


class LogSubjects:
    """The subjects of the log of one partition."""

    def __init__(self, partition: int = HOME) -> None:
        self._levels = (f"p{partition}",) if partition else ()
        self._base = self._subject("")
        self.delay = self._subject("delay")
        self.record = self._subject("record")
        self.checkpoint = self._subject("checkpoint")
        self.layout = self._subject("layout")
        self.shared = self._subject("shared")
        self.sorted_prefix = f"{self._subject('sorted')}."
        self.body_prefix = f"{self._subject('body')}."
        self.transfer_prefix = f"{self._subject('transfer')}."
        self.topic_prefix = f"{self._subject(subjects.TOPIC_PREFIX)}."
        # Listed by name: the audit stream stores the decisions of all components.
        self.all = (
            self.delay,
            self.record,
            self.checkpoint,
            self.layout,
            self.shared,
            f"{self.sorted_prefix}>",
            f"{self.body_prefix}>",
            f"{self.transfer_prefix}>",
            self._subject("queue", ">"),
            f"{self.topic_prefix}>",
        )

    def _subject(self, *levels: str) -> str:
        return subjects.log_subject(PART, *self._levels, *levels)

    def queue(self, name: str) -> str:
        return self._subject("queue", destinations.token(name))

    def of_queue(self, subject: str) -> str:
        """The name of the queue of a log subject; see `queue`."""
        return destinations.of_token(subject.removeprefix(self._subject("queue", "")))

    def topic(self, subject: str) -> str:
        """For a users' subject or pattern."""
        return self._subject(subject)

    def of_topic(self, subject: str) -> str:
        """The users' subject of a log subject; see `topic`."""
        return subject.removeprefix(self._base)

    def body(self, body: str) -> str:
        """For the chunks of a large body."""
        return f"{self.body_prefix}{subjects.token(body)}"

    def transfer(self, partition: int) -> str:
        """For messages on their way to another partition."""
        return f"{self.transfer_prefix}{partition}"

    def group(self, subject: str) -> str:
        """What is sorted together: the messages of one queue or transfer, or of all topics."""
        return self.topic_prefix[:-1] if subject.startswith(self.topic_prefix) else subject

    def sorted(self, group: str) -> str:
        """For messages of shared pages that were sorted."""
        return f"{self.sorted_prefix}{group.removeprefix(self._base)}"

    def has_own_page(self, subject: str) -> bool:
        return subject == self.checkpoint or subject.startswith(self.body_prefix)
