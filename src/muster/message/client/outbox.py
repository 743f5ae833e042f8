"""Messages and acknowledgements of a connection on their way to the log of a partition.

Everything that the sessions send and acknowledge at one time becomes one `protocol.CommitWork`, and one is in
progress at a time: order is preserved, and concurrent senders share a sync. A work without a reply is
repeated with the same number, to the same dispatcher or the next one.

While the log is full, senders wait, and acknowledgements overtake them because they make room. An
acknowledgement for which there is no room either is retried as long as the connection exists: the application
has received the message and will not acknowledge it a second time.
"""

from __future__ import annotations

import asyncio
import operator
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from muster.core import errors
from muster.message import errors as message_errors
from muster.message import protocol
from muster.message.client import bodies

if TYPE_CHECKING:
    from muster.message.client import partition_link

FULL_S: Final = 10.0  # how long senders wait for room in a full log before they fail
FULL_RETRY_S: Final = 0.25
UNSENT_MAX = 20_000  # messages that may wait in a connection before senders have to wait
UNSENT_BYTES_MAX: Final = 32 << 20  # bytes of these; senders that do not wait fail at twice that
STAGE_TRIES: Final = 5


Submit = Callable[[list[protocol.SendMessage], dict[str, list[int]], bool], "asyncio.Future[None]"]


class _Submission:
    __slots__ = ("acks", "atomic", "future", "sends", "size")

    def __init__(
        self,
        sends: list[protocol.SendMessage],
        acks: dict[str, list[int]],
        atomic: bool,
        future: asyncio.Future[None],
    ) -> None:
        self.sends = sends
        self.acks = acks
        self.atomic = atomic
        self.future = future
        self.size = sum(map(_size, sends))
        if acks:
            self.size += _ack_bytes(acks)


def _size(send: protocol.SendMessage) -> int:
    return len(send.data) + len(send.meta)


def _ack_bytes(acks: dict[str, list[int]]) -> int:
    return protocol.ACK_BYTES * sum(map(len, acks.values()))


