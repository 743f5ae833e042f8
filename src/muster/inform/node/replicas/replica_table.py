"""The copies a node holds in memory.

Of every copy there is an entry, as small as it can be: a node may have a million.  Values are kept in it as
far as the memory allows, and the ones that have not been asked for go first (a clock: what was touched since
the hand last passed gets another round).  A value that went is read again from the view or the log by the
caller.

A deleted context keeps its entry for a while, so that its log can be continued and late records of it are
known to be late.  Pure: no clock, no I/O.
"""

from __future__ import annotations

import sys
from collections import deque

import msgspec

from muster.inform import protocol
from muster.inform.node.replicas import demand, sorted_keys

ENTRY_BYTES = 440  # measured: with the id of the last write and its places in the tables, without its key
VALUE_BYTES = 48  # what a value takes beyond its length


class Replica(msgspec.Struct, gc=False):
    """One context here."""

    value: bytes | None  # None: it was deleted, or the value was evicted
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
    touched: bool = False  # asked for since the hand last passed
    queued: bool = False  # the hand will pass; so it is with everything that has a value

    def is_live(self, now_ns: int) -> bool:
        return not self.deleted and (self.expires_at_ns == 0 or self.expires_at_ns > now_ns)

    def read(self) -> bytes | None:
        """The value; None where it was evicted."""
        self.touched = True
        return self.value


class ReplicaTable:
    def __init__(self, me: str, *, memory_bytes_max: int) -> None:
        self.me = me
        self.index: dict[str, Replica] = {}
        self.order: sorted_keys.SortedKeys | None = None  # of the index, once somebody has asked for it
        self.permanent = 0
        self.temporary = 0
        self.evicted = 0
        self.buckets: dict[int, int] = {}
        self.buckets_generation = 0  # grows when one comes or goes
        self.memory_bytes = 0
        self._memory_bytes_max = memory_bytes_max
        self._values = 0
        self._queue: deque[str] = deque()  # where the hand passes; may name what is gone
        self._holders: dict[tuple[str, ...], tuple[str, ...]] = {}  # one tuple for all contexts placed alike

    def kind(self, copy: Replica) -> demand.ReplicaKind:
        if copy.temporary:
            return demand.ReplicaKind.TEMPORARY
        return demand.ReplicaKind.PRIMARY if copy.holders[0] == self.me else demand.ReplicaKind.PERMANENT

    def apply(self, record: protocol.ContextRecord, sequence: int, now_s: float) -> bool:
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
        self, record: protocol.ContextRecord, sequence: int, now_s: float, *, fresh_at_s: float
    ) -> None:
        known = self.index.get(record.key)
        if known is None or (known.temporary and known.sequence <= sequence):
            since_s = known.since_s if known is not None else now_s
            self._install(record, sequence, temporary=True, since_s=since_s, fresh_at_s=fresh_at_s)

    def _install(
        self,
        record: protocol.ContextRecord,
        sequence: int,
        *,
        temporary: bool,
        since_s: float,
        fresh_at_s: float,
    ) -> None:
        key = record.key
        known = self.index.get(key)
        if known is not None:
            self._weigh(key, known, -1)
        copy = Replica(
            value=None,
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
            queued=known is not None and known.queued,
        )
        self.index[key] = copy
        if known is None and self.order is not None:
            self.order.add(key)
        self._weigh(key, copy, +1)
        if known is None or known.temporary != temporary:
            if known is not None:
                self._count(key, known, -1)
            self._count(key, copy, +1)
        if record.value is not None:
            self.keep_value(key, copy, record.value)

    def keep_value(self, key: str, copy: Replica, value: bytes) -> None:
        """Of a copy that has none, unless another has taken its place meanwhile."""
        if self.index.get(key) is not copy or copy.value is not None:
            return
        copy.value = value
        self._values += 1
        self.memory_bytes += len(value) + VALUE_BYTES
        if not copy.queued:
            copy.queued = True
            self._queue.append(key)
        self._make_room(copy)

    def _make_room(self, newest: Replica) -> None:
        while self.memory_bytes > self._memory_bytes_max and self._values > 1:
            key = self._queue.popleft()
            copy = self.index.get(key)
            if copy is None or not copy.queued:
                continue
            if copy is newest or (copy.touched and copy.value is not None):
                copy.touched = False
                self._queue.append(key)
                continue
            copy.queued = False
            if copy.value is not None:
                self._forget_value(copy)
                self.evicted += 1
        if len(self._queue) > 2 * len(self.index) + 1_000:  # contexts came and went, and none was evicted
            self._queue = deque(dict.fromkeys(key for key in self._queue if key in self.index))

    def _forget_value(self, copy: Replica) -> None:
        if copy.value is not None:
            self.memory_bytes -= len(copy.value) + VALUE_BYTES
            self._values -= 1
            copy.value = None

    def drop(self, key: str) -> None:
        copy = self.index.pop(key, None)
        if copy is not None:
            if self.order is not None:
                self.order.discard(key)
            self._weigh(key, copy, -1)
            self._count(key, copy, -1)

    def _weigh(self, key: str, copy: Replica, by: int) -> None:
        """One entry more, or one less: then its value goes too."""
        self.memory_bytes += by * (ENTRY_BYTES + len(key) + len(copy.attributes))
        if by < 0:
            self._forget_value(copy)

    def _count(self, key: str, copy: Replica, by: int) -> None:
        if copy.temporary:
            self.temporary += by
            return
        self.permanent += by
        bucket = protocol.bucket(key)
        before = self.buckets.get(bucket, 0)
        if before + by:
            self.buckets[bucket] = before + by
        else:
            del self.buckets[bucket]
        if not before or not before + by:
            self.buckets_generation += 1
