"""Messages and acknowledgements on their way to the logs of the partitions.

What a connection submits to a partition waits in its `Lane`, in order. An `Outbox` stores what waits in
lanes: everything that is there at one time becomes one work, and one work is in progress at a time, so that
order is preserved and concurrent senders share a request and a sync. A work without a reply is repeated with
the same number, to the same dispatcher or the next one.

All connections of a login share an outbox for each partition (`login_outbox`). Each connection has one of its
own as well (`OwnWorks`), for what concerns it alone: transactions, bodies that are too large for a shared
request, and everything for as long as it would fail the works of others. A lane uses one outbox at a time.

While the log is full, senders wait, and acknowledgements overtake them because they make room. An
acknowledgement for which there is no room either is retried as long as the connection exists: the application
has received the message and will not acknowledge it a second time.
"""

from __future__ import annotations

import asyncio
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from muster.core import errors
from muster.message import errors as message_errors
from muster.message import partitions, protocol
from muster.message.client import bodies, routes

if TYPE_CHECKING:
    from muster.message.client import dispatcher_connection, partition_link

FULL_S = 10.0  # how long senders wait for room in a full log before they fail
FULL_RETRY_S: Final = 0.25
UNSENT_MAX = 20_000  # messages that may wait in a lane before senders have to wait
UNSENT_BYTES_MAX: Final = 32 << 20  # bytes of these; senders that do not wait fail at twice that
STAGE_TRIES: Final = 5
COLLECT_S_MAX: Final = 0.001


class Submission:
    __slots__ = ("acks", "atomic", "future", "is_shareable", "lane", "refused_s", "sends", "size")

    def __init__(
        self,
        lane: Lane,
        sends: list[protocol.SendMessage],
        acks: dict[str, list[int]],
        atomic: bool,
        future: asyncio.Future[None],
    ) -> None:
        self.lane = lane
        self.sends = sends
        self.acks = acks
        self.atomic = atomic
        self.future = future
        self.refused_s = 0.0  # when the log had no room for it first
        size = _ack_bytes(acks) if acks else 0
        self.is_shareable = not atomic
        for send in sends:
            size += len(send.data) + len(send.meta)
        if size > protocol.REQUEST_BYTES_MAX or size > protocol.LARGE_BYTES:
            self.is_shareable = False
        self.size = size


def _size(send: protocol.SendMessage) -> int:
    return len(send.data) + len(send.meta)


def _ack_bytes(acks: dict[str, list[int]]) -> int:
    return protocol.ACK_BYTES * sum(map(len, acks.values()))


