"""The log of all contexts: one durable stream, a subject for each context, compare-and-set on the last entry.

The consensus is that of the stream.  An append with the right sequence is the next state of the context; an
append by a node that does not have the last entry fails.

A broker that leads the stream and is cut off from the others, or was frozen, goes on answering with what it
has.  It cannot store anything.  So where the stream is replicated, its end (`ContextLog.end`) and what is the
last entry of a key (`ContextLog.is_last`) are confirmed by a record that changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import secrets
from collections.abc import AsyncGenerator
from typing import NamedTuple

from muster.bus import api
from muster.core import errors, quotas
from muster.inform import protocol

MAX_BYTES = 1 << 30
OWN_KEYS = "\0"  # keys that are not of contexts begin with it: keys of clients contain no zero byte
PURGED_KEY = f"{OWN_KEYS}purged"
CONFIRMED_KEY = f"{OWN_KEYS}confirmed "  # and the node
DUPLICATE_WINDOW_S = 180.0  # longer than any node tries a write: see `state.NodeState.require_recent`
DUPLICATE_WINDOW_S_MIN = 0.1  # minimum of the broker


class ContextLogEntry(NamedTuple):
    record: protocol.ContextRecord
    sequence: int

    @property
    def version(self) -> int:
        return self.record.version or self.sequence


class ContextLog:
    def __init__(self, stream: api.Stream, node: str, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.is_replicated = True  # until its first report
        confirmed = protocol.ContextRecord(CONFIRMED_KEY + node, (node,), 0, node, reason="confirm")
        self._confirmed = protocol.log_subject(confirmed.key), protocol.encode(confirmed)
        self.under_way = quotas.StoredAmounts()  # appends without an acknowledgement, by writer
        self._stream = stream
        self._pending: dict[str, tuple[bytes, protocol.ContextRecord]] = {}
        self._ids = map(f"{secrets.token_hex(8)}-{{:x}}".format, itertools.count())

    @classmethod
    async def open(
        cls,
        bus: api.Bus,
        *,
        history: int = 16,
        max_bytes: int = MAX_BYTES,
        replicas: int = 1,
        joins: bool = False,
        tombstone_s: float = DUPLICATE_WINDOW_S,
    ) -> ContextLog:
        if joins:
            with contextlib.suppress(errors.NotFound):
                return cls(await bus.open_stream(protocol.STREAM), bus.identity, max_bytes)
        stream = await bus.stream(
            api.StreamSettings(
                protocol.STREAM,
                subjects=(protocol.LOG_SUBJECTS,),
                max_bytes=max_bytes,
                max_age_s=0.0,
                max_messages_per_subject=history,
                on_full=api.FullPolicy.REFUSE,
                replicas=replicas,
                # Not longer than the tombstone: a retry after the purge would count as already stored.
                duplicate_window_s=min(DUPLICATE_WINDOW_S, max(DUPLICATE_WINDOW_S_MIN, tombstone_s)),
            )
        )
        return cls(stream, bus.identity, max_bytes)

    async def last(self, key: str) -> ContextLogEntry | None:
        """Return the current entry of a key."""
        stored = await self._stream.last_for(protocol.log_subject(key))
        return None if stored is None else parse_entry(stored, key)

    async def append(
        self, record: protocol.ContextRecord, after: int, *, timeout_s: float, message_id: str = ""
    ) -> int:
        """Return the new sequence; `errors.Conflict` unless ``after`` is the sequence of the key's last
        entry.

        Returns an `api.Duplicate` if the same write was stored before, possibly as another record.  After
        `errors.TimedOut` the outcome is unknown; also after `errors.Conflict`, because the bus repeats
        messages without an acknowledgement.  ``message_id``: of a write other than that of the record.
        """
        message = self._outgoing(record, after, message_id)
        self.under_way.change(record.writer, 1, len(message.data))
        try:
            return await self._stream.store(message, timeout_s=timeout_s)
        finally:
            self.under_way.change(record.writer, -1, -len(message.data))

    def append_nowait(
        self, record: protocol.ContextRecord, after: int, *, timeout_s: float
    ) -> asyncio.Future[int]:
        """Append without waiting. Until the future is done, `pending` returns the record."""
        message = self._outgoing(record, after)
        stored = self._stream.store_soon(message, timeout_s=timeout_s)
        self._pending[message.subject] = message.data, record
        self.under_way.change(record.writer, 1, len(message.data))
        stored.add_done_callback(lambda _: self._appended(message, record))
        return stored

    def _appended(self, message: api.OutgoingMessage, record: protocol.ContextRecord) -> None:
        self._pending.pop(message.subject, None)
        self.under_way.change(record.writer, -1, -len(message.data))

    def _outgoing(
        self, record: protocol.ContextRecord, after: int, message_id: str = ""
    ) -> api.OutgoingMessage:
        return api.OutgoingMessage(
            protocol.log_subject(record.key),
            protocol.encode(record),
            message_id=message_id or _message_id(record) or next(self._ids),
            expected_last_subject_sequence=after,
        )

    async def get(self, sequence: int, key: str) -> ContextLogEntry | None:
        """Return the entry at a sequence; None if it is no longer stored."""
        try:
            return parse_entry(await self._stream.get(sequence), key)
        except errors.NotFound:
            return None

    async def stored_at_ns(self, sequence: int) -> int:
        """When an entry was stored, by the clock of the log; 0 if it is no longer stored."""
        try:
            return (await self._stream.get(sequence)).stored_at_ns
        except errors.NotFound:
            return 0

    def pending(self, stored: api.StoredMessage) -> protocol.ContextRecord | None:
        """Return the record if this node is appending it; it often arrives before its acknowledgement."""
        data, record = self._pending.get(stored.subject, (None, None))
        return record if data == stored.data else None

    async def entries(self, key: str, *, since: int = 1) -> AsyncGenerator[ContextLogEntry]:
        """Yield the stored entries of a context from that sequence on, oldest first, one page in memory.

        `errors.Dropped` if the oldest entries were removed meanwhile: start again.
        """
        first = (await self._stream.state()).first_sequence
        async for stored in self._stream.read(
            max(first, since), subject=protocol.log_subject(key), gaps=True
        ):
            yield parse_entry(stored, key)

    async def entries_of_all(self, *, since: int) -> AsyncGenerator[ContextLogEntry]:
        """Yield the stored entries of all contexts from that sequence on."""
        first = (await self._stream.state()).first_sequence
        async for stored in self._stream.read(max(first, since), gaps=True):
            with contextlib.suppress(errors.InvalidInput):  # the follower reports it
                yield parse_entry(stored)

    async def last_sequence(self) -> int:
        return (await self.state()).last_sequence

    async def state(self) -> api.StreamState:
        state = await self._stream.state()
        self.is_replicated = state.replicas > 1
        return state

    async def end(self, *, timeout_s: float) -> int:
        """The end of a replicated log, which most replicas have confirmed after this was called."""
        return await self._stream.store(api.OutgoingMessage(*self._confirmed), timeout_s=timeout_s)

    async def is_last(self, key: str, sequence: int, *, timeout_s: float) -> bool:
        """Whether this is the sequence of the last entry of ``key``, which was just read (0: there is none).

        A single broker need not be asked again. Most replicas of a log have to confirm it.
        """
        if not self.is_replicated:
            return True
        message = api.OutgoingMessage(
            *self._confirmed,
            expected_last_subject_sequence=sequence,
            expected_subject=protocol.log_subject(key),
        )
        try:
            await self._stream.store(message, timeout_s=timeout_s)
        except errors.Conflict:
            return False
        return True

    async def has_any(self, first: int, last: int) -> bool:
        """Whether the range has an entry: purged deletions leave gaps, also at the end of the log."""
        first = max(first, await self.first_sequence())
        if first > last:
            return False
        try:
            async for _ in self._stream.read(first, last, gaps=True):
                return True
        except errors.NotFound:  # the oldest entry was removed during the read
            return True
        return False

    async def first_sequence(self) -> int:
        return (await self._stream.state()).first_sequence

    def follow(self, first: int) -> api.OrderedConsumer:
        return self._stream.follow(first, gaps=True)

    async def purged_up_to(self) -> int:
        """A reader whose position is before this sequence may have missed purged deletions."""
        entry = await self.last(PURGED_KEY)
        return 0 if entry is None else protocol.decode(entry.record.value or b"", int)

    async def record_purge(self, up_to: int, *, timeout_s: float) -> None:
        """Record that deletions up to this sequence will be purged; call it before `purge`."""
        while True:
            last = await self.last(PURGED_KEY)
            if last is not None and protocol.decode(last.record.value or b"", int) >= up_to:
                return
            record = protocol.ContextRecord(PURGED_KEY, (), 0, "", protocol.encode(up_to), reason="place")
            with contextlib.suppress(errors.Conflict):  # another node was faster, maybe with a lower sequence
                await self.append(record, last.sequence if last is not None else 0, timeout_s=timeout_s)
                return

    async def purge(self, key: str, deleted_at: int) -> None:
        """Remove the entries of a context up to its deletion; newer entries stay."""
        await self._stream.purge(subject=protocol.log_subject(key), before=deleted_at + 1)


def _message_id(record: protocol.ContextRecord) -> str:
    """Empty for a record that is not a write."""
    if not record.request or record.reason == "place":
        return ""
    return write_id(record.writer, record.key, record.request)


def write_id(writer: str, key: str, request: str) -> str:
    """The same for all attempts of a write, so the stream stores it once, whichever node is the primary.

    Clients choose request ids, so an id is scoped to one writer and key.
    """
    scope = f"{writer}\0{key}\0{request}"
    return hashlib.blake2b(scope.encode(), digest_size=16).hexdigest()


def parse_entry(stored: api.StoredMessage, key: str | None = None) -> ContextLogEntry:
    record = protocol.decode_record(stored.data)
    if key is None:
        if protocol.log_subject(record.key) != stored.subject:
            raise errors.InvalidInput(
                f"a record of {record.key[:80]!r} is stored under the subject of another key"
            )
    elif record.key != key:
        raise errors.InvalidInput(f"the subject of {key[:80]!r} has a record of {record.key[:80]!r}")
    if not record.holders and record.key != PURGED_KEY:
        raise errors.InvalidInput(f"a record of {record.key[:80]!r} has no holders")
    return ContextLogEntry(record, stored.sequence)
