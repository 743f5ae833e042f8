"""The log of all contexts: one durable stream, to which each node appends pages of records.

What waits to be appended becomes one page, one message, one sync.  A node has one page under way.  It names
what its node knew (`page_order`), and is published after the last page of its node (compare-and-set on the
subject of the node).  A fence, which another node puts there, ends what the node was about to write.  It
follows a report of the only broker that the node is not connected, or a warning that the node did not answer
with a page: a node that is only slow, or that only one other cannot reach, is not fenced.  The first page of
a new process of the node ends what the former one may append, for ever.

All nodes apply the log in its order.  A node has the result of an append when it has applied its page.

A broker that leads the stream and is cut off from the others, or was frozen, goes on answering with what it
has.  It cannot store anything.  So where the stream is replicated, its end is confirmed by a page, which all
reads that wait share (`ContextLog.confirm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

import msgspec

from muster.bus import api
from muster.bus.log import pages
from muster.core import errors, quotas
from muster.core.telemetry import log
from muster.inform import protocol
from muster.inform.node.log import page_order
from muster.supervision import tasks

events = log.EventLog("inform")

MAX_BYTES = 1 << 30
WAITING_BYTES_MAX = 64 << 20
PAGE_BYTES = 512 << 10  # unless a record has more
RECORD_BYTES = 200  # beside key, value and attributes
RETRY_S = 0.25
CONFIRMS_MAX = 8
LEASE_S = 5.0  # no other node takes contexts of a node that reads by lease for so long after its last page
LEASE_SAFE_S = 4.0  # it reads from memory for so long after that was sent: rates of clocks may differ
WARNED_S = 2.0  # a node that does not reply has so long to append, before it is fenced
OWN_KEYS = "\0"  # keys of former records that are not of contexts begin with it


class ContextLogEntry(NamedTuple):
    record: protocol.ContextRecord
    position: int  # sequence and place

    @property
    def version(self) -> int:
        return self.record.version or self.position

    @property
    def sequence(self) -> int:
        return pages.sequence_of(self.position)


class PendingRecord:
    """A record to be appended; ``record`` None: a confirmation. ``since``: what its writer had applied."""

    __slots__ = ("record", "since", "size", "stored")

    def __init__(
        self, record: protocol.ContextRecord | None, since: int, stored: asyncio.Future[int]
    ) -> None:
        self.record = record
        self.since = since
        self.stored = stored
        self.size = 0
        if record is not None:
            self.size = len(record.key) + len(record.value or b"") + len(record.attributes) + RECORD_BYTES
            self.size += sum(map(len, record.holders))

    def settle(self, outcome: int | errors.MusterError) -> None:
        if self.stored.done():
            return
        if isinstance(outcome, int):
            self.stored.set_result(outcome)
        else:
            self.stored.set_exception(outcome)
            self.stored.exception()  # its caller may be gone


class SentPage(NamedTuple):
    page: protocol.ContextLogPage
    data: bytes
    items: list[PendingRecord]
    at_s: float
    keys: frozenset[str]


class NodeSeen(NamedTuple):
    """What is known of the last page of a node, when it is applied."""

    sequence: int
    lease_s: float
    leased_until_s: float  # the node may answer from memory
    warned_until_s: float  # the page is a warning, and the node may append; -inf: it is none


class ContextLog:
    """``apply_own`` is called with a page of this node that is the next one, when it is acknowledged."""

    def __init__(
        self,
        stream: api.Stream,
        node: str,
        max_bytes: int = MAX_BYTES,
        *,
        reads_by_lease: bool = False,
        timeout_s: float = api.DURABLE_TIMEOUT_S,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.is_replicated = True  # until its first report
        self.under_way = quotas.StoredAmounts()  # records without a result, by writer
        self.order = page_order.PageOrder()
        self.applied = 0  # the sequence of the last message that was applied
        self.bytes = 0  # of the log at its last report, and of the pages since
        self.first_sequence = 0  # of the log at its last report
        self.seen: dict[str, NodeSeen] = {}
        self.leased_from_s = -float("inf")  # when the last page was sent that is known to be stored
        self.apply_own: Callable[[int, SentPage], None] = lambda sequence, sent: None
        self._stream = stream
        self._node = node
        self._subject = protocol.page_subject(node)
        self._lease_s = LEASE_S if reads_by_lease else 0.0
        self._timeout_s = timeout_s
        self._now_s = now_s or asyncio.get_running_loop().time
        self._waiting: deque[PendingRecord] = deque()
        self._waiting_bytes = 0
        self._sent: SentPage | None = None
        self._fenced_at = 0
        self._process = secrets.token_hex(8)
        self._number = 0  # of the last page that was sent
        self._first_own = 0  # the sequence of the first page of this process
        self._former_until_s = -float("inf")  # a former process of this node may answer from memory
        self.is_superseded = False  # another process of this node appends
        self.identity = ""  # of the stream
        self.is_replaced = False  # what was applied is of another stream, or of pages that were lost
        self._following: api.OrderedConsumer | None = None
        self._tasks = tasks.TaskSupervisor(f"log of contexts {node}")
        self._storing: asyncio.Task[None] | None = None
        self._advanced: asyncio.Event | None = None  # set while a caller waits for the follower

    async def close(self) -> None:
        sent = self._sent
        await self._tasks.close()
        error = errors.TimedOut("this node is closing")
        self._fail([*(sent.items if sent is not None else ()), *self._items()], error)

    # Appending.

    def append(self, record: protocol.ContextRecord, since: int) -> asyncio.Future[int]:
        """The position, when the record has been applied. ``since``: the state that it continues.

        `errors.Conflict`: it is void, because the context has changed since, or this node was fenced.
        `errors.TimedOut`: it may be stored yet.
        """
        if self._waiting_bytes > WAITING_BYTES_MAX:
            raise errors.Overloaded("too much waits to be stored in the log of contexts", retry_after_s=1.0)
        item = PendingRecord(record, since, asyncio.get_running_loop().create_future())
        self.under_way.change(record.writer, 1, item.size)
        item.stored.add_done_callback(lambda _: self.under_way.change(record.writer, -1, -item.size))
        return self._submit(item)

    async def confirm(self) -> int:
        """Append, maybe nothing; all that the log had when this was called has been applied then."""
        for _ in range(CONFIRMS_MAX):
            with contextlib.suppress(errors.Conflict):
                return await self.confirmation()
        raise errors.Unavailable(f"other pages of {self._node} come first again and again")

    def confirmation(self) -> asyncio.Future[int]:
        """As `confirm`, once: `errors.Conflict` if a fence comes first."""
        item = PendingRecord(None, self.applied, asyncio.get_running_loop().create_future())
        return self._submit(item)

    def _submit(self, item: PendingRecord) -> asyncio.Future[int]:
        if self.is_superseded:
            raise errors.Unavailable(f"another process runs as the information node {self._node}")
        self._waiting.append(item)
        self._waiting_bytes += item.size
        if self._storing is None:
            self._storing = self._tasks.spawn("store", self._store_waiting())
        return item.stored

    async def _store_waiting(self) -> None:
        try:
            while self._waiting:
                if not self._first_own and (left_s := self.lease_left_s(self._node)):
                    self._former_until_s = self._now_s() + left_s
                    await self._store(self._page([]))  # after which a former process appends nothing
                elif (left_s := self._former_until_s - self._now_s()) > 0:
                    await asyncio.sleep(left_s)
                elif items := self._next_items():
                    await self._store(self._page(items))
        except errors.MusterError as error:
            self.leased_from_s = -float("inf")  # other nodes may have the page that was sent
            self._fail(self._items(), _in_doubt(error))
        finally:
            self._sent = self._storing = None

    def _next_items(self) -> list[PendingRecord]:
        size = 0
        items: list[PendingRecord] = []
        while self._waiting and len(items) < page_order.RECORDS_MAX:
            item = self._waiting[0]
            if items and size + item.size > PAGE_BYTES:
                break
            self._waiting.popleft()
            self._waiting_bytes -= item.size
            if item.stored.done():  # cancelled
                continue
            if item.record is not None and self._is_void(item.record, item.since):
                item.settle(_void(item.record.key))
                continue
            items.append(item)
            size += item.size
        return items

    def _page(self, items: list[PendingRecord]) -> SentPage:
        records = [item.record for item in items if item.record is not None]
        self._number += 1
        page = protocol.ContextLogPage(
            self.applied, records, self._lease_s, process=self._process, number=self._number
        )
        keys = frozenset(record.key for record in records) if self._lease_s else frozenset[str]()
        return SentPage(page, protocol.encode(page), items, self._now_s(), keys)

    def _is_void(self, record: protocol.ContextRecord, since: int) -> bool:
        changed_at = max(self.order.changed_at(record), self._fenced_at)
        return changed_at > since or self.applied - since > page_order.WINDOW

    async def _store(self, sent: SentPage) -> None:
        self._sent = sent
        last = self.seen.get(self._node)
        try:
            sequence = await self._stream.publish(
                self._subject,
                sent.data,
                message_id=f"{self._process}-{sent.page.number}",
                expected_last_subject_sequence=last.sequence if last is not None else 0,
                timeout_s=self._timeout_s,
            )
        except errors.Conflict:
            # A fence, another process of this node, or a page of this node that was not acknowledged. Or all
            # pages of this node were trimmed.
            await self.look_up(self._node)
            self._sent = None
            self._fail(sent.items, _fenced())
        except errors.Unavailable as error:
            # The next page can be stored, or this one, and not both. Other nodes may have it by now.
            self._sent = None
            self.leased_from_s = -float("inf")
            self._fail(sent.items, _in_doubt(error))
            waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
            self._fail(waiting, errors.Unavailable(f"the log of contexts does not reply: {error.message}"))
        except errors.MusterError as error:
            self._sent = None
            self._fail(sent.items, error)
        else:
            if self.applied == sequence - 1:
                self.apply_own(int(sequence), sent)
            await self.reached(int(sequence), self._timeout_s)
            if self._sent is sent:
                raise errors.Unavailable("the log has lost pages that this node had applied")

    async def look_up(self, node: str) -> None:
        """Receive the last page of a node, if it has any that is not trimmed."""
        stored = await self._stream.last_for(protocol.page_subject(node))
        if stored is None:
            self.seen.pop(node, None)
            return
        await self.reached(stored.sequence, self._timeout_s)
        seen = self.seen.get(node)
        if seen is None or seen.sequence < stored.sequence:
            self._see(node, stored.sequence, protocol.decode(stored.data, protocol.ContextLogPage))

    def _see(self, node: str, sequence: int, page: protocol.ContextLogPage) -> None:
        now_s = self._now_s()
        warned_until_s = now_s + WARNED_S if page.is_warning else -float("inf")
        self.seen[node] = NodeSeen(sequence, page.lease_s, now_s + page.lease_s, warned_until_s)

    def _items(self) -> list[PendingRecord]:
        items = [*(self._sent.items if self._sent is not None else ()), *self._waiting]
        self._waiting.clear()
        self._waiting_bytes = 0
        return items

    def _fail(self, items: Iterable[PendingRecord], error: errors.MusterError) -> None:
        for item in items:
            item.settle(error)

    async def warn(self, node: str) -> int:
        """Ask a node to append something, unless it was asked and has not. The sequence of the warning."""
        while (seen := self.seen.get(node)) is None or seen.warned_until_s < self._now_s() - WARNED_S:
            lease_s = 0.0 if seen is None else seen.lease_s
            page = protocol.ContextLogPage(self.applied, lease_s=lease_s, is_warning=True)
            if sequence := await self._append_for(node, page):
                return sequence
        return seen.sequence

    async def fence(self, node: str, live: list[protocol.FenceCandidate]) -> bool:
        """End what ``node`` decided before. False: it has appended more, or `left_s` is not over."""
        if node not in self.seen:
            await self.look_up(node)
        if self.left_s(node):
            return False
        return await self._append_for(node, protocol.ContextLogPage(self.applied, fence=live)) > 0

    async def _append_for(self, node: str, page: protocol.ContextLogPage) -> int:
        """Append to the pages of another node. 0: there are more than this one knew."""
        seen = self.seen.get(node)
        try:
            sequence = await self._stream.publish(
                protocol.page_subject(node),
                protocol.encode(page),
                message_id=secrets.token_hex(16),
                expected_last_subject_sequence=seen.sequence if seen is not None else 0,
                timeout_s=self._timeout_s,
            )
        except errors.Conflict:
            await self.look_up(node)
            return 0
        await self.reached(int(sequence), self._timeout_s)
        return int(sequence)

    def may_answer(self, key: str) -> bool:
        """Whether no other node can know a later record of this key, whose primary this node is: neither one
        that another primary has written, nor one whose acknowledgement this node waits for."""
        if not self._lease_s or self._now_s() >= self.leased_from_s + LEASE_SAFE_S:
            return False
        return self._sent is None or key not in self._sent.keys

    def lease_left_s(self, node: str) -> float:
        """How long the node may still answer from memory, at most."""
        seen = self.seen.get(node)
        return 0.0 if seen is None else max(0.0, seen.leased_until_s - self._now_s())

    def left_s(self, node: str) -> float:
        """How long the node may still answer from memory, or answer a warning, at most."""
        seen = self.seen.get(node)
        return 0.0 if seen is None else max(self.lease_left_s(node), seen.warned_until_s - self._now_s())

    # Applying.

    def sent(self, stored: api.StoredMessage) -> SentPage | None:
        """The page that this node sent, if this is it; it often arrives before its acknowledgement."""
        sent = self._sent
        return sent if sent is not None and sent.data == stored.data else None

    def add(
        self, sequence: int, node: str | None, page: protocol.ContextLogPage
    ) -> list[tuple[ContextLogEntry, bool]]:
        """Take the next page; returns its records, and whether they count."""
        if node is not None:
            self._see(node, sequence, page)
        if node == self._node and page.process:
            self._recognise(sequence, page.process)
        if node == self._node and page.is_warning and not self.is_superseded:
            self.confirmation()
        counts = self.order.add(sequence, page, node)
        positions = range(pages.position(sequence), pages.position(sequence, len(counts)))
        entries = map(ContextLogEntry, page.records, positions)
        return list(zip(entries, counts, strict=True))

    def _recognise(self, sequence: int, process: str) -> None:
        """A page after the first one of this process must be its own."""
        if process == self._process:
            self._first_own = self._first_own or sequence
        elif 0 < self._first_own < sequence and not self.is_superseded:
            self.is_superseded = True
            self.leased_from_s = -float("inf")
            events.error("node-superseded", node=self._node, by_page=sequence)

    def advance(self, sequence: int) -> None:
        """All up to there has been applied."""
        self.applied = max(self.applied, sequence)
        if self._advanced is not None:
            self._advanced.set()
            self._advanced = None

    def settle(self, sequence: int, sent: SentPage, counts: list[bool]) -> None:
        """This page of this node has been applied."""
        self._sent = None
        if not self.is_superseded:
            self.leased_from_s = sent.at_s
        place = 0
        for item in sent.items:
            if item.record is None:
                item.settle(pages.position(sequence))
                continue
            item.settle(pages.position(sequence, place) if counts[place] else _void(item.record.key))
            place += 1

    def fenced(self, sequence: int) -> None:
        """This node was fenced: what it decided before is void."""
        self.leased_from_s = -float("inf")
        self._fenced_at = sequence

    def restart(self) -> None:
        """The log is read from its beginning."""
        self.order.clear()
        self.seen.clear()
        self.applied = self._fenced_at = self._first_own = 0
        self.is_replaced = False

    async def reached(self, sequence: int, timeout_s: float) -> None:
        """Wait until all up to there has been applied."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.applied < sequence:
                    await self.advanced()
        except TimeoutError:
            raise errors.TimedOut(f"the log was not received up to {sequence} in {timeout_s:g} s") from None

    async def advanced(self) -> None:
        """Wait until a message is applied."""
        if self._advanced is None:
            self._advanced = asyncio.Event()
        await self._advanced.wait()

    # Reading.

    async def get(self, position: int, key: str) -> ContextLogEntry | None:
        """Return the entry at a position; None if it is no longer stored."""
        try:
            stored = await self._stream.get(pages.sequence_of(position))
        except errors.NotFound:
            return None
        records = decode_page(stored).records
        place = position - pages.position(stored.sequence)
        if place >= len(records) or records[place].key != key:
            raise errors.InvalidInput(f"the log has no record of {key[:80]!r} at {position}")
        return ContextLogEntry(records[place], position)

    async def state(self) -> api.StreamState:
        applied, state = self.applied, await self._stream.state()
        self.is_replicated = state.replicas > 1
        identity = f"{state.created_ns} {state.restored}"
        # A leader that is cut off from the others does not know the end.
        is_shorter = state.last_sequence < applied and not self.is_replicated
        if is_shorter or identity != (self.identity or identity):
            self.is_replaced = True
            if self._following is not None:
                await self._following.close()
        self.identity = identity
        self.bytes, self.first_sequence = state.bytes, state.first_sequence
        return state

    async def is_gap(self, first: int, last: int) -> bool:
        """Whether there is nothing to receive: former deletions left gaps, also at the end of the log."""
        if (await self._stream.state()).first_sequence > first:
            return False  # they were trimmed: the follower begins again
        with contextlib.suppress(errors.NotFound, errors.Dropped):  # removed during the read
            async for _ in self._stream.read(first, last, gaps=True):
                return False
            return True
        return False

    def follow(self, first: int) -> api.OrderedConsumer:
        self._following = self._stream.follow(first, gaps=True)
        return self._following

    def read(self, first: int, last: int) -> AsyncIterator[api.StoredMessage]:
        return self._stream.read(first, last, gaps=True)

    async def purge(self, before: int) -> None:
        """Remove what is older."""
        await self._stream.purge(before=before)


