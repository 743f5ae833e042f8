"""The log of all contexts: one durable stream, a subject for each context, compare-and-set on its last entry.

We write no consensus: the stream's engine has it.  What an append with the right sequence says is true; an
append by somebody who does not know the last entry fails.
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
from muster.core import errors
from muster.inform import protocol

MAX_BYTES = 1 << 30
FORGOTTEN_KEY = "\0forgotten"  # no context: the key of a client contains no zero
DUPLICATE_WINDOW_S = 120.0  # longer than an initiator repeats a write
DUPLICATE_WINDOW_S_MIN = 0.1  # the broker's least


class ContextLogEntry(NamedTuple):
    record: protocol.ContextRecord
    sequence: int

    @property
    def version(self) -> int:
        return self.record.version or self.sequence


class ContextLog:
    def __init__(self, stream: api.Stream) -> None:
        self._stream = stream
        self._under_way: dict[str, tuple[bytes, protocol.ContextRecord]] = {}
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
                return cls(await bus.open_stream(protocol.STREAM))
        stream = await bus.stream(
            api.StreamSettings(
                protocol.STREAM,
                subjects=(protocol.LOG_SUBJECTS,),
                max_bytes=max_bytes,
                max_age_s=0.0,
                max_messages_per_subject=history,
                on_full=api.FullPolicy.REFUSE,
                replicas=replicas,
                # A deletion must not be forgotten sooner: a repeat would count as stored after it was purged.
                duplicate_window_s=min(DUPLICATE_WINDOW_S, max(DUPLICATE_WINDOW_S_MIN, tombstone_s)),
            )
        )
        return cls(stream)

    async def last(self, key: str) -> ContextLogEntry | None:
        """What stands there now."""
        stored = await self._stream.last_for(protocol.log_subject(key))
        return None if stored is None else entry_of(stored, key)

    async def append(
        self, record: protocol.ContextRecord, after: int, *, timeout_s: float, message_id: str = ""
    ) -> int:
        """The new sequence; `errors.Conflict` unless ``after`` is the sequence of the key's last entry.

        An `api.Duplicate` if the same write was stored before, as whatever record.  `errors.TimedOut` leaves
        the outcome open; so does `errors.Conflict`, as the bus repeats what was not acknowledged.
        ``message_id``: of another write than the record's own.
        """
        return await self._stream.store(self._outgoing(record, after, message_id), timeout_s=timeout_s)

    def append_soon(
        self, record: protocol.ContextRecord, after: int, *, timeout_s: float
    ) -> asyncio.Future[int]:
        """The same from a plain function. Until it is done the record is `under_way`."""
        message = self._outgoing(record, after)
        stored = self._stream.store_soon(message, timeout_s=timeout_s)
        self._under_way[message.subject] = message.data, record
        stored.add_done_callback(lambda _: self._under_way.pop(message.subject, None))
        return stored

    def _outgoing(
        self, record: protocol.ContextRecord, after: int, message_id: str = ""
    ) -> api.OutgoingMessage:
        return api.OutgoingMessage(
            protocol.log_subject(record.key),
            protocol.encode(record),
            message_id=message_id or _message_id(record) or next(self._ids),
            expected_last_subject_sequence=after,
        )

    async def at(self, sequence: int, key: str) -> ContextLogEntry | None:
        """What stands there; None if it is gone."""
        try:
            return entry_of(await self._stream.get(sequence), key)
        except errors.NotFound:
            return None

    def under_way(self, stored: api.StoredMessage) -> protocol.ContextRecord | None:
        """The record, if it is one that we append just now: often it is here before its acknowledgement."""
        data, record = self._under_way.get(stored.subject, (None, None))
        return record if data == stored.data else None

    async def entries(self, key: str, *, since: int = 1) -> AsyncGenerator[ContextLogEntry]:
        """What the log still has of a context from that sequence on, oldest first, a page in memory.

        `errors.Dropped` if the oldest went meanwhile: begin again.
        """
        first = (await self._stream.state()).first_sequence
        async for stored in self._stream.read(
            max(first, since), subject=protocol.log_subject(key), gaps=True
        ):
            yield entry_of(stored, key)

    async def ends_at(self) -> int:
        return (await self._stream.state()).last_sequence

    async def has_any(self, first: int, last: int) -> bool:
        """Whether anything stands there: what was deleted long ago leaves gaps, at the log's end as well."""
        first = max(first, await self.begins_at())
        if first > last:
            return False
        try:
            async for _ in self._stream.read(first, last, gaps=True):
                return True
        except errors.NotFound:  # the oldest went while we looked
            return True
        return False

    async def begins_at(self) -> int:
        return (await self._stream.state()).first_sequence

    def follow(self, first: int) -> api.OrderedConsumer:
        return self._stream.follow(first, gaps=True)

    async def forgotten_up_to(self) -> int:
        """A reader that had not come to this sequence may have missed deletions that are gone."""
        entry = await self.last(FORGOTTEN_KEY)
        return 0 if entry is None else protocol.decode(entry.record.value or b"", int)

    async def will_forget(self, up_to: int, *, timeout_s: float) -> None:
        """Record that deletions up to this sequence are going to be forgotten; before `forget`."""
        while True:
            last = await self.last(FORGOTTEN_KEY)
            if last is not None and protocol.decode(last.record.value or b"", int) >= up_to:
                return
            record = protocol.ContextRecord(FORGOTTEN_KEY, (), 0, "", protocol.encode(up_to), reason="place")
            with contextlib.suppress(errors.Conflict):  # another node was faster: it may have gone less far
                await self.append(record, last.sequence if last is not None else 0, timeout_s=timeout_s)
                return

    async def forget(self, key: str, deleted_at: int) -> None:
        """All of a context up to that sequence, its deletion; it may have been written again since."""
        await self._stream.purge(subject=protocol.log_subject(key), before=deleted_at + 1)


def _message_id(record: protocol.ContextRecord) -> str:
    """Empty for a record that is not a write."""
    if not record.request or record.reason == "place":
        return ""
    return write_id(record.writer, record.key, record.request)


def write_id(writer: str, key: str, request: str) -> str:
    """One for all attempts of a write, so that the stream stores it once whoever the primary is.

    Requests are named by clients, so a name counts for one writer and key.
    """
    scope = f"{writer}\0{key}\0{request}"
    return hashlib.blake2b(scope.encode(), digest_size=16).hexdigest()


def entry_of(stored: api.StoredMessage, key: str | None = None) -> ContextLogEntry:
    record = protocol.decode_record(stored.data)
    if key is None:
        if protocol.log_subject(record.key) != stored.subject:
            raise errors.InvalidInput(f"a record of {record.key[:80]!r} stands under another's subject")
    elif record.key != key:
        raise errors.InvalidInput(f"under the subject of {key[:80]!r} stands a record of {record.key[:80]!r}")
    if not record.holders and record.key != FORGOTTEN_KEY:
        raise errors.InvalidInput(f"a record of {record.key[:80]!r} names no holders")
    return ContextLogEntry(record, stored.sequence)
