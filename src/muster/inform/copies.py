"""The copies a node holds in memory.

Of every copy there is a small entry; values are kept as far as the memory allows, and the ones that have
not been asked for go first (a clock: what was touched since the hand last passed gets another round).  A
value that went is read again from the view or the log by the caller.

A deleted context keeps its entry for a while, so that its log can be continued and late records of it are
known to be late.  Pure: no clock, no I/O.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec

from muster.inform import demand, protocol

ENTRY_BYTES = 420  # measured: an entry with its key, stamp and place in the tables


class Copy(msgspec.Struct, gc=False):
    """One context here, without its value."""

    sequence: int  # of the record it was made from
    version: int
    stamp: int
    stamped_by: str
    holders: tuple[str, ...]
    attributes: bytes
    expires_at_ns: int
    writer: str
    request: str
    deleted: bool
    temporary: bool
    since_s: float  # when it came here
    fresh_at_s: float = 0.0  # of a temporary copy: when it was known to be the newest

    def is_live(self, now_ns: int) -> bool:
        return not self.deleted and (self.expires_at_ns == 0 or self.expires_at_ns > now_ns)


class Copies:
    def __init__(self, me: str, *, memory_bytes_max: int) -> None:
        self.me = me
        self.values: dict[str, bytes] = {}
        self.index: dict[str, Copy] = {}
        self.permanent = 0
        self.temporary = 0
        self.evicted = 0
        self.buckets: dict[int, int] = {}
        self._memory_bytes_max = memory_bytes_max
        self._value_bytes = 0
        self._touched: set[str] = set()
        self._holders: dict[tuple[str, ...], tuple[str, ...]] = {}  # one tuple for all contexts placed alike

    @property
    def memory_bytes(self) -> int:
        return self._value_bytes + len(self.index) * ENTRY_BYTES

    def kind(self, copy: Copy) -> demand.Kind:
        if copy.temporary:
            return demand.Kind.TEMPORARY
        return demand.Kind.PRIMARY if copy.holders[0] == self.me else demand.Kind.PERMANENT

    def value(self, key: str) -> bytes | None:
        """None where it has been evicted."""
        value = self.values.get(key)
        if value is not None:
            self._touched.add(key)
        return value

    def apply(self, record: protocol.Record, sequence: int, now_s: float) -> bool:
        """Take note of a record of the log: whether it is news here. Older ones than what we have are not."""
        known = self.index.get(record.key)
        if known is not None and known.sequence >= sequence and not known.temporary:
            return False
        if self.me not in record.holders:
            if known is None or known.temporary:
                return False
            self.drop(record.key)
            return True
        since_s = now_s if known is None or known.temporary else known.since_s
        self._install(record, sequence, temporary=False, since_s=since_s, fresh_at_s=0.0)
        return True

    def install_temporary(
        self, record: protocol.Record, sequence: int, now_s: float, *, fresh_at_s: float
    ) -> None:
        known = self.index.get(record.key)
        if known is None or (known.temporary and known.sequence <= sequence):
            since_s = known.since_s if known is not None else now_s
            self._install(record, sequence, temporary=True, since_s=since_s, fresh_at_s=fresh_at_s)

    def _install(
        self, record: protocol.Record, sequence: int, *, temporary: bool, since_s: float, fresh_at_s: float
    ) -> None:
        key = record.key
        known = self.index.get(key)
        if known is not None:
            self._count(key, known, -1)
        copy = Copy(
            sequence=sequence,
            version=record.version or sequence,
            stamp=record.stamp,
            stamped_by=sys.intern(record.stamped_by),
            holders=self._holders.setdefault(record.holders, record.holders),
            attributes=record.attributes,
            expires_at_ns=record.expires_at_ns,
            writer=sys.intern(record.writer),
            request=record.request,
            deleted=record.value is None,
            temporary=temporary,
            since_s=since_s,
            fresh_at_s=fresh_at_s,
        )
        self.index[key] = copy
        self._count(key, copy, +1)
        self.keep_value(key, record.value)

    def keep_value(self, key: str, value: bytes | None) -> None:
        self._forget_value(key)
        if value is None:
            return
        self.values[key] = value
        self._value_bytes += len(value)
        while self.memory_bytes > self._memory_bytes_max and len(self.values) > 1:
            oldest = next(iter(self.values))
            if oldest in self._touched:
                self._touched.discard(oldest)
                self.values[oldest] = self.values.pop(oldest)
            else:
                self._forget_value(oldest)
                self.evicted += 1

    def _forget_value(self, key: str) -> None:
        old = self.values.pop(key, None)
        if old is not None:
            self._value_bytes -= len(old)
            self._touched.discard(key)

    def drop(self, key: str) -> None:
        copy = self.index.pop(key, None)
        if copy is not None:
            self._count(key, copy, -1)
            self._forget_value(key)

    def _count(self, key: str, copy: Copy, by: int) -> None:
        if copy.temporary:
            self.temporary += by
            return
        self.permanent += by
        bucket = protocol.bucket(key)
        count = self.buckets.get(bucket, 0) + by
        if count:
            self.buckets[bucket] = count
        else:
            del self.buckets[bucket]

    def primaries(self) -> Iterator[tuple[str, Copy]]:
        me = self.me
        return (
            (key, copy)
            for key, copy in list(self.index.items())
            if not copy.temporary and copy.holders[0] == me
        )