class Lane:
    """What a connection submits to one partition. ``own`` and ``shared`` None: the partition is not known
    yet, so that everything waits.
    """

    def __init__(
        self,
        connection: dispatcher_connection.DispatcherConnection,
        own: OwnWorks | None = None,
        shared: Outbox | None = None,
    ) -> None:
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self._works = own
        self.own = Outbox(connection.spawn, own) if own is not None else None
        self.shared = shared
        self.waiting: deque[Submission] = deque()
        self._current: list[Submission] = []  # being stored
        self.alone = False  # use the own outbox until a work succeeds there: a shared one failed
        self._acknowledging: set[tuple[str, int]] | None = None  # None: not known
        self._unsent = 0
        self._unsent_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

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
        entry = Submission(self, sends, acks, atomic, future)
        if entry.size > protocol.WORK_BYTES_MAX:
            # Large bodies are stored separately.
            together = sum(_size(send) for send in sends if len(send.data) <= protocol.LARGE_BYTES)
            if together > protocol.WORK_BYTES_MAX:
                raise errors.LimitExceeded(
                    f"a transaction of {together} bytes: the maximum is {protocol.WORK_BYTES_MAX}"
                )
        self.waiting.append(entry)
        self._acknowledging = None
        self._unsent += len(sends)
        self._unsent_bytes += entry.size
        if self.is_full:
            self._room.clear()
        self.offer()
        return future

    # For the outboxes.

    @property
    def outbox(self) -> Outbox | None:
        """The one that stores the next submission."""
        first = self.waiting[0]
        if (
            self._works is None
            or self.alone
            or not first.is_shareable
            or not self.connection.shares_works
            or (first.acks and not self._works.link.is_registered)
        ):
            return self.own
        return self.shared

    def offer(self) -> None:
        """Let an outbox store what waits, after what is being stored."""
        if not self.waiting or self._current or self.connection.closed:
            return
        if (outbox := self.outbox) is not None:
            outbox.add(self)

    def take(self) -> Submission:
        entry = self.waiting.popleft()
        self._current.append(entry)
        return entry

    def move_acks_first(self) -> None:
        """The log is full: acknowledgements make room."""
        acks = [entry for entry in self.waiting if not entry.sends]
        if 0 < len(acks) < len(self.waiting):
            self.waiting = deque([*acks, *(entry for entry in self.waiting if entry.sends)])

    def put_back(self, entries: Iterable[Submission]) -> None:
        """These are stored later."""
        back = set(entries)
        self.waiting.extendleft([entry for entry in reversed(self._current) if entry in back])
        self._current = [entry for entry in self._current if entry not in back]

    def settle(self, error: errors.MusterError | None) -> None:
        """What was being stored is stored, or failed."""
        settled, self._current, self._acknowledging = self._current, [], None
        for entry in settled:
            self._unsent -= len(entry.sends)
            self._unsent_bytes -= entry.size
            if error is not None:
                fail(entry.future, self.explain(error))
            elif not entry.future.done():
                entry.future.set_result(None)
        if not self.is_full:
            self._room.set()
        self.offer()

    def explain(self, error: errors.MusterError) -> errors.MusterError:
        if not isinstance(error, errors.Unavailable) or self.connection.closed:
            return error
        return errors.TimedOut(
            f"not stored within {self.connection.in_doubt_s:g} s, but it may still be: {error.message}",
            hint="`muster status` shows the cause: a broker whose disk is full stores nothing",
        )

    # For the connection.

    def pending_acks(self) -> list[dict[str, list[int]]]:
        """Acknowledgements that are not confirmed yet, by backlog."""
        return [entry.acks for entry in (*self._current, *self.waiting)]

    def is_acknowledging(self, key: str, sequence: int) -> bool:
        """Whether an acknowledgement of the message is not confirmed yet."""
        if self._acknowledging is None:
            acks = [item for entry in self.pending_acks() for item in entry.items()]
            self._acknowledging = {(backlog, number) for backlog, numbers in acks for number in numbers}
        return (key, sequence) in self._acknowledging

    @property
    def is_full(self) -> bool:
        return self._unsent >= UNSENT_MAX or self._unsent_bytes >= UNSENT_BYTES_MAX

    async def wait_for_room(self) -> None:
        """Back-pressure: wait while too much is unconfirmed."""
        await self._room.wait()

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        """Wait until everything submitted is confirmed or failed."""
        futures = [entry.future for entry in (*self._current, *self.waiting) if not entry.future.done()]
        if futures:
            await asyncio.wait(futures, timeout=timeout_s)

    def take_all(self) -> list[Submission]:
        """Everything that waits, which is no longer in this lane."""
        taken, self.waiting = [*self.waiting], deque()
        self._unsent = self._unsent_bytes = 0
        self._room.set()
        return taken

    def abandon(self) -> None:
        """The connection is closed."""
        not_stored = errors.NotConnected("the connection was closed before the message was stored")
        doubt = errors.NotConnected("the connection was closed: it may have been stored or not")
        for entry in self._current:
            fail(entry.future, doubt)
        for entry in self.take_all():
            fail(entry.future, not_stored)


class WorkSender(Protocol):
    """How an outbox stores submissions."""

    is_shared: bool

    async def store(self, entries: list[Submission]) -> None:
        """All of them, or an error. Until it returns, nothing else is stored."""


