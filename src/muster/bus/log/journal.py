"""Decides what an owned log appends, recognises and trims. Pure: no stream, no clock.

Waiting transactions become one page: whatever arrives while a page is being stored waits for the next. So
the state is exact whenever a page is made, and a page may contain, before its new records, the live ones of
the oldest pages: these are then removed. A log is trimmed by its own appends, in proportion to them, until it
is at most `TRIM_FACTOR` times as large as what is live, and smaller near the budget.

Invariant: ``pages`` are the stored pages in order, and each record that is live is in one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from muster.bus.log import pages
from muster.core import errors

TRIM_FACTOR = 3
TRIM_BYTES_MIN = 4 << 20  # a smaller log is not trimmed
TRIM_BATCH_BYTES = 256 << 10  # of the oldest pages that are rewritten with one page
WINDOW_MS = 120_000  # how long requests are recognised, unless a service needs longer
REQUESTS_MAX = 100_000


class LogState(Protocol):
    """The state in memory."""

    def apply(self, record: pages.OwnedRecord, version: int, position: int) -> None:
        """A stored record; of one that was rewritten only the position is new."""
        ...

    def holds(self, key: bytes, position: int) -> bool:
        """Whether the record of ``key`` at ``position`` is its present one."""
        ...

    def reset(self) -> None:
        """Forget everything: the log is read from its beginning."""
        ...

    @property
    def live_bytes(self) -> int: ...


class StoredPage(msgspec.Struct, frozen=True):
    """``body``: the lowest sequence of its body; 0 without one."""

    sequence: int
    size: int
    body: int = 0


@dataclass(slots=True)
class OldestPages:
    """The records of the ``trimmed`` pages, read for trimming, with their positions."""

    trimmed: Sequence[StoredPage]
    records: deque[tuple[int, pages.OwnedRecord]]
    requests: list[pages.LogRequest]


class LogTransaction:
    """Records that are stored together, or not at all."""

    __slots__ = ("body", "is_large", "known", "records", "request", "size")

    def __init__(
        self,
        records: Sequence[pages.OwnedRecord],
        request: pages.LogRequest | None = None,
        known: Sequence[pages.LogRequest] = (),
    ) -> None:
        if len(records) >= pages.RECORDS_MAX:
            raise errors.LimitExceeded(
                f"a transaction of {len(records):,} records: the maximum is {pages.RECORDS_MAX - 1:,}"
            )
        self.records = list(records)
        self.request = request
        self.known = list(known)  # requests of trimmed pages
        self.size = sum(record.size for record in records)
        self.is_large = self.size > pages.PAGE_BYTES  # its records are stored as a body
        self.body: list[int] = []  # where they are
        self.size += sum(each.size for each in self.known) + (request.size if request is not None else 0)


class LogJournal:
    """``bytes_max``: the budget. Deletions are appended up to it; other records leave ``reserve_bytes``."""

    def __init__(
        self, state: LogState, *, bytes_max: int, reserve_bytes: int, window_ms: int = WINDOW_MS
    ) -> None:
        self.state = state
        self.log = ""
        self.epoch = 0
        self.last = 0  # the sequence of the last page
        self.end = 0  # of the last message: it may be none of the log
        self.bytes = 0
        self.pages: deque[StoredPage] = deque()
        self._oldest_read = 0
        self._first = 0  # as the last page names it; 0: not known
        self.requests: dict[str, pages.LogRequest] = {}
        self._requests_bytes = 0
        self.last_request_ms = 0  # when the last one was executed, in the log's time
        self._bytes_max = bytes_max
        self._reserve_bytes = reserve_bytes
        self._window_ms = window_ms

    # Reading.

    def follows(self, page: pages.OwnedPage) -> bool:
        """Whether ``page`` is the next one. Otherwise pages were trimmed before they were read, or the log
        was restored from a backup without those that were read; it is read from its beginning."""
        return not self.last or (page.previous == self.last and self.log in (page.log, page.former))

    @property
    def missing(self) -> int:
        """The first page, if it was stored behind the last trimmed one and not read: it is lost. 0: none."""
        return self._first if self._oldest_read > self._first > 0 else 0

    def restart(self) -> None:
        self.state.reset()
        self.log, self.epoch, self.last, self.end, self.bytes = "", 0, 0, 0, 0
        self.last_request_ms = self._first = 0
        self.pages.clear()
        self.requests.clear()
        self._requests_bytes = 0

    def skip(self, sequence: int, size: int) -> None:
        """A message that is no page of the log. It takes room until it is trimmed."""
        self.end = sequence
        self._add(StoredPage(sequence, size))

    def _add(self, page: StoredPage) -> None:
        if not self.pages:
            self._oldest_read = page.sequence
        self.pages.append(page)
        self.bytes += page.size

    def apply(
        self, sequence: int, size: int, page: pages.OwnedPage, body: Sequence[pages.OwnedRecord]
    ) -> None:
        """The next page. ``body``: its records, if they are in other messages."""
        if page.epoch < self.epoch:
            raise errors.InvariantViolation(
                f"page {sequence} has epoch {page.epoch}, after {self.epoch}: two owners wrote at once"
            )
        self.log, self.epoch, self.last, self.end = page.log, page.epoch, sequence, sequence
        size += sum(record.size for record in body)
        self._add(StoredPage(sequence, size, min(page.body, default=0)))
        self._first = page.first if page.leaves_first else 0
        while self.pages[0].sequence < page.first:
            self.bytes -= self.pages.popleft().size
        for place, record in enumerate(body or page.records):
            position = pages.position(sequence, place)
            self.state.apply(record, record.version or position, position)
        for request in page.requests:
            if request.position < pages.RECORDS_MAX:
                at = pages.position(sequence, request.position)
                request = msgspec.structs.replace(request, position=at)
            if request.id not in self.requests:
                self._requests_bytes += request.size
            self.requests[request.id] = request
            self.last_request_ms = max(self.last_request_ms, request.at_ms)
        while len(self.requests) > REQUESTS_MAX:
            self._forget(next(iter(self.requests.values())))

    def _forget(self, request: pages.LogRequest) -> None:
        del self.requests[request.id]
        self._requests_bytes -= request.size

    # Appending.

    def executed(self, request: str, now_ms: int) -> int | None:
        """The position of the request with this id, if it was executed lately."""
        while self.requests:
            oldest = next(iter(self.requests.values()))
            if now_ms - oldest.at_ms <= self._window_ms:
                break
            self._forget(oldest)
        known = self.requests.get(request)
        return None if known is None else known.position

    def check_room(self, transaction: LogTransaction, waiting_bytes: int) -> None:
        room = self._bytes_max - self.bytes - waiting_bytes
        if any(record.value is not None for record in transaction.records):
            room -= self._reserve_bytes
        if transaction.size + pages.OVERHEAD_BYTES > room:
            raise errors.LimitExceeded(
                f"no room for {transaction.size} bytes: the log uses {self.bytes} of {self._bytes_max}",
                hint="delete what is not needed, or raise the budget of the log",
            )

    def first_page(self, oldest: OldestPages | None = None) -> int:
        """The first page that is not trimmed once the last records of ``oldest`` are rewritten; 0: none."""
        trimmed = 0 if oldest is None or oldest.records else len(oldest.trimmed)
        return self.pages[trimmed].sequence if self.pages else 0

    def next_page(
        self, waiting: deque[LogTransaction], oldest: OldestPages | None
    ) -> tuple[pages.OwnedPage, list[tuple[LogTransaction, int]]]:
        """A page of the first ones of ``waiting``, which are removed, each with the place of its last record.
        A large transaction has a page of its own. ``oldest``: the pages whose records are the first of them.
        """
        first = self.first_page(oldest)
        page = pages.OwnedPage(self.log, self.epoch, self.last, [], [], [], first, leaves_first=True)
        taken: list[tuple[LogTransaction, int]] = []
        size = 0
        while waiting:
            following = waiting[0]
            if taken and (following.is_large or size + following.size > pages.PAGE_BYTES):
                break
            taken.append((waiting.popleft(), 0))
            size += following.size
            (page.body if following.is_large else page.records).extend(
                following.body if following.is_large else following.records  # type: ignore[arg-type]
            )
            count = len(following.records) if following.is_large else len(page.records)
            place = max(0, count - 1)
            taken[-1] = following, place
            page.requests.extend(following.known)
            if following.request is not None:
                page.requests.append(msgspec.structs.replace(following.request, position=place))
            if following.is_large:
                break
        return page, taken

    # Trimming.

    @property
    def is_trim_due(self) -> bool:
        live = self.state.live_bytes + self._requests_bytes
        # What is not live takes at most half of the room in the budget.
        most = min(TRIM_FACTOR * live, (live + self._bytes_max - self._reserve_bytes) // 2)
        return self.bytes > max(TRIM_BYTES_MIN, most) and self.pages[0].sequence != self.last

    def oldest_pages(self) -> list[StoredPage]:
        """The pages to rewrite next; never the last one."""
        chosen: list[StoredPage] = []
        size = 0
        for page in self.pages:
            size += page.size
            if page.sequence == self.last or (chosen and size > TRIM_BATCH_BYTES):
                break
            chosen.append(page)
        return chosen

    def rewrite(self, oldest: OldestPages, now_ms: int) -> LogTransaction:
        """The next live records of ``oldest``, as many as fit into a page. To be stored next: what is live
        may change with each page."""
        records: list[pages.OwnedRecord] = []
        size = 0
        while oldest.records:
            position, record = oldest.records[0]
            if self.state.holds(record.key, position):
                if records and size + record.size > pages.PAGE_BYTES:
                    break
                size += record.size
                records.append(
                    record if record.version else msgspec.structs.replace(record, version=position)
                )
            oldest.records.popleft()
        known = [request for request in oldest.requests if now_ms - request.at_ms <= self._window_ms]
        oldest.requests = []
        return LogTransaction(records, known=known)

    def first_body(self) -> int:
        """The lowest sequence of a body that a page names; 0: none does."""
        return next((page.body for page in self.pages if page.body), 0)