class Outbox:
    def __init__(self, link: partition_link.PartitionLink) -> None:
        self._link = link
        self._connection = link.connection
        self._loop = asyncio.get_running_loop()
        self.full_s = FULL_S
        self._waiting: deque[_Submission] = deque()
        self._current: list[_Submission] = []
        self._acknowledging: set[tuple[str, int]] | None = None  # None: not known
        self._unsent = 0
        self._unsent_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._full_since: float | None = None
        self._full_until = 0.0  # when to retry messages
        self._acks_until = 0.0  # when to retry acknowledgements
        self._acks_reported = False
        self._works = 0

    def submit(
        self, sends: list[protocol.SendMessage], acks: dict[str, list[int]], *, atomic: bool
    ) -> asyncio.Future[None]:
        if len(sends) > protocol.SENDS_MAX:
            raise errors.LimitExceeded(
                f"{len(sends)} messages in one transaction: the maximum is {protocol.SENDS_MAX}"
            )
        if sends and (self._unsent >= 2 * UNSENT_MAX or self._unsent_bytes >= 2 * UNSENT_BYTES_MAX):
            raise errors.Overloaded(
                f"{self._unsent} messages of this connection wait to be stored: wait until some are",
                retry_after_s=1.0,
            )
        future: asyncio.Future[None] = self._loop.create_future()
        waiting = _Submission(sends, acks, atomic, future)
        if waiting.size > protocol.WORK_BYTES_MAX:
            # Large bodies are stored separately.
            together = sum(_size(send) for send in sends if len(send.data) <= protocol.LARGE_BYTES)
            if together > protocol.WORK_BYTES_MAX:
                raise errors.LimitExceeded(
                    f"a transaction of {together} bytes: the maximum is {protocol.WORK_BYTES_MAX}"
                )
        self._waiting.append(waiting)
        self._acknowledging = None
        self._unsent += len(sends)
        self._unsent_bytes += waiting.size
        if self.is_full:
            self._room.clear()
        if self._worker is None:
            self._worker = self._connection.spawn(self._work())
        self._wake.set()
        return future

    def pending_acks(self) -> list[dict[str, list[int]]]:
        """Acknowledgements that are not confirmed yet, by backlog."""
        return [entry.acks for entry in (*self._current, *self._waiting)]

    def is_acknowledging(self, key: str, sequence: int) -> bool:
        """Whether an acknowledgement of the message is not confirmed yet."""
        if self._acknowledging is None:
            acks = [item for entry in self.pending_acks() for item in entry.items()]
            self._acknowledging = {(backlog, number) for backlog, numbers in acks for number in numbers}
        return (key, sequence) in self._acknowledging

    @property
    def log_is_full(self) -> bool:
        """Whether senders wait until messages are consumed."""
        return self._full_since is not None

    @property
    def is_full(self) -> bool:
        return self._unsent >= UNSENT_MAX or self._unsent_bytes >= UNSENT_BYTES_MAX

    async def wait_for_room(self) -> None:
        """Back-pressure: wait while too much is unconfirmed."""
        await self._room.wait()

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        """Wait until everything submitted is confirmed or failed."""
        futures = [entry.future for entry in (*self._current, *self._waiting) if not entry.future.done()]
        if futures:
            await asyncio.wait(futures, timeout=timeout_s)

    def abandon(self, error: errors.MusterError) -> None:
        while self._waiting:
            if not (future := self._waiting.popleft().future).done():
                future.set_exception(error)
                future.exception()  # retrieve it: a sender may ignore the future

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while taken := self._next_batch():
                self._current = taken
                await self._store(taken)
                self._current = []
                self._acknowledging = None

    def _next_batch(self) -> list[_Submission]:
        """The submissions of the next work; none if nothing waits, or the log is full."""
        if self._loop.time() < self._acks_until:
            return []
        if self._loop.time() < self._full_until:
            taken = [entry for entry in self._waiting if not entry.sends and not entry.atomic]
            taken = taken or [entry for entry in self._waiting if not entry.sends][:1]
            chosen = set(taken)
            self._waiting = deque(entry for entry in self._waiting if entry not in chosen)
            return taken
        if not self._waiting:
            return []
        taken = [self._waiting.popleft()]
        size, total = len(taken[0].sends), taken[0].size
        while not taken[0].atomic and self._waiting and not self._waiting[0].atomic:
            size += len(self._waiting[0].sends)
            total += self._waiting[0].size
            if size > protocol.SHARED_SENDS_MAX or total > protocol.REQUEST_BYTES_MAX:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _put_back(self, taken: list[_Submission], error: errors.MusterError) -> list[_Submission]:
        """The log has no room: put back the submissions that are retried later, and return the others."""
        if not isinstance(error, errors.LimitExceeded) or self._connection.closed:
            return taken
        now = self._loop.time()
        retried = [entry for entry in taken if not entry.sends and not entry.atomic]
        if isinstance(error, message_errors.LogFull):
            self._full_since = now if self._full_since is None else self._full_since
            if now - self._full_since < self.full_s:
                retried = taken
            else:
                self._full_since = None
            self._full_until = now + FULL_RETRY_S
        elif retried:
            self._acks_until = now + FULL_RETRY_S
            if not self._acks_reported:
                self._acks_reported = True
                self._connection.report(error)
        if retried:
            self._waiting.extendleft(reversed(retried))
            self._loop.call_at(now + FULL_RETRY_S + 0.001, self._wake.set)
        back = set(retried)
        return [entry for entry in taken if entry not in back]

    async def _store(self, taken: list[_Submission]) -> None:
        acks: dict[str, list[int]] = {}
        for entry in taken:
            for key, sequences in entry.acks.items():
                acks.setdefault(key, []).extend(sequences)
        error: errors.MusterError | None = None
        try:
            for entry in taken:
                if entry.size > protocol.LARGE_BYTES:
                    # A retry does not store them a second time.
                    entry.sends[:] = [await bodies.upload(self._link, send) for send in entry.sends]
            sends, later = self._connection.publisher.prepare(
                [send for entry in taken for send in entry.sends]
            )
            size = sum(map(_size, sends)) + _ack_bytes(acks)
            await self._send_work(sends, acks, size, strict=taken[0].atomic)
            self._acks_reported = False
            if sends:
                self._full_since = None
                await self._connection.publisher.publish_stored(sends, later)
        except errors.MusterError as failure:
            taken = self._put_back(taken, failure)
            error = self.explain(failure)
        except BaseException:
            doubt = errors.NotConnected("the connection was closed: it may have been stored or not")
            for entry in taken:
                fail(entry.future, doubt)
            raise
        self._unsent -= sum(len(entry.sends) for entry in taken)
        self._unsent_bytes -= sum(entry.size for entry in taken)
        if not self.is_full:
            self._room.set()
        for entry in taken:
            if error is not None:
                fail(entry.future, error)
            elif not entry.future.done():
                entry.future.set_result(None)

    def explain(self, error: errors.MusterError) -> errors.MusterError:
        if not isinstance(error, errors.Unavailable) or self._connection.closed:
            return error
        return errors.TimedOut(
            f"not stored within {self._connection.in_doubt_s:g} s, but it may still be: {error.message}",
            hint="`muster status` shows the cause: a broker whose disk is full stores nothing",
        )

    async def _send_work(
        self, sends: list[protocol.SendMessage], acks: dict[str, list[int]], size: int, *, strict: bool
    ) -> None:
        """Send a work in one request, or in several if it is too large. A new dispatcher needs all of them
        again.
        """
        self._works += 1
        link, work, name = self._link, self._works, self._connection.name
        before, last = (
            (_split(sends), []) if size > protocol.REQUEST_BYTES_MAX and len(sends) > 1 else ([], sends)
        )
        for _ in range(STAGE_TRIES):
            staged = 0
            try:
                for part in before:
                    await link.request(protocol.StageMessages(name, work, staged, part))
                    staged += len(part)
                await link.request(protocol.CommitWork(name, work, last, acks, strict=strict, staged=staged))
                return
            except errors.Conflict:
                continue
        raise errors.NotConnected("the dispatcher changed repeatedly during the request")


