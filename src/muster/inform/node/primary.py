"""The primary of a context: appends writes to the log, and changes the holders.

An append names the sequence of the last record of the key (compare-and-set).  So a former primary, if it is
still alive, cannot append any more: the conflict shows it that it has been replaced.

All attempts of a write use its id as the message id of the append, so the log stores the write once,
whichever primary tries it and whatever was written in between.  Only the reply remains to be determined.  If
a retry would be rejected (its expected version has passed because of the first attempt), the primary searches
the log of the context for the first attempt; if the log does not reach back far enough, the outcome is
reported as unknown.  If no attempt was stored, the rejection first uses up the id of the write: an attempt
that another node is still making cannot be stored after the client got the error.

A lease ends with a record of the log, too.  Every node estimates the time of the log by itself, so a lease
that is over for one node may last for another.  A write that is rejected because a lease is over, and a
linearizable read that finds it over, therefore first append the end of the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from muster.bus import api
from muster.core import clock, errors
from muster.inform import protocol
from muster.inform.node import state, write_attempts
from muster.inform.node.log import context_log
from muster.inform.node.replicas import placement, replica_table

ATTEMPTS = 8


class KeyState(NamedTuple):
    """The state of a key in the log, as far as its next record depends on it."""

    sequence: int
    version: int
    holders: tuple[str, ...]
    stamp: clock.HybridTimestamp | None
    writer: str | None  # None: no context, so no owner
    request: str
    live: bool
    expired: bool = False  # its lease is over by the time of this node, but not in the log


NOTHING = KeyState(0, 0, (), None, None, "", False)  # equivalent: a version is read of what is live


class PrimaryWriter:
    def __init__(self, shared: state.NodeState) -> None:
        self._state = shared
        self._applied: dict[tuple[str, int], tuple[set[str], asyncio.Event]] = {}
        self._attempts = write_attempts.WriteAttempts()

    # Writes.

    async def update(self, update: protocol.UpdateContext) -> protocol.WriteResult:
        """Execute a write as the primary of the context; `protocol.PrimaryMoved` if another node is the
        primary.
        """
        return await self._attempts.run(update.writer, update.write, lambda: self._update(update))

    async def _update(self, update: protocol.UpdateContext) -> protocol.WriteResult:
        shared, write = self._state, update.write
        begun_s = shared.now_s()
        async with shared.key_locks.hold(write.key):
            fresh = False
            for _ in range(ATTEMPTS):
                shared.require_recent(begun_s, write.key)
                with in_doubt(write.key, is_repeat=update.write.repeat):
                    base = self.base_here(write.key) if not fresh else None
                    if base is None:
                        # If the request has holders, the initiator has no record of the context either.
                        base = NOTHING if update.holders and not fresh else await self.base_in_log(write.key)
                    try:
                        record = self.next_record(update, base)
                    except protocol.PrimaryMoved:
                        raise
                    except errors.MusterError as rejection:
                        if (
                            not fresh
                        ):  # this node may have been replaced: reject only with the state of the log
                            fresh = True
                            continue
                        if base.expired:
                            await self._end_lease(write.key, base)
                            continue
                        if not await shared.log.is_last(
                            write.key, base.sequence, timeout_s=shared.settings.timeout_s
                        ):
                            continue
                        if not update.write.repeat:
                            raise
                        first = await self._first_attempt(update)
                        if first is not None:
                            return written(first, 1)
                        if isinstance(rejection, errors.Forbidden) or await self._fence(update, base):
                            raise
                        continue
                    if record is None:  # already stored
                        status = "normal" if len(base.holders) == 1 else "updated"
                        return protocol.WriteResult(
                            write.key, base.version, str(base.stamp), shared.name, 1, status
                        )
                    waiting = self._expect(record) if record.acknowledge else None
                    replicas = 1
                    try:
                        entry = await self._append(record, base.sequence)
                        if waiting is not None and entry.record == record:
                            replicas = await self._replicated(record, waiting)
                    except errors.Conflict:
                        fresh = True  # the local state is outdated
                        update = _repeated(update)
                        continue
                    finally:
                        self._applied.pop((record.key, record.stamp), None)
                    if not _is_attempt(entry, update):
                        raise errors.Conflict(f"{write.key!r}: another attempt of this write was rejected")
                    return written(entry, replicas)
        raise errors.TimedOut(
            f"{write.key!r} had too many concurrent writes; this one may have been stored", retry_after_s=0.1
        )

    def next_record(self, update: protocol.UpdateContext, base: KeyState) -> protocol.ContextRecord | None:
        shared, write = self._state, update.write
        holders = base.holders or update.holders
        if not holders or holders[0] != shared.name:
            raise protocol.PrimaryMoved(f"{shared.name} is not the primary of {write.key!r}")
        if write.request == base.request and update.writer == base.writer:
            return None
        shared.check(update.writer, "write", write.key, base.writer if base.live else None)
        version = base.version if base.live else 0
        if write.expected_version is not None and write.expected_version != version:
            raise errors.Conflict(
                f"{write.key!r} has the version {version}, not {write.expected_version}", actual=version
            )
        if isinstance(write, protocol.PutContext):
            size = len(write.value) + replica_table.RECORD_BYTES
            is_new = not (base.live and base.writer == update.writer)
            shared.check_quota(update.writer, size, is_new=is_new)
        now_ns = shared.now_ns()
        stamp = shared.clock.now(now_ns) if base.stamp is None else self._stamp_after(base.stamp, now_ns)
        if isinstance(write, protocol.DeleteContext):
            if not base.live:
                raise errors.NotFound(f"no context {write.key!r}")
            return protocol.ContextRecord(
                write.key,
                holders,
                stamp.time,
                stamp.node,
                writer=update.writer,
                request=write.request,
                reason="delete",
            )
        return protocol.ContextRecord(
            write.key,
            holders,
            stamp.time,
            stamp.node,
            write.value,
            protocol.encode(write.attributes) if write.attributes else b"",
            expires_at_ns=shared.log_now_ns() + int(write.lease_s * 1e9) if write.lease_s else 0,
            writer=update.writer,
            request=write.request,
            acknowledge=write.ack == "replicated" and len(holders) > 1,
        )

    def _stamp_after(self, last: clock.HybridTimestamp, now_ns: int) -> clock.HybridTimestamp:
        try:
            return self._state.clock.observe(last, now_ns)
        except clock.ClockSkewTooLarge:
            # The clock of its writer was wrong: continue the context from there, but not the local clock.
            return clock.HybridTimestamp(last.time + 1, self._state.name)

    def base_here(self, key: str) -> KeyState | None:
        shared = self._state
        replica = shared.replicas.index.get(key)
        if replica is None or replica.temporary:
            return None
        stamp = clock.HybridTimestamp(replica.stamp, replica.stamped_by)
        live = shared.is_live(replica)
        return KeyState(
            replica.sequence,
            replica.version,
            replica.holders,
            stamp,
            replica.writer,
            replica.request,
            live,
            expired=not replica.deleted and not live,
        )

    async def base_in_log(self, key: str) -> KeyState:
        shared = self._state
        entry = await shared.log.last(key)
        if entry is None:
            shared.drop(key)
            return NOTHING
        shared.apply(entry)
        record = entry.record
        if shared.name not in record.holders:
            shared.remember_holders(key, record.holders)
        expired = 0 < record.expires_at_ns <= shared.log_now_ns()  # equivalent (0 -> 1): no lease is so old
        present = record.value is not None
        return KeyState(
            entry.sequence,
            entry.version,
            record.holders,
            _stamp(record),
            record.writer,
            record.request,
            live=present and not expired,
            expired=present and expired,
        )

    async def _append(self, record: protocol.ContextRecord, after: int) -> context_log.ContextLogEntry:
        """Append and apply; or return what an earlier attempt of the same write stored.

        After a timeout the log is read; `errors.TimedOut` if the outcome stays unknown.
        """
        shared = self._state
        try:
            sequence = await shared.log.append(record, after, timeout_s=shared.settings.timeout_s)
        except errors.TimedOut as error:
            return await self.find_stored(record, error)
        entry = context_log.ContextLogEntry(record, int(sequence))  # an `api.Duplicate` cannot be encoded
        if isinstance(sequence, api.Duplicate):
            with in_doubt(record.key):
                first = await shared.log.get(sequence, record.key)
            if first is None:
                raise errors.TimedOut(
                    f"the outcome of the write of {record.key!r} is unknown: its log is too short",
                    hint="read the context and decide again",
                )
            if first.record != record:
                shared.apply(first)
                return first
        shared.apply(entry)
        shared.appended(sequence, record.key)
        return entry

    async def _first_attempt(self, update: protocol.UpdateContext) -> context_log.ContextLogEntry | None:
        """Return the record of an earlier attempt; None if it is certain that there is none."""
        shared, key = self._state, update.write.key
        number = 0
        try:
            async for entry in shared.log.entries(key):
                if _is_attempt(entry, update):
                    return entry
                number += 1
        except errors.Dropped:  # the oldest entry was removed during the read, so the history is incomplete
            number = shared.settings.history
        if number < shared.settings.history:
            return None
        raise errors.TimedOut(
            f"the outcome of the write of {key!r} is unknown: its log is too short",
            hint="read the context and decide again",
        )

    async def _fence(self, update: protocol.UpdateContext, base: KeyState) -> bool:
        """Make the log reject every other attempt of a write that is about to be rejected.

        An attempt may still be pending, and succeed after the client got the error.  The record changes
        nothing but uses up the id of the write.  False: the log has changed since ``base``.
        """
        shared, write = self._state, update.write
        entry = await shared.log.last(write.key)
        if entry is not None:
            record = _placed(entry, entry.record.holders)
        elif isinstance(write, protocol.PutContext):  # it expects a version that no later record can have
            return True
        else:
            stamp = shared.clock.now(shared.now_ns())
            record = protocol.ContextRecord(
                write.key, update.holders, stamp.time, stamp.node, reason="refuse"
            )
        write_id = context_log.write_id(update.writer, write.key, write.request)
        try:
            sequence = await shared.log.append(
                record, base.sequence, timeout_s=shared.settings.timeout_s, message_id=write_id
            )
        except errors.Conflict:
            return False
        if isinstance(sequence, api.Duplicate):
            first = await shared.log.get(sequence, write.key)
            return first is None or not _is_attempt(first, update)
        shared.apply(context_log.ContextLogEntry(record, sequence))
        shared.appended(sequence, write.key)
        return True

    async def find_stored(
        self, record: protocol.ContextRecord, error: errors.TimedOut
    ) -> context_log.ContextLogEntry:
        shared = self._state
        with in_doubt(record.key):
            entry = await shared.log.last(record.key)
        if entry is None or entry.record != record:
            raise errors.TimedOut(
                f"{record.key!r} was not stored within {shared.settings.timeout_s:g} s; it may be stored yet",
                hint="a broker with a full disk does not reply: see `muster status`",
            ) from error
        shared.apply(entry)
        return entry

    def _expect(self, record: protocol.ContextRecord) -> asyncio.Event:
        done = asyncio.Event()
        self._applied[record.key, record.stamp] = set(record.holders) - {self._state.name}, done
        return done

    def applied(self, applied: protocol.ReplicaApplied) -> None:
        """Handle the acknowledgement of a holder."""
        expected = self._applied.get((applied.key, applied.stamp))
        if expected is not None:
            missing, done = expected
            missing.discard(applied.node)
            if not missing:
                done.set()

    async def _replicated(self, record: protocol.ContextRecord, done: asyncio.Event) -> int:
        missing, _ = self._applied[record.key, record.stamp]
        try:
            async with asyncio.timeout(self._state.settings.timeout_s):
                await done.wait()
        except TimeoutError:
            state.events.warning("replicas-not-confirmed", key=record.key, nodes=sorted(missing))
        return len(record.holders) - len(missing)

    # Changes of the holders and the primary.

    async def become_primary(self, key: str, silent: str) -> None:
        """Become the primary, unless ``silent`` is no longer the primary."""
        shared = self._state
        async with shared.key_locks.hold(key):
            entry = await shared.log.last(key)
            if entry is None or entry.record.holders[0] != silent:
                return
            kept = [node for node in entry.record.holders if node not in (silent, shared.name)]
            candidates = [
                candidate
                for candidate in shared.directory.candidates(shared.information())
                if candidate.node != silent
            ]
            missing = shared.replica_target() - 1 - len(kept)
            rest = [candidate for candidate in candidates if candidate.node not in (shared.name, *kept)]
            holders = (shared.name, *kept, *placement.rank(rest, max(0, missing)))
            await self._place(entry, holders)
            state.events.info("primary-taken", key=key, node=shared.name, silent=silent)

    async def place(self, key: str, holders: tuple[str, ...], *, before: tuple[str, ...]) -> None:
        """Move the replicas to ``holders``, if the current holders are ``before``."""
        async with self._state.key_locks.hold(key):
            entry = await self._state.log.last(key)
            if entry is not None and entry.record.holders == before and entry.record.value is not None:
                await self._place(entry, holders)

    async def _place(self, entry: context_log.ContextLogEntry, holders: tuple[str, ...]) -> None:
        try:
            await self._append(_placed(entry, holders), entry.sequence)
        except errors.Conflict:
            last = await self._state.log.last(entry.record.key)
            if last is not None:
                self._state.apply(last)

    async def expire(self, key: str) -> bool:
        """Append the end of a lease of this primary, for its watchers. Return whether it did.

        It does not read the log first: if the local replica is outdated, the append fails.
        """
        shared = self._state
        async with shared.key_locks.hold(key):
            base = self.base_here(key)
            if base is None or not base.expired or base.holders[0] != shared.name:
                return False
            if await self._end_lease(key, base):
                return True
            await self.base_in_log(key)
            return False

    async def end_lease(self, key: str) -> None:
        """Append the end of a lease that is over, as any node, for a linearizable read.

        It needs no primary: whether the lease was renewed before is decided by the log.
        """
        async with self._state.key_locks.hold(key):
            base = await self.base_in_log(key)
            if base.expired:
                await self._end_lease(key, base)

    async def _end_lease(self, key: str, base: KeyState) -> bool:
        """Whether it was appended; not if the log has changed since ``base``."""
        assert base.stamp is not None
        assert base.writer is not None
        stamp = self._stamp_after(base.stamp, self._state.now_ns())
        record = protocol.ContextRecord(
            key, base.holders, stamp.time, stamp.node, writer=base.writer, reason="expire"
        )
        try:
            await self._append(record, base.sequence)
        except errors.Conflict:
            return False
        return True


def written(entry: context_log.ContextLogEntry, replicas: int) -> protocol.WriteResult:
    record = entry.record
    stamp = state.stamp_text(record.stamp, record.stamped_by)
    status = "normal" if replicas >= len(record.holders) else "updated"
    return protocol.WriteResult(record.key, entry.version, stamp, record.holders[0], replicas, status)


@contextlib.contextmanager
def in_doubt(key: str, *, is_repeat: bool = True) -> Iterator[None]:
    """While an earlier attempt may have been stored, report every failure as an unknown outcome."""
    try:
        yield
    except errors.TimedOut:
        raise
    except errors.Unavailable as error:
        if not is_repeat:
            raise
        raise errors.TimedOut(f"{key!r} may have been written: {error}") from error


def _placed(entry: context_log.ContextLogEntry, holders: tuple[str, ...]) -> protocol.ContextRecord:
    """The same value with other holders."""
    return msgspec.structs.replace(
        entry.record, holders=holders, version=entry.version, reason="place", acknowledge=False
    )


def _is_attempt(entry: context_log.ContextLogEntry, update: protocol.UpdateContext) -> bool:
    """Whether the record belongs to this write, also after a move of the replicas."""
    return (entry.record.request, entry.record.writer) == (update.write.request, update.writer)


def _repeated(update: protocol.UpdateContext) -> protocol.UpdateContext:
    return msgspec.structs.replace(update, write=msgspec.structs.replace(update.write, repeat=True))


def _stamp(record: protocol.ContextRecord) -> clock.HybridTimestamp:
    return clock.HybridTimestamp(record.stamp, record.stamped_by)
