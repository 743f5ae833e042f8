"""A transaction: it reads one snapshot, buffers its writes, and submits both at its end.

Nothing is locked while it is open, so a slow one delays no other; the price is that it may be rejected at its
end (`api.TransactionConflict`). It sees its own writes. A read-only one needs no check: it saw a consistent
snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from muster.core import errors
from muster.store import api, commit_plan, engine

_COLLECTION = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{api.COLLECTION_CHARS_MAX - 1}}}\Z")


def check_collection(name: str) -> str:
    if not _COLLECTION.match(name):
        raise errors.InvalidInput(
            f"{name[:80]!r} cannot name a collection: use 1 to {api.COLLECTION_CHARS_MAX} of "
            "A-Z a-z 0-9 . _ -, a letter or digit first"
        )
    return name


def encode_key(text: str) -> bytes:
    data = _encode(text, "key")
    if not data:
        raise errors.InvalidInput("an empty text cannot be a key")
    if len(data) > api.KEY_BYTES_MAX:
        raise errors.LimitExceeded(
            f"a key of {len(data)} bytes, beginning {text[:40]!r}: the most is {api.KEY_BYTES_MAX}"
        )
    return data


def range_of(collection: str, prefix: str, start: str | None, end: str | None) -> commit_plan.KeyRange:
    """Keys with ``prefix``, from ``start`` (included) to ``end`` (not included)."""
    low, high = _encode(prefix, "prefix"), None
    if low:
        high = low[:-1] + bytes([low[-1] + 1])  # no byte of UTF-8 is 0xff
    if start is not None:
        low = max(low, _encode(start, "start"))
    if end is not None:
        bound = _encode(end, "end")
        high = bound if high is None else min(high, bound)
    return commit_plan.KeyRange(check_collection(collection), low, high)


def _encode(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise errors.InvalidInput(f"{text[:80]!r} cannot be a {what}: it holds half a character") from error


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 0:
        raise errors.InvalidInput(f"a limit of {limit} is not possible: give 0 or more")


def _check_integer(number: int | None, what: str) -> None:
    if number is not None and not 0 <= number <= api.INTEGER_MAX:
        raise errors.InvalidInput(f"{number} cannot be {what}: it must be from 0 to 2**63 - 1")


class Transaction:
    """Made by `database.Store.transaction`; use it with ``async with``, from one task."""

    def __init__(
        self,
        source: engine.StorageEngine,
        submit: Callable[[commit_plan.Commit, int], Awaitable[int]],
        settings: api.StoreOptions,
    ) -> None:
        self._source = source
        self._submit = submit
        self._settings = settings
        self._stack = AsyncExitStack()
        self._reader: engine.EngineReader | None = None
        self._writes: dict[commit_plan.Place, commit_plan.RecordWrite] = {}
        self._bytes = 0
        self._keys_read: set[commit_plan.Place] = set()
        self._ranges_read: list[commit_plan.KeyRange] = []
        self._open = False
        self._version: int | None = None

    @property
    def version(self) -> int:
        """Once committed: the version of every record it wrote (of the snapshot, if it wrote none)."""
        if self._version is None:
            raise errors.InvalidInput("a transaction has a version only when it has committed")
        return self._version

    # -- reads -------------------------------------------------------------------------------------------

    async def get(self, collection: str, key: str) -> api.StoreRecord | None:
        return (await self.get_many(collection, [key])).get(key)

    async def get_many(self, collection: str, keys: Iterable[str]) -> dict[str, api.StoreRecord]:
        """The records of ``keys`` that exist."""
        self._check_open()
        check_collection(collection)
        records: dict[str, api.StoreRecord] = {}
        missing: list[bytes] = []
        for key in dict.fromkeys(keys):
            place = (collection, encode_key(key))
            write = self._writes.get(place)
            if write is None:
                missing.append(place[1])
            elif write.value is not None:
                records[key] = _own(place, write)
        if missing:
            reader = await self._snapshot()
            self._keys_read.update((collection, key) for key in missing)
            records |= {record.key: record for record in await reader.get_many(collection, missing)}
        return records

    async def scan(
        self,
        collection: str,
        *,
        prefix: str = "",
        start: str | None = None,
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> list[api.StoreRecord]:
        """Records in the order of their keys: from ``start`` (included) to ``end`` (not included)."""
        self._check_open()
        key_range = range_of(collection, prefix, start, end)
        check_limit(limit)
        reader = await self._snapshot()
        own = {place[1].decode(): write for place, write in self._writes.items() if key_range.holds(place)}
        # Each own write may hide a record of the snapshot, so that many more are read.
        read_limit = None if limit is None else limit + len(own)
        seen = await reader.scan(key_range, read_limit, reverse)
        self._ranges_read.append(_covered(key_range, seen, read_limit, reverse))
        if not own:
            return seen
        merged = [record for record in seen if record.key not in own]
        merged += [
            _own((collection, key.encode()), write) for key, write in own.items() if write.value is not None
        ]
        merged.sort(key=lambda record: record.key, reverse=reverse)
        return merged[:limit]

    # -- writes, buffered until the end ------------------------------------------------------------------

    def put(
        self,
        collection: str,
        key: str,
        value: bytes,
        *,
        expected_version: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Store ``value``.

        ``expected_version`` refuses unless the record is at that version (`api.ABSENT`: does not exist).
        ``epoch`` refuses if the record was written under a higher one, and marks it; a write without an
        epoch is not refused and leaves the mark as it is.
        """
        check_collection(collection)
        self._put(collection, key, value, expected_version, epoch)

    def put_many(
        self, collection: str, items: Iterable[tuple[str, bytes]], *, epoch: int | None = None
    ) -> None:
        check_collection(collection)
        for key, value in items:
            self._put(collection, key, value, None, epoch)

    def delete(
        self, collection: str, key: str, *, expected_version: int | None = None, epoch: int | None = None
    ) -> None:
        """Nothing happens if there is no such record. Its epoch is forgotten with it (see `fence`)."""
        check_collection(collection)
        self._write((collection, encode_key(key)), None, expected_version, epoch)

    def fence(self, scope: str, epoch: int) -> None:
        """Refuse this transaction if one with a higher epoch has been fenced by the same scope.

        A scope is any name, such as the lease's.  Unlike a record's own epoch it outlives every record, and
        it protects those too that the new holder has not touched yet.
        """
        self._write((commit_plan.FENCES, encode_key(scope)), b"", None, epoch)

    def _put(
        self, collection: str, key: str, value: bytes, expected_version: int | None, epoch: int | None
    ) -> None:
        if len(value) > self._settings.value_bytes_max:
            raise errors.LimitExceeded(
                f"the value of {key[:80]!r} has {len(value)} bytes; at most {self._settings.value_bytes_max} "
                "are allowed",
                hint="raise value_bytes_max, or store it in parts",
            )
        self._write((collection, encode_key(key)), bytes(value), expected_version, epoch)

    def _write(
        self, place: commit_plan.Place, value: bytes | None, expected_version: int | None, epoch: int | None
    ) -> None:
        self._check_open()
        _check_integer(expected_version, "an expected version")
        _check_integer(epoch, "an epoch")
        earlier = self._writes.get(place)
        if earlier is not None:  # the expectation of the first write applies at the commit
            if earlier.expected_version is not None:
                expected_version = earlier.expected_version
            epochs = [known for known in (earlier.epoch, epoch) if known is not None]
            epoch = max(epochs, default=None)
            self._bytes -= commit_plan.size(place, len(earlier.value or b""))
        self._bytes += commit_plan.size(place, len(value or b""))
        if self._bytes > self._settings.transaction_bytes_max:
            raise errors.LimitExceeded(
                f"a transaction of more than {self._settings.transaction_bytes_max} bytes",
                hint="commit in several parts, or raise transaction_bytes_max",
            )
        self._writes[place] = commit_plan.RecordWrite(value, expected_version, epoch)

    # -- life --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._open or self._version is not None:
            raise errors.InvalidInput("a transaction is entered once; make another")
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        snapshot = self._reader.version if self._reader is not None else None
        await self._stack.aclose()  # gives the reader back before waiting for the disk
        if error is not None:
            return
        if self._writes or snapshot is None:
            commit = commit_plan.Commit(
                self._writes, snapshot, frozenset(self._keys_read), tuple(self._ranges_read)
            )
            self._version = await self._submit(commit, self._bytes)
        else:
            self._version = snapshot

    def _check_open(self) -> None:
        if not self._open:
            raise errors.InvalidInput("this transaction is not open: use it inside its `async with`")

    async def _snapshot(self) -> engine.EngineReader:
        if self._reader is None:
            self._reader = await self._stack.enter_async_context(self._source.snapshot())
        return self._reader


def _own(place: commit_plan.Place, write: commit_plan.RecordWrite) -> api.StoreRecord:
    return api.StoreRecord(place[1].decode(), write.value or b"", 0, write.epoch or 0)


def _covered(
    key_range: commit_plan.KeyRange, seen: list[api.StoreRecord], limit: int | None, reverse: bool
) -> commit_plan.KeyRange:
    """The part of the range that the result depends on: up to the last record, if the limit cut it."""
    if limit is None or len(seen) < limit:
        return key_range
    if not seen:
        return commit_plan.KeyRange(key_range.collection, b"", b"")
    last = seen[-1].key.encode()
    if reverse:
        return commit_plan.KeyRange(key_range.collection, last, key_range.high)
    return commit_plan.KeyRange(key_range.collection, key_range.low, last + b"\0")
