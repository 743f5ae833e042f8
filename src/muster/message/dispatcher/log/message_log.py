"""The log of a partition, and what its dispatcher knows of it: the ledger, the index of pages, the room."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from muster.bus import api
from muster.core import errors
from muster.message import errors as message_errors
from muster.message import partitions, settings
from muster.message.dispatcher import backlog
from muster.message.dispatcher.log import journal, ledger, log_reader, pages, shared_pages

FULL: Final = 0.8


class MessageLog:
    def __init__(
        self,
        stream: api.Stream,
        epoch: int,
        message_settings: settings.MessageSettings,
        *,
        max_bytes: int = 1 << 30,
        partition: int = partitions.HOME,
        partition_count: int = 1,
    ) -> None:
        self.stream = stream
        self.epoch = epoch
        self.max_bytes = max_bytes
        self.partition = partition
        self.partition_count = partition_count
        self.subjects = partitions.LogSubjects(partition)
        self.ledger = ledger.Ledger(
            lambda key: ledger.settings_of(message_settings, key).retry(message_settings.max_deliveries)
        )
        self.shared_pages = shared_pages.SharedPages(self.subjects.group)
        self.foreign: set[int] = set()  # sequences of messages that are no pages, to be deleted
        self.journal = journal.Journal(
            stream, 0, self._applied, self.subjects, self.shared_pages, self.foreign
        )
        self.reader = log_reader.LogReader(
            stream, self.subjects, self.shared_pages, lambda: self.journal.head, self.foreign
        )
        self.patterns = ledger.TopicPatternIndex()  # of the topics that are stored
        self.records = 0  # records since the last checkpoint
        self.checkpoint_head = 0  # the last checkpoint is the sum up to here
        self.used_bytes = 0  # size of the log when last read, plus later sends
        self._now_s = asyncio.get_running_loop().time
        self._refused_at = -math.inf  # last time a message was rejected for lack of room
        # Called when messages are in the log
        self.on_stored: Callable[[journal.Placed], None] = lambda _: None
        self.on_record: Callable[[ledger.LogRecord], None] = lambda _: None
        self.on_moved: Callable[[list[log_reader.Numbered]], None] = lambda _: None  # to other pages
        self.on_ended: Callable[[backlog.Backlog], None] = lambda _: None  # it was replaced or deleted

    def check_is_here(self, queue: str) -> None:
        if partitions.of_queue(queue, self.partition_count) != self.partition:
            raise errors.InvalidInput(f"the queue {queue!r} is in another partition")

    # Room.

    def has_room(self, size: int = 0) -> bool:
        """Whether there is room for messages. They are rejected before the log is full, because
        acknowledgements need room too.
        """
        return self.used_bytes + size <= FULL * self.max_bytes

    def is_short_of_room(self, within_s: float) -> bool:
        """Whether the log is full, or a message was recently rejected for lack of room."""
        return not self.has_room() or self._now_s() - self._refused_at < within_s

    def check_room(self, size: int) -> None:
        """Reject messages of this size if they do not fit, or if too many wait already."""
        if not self.has_room(size):
            self._refused_at = self._now_s()
            raise message_errors.LogFull(
                "the log of messages is full: consume some, or raise retention.messages.max_bytes"
            )
        if self.journal.is_full:
            raise errors.Overloaded("too many messages wait to be stored", retry_after_s=0.1)

    # Writing.

    async def store(self, item: journal.JournalItem) -> list[int]:
        """Add an item to the log and wait until it is stored; returns the number of each copy."""
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

        def stored(numbers: list[int]) -> None:
            if not done.done():
                done.set_result(numbers)

        def failed(error: errors.MusterError) -> None:
            if not done.done():  # this task may be cancelled when the dispatcher stops
                done.set_exception(error)

        item.stored, item.failed = stored, failed
        self.journal.add(item)
        return await done

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
                if key in self.ledger.backlogs:  # or it was deleted by the same record
                    self.ledger.backlogs[key].start_empty(before)
        self.ledger.reach(sequence, end)
        self.on_stored(placed)
