"""The writer of the log: everything to be stored at one time becomes a page.

A `JournalItem` is stored atomically; as many as fit share a page, and thereby a sync, whatever their
destinations. An item that is larger than a page, or has chunks with pages of their own, is an atomic batch.
Each batch expects the log to end where the last batch ended. If another process has written a page since, it
is the new owner, and the batch is rejected. This is the fencing. What is no page is skipped.

After a batch is stored, its record and all its messages are reported in one step (`OnBatch`), before the
callbacks of its items are called. Nothing else runs in between, so the end of the log is never known before
the messages that precede it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from muster.bus import api
from muster.core import errors
from muster.message import destinations, messages, partitions
from muster.message.dispatcher.log import ledger, pages, shared_pages

BATCH = 1000  # pages in a batch: the broker's limit
STORE_S = 10.0  # then the outcome is unknown, and the log is read again
QUEUED_MAX = 50_000
QUEUED_BYTES_MAX = 64 << 20


Stored = Callable[[list[int]], None]  # called with the number of each copy, 0 if it is not stored
Placed = list[tuple["JournalMessage", int]]  # copies in item order, with their numbers
#: Record of a batch, last sequence of the log after it, and its messages.
OnBatch = Callable[[ledger.LogRecord | None, int, Placed], None]


@dataclass(slots=True)
class JournalMessage:
    """A message to be stored. ``subject`` None: it is published to current subscribers only.

    ``deferred``: it is not in its destination yet, but delayed or on its way to another partition.
    """

    destination: destinations.Destination
    meta: messages.MessageMeta
    raw: str
    data: bytes
    subject: str | None
    republish: bool = False
    deferred: bool = False


@dataclass(slots=True)
class JournalItem:
    """``page``: stored as it is, with this subject; the item has nothing else, and its number is that of the
    page."""

    copies: list[JournalMessage] = field(default_factory=list)
    record: ledger.LogRecord = field(default_factory=ledger.LogRecord)
    stored: Stored = lambda _: None
    failed: Callable[[errors.MusterError], None] = lambda _: None
    closes_batch: bool = False  # no later message may be in the same batch
    page: tuple[str, pages.MessagePage] | None = None
    size: int = field(init=False)
    bytes: int = field(init=False)
    record_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(copy.subject is not None for copy in self.copies)
        self.bytes = sum(len(copy.data) + len(copy.raw) for copy in self.copies)
        self.record_bytes = ledger.estimate_bytes(self.record)


class Journal:
    """``head`` is the last sequence of the log, which is known because no other process writes."""

    def __init__(
        self,
        stream: api.Stream,
        head: int,
        on_batch: OnBatch,
        log_subjects: partitions.LogSubjects | None = None,
        shared: shared_pages.SharedPages | None = None,
        foreign: set[int] | None = None,
    ) -> None:
        """``foreign``: the sequences of messages that are no pages."""
        self._stream = stream
        self._subjects = log_subjects or partitions.LogSubjects()
        self._shared = shared or shared_pages.SharedPages(self._subjects.group)
        self._foreign = set() if foreign is None else foreign
        self._name = secrets.token_hex(6)
        self._on_batch = on_batch
        self.head = head
        self.batches = 0
        self.bytes = 0  # of waiting items
        self._items: deque[JournalItem] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_full(self) -> bool:
        return len(self._items) > QUEUED_MAX or self.bytes > QUEUED_BYTES_MAX

    def add(self, item: JournalItem) -> None:
        self._items.append(item)
        self.bytes += item.bytes
        self._wake.set()

    def abandon(self, error: errors.MusterError) -> None:
        while self._items:
            self._items.popleft().failed(error)

    async def run(self) -> None:
        """Run until the log has another owner or fails; raises the error."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._items:
                await self._store(self._next_batch())

    def _next_batch(self) -> list[JournalItem]:
        taken: list[JournalItem] = []
        size = total = records = 0
        closed = False  # to messages: a subscription requested before them must receive them
        while self._items:
            item = self._items[0]
            if taken and (
                size + item.size > pages.PLACES
                or total + item.bytes > pages.PAGE_BYTES
                or records + item.record_bytes > pages.PAGE_BYTES
                or (closed and item.copies)
                or item.page is not None
            ):
                break
            taken.append(self._items.popleft())
            size += item.size
            total += item.bytes
            records += item.record_bytes
            self.bytes -= item.bytes
            closed = closed or item.closes_batch
            if item.page is not None:
                break
        return taken

    async def _store(self, items: list[JournalItem]) -> None:
        record = _merge_records([item.record for item in items])
        record_bytes = sum(item.record_bytes for item in items)
        batch, places = _build_pages(
            [copy for item in items for copy in item.copies], record, record_bytes, self._subjects
        )
        if (page := items[0].page) is not None:
            batch, places = [page], []
        try:
            if len(batch) > BATCH:
                raise errors.LimitExceeded(
                    f"{len(batch)} pages in one transaction: the maximum is {BATCH}; use several transactions"
                )
            last = await self._publish(batch) if batch else self.head
        except (errors.LimitExceeded, errors.InvalidInput) as error:
            if len(items) > 1:  # one of them is invalid, or some would fit: retry in parts
                for part in _split_items(items):
                    await self._store(part)
                return
            items[0].failed(error)
            return
        except errors.MusterError as error:
            # The log has another owner, or the outcome is unknown: the next dispatcher reads the log.
            for item in items:
                item.failed(errors.NotConnected(f"the log could not be written: {error.message}"))
            raise
        first = last - len(batch) + 1
        self.head = last
        self.batches += 1
        for sequence, (subject, written) in enumerate(batch, first):
            if subject == self._subjects.shared:
                self._shared.stored(sequence, written.parts)
        numbers = [pages.number(first + at, place) if at >= 0 else 0 for at, place in places]
        if page is not None:
            items[0].stored([pages.number(first, 0)])
        copies = [copy for item in items for copy in item.copies]
        self._on_batch(record, last, list(zip(copies, numbers, strict=True)))
        at = 0
        for item in items:
            item.stored(numbers[at : at + len(item.copies)])
            at += len(item.copies)

    async def _publish(self, batch: list[tuple[str, pages.MessagePage]]) -> int:
        """The sequence of its last page."""
        while True:
            head = self.head
            try:
                return await self._stream.publish_batch(
                    [
                        api.OutgoingMessage(
                            subject,
                            pages.encode(page),
                            # With ids, a batch can be published again if its acknowledgement is lost.
                            message_id=f"{self._name}-{head}-{place}",
                            expected_last_sequence=head if not place else None,
                        )
                        for place, (subject, page) in enumerate(batch)
                    ],
                    timeout_s=STORE_S,
                )
            except errors.Conflict:
                async for message in self._stream.read(head + 1, gaps=True):
                    if pages.is_page(message.data):
                        raise
                    self.head = message.sequence
                    self._foreign.add(message.sequence)
                if self.head == head:
                    raise