def _split(sends: list[protocol.SendMessage]) -> list[list[protocol.SendMessage]]:
    """Split into requests that fit into a bus message."""
    parts: list[list[protocol.SendMessage]] = [[]]
    total = 0
    for send in sends:
        if parts[-1] and total + _size(send) > protocol.REQUEST_BYTES_MAX:
            parts.append([])
            total = 0
        parts[-1].append(send)
        total += _size(send)
    return parts


class EarlySubmissions:
    """What is submitted before it is known to which outbox it belongs."""

    def __init__(self) -> None:
        self._waiting: deque[_Submission] = deque()
        self._bytes = 0
        self._taken = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= UNSENT_MAX or self._bytes >= UNSENT_BYTES_MAX

    def futures(self) -> list[asyncio.Future[None]]:
        return [entry.future for entry in self._waiting]

    def add(
        self, sends: list[protocol.SendMessage], acks: dict[str, list[int]], *, atomic: bool
    ) -> asyncio.Future[None]:
        if len(self._waiting) >= 2 * UNSENT_MAX or self._bytes >= 2 * UNSENT_BYTES_MAX:
            raise errors.Overloaded(
                f"{len(self._waiting)} messages of this connection wait to be stored: wait until some are",
                retry_after_s=1.0,
            )
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Submission(sends, acks, atomic, future))
        self._bytes += self._waiting[-1].size
        return future

    def submit_all(self, submit: Submit) -> None:
        """Pass everything on, in order."""
        waiting, self._waiting, self._bytes = self._waiting, deque(), 0
        self._taken.set()
        for entry in waiting:
            try:
                pass_result(submit(entry.sends, entry.acks, entry.atomic), entry.future)
            except errors.MusterError as error:
                fail(entry.future, error)

    def abandon(self, error: errors.MusterError) -> None:
        waiting, self._waiting, self._bytes = self._waiting, deque(), 0
        self._taken.set()
        for entry in waiting:
            fail(entry.future, error)

    async def wait_for_room(self) -> None:
        while self.is_full:
            self._taken.clear()
            await self._taken.wait()


_is_full = operator.attrgetter("is_full")


class Outboxes:
    """All outboxes of a connection, of which there is at least one."""

    def __init__(self, first: Outbox, early: EarlySubmissions) -> None:
        self._outboxes = [first]
        self._early = early

    def add(self, outbox: Outbox) -> None:
        outbox.full_s = self.full_s
        self._outboxes.append(outbox)

    @property
    def full_s(self) -> float:
        return self._outboxes[0].full_s

    @full_s.setter
    def full_s(self, full_s: float) -> None:
        for outbox in self._outboxes:
            outbox.full_s = full_s

    def pending_acks(self) -> list[dict[str, list[int]]]:
        return [acks for outbox in self._outboxes for acks in outbox.pending_acks()]

    def is_acknowledging(self, key: str, sequence: int) -> bool:
        return any(outbox.is_acknowledging(key, sequence) for outbox in self._outboxes)

    @property
    def log_is_full(self) -> bool:
        return any(outbox.log_is_full for outbox in self._outboxes)

    @property
    def is_full(self) -> bool:
        return self._early.is_full or any(map(_is_full, self._outboxes))

    async def wait_for_room(self) -> None:
        await self._early.wait_for_room()
        for outbox in self._outboxes:
            await outbox.wait_for_room()

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        if early := self._early.futures():
            await asyncio.wait(early, timeout=timeout_s)
        for outbox in self._outboxes:
            await outbox.wait_idle(timeout_s)

    def abandon(self, error: errors.MusterError) -> None:
        self._early.abandon(error)
        for outbox in self._outboxes:
            outbox.abandon(error)


def fail(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieve it: a sender may ignore the future


def pass_result(source: asyncio.Future[None], target: asyncio.Future[None]) -> None:
    """Complete ``target`` like ``source``."""

    def done(ended: asyncio.Future[None]) -> None:
        if ended.cancelled():
            target.cancel()
        elif (error := ended.exception()) is not None:
            fail(target, error)
        elif not target.done():
            target.set_result(None)

    source.add_done_callback(done)


def join(futures: list[asyncio.Future[None]]) -> asyncio.Future[None]:
    """Completes when all of them have; with the first error, if there is one."""
    joined: asyncio.Future[None] = futures[0].get_loop().create_future()
    left = len(futures)

    def done(_: asyncio.Future[None]) -> None:
        nonlocal left
        left -= 1
        if left or joined.done():
            return
        failed = [error for future in futures if not future.cancelled() and (error := future.exception())]
        if failed:
            fail(joined, failed[0])
        else:
            joined.set_result(None)

    for future in futures:
        future.add_done_callback(done)
    return joined