class Outbox:
    def __init__(
        self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], works: WorkSender
    ) -> None:
        self._spawn = spawn
        self._works = works
        self._loop = asyncio.get_running_loop()
        self._lanes: OrderedDict[Lane, None] = OrderedDict()  # in which something waits, in turn
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self.log_is_full = False  # senders wait until messages are consumed
        self._full_until = 0.0  # when to retry messages
        self._acks_until = 0.0  # when to retry acknowledgements
        self._acks_reported = False

    def add(self, lane: Lane) -> None:
        self._lanes[lane] = None
        if self._worker is None:
            self._worker = self._spawn(self._work())
        self._wake.set()

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while entries := self._next_entries():
                began_s = self._loop.time()
                await self._store(entries)
                wait_s = min((self._loop.time() - began_s) / 4, COLLECT_S_MAX)
                await asyncio.sleep(0)  # those that waited for this work in this process send now
                if 1 < len(entries) > sum(len(lane.waiting) for lane in self._lanes):
                    # Clients continue one after the other: their next messages become one work, which costs
                    # the dispatcher and the broker less than several.
                    await asyncio.sleep(wait_s)

    def _next_entries(self) -> list[Submission]:
        """The submissions of the next work; none if nothing waits, or the log is full."""
        now = self._loop.time()
        if now < self._acks_until:
            return []
        is_full = now < self._full_until
        entries: list[Submission] = []
        size = total = 0
        lanes = self._lanes
        if is_full:
            for lane in lanes:
                lane.move_acks_first()
        blocked: list[Lane] = []
        while lanes:
            lane = next(iter(lanes))
            if not lane.waiting or lane.outbox is not self:
                del lanes[lane]
                lane.offer()
                continue
            entry = lane.waiting[0]
            if is_full and entry.sends:
                del lanes[lane]
                blocked.append(lane)
                continue
            size += len(entry.sends)
            total += entry.size
            if entries and (
                entry.atomic or size > protocol.SHARED_SENDS_MAX or total > protocol.REQUEST_BYTES_MAX
            ):
                break
            entries.append(lane.take())
            lanes.move_to_end(lane)
            if entry.atomic:
                break
        lanes.update(dict.fromkeys(blocked))
        return entries

    async def _store(self, entries: list[Submission]) -> None:
        lanes = dict.fromkeys(entry.lane for entry in entries)
        failure: errors.MusterError | None = None
        try:
            await self._works.store(entries)
        except errors.MusterError as error:
            failure = error
            retried = self._retried(entries, error)
            for lane in lanes:
                lane.put_back(retried)
        except BaseException:
            self._worker = None
            doubt = errors.NotConnected("the connection was closed: it may have been stored or not")
            for lane in lanes:
                lane.settle(doubt)
            raise
        else:
            self._acks_reported = False
            if any(entry.sends for entry in entries):
                self.log_is_full = False
        for lane in lanes:
            lane.settle(failure)

    def _retried(self, entries: list[Submission], error: errors.MusterError) -> list[Submission]:
        """The submissions of a failed work that are stored later: those for which the log has no room, and
        those that another one may have failed.
        """
        now = self._loop.time()
        entries = [entry for entry in entries if not entry.lane.connection.closed]
        acks = [entry for entry in entries if not entry.sends and not entry.atomic]
        if isinstance(error, message_errors.LogFull):
            for entry in entries:
                entry.refused_s = entry.refused_s or now
            waiting = [entry for entry in entries if entry.sends or entry.atomic]
            retried = acks + [entry for entry in waiting if now - entry.refused_s < FULL_S]
            self.log_is_full = len(retried) > len(acks)
            self._full_until = now + FULL_RETRY_S
        elif isinstance(error, errors.Unavailable):
            return []
        elif self._works.is_shared:
            # One of them is refused, or its connection is not registered with a new dispatcher yet.
            for entry in entries:
                entry.lane.alone = True
            return entries
        elif isinstance(error, errors.LimitExceeded) and acks:
            retried = acks
            self._acks_until = now + FULL_RETRY_S
            if not self._acks_reported:
                self._acks_reported = True
                acks[0].lane.connection.report(error)
        else:
            return []
        self._loop.call_at(now + FULL_RETRY_S + 0.001, self._wake.set)
        return retried


class OwnWorks:
    """Works of one connection: everything that a dispatcher can store for it."""

    is_shared = False

    def __init__(
        self, connection: dispatcher_connection.DispatcherConnection, link: partition_link.PartitionLink
    ) -> None:
        self._connection = connection
        self.link = link
        self._number = 0

    async def store(self, entries: list[Submission]) -> None:
        acks: dict[str, list[int]] = {}
        for entry in entries:
            for key, sequences in entry.acks.items():
                acks.setdefault(key, []).extend(sequences)
            if entry.size > protocol.LARGE_BYTES:
                # A retry does not store them a second time.
                entry.sends[:] = [await bodies.upload(self.link, send) for send in entry.sends]
        sends = [send for entry in entries for send in entry.sends]
        size = sum(map(_size, sends)) + _ack_bytes(acks)
        await self._send(sends, acks, size, strict=entries[0].atomic)
        entries[0].lane.alone = False

    async def _send(
        self, sends: list[protocol.SendMessage], acks: dict[str, list[int]], size: int, *, strict: bool
    ) -> None:
        """Send a work in one request, or in several if it is too large. A new dispatcher needs all of them
        again.
        """
        self._number += 1
        link, work, name = self.link, self._number, self._connection.name
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