async def open_stream(
    bus: api.Bus, *, max_bytes: int = MAX_BYTES, replicas: int = 1, joins: bool = False
) -> api.Stream:
    """``joins``: leave an existing one as it is."""
    if joins:
        with contextlib.suppress(errors.NotFound):
            return await bus.open_stream(protocol.STREAM)
    settings = api.StreamSettings(
        protocol.STREAM,
        subjects=(protocol.LOG_SUBJECTS,),
        max_bytes=max_bytes,
        max_age_s=0.0,
        on_full=api.FullPolicy.REFUSE,
        replicas=replicas,
    )
    return await bus.stream(settings)


def decode_page(stored: api.StoredMessage) -> protocol.ContextLogPage:
    """A page, or a former record as one."""
    if protocol.node_of(stored.subject) is None:
        return _former_page(stored)
    page = protocol.decode(stored.data, protocol.ContextLogPage)
    if len(page.records) > page_order.RECORDS_MAX or page.basis >= stored.sequence:
        raise errors.InvalidInput(f"page {stored.sequence} of the log of contexts is invalid")
    for record in page.records:
        if not record.holders and record.reason not in ("forget", "refuse"):
            raise errors.InvalidInput(f"a record of {record.key[:80]!r} has no holders")
    return page


def _former_page(stored: api.StoredMessage) -> protocol.ContextLogPage:
    """Such a record was appended under the condition that it follows the last one of its key."""
    record = protocol.decode(stored.data, protocol.ContextRecord)
    if stored.subject != protocol.former_subject(record.key):
        raise errors.InvalidInput(
            f"a record of {record.key[:80]!r} is stored under the subject of another key"
        )
    if record.key.startswith(OWN_KEYS):
        return protocol.ContextLogPage(stored.sequence - 1)
    version = record.version or stored.sequence
    return protocol.ContextLogPage(stored.sequence - 1, [msgspec.structs.replace(record, version=version)])


def _void(key: str) -> errors.Conflict:
    return errors.Conflict(f"{key!r} has changed meanwhile")


def _fenced() -> errors.Conflict:
    return errors.Conflict("another page of this node came first")


def _in_doubt(error: errors.MusterError) -> errors.TimedOut:
    return errors.TimedOut(
        f"not acknowledged by the log of contexts, and may be stored yet: {error.message}",
        hint="a broker with a full disk does not reply: see `muster status`",
    )
