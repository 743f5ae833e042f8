"""The replicas of a node in memory.

Each replica has a small entry, because a node may have a million.  Values stay in memory as far as it allows;
unused values are evicted first (a clock algorithm: a value that was read since the last pass of the hand gets
another round).  The caller reads an evicted value from the view or the log.

The entry of a deleted context stays for some time, so that its log can be continued and late records are
detected.  Pure: no clock, no I/O.
"""

from __future__ import annotations

import sys
from collections import deque

import msgspec

from muster.core import quotas
from muster.inform import protocol
from muster.inform.node.replicas import demand, sorted_keys

ENTRY_BYTES = 480  # measured: with the id of the last write and the table slots, without the key
VALUE_BYTES = 48  # overhead of a value beyond its length
RECORD_BYTES = 200  # of a record in the log, beyond key, attributes and value


class Replica(msgspec.Struct, gc=False):
    """A context on this node."""

    value: bytes | None  # None: deleted or evicted
    position: int  # of its record in the log
    version: int
    stamp: int
    stamped_by: str
    holders: tuple[str, ...]
    attributes: bytes
    expires_at_ns: int  # deleted: when its tombstone ends
    writer: str
    request: str
    deleted: bool
    temporary: bool
    since_s: float  # when it was created here
    fresh_at_s: float = 0.0  # temporary replica: when it was read from the log
    log_bytes: int = 0  # of its records in the log: an estimate, from above when they have equal sizes
    touched: bool = False  # read since the last pass of the hand
    queued: bool = False  # in the eviction queue, as every replica with a value

    def is_live(self, now_ns: int) -> bool:
        return not self.deleted and (self.expires_at_ns == 0 or self.expires_at_ns > now_ns)

    def read(self) -> bytes | None:
        """Return the value; None if it was evicted."""
        self.touched = True
        return self.value


class ReplicaTable:
    def __init__(self, me: str, *, memory_bytes_max: int, history: int = 1) -> None:
        """``history``: records of a context in the log. They are charged to the writer of the last one: an
        older one counts as long as it may be stored, and less with each record that follows."""
        self.me = me
        self.stored = quotas.StoredAmounts()  # permanent contexts, and bytes of them in the log, by writer
        self._history = history
        self.index: dict[str, Replica] = {}
        self.order: sorted_keys.SortedKeys | None = None  # of the index, after the first search
        self.permanent = 0
        self.temporary = 0
        self.evicted = 0
        self.buckets: dict[int, int] = {}
        self.buckets_generation = 0  # incremented when a bucket is added or removed
        self.memory_bytes = 0
        self._memory_bytes_max = memory_bytes_max
        self._values = 0
        self._queue: deque[str] = deque()  # eviction queue; may contain dropped keys
        self._holders: dict[
            tuple[str, ...], tuple[str, ...]
        ] = {}  # shared tuples for contexts with the same holders

    def kind(self, replica: Replica) -> demand.ReplicaKind:
        if replica.temporary:
            return demand.ReplicaKind.TEMPORARY
        return demand.ReplicaKind.PRIMARY if replica.holders[0] == self.me else demand.ReplicaKind.PERMANENT

    def apply(self, record: protocol.ContextRecord, position: int, now_s: float) -> bool:
        """Apply a record of the log. Return whether it changed anything; outdated records do not.

        A temporary replica follows the log like a permanent one, and is dropped with its context.
        """
        known = self.index.get(record.key)
        if known is not None and known.position > position:
            return False
        if known is not None and known.position == position and not known.temporary:
            return False  # a temporary one may be ahead of the log's follower, and permanent from here on
        if self.me not in record.holders:
            if known is None or known.position == position:
                return False
            if known.temporary and record.value is not None:
                self._install(
                    record, position, temporary=True, since_s=known.since_s, fresh_at_s=known.fresh_at_s
                )
            else:
                self.drop(record.key)
            return True
        since_s = now_s if known is None or known.temporary else known.since_s
        self._install(record, position, temporary=False, since_s=since_s, fresh_at_s=0.0)
        return True

    def install_temporary(
        self, record: protocol.ContextRecord, position: int, now_s: float, *, fresh_at_s: float
    ) -> None:
        known = self.index.get(record.key)
        if known is None or (known.temporary and known.position <= position):
            since_s = known.since_s if known is not None else now_s
            self._install(record, position, temporary=True, since_s=since_s, fresh_at_s=fresh_at_s)

    def _install(
        self,
        record: protocol.ContextRecord,
        position: int,
        *,
        temporary: bool,
        since_s: float,
        fresh_at_s: float,
    ) -> None:
        key = record.key
        known = self.index.get(key)
        log_bytes = len(key) + len(record.attributes) + len(record.value or b"") + RECORD_BYTES
        if known is not None:
            self._account(key, known, -1)
            log_bytes += known.log_bytes * (self._history - 1) // self._history
        replica = Replica(
            value=None,
            position=position,
            version=record.version or position,
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
            log_bytes=log_bytes,
        )
        self.index[key] = replica
        if known is None and self.order is not None:
            self.order.add(key)
        self._account(key, replica, +1)
        if known is None or known.temporary != temporary:
            if known is not None:
                self._count(key, known, -1)
            self._count(key, replica, +1)
        if record.value is not None:
            self.store_value(key, replica, record.value)

    def store_value(self, key: str, replica: Replica, value: bytes) -> None:
        """Store the value of a replica that has none, unless the replica has been replaced."""
        if self.index.get(key) is not replica or replica.value is not None:
            return
        replica.value = value
        self._values += 1
        self.memory_bytes += len(value) + VALUE_BYTES
        if not replica.queued:
            replica.queued = True
            self._queue.append(key)
        self._make_room(replica)

    def _make_room(self, newest: Replica) -> None:
        while self.memory_bytes > self._memory_bytes_max and self._values > 1:
            key = self._queue.popleft()
            replica = self.index.get(key)
            if replica is None or not replica.queued:
                continue
            if replica is newest or (replica.touched and replica.value is not None):
                replica.touched = False
                self._queue.append(key)
                continue
            replica.queued = False
            if replica.value is not None:
                self._forget_value(replica)
                self.evicted += 1
        if len(self._queue) > 2 * len(self.index) + 1_000:  # it has many dropped keys
            self._queue = deque(dict.fromkeys(key for key in self._queue if key in self.index))

    def _forget_value(self, replica: Replica) -> None:
        if replica.value is not None:
            self.memory_bytes -= len(replica.value) + VALUE_BYTES
            self._values -= 1
            replica.value = None

    def drop(self, key: str) -> None:
        replica = self.index.pop(key, None)
        if replica is not None:
            if self.order is not None:
                self.order.discard(key)
            self._account(key, replica, -1)
            self._count(key, replica, -1)

    def _account(self, key: str, replica: Replica, by: int) -> None:
        """Add or subtract an entry; on subtraction the value is dropped too."""
        if not replica.temporary:
            self.stored.change(replica.writer, by * (not replica.deleted), by * replica.log_bytes)
        self.memory_bytes += by * (ENTRY_BYTES + len(key) + len(replica.attributes))
        if by < 0:
            self._forget_value(replica)

    def _count(self, key: str, replica: Replica, by: int) -> None:
        if replica.temporary:
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