class SharedWorks:
    """Works of all connections of a login. ``link`` is that of the login."""

    is_shared = True

    def __init__(self, link: partition_link.PartitionLink) -> None:
        self._link = link
        self._number = 0

    async def store(self, entries: list[Submission]) -> None:
        sends: list[protocol.SendMessage] = []
        acks: dict[str, dict[str, list[int]]] = {}
        for entry in entries:
            sends += entry.sends
            if entry.acks:
                by_backlog = acks.setdefault(entry.lane.connection.name, {})
                for key, sequences in entry.acks.items():
                    by_backlog.setdefault(key, []).extend(sequences)
        self._number += 1
        await self._link.request(protocol.SharedWork(self._link.connection.name, self._number, sends, acks))


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


class ConnectionOutbox:
    """Everything that a connection submits: a lane for each partition, and one for what is submitted before
    the number of partitions is known.
    """

    def __init__(self, connection: dispatcher_connection.DispatcherConnection) -> None:
        self._connection = connection
        self._early = Lane(connection)
        self._by_partition: dict[int, Lane] = {}
        self._lanes = [self._early]

    def _lane(self, partition: int) -> Lane:
        lane = self._by_partition.get(partition)
        if lane is None:
            works = OwnWorks(self._connection, self._connection.link(partition))
            lane = Lane(self._connection, works, self._connection.shared.outbox(partition))
            self._by_partition[partition] = lane
            self._lanes.append(lane)
        return lane

    def submit(
        self, sends: list[protocol.SendMessage], acks: dict[str, list[int]], *, atomic: bool, count: int
    ) -> asyncio.Future[None]:
        """``count``: the number of partitions; 0: it is not known."""
        if count == 1:
            return self._lane(partitions.HOME).submit(sends, acks, atomic=atomic)
        if not count:
            if not self._early.waiting:
                self._connection.spawn(self._find_partitions())
            return self._early.submit(sends, acks, atomic=atomic)
        parts_of_sends = routes.split_sends(sends, count)
        parts_of_acks = routes.split_keys(acks, count)
        concerned = sorted({*parts_of_sends, *parts_of_acks}) or [partitions.HOME]
        if len(concerned) == 1 or atomic:
            # A transaction of several partitions is coordinated by one where it acknowledges, if it does:
            # the messages that it sends to others are passed on.
            coordinator = min(parts_of_acks, default=concerned[0])
            return self._lane(coordinator).submit(sends, acks, atomic=atomic)
        return _join(
            [
                self._lane(partition).submit(
                    parts_of_sends.get(partition, []), parts_of_acks.get(partition, {}), atomic=False
                )
                for partition in concerned
            ]
        )

    async def _find_partitions(self) -> None:
        connection = self._connection
        try:
            asked = connection.shared if connection.shares_works else connection
            connection.set_partition_count(await asked.partition_count())
        except errors.MusterError as error:
            for entry in self._early.take_all():
                fail(entry.future, self._early.explain(error))

    def submit_early(self, count: int) -> None:
        """The number of partitions is known: submit what waits for it, in order."""
        for entry in self._early.take_all() if self._early.waiting else ():
            try:
                future = self.submit(entry.sends, entry.acks, atomic=entry.atomic, count=count)
                _join([future], entry.future)
            except errors.MusterError as error:
                fail(entry.future, error)

    def pending_acks(self) -> list[dict[str, list[int]]]:
        return [acks for lane in self._lanes for acks in lane.pending_acks()]

    def is_acknowledging(self, key: str, sequence: int) -> bool:
        return any(lane.is_acknowledging(key, sequence) for lane in self._lanes)

    @property
    def log_is_full(self) -> bool:
        """Whether senders wait until messages are consumed."""
        outboxes = (outbox for lane in self._lanes for outbox in (lane.own, lane.shared))
        return any(outbox is not None and outbox.log_is_full for outbox in outboxes)

    @property
    def is_full(self) -> bool:
        return any(map(_is_full, self._lanes))

    async def wait_for_room(self) -> None:
        for lane in self._lanes:
            await lane.wait_for_room()

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        for lane in list(self._lanes):
            await lane.wait_idle(timeout_s)

    def abandon(self) -> None:
        for lane in self._lanes:
            lane.abandon()


_is_full = operator.attrgetter("is_full")


def fail(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieve it: a sender may ignore the future


def _join(
    futures: list[asyncio.Future[None]], joined: asyncio.Future[None] | None = None
) -> asyncio.Future[None]:
    """Completes when all of them have; with the first error, if there is one."""
    joined = joined or futures[0].get_loop().create_future()
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
