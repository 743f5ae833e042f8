"""An owned log: the shell that stores, reads and follows its pages.

    log = OwnedLog(stream, "muster.manage.log.registry", state)
    await log.start()                       # a standby: follows
    async with await all_leases.acquire("manage.registry") as lease:
        await log.own(lease.epoch)          # reads to the end, and writes the first page
        position = await log.append([(b"key", b"value")], request="id")

One page is stored at a time, and fenced by the sequence of the one before it. So after the first page of a
new owner each append of the former one fails; the lease only decides who tries. An append whose outcome is
unknown ends the ownership as well: the owner has to read the log again.

Others can put messages on the subject of the pages, though no permission allows it: the broker sends its
replies to the subject that a client names. What is no page is skipped by all readers, and trimmed; it costs
the owner another attempt, not the ownership.

`confirm` proves that the log has no newer owner and no newer page: a read after it is linearizable, without
clocks. All that wait share an empty page.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from muster.bus import api
from muster.bus.log import journal as journal_
from muster.bus.log import pages
from muster.core import errors
from muster.core.telemetry import log
from muster.supervision import tasks

events = log.EventLog("bus")

WAITING_BYTES_MAX = 64 << 20
PURGE_PAGES = 64  # trimmed pages that are removed together,
PURGE_SHARE = 16  # or this part of the budget
TRIM_SHARE = 2  # of the size of a large transaction: what is trimmed before it, in pages of their own
CHECK_S = 1.0  # how often a follower compares its position with the end of the log
TIMEOUT_S = 10.0
RETRY_S = 0.25


class NotOwner(errors.Unavailable):
    """This process does not own the log, or not any more: ask the owner."""

    code = "not-owner"


class LogDamaged(errors.MusterError):
    """A part of the log that was acknowledged is lost."""

    code = "log-damaged"


class OwnedLog:
    """``state`` is changed here only, by stored records. ``bytes_max``: the budget; ``reserve_bytes`` of it
    are for deletions. ``window_ms``: how long requests are recognised. ``on_applied`` is called after each
    page with its last position."""

    def __init__(
        self,
        stream: api.Stream,
        subject: str,
        state: journal_.LogState,
        *,
        bytes_max: int = 1 << 30,
        reserve_bytes: int = 1 << 20,
        window_ms: int = journal_.WINDOW_MS,
        on_applied: Callable[[int], None] = lambda position: None,
        now_ms: Callable[[], int] = lambda: int(asyncio.get_running_loop().time() * 1000),
    ) -> None:
        self._stream = stream
        self._pages_subject = f"{subject}.page"
        self._body_subject = f"{subject}.body"
        self._journal = journal_.LogJournal(
            state, bytes_max=bytes_max, reserve_bytes=reserve_bytes, window_ms=window_ms
        )
        self._on_applied = on_applied
        self._clock_ms = now_ms
        self._ahead_ms = 0  # of the log's time
        self._tasks = tasks.TaskSupervisor(f"log {subject}")
        self._following: asyncio.Task[None] | None = None
        self._owner = False
        self._waiting: deque[journal_.LogTransaction] = deque()
        self._waiting_bytes = 0
        self._futures: dict[journal_.LogTransaction, asyncio.Future[int]] = {}
        self._pending: dict[str, asyncio.Future[int]] = {}  # by the id of their request
        self._confirming: asyncio.Future[int] | None = None
        self._storing: asyncio.Task[None] | None = None
        self._oldest: journal_.OldestPages | None = None
        self._purge_bytes = bytes_max // PURGE_SHARE
        self._trimmed, self._trimmed_bytes = 0, 0  # pages that were rewritten and not removed yet
        self._trimmed_first = 0  # bytes of those before the transaction that waits
        self._current_at = 0.0  # when the state was known to be current
        self._incarnation = (0, "")  # of the stream: another one has other pages at the same sequences
        self._stopped = False
        self.skipped = 0  # messages that are no pages
        self.lost = asyncio.Event()  # the ownership has ended
        self.lost_because = ""

    def __repr__(self) -> str:
        role = "owner" if self._owner else "follower"
        return f"<log {self._pages_subject} {role} at {self._journal.last} epoch {self._journal.epoch}>"

    # Reading.

    @property
    def position(self) -> int:
        """After the last record that is applied."""
        return pages.position(self._journal.last + 1)

    @property
    def age_s(self) -> float:
        """How old the state can be."""
        if self._owner:
            return 0.0
        return asyncio.get_running_loop().time() - self._current_at

    @property
    def stored_bytes(self) -> int:
        return self._journal.bytes

    @property
    def is_owned(self) -> bool:
        return self._owner

    @property
    def epoch(self) -> int:
        """Of the last page."""
        return self._journal.epoch

    def executed(self, request: str) -> int | None:
        """The position of the request with this id, if it was executed in the last minutes."""
        return self._journal.executed(request, self._log_ms()) if request else None

    async def start(self) -> None:
        """Read what is stored, and follow it."""
        await self._catch_up()
        self._tasks.loop("check", self._check)
        self._follow_on()

    async def stop(self) -> None:
        self._stopped = True
        self._give_up("stopped")
        await self._tasks.close()
        self._settle([(sent, 0) for sent in self._futures], _in_doubt(errors.TimedOut("stopped")))

    def _follow_on(self) -> None:
        self._following = self._tasks.loop("follow", self._follow)

    async def _follow(self) -> None:
        while True:
            try:
                await self._catch_up()
                first = self._journal.end + 1
                async with self._stream.follow(first, subject=self._pages_subject) as following:
                    async for message in following:
                        if not await self._apply(message):
                            break
            except errors.Dropped:  # trimmed before it was read
                self._journal.restart()
            except errors.Unavailable:
                await asyncio.sleep(RETRY_S)

    async def _check(self) -> None:
        """Note when the state is current."""
        while True:
            if not self._owner:
                asked_at, known = asyncio.get_running_loop().time(), self._journal.end
                try:
                    last = await self._stream.last_for(self._pages_subject)
                except errors.Unavailable:
                    pass
                else:
                    end = last.sequence if last is not None else 0
                    if end < known and self._following is not None:  # restored from a backup
                        self._following.cancel()
                        self._follow_on()
                    elif end <= self._journal.end:
                        self._current_at = asked_at
            await asyncio.sleep(CHECK_S)

    async def _catch_up(self) -> None:
        while True:
            asked_at = asyncio.get_running_loop().time()
            stream = await self._stream.state()
            former, self._incarnation = self._incarnation, (stream.created_ns, stream.restored)
            if former != self._incarnation or stream.last_sequence < self._journal.end:
                self._journal.restart()  # or its end is lost, which is damaged or was not synced
            first = self._journal.end + 1 if self._journal.end else stream.first_sequence
            try:
                async for message in self._stream.read(first, subject=self._pages_subject):
                    if not await self._apply(message):
                        break
                else:
                    if not (missing := self._journal.missing):
                        self._current_at = asked_at
                        return
                    self._journal.restart()
                    await self._check_first(missing)
            except errors.Dropped:
                self._journal.restart()

    async def _apply(self, message: api.StoredMessage) -> bool:
        """Apply a page that was read. False: the log has to be read from its beginning."""
        if message.sequence <= self._journal.end:
            return True
        page = self._page_in(message)
        if page is None:
            return True
        if not self._journal.follows(page):
            if page.log == self._journal.log:
                await self._check_trimmed(self._journal.last, f"page {page.previous}")
            events.info("log-read-again", log=self._pages_subject, at=message.sequence)
            self._journal.restart()
            return False
        try:
            body = await self._body(page)
        except errors.NotFound:
            await self._check_trimmed(message.sequence, f"the body of page {message.sequence}")
            self._journal.restart()
            return False
        self._apply_page(message.sequence, message.data, page, body)
        return True

    async def _check_trimmed(self, before: int, missing: str) -> None:
        """The oldest are removed first: what is missing behind a page that is still stored was lost."""
        try:
            await self._stream.get(before)
        except errors.NotFound:
            return
        raise self._damaged(missing)

    async def _check_first(self, missing: int) -> None:
        """As `_check_trimmed`, of a page that is not behind another one."""
        last = await self._stream.last_for(self._pages_subject)
        page = pages.page_in(last.data) if last is not None else None
        if page is None or (page.leaves_first and page.first <= missing):
            raise self._damaged(f"page {missing}")

    def _damaged(self, missing: str) -> LogDamaged:
        return LogDamaged(
            f"{missing} of {self._pages_subject} is lost",
            hint="`muster doctor` shows whether another replica has it; else restore a backup",
        )

    def _page_in(self, message: api.StoredMessage) -> pages.OwnedPage | None:
        """The page; a message that is none is skipped. `errors.InvalidInput`: a damaged one."""
        page = pages.page_in(message.data)
        if page is None:
            if not self.skipped:
                events.warning("not-a-page", log=self._pages_subject, sequence=message.sequence)
            self.skipped += 1
            self._journal.skip(message.sequence, _size(message.data))
        return page

    def _apply_page(
        self, sequence: int, data: bytes, page: pages.OwnedPage, body: Sequence[pages.OwnedRecord]
    ) -> None:
        """The state has all of a page. If it refuses one, the log is read from its beginning: the state is
        never one that skipped records."""
        try:
            self._journal.apply(sequence, _size(data), page, body)
            self._on_applied(self.position - 1)
        except BaseException:
            self._journal.restart()
            raise

    async def _body(self, page: pages.OwnedPage) -> list[pages.OwnedRecord]:
        if not page.body:
            return []
        return pages.from_body([(await self._stream.get(sequence)).data for sequence in page.body])

    # Owning.

    async def own(self, epoch: int) -> None:
        """Become the owner: read to the end and fence the former owner. `NotOwner` if the log has a higher
        epoch already."""
        await self.resign()
        if self._storing is not None:  # the log is followed when it ends
            await asyncio.wait([self._storing])
        following, self._following = self._following, None
        try:
            if following is not None:
                following.cancel()
                await asyncio.wait([following])
            await self._fence(epoch)
            await self._purge()
        except BaseException:
            if not (self._stopped or self._owner):
                self._follow_on()
            raise
        self._ahead_ms = self._journal.last_request_ms - self._clock_ms()
        self._owner = True
        self.lost.clear()
        events.info("log-owned", log=self._pages_subject, epoch=epoch, page=self._journal.last)

    def _log_ms(self) -> int:
        """The time of the log, which goes on where the former owner's last request was: requests are
        recognised for their time also if the clocks of two owners differ. For a follower it stands still."""
        return self._clock_ms() + self._ahead_ms if self._owner else self._journal.last_request_ms

    async def _fence(self, epoch: int) -> None:
        while True:
            await self._catch_up()
            journal = self._journal
            if epoch <= journal.epoch:
                raise NotOwner(f"epoch {epoch} of the log has been superseded by {journal.epoch}")
            restored = self._incarnation[1]
            log, former = journal.log, ""
            if not log or log.partition(" ")[2] != restored:
                log, former = f"{secrets.token_hex(8)} {restored}".rstrip(), log
            first = journal.first_page()
            page = pages.OwnedPage(log, epoch, journal.last, first=first, former=former, leaves_first=True)
            try:
                await self._store(page, [])
            except errors.Conflict:
                continue  # the former owner was faster: read its page first
            return

    async def _store(self, page: pages.OwnedPage, body: Sequence[pages.OwnedRecord]) -> int:
        data = pages.encode(page)
        while True:
            end = self._journal.end
            try:
                sequence = await self._stream.publish(
                    self._pages_subject,
                    data,
                    message_id=secrets.token_hex(16),
                    expected_last_subject_sequence=end,
                    timeout_s=TIMEOUT_S,
                )
                break
            except errors.Conflict as conflict:
                # Also if an attempt was stored whose acknowledgement was lost: no page is like another one.
                following = await self._next_page()
                if following is None and self._journal.end > end:
                    continue  # what was stored is no page
                if following is None or following.data != data:
                    if following is None or pages.decode(following.data).previous != page.previous:
                        raise _in_doubt(conflict) from conflict  # the page after ``previous`` was trimmed
                    raise
                sequence = following.sequence
                break
        self._apply_page(int(sequence), data, page, body)
        return int(sequence)

    async def _next_page(self) -> api.StoredMessage | None:
        """The page after those that are known."""
        try:
            async for message in self._stream.read(self._journal.end + 1, subject=self._pages_subject):
                if self._page_in(message) is not None:
                    return message
        except errors.Dropped as error:
            raise _in_doubt(error) from error
        return None

    async def append(self, changes: Iterable[tuple[bytes, bytes | None]], *, request: str = "") -> int:
        """Store the changes, all or none; returns the position of the last.

        A ``request`` that was executed in the last minutes is not executed again: the result is then an
        `api.Duplicate`. `NotOwner`, `errors.LimitExceeded` and `errors.Overloaded`: nothing was stored.
        `errors.TimedOut`: it may have been stored.
        """
        if not self._owner:
            raise NotOwner("this process does not own the log")
        if request:
            executed = self.executed(request)
            if executed is not None:
                return api.Duplicate(executed)
            if (pending := self._pending.get(request)) is not None:
                return api.Duplicate(await asyncio.shield(pending))
        transaction = journal_.LogTransaction(
            [pages.OwnedRecord(key, value) for key, value in changes],
            pages.LogRequest(request, self._log_ms(), 0) if request else None,
        )
        future = self._submit(transaction)
        if request:
            self._pending[request] = future
            future.add_done_callback(lambda _: self._pending.pop(request, None))
        return await asyncio.shield(future)

    async def confirm(self) -> int:
        """Prove the ownership: whatever is applied when this returns was current after it was called."""
        if not self._owner:
            raise NotOwner("this process does not own the log")
        if self._confirming is None:
            self._confirming = self._submit(journal_.LogTransaction([]))
        return await asyncio.shield(self._confirming)

    def _submit(self, transaction: journal_.LogTransaction) -> asyncio.Future[int]:
        self._journal.check_room(transaction, self._waiting_bytes)
        if self._waiting_bytes + transaction.size > WAITING_BYTES_MAX and self._waiting:
            raise errors.Overloaded("too much waits to be stored in the log", retry_after_s=1.0)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._futures[transaction] = future
        self._waiting.append(transaction)
        self._waiting_bytes += transaction.size
        if self._storing is None:
            self._storing = self._tasks.spawn("store", self._store_waiting())
        return future

    async def _store_waiting(self) -> None:
        """Store pages, one after the other, until nothing waits."""
        try:
            while self._waiting and self._owner:
                await self._store_next()
        except errors.MusterError as error:
            self._give_up(error.message)
        except Exception as error:
            self._settle([(sent, 0) for sent in self._futures], _in_doubt(errors.TimedOut(str(error))))
            self._give_up(f"the state refused a record: {error}")
            raise
        finally:
            self._storing = None

    async def _store_next(self) -> None:
        following, rewrite = self._waiting[0], None
        if not following.is_large or self._trimmed_first < TRIM_SHARE * following.size:
            rewrite = await self._rewrite()
        if rewrite is not None:
            self._waiting.appendleft(rewrite)
        self._confirming = None  # a later `confirm` needs a page that is sent after it
        taken: list[tuple[journal_.LogTransaction, int]] = []
        try:
            if self._waiting[0].is_large:
                await self._store_body(self._waiting[0])
            page, taken = self._journal.next_page(self._waiting, self._oldest)
            self._waiting_bytes = sum(transaction.size for transaction in self._waiting)
            sequence = await self._store(page, taken[0][0].records if taken[0][0].is_large else ())
        except errors.LimitExceeded as error:
            if rewrite is not None or not taken:  # neither is there room for what waits
                self._oldest = None  # read again
                taken += [(transaction, 0) for transaction in self._waiting]
                self._waiting.clear()
                self._waiting_bytes = 0
            for transaction, _ in taken:
                await self._remove_body(transaction)
            self._settle(taken, error)
            if self._trimmed:
                await self._purge()
            return
        except errors.MusterError as error:
            known = isinstance(error, errors.Conflict)
            self._settle(taken, NotOwner(error.message) if known else _in_doubt(error))
            raise
        for transaction, place in taken:
            future = self._futures.pop(transaction, None)
            if future is not None and not future.done():
                future.set_result(pages.position(sequence, place))
        if following in (transaction for transaction, _ in taken):
            self._trimmed_first = 0
        if rewrite is not None:
            await self._remove_rewritten()

    async def _store_body(self, transaction: journal_.LogTransaction) -> None:
        for part in pages.to_body(transaction.records):
            sequence = await self._stream.publish(
                self._body_subject, part, message_id=secrets.token_hex(16), timeout_s=TIMEOUT_S
            )
            transaction.body.append(int(sequence))

    async def _remove_body(self, transaction: journal_.LogTransaction) -> None:
        """It was refused, and the stream may be full: its body must not take room until the next purge."""
        with contextlib.suppress(errors.Unavailable, errors.NotFound):
            for sequence in transaction.body:
                await self._stream.delete(sequence)

    def _settle(
        self, taken: Sequence[tuple[journal_.LogTransaction, int]], error: errors.MusterError
    ) -> None:
        for transaction, _ in taken:
            future = self._futures.pop(transaction, None)
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # its caller may be gone

    async def resign(self) -> None:
        """End the ownership. What is being stored ends first; the log is followed again."""
        if not self._owner:
            return
        self._owner = False
        if self._storing is None:
            self._give_up("resigned")
        else:  # also if this is cancelled
            self._storing.add_done_callback(lambda _: self._give_up("resigned"))
            await asyncio.wait([self._storing])

    def _give_up(self, reason: str) -> None:
        """The ownership has ended. What waits was not stored; the log is followed again."""
        if self._owner:
            events.info("log-lost", log=self._pages_subject, epoch=self._journal.epoch, reason=reason)
        if self._following is None and not self._stopped:
            self._follow_on()
        self._owner = False
        self._oldest = self._confirming = None
        self.lost_because = reason
        self.lost.set()
        self._settle([(transaction, 0) for transaction in self._waiting], NotOwner(reason))
        self._waiting.clear()
        self._waiting_bytes = 0

    # Trimming.

    async def _rewrite(self) -> journal_.LogTransaction | None:
        if self._oldest is None and self._journal.is_trim_due:
            self._oldest = await self._read_oldest()
        if self._oldest is None:
            return None
        return self._journal.rewrite(self._oldest, self._log_ms())

    async def _read_oldest(self) -> journal_.OldestPages:
        chosen = self._journal.oldest_pages()
        oldest = journal_.OldestPages(chosen, deque(), [])
        first, last = chosen[0].sequence, chosen[-1].sequence
        async for message in self._stream.read(first, last, subject=self._pages_subject):
            page = pages.page_in(message.data)
            if page is None:
                continue
            for place, record in enumerate(await self._body(page) or page.records):
                oldest.records.append((pages.position(message.sequence, place), record))
            known = self._journal.requests
            oldest.requests += [known[request.id] for request in page.requests if request.id in known]
        return oldest

    async def _remove_rewritten(self) -> None:
        oldest = self._oldest
        if oldest is None or oldest.records:
            return
        self._oldest = None
        size = sum(page.size for page in oldest.trimmed)
        self._trimmed += len(oldest.trimmed)
        self._trimmed_bytes += size
        self._trimmed_first += size
        if self._trimmed >= PURGE_PAGES or self._trimmed_bytes > self._purge_bytes:
            await self._purge()

    async def _purge(self) -> None:
        """Remove trimmed pages, and then bodies that no page names: theirs, and those of owners that ended
        before their page."""
        journal = self._journal
        try:
            await self._stream.purge(subject=self._pages_subject, before=journal.pages[0].sequence)
            await self._stream.purge(subject=self._body_subject, before=journal.first_body() or journal.last)
        except errors.Unavailable as error:  # they are removed with the next ones
            events.warning("log-not-trimmed", log=self._pages_subject, error=error)
        else:
            self._trimmed, self._trimmed_bytes = 0, 0


def _size(data: bytes) -> int:
    return len(data) + pages.OVERHEAD_BYTES


def _in_doubt(error: errors.MusterError) -> errors.MusterError:
    return errors.TimedOut(f"not acknowledged, but it may have been stored: {error.message}")