def _split_items(items: list[JournalItem]) -> list[list[JournalItem]]:
    """Parts to retry separately: acknowledgements, which need little room, and messages; or two halves."""
    without = [item for item in items if not item.copies]
    if 0 < len(without) < len(items):
        return [without, [item for item in items if item.copies]]
    middle = len(items) // 2
    return [items[:middle], items[middle:]]


def count_by_queue(copies: Iterable[JournalMessage]) -> dict[str, int]:
    """Number of stored messages by queue."""
    counts: dict[str, int] = {}
    for copy in copies:
        if copy.destination.is_queue and not copy.deferred:
            key = ledger.queue_key(copy.destination.name)
            counts[key] = counts.get(key, 0) + 1
    return counts


def _build_pages(
    copies: list[JournalMessage],
    record: ledger.LogRecord | None,
    record_bytes: int,
    log_subjects: partitions.LogSubjects,
) -> tuple[list[tuple[str, pages.MessagePage]], list[tuple[int, int]]]:
    """The pages of a batch by subject, and for each copy its page (-1: none) and its place.

    Messages of one destination are together; a page that has those of several, or delayed ones, is a shared
    page. Each chunk of a checkpoint or a large body has its own page. The record, which must remain until the
    next checkpoint, is never on such a page, nor on a page that would become too large for the broker.
    """
    bound: list[tuple[str, pages.MessagePage]] = []
    places: list[tuple[int, int]] = [(-1, 0)] * len(copies)
    by_subject: dict[str, list[int]] = {}
    for at, copy in enumerate(copies):
        if copy.subject is None:
            continue
        if log_subjects.has_own_page(copy.subject):
            places[at] = (len(bound), 0)
            held = [pages.PagedMessage(copy.raw, copy.data)]
            bound.append((copy.subject, pages.MessagePage(held=held)))
        else:
            by_subject.setdefault(copy.subject, []).append(at)
    own = len(bound)
    used = pages.PAGE_BYTES
    for subject, of_subject in by_subject.items():
        size = len(subject)
        for at in of_subject:
            copy = copies[at]
            size += len(copy.data) + len(copy.raw) + 16
            page = bound[-1][1] if len(bound) > own else None
            if page is None or used + size > pages.PAGE_BYTES or len(page.held) >= pages.PLACES:
                used, page = 0, pages.MessagePage(held=[], parts=[])
                bound.append((subject, page))
            used, size = used + size, 0
            if page.parts and page.parts[-1][0] == subject:
                page.parts[-1] = (subject, page.parts[-1][1] + 1)
            else:
                page.parts.append((subject, 1))
            places[at] = (len(bound) - 1, len(page.held))
            page.held.append(pages.PagedMessage(copy.raw, copy.data))
    for at, (_, page) in enumerate(bound[own:], own):
        if len(page.parts) > 1 or page.parts[0][0] == log_subjects.delay:
            bound[at] = (log_subjects.shared, page)
        else:
            page.parts = []
    if record is not None:
        if len(bound) == own or used + record_bytes > pages.STORED_BYTES_MAX:
            bound.append((log_subjects.record, pages.MessagePage()))
        bound[-1][1].record = record
    is_shared = [subject == log_subjects.shared for subject, _ in bound]
    return bound, [(at, place + pages.SHARED if at >= 0 and is_shared[at] else place) for at, place in places]


def _merge_records(records: list[ledger.LogRecord]) -> ledger.LogRecord | None:
    if len(records) == 1:
        total = records[0]
    else:
        total = ledger.LogRecord()
        consumed: dict[str, bool] = {}  # the latest state
        for record in records:
            for key, sequences in record.acked.items():
                total.acked.setdefault(key, []).extend(sequences)
            for key, count in record.stored.items():
                total.stored[key] = total.stored.get(key, 0) + count
            total.subscribed += record.subscribed
            total.unsubscribed += record.unsubscribed
            total.last_works.update(record.last_works)
            total.dropped += record.dropped
            total.bodies += record.bodies
            total.deleted_bodies += record.deleted_bodies
            total.transferred.update(record.transferred)
            total.received.update(record.received)
            total.prepared += record.prepared
            total.resolved += record.resolved
            total.decided.update(record.decided)
            total.completed += record.completed
            for key in record.consumed:
                consumed[key] = True
            for key in record.idle:
                consumed[key] = False
        total.consumed = [key for key, last in consumed.items() if last]
        total.idle = [key for key, last in consumed.items() if not last]
    return total if total != ledger.LogRecord() else None
