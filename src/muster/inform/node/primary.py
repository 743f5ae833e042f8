"""The primary of a context: appends writes to the log, and changes the holders.

Only the primary writes a context.  A record counts only if it continues the state that its node knew
(`muster.inform.node.log.page_order`), so a former primary that still lives writes nothing: it learns from the
log that it was replaced.

Records contain the ids of their requests.  A request that was executed, by any primary, is not executed
again: its first result is returned.  What memory does not remember is searched in the versions of the
context, if the client has marked the request as a repetition; if they do not reach back far enough, the
outcome is reported as unknown.  The rejection of a repetition is a record, too (``refuse``): an attempt that
comes later is rejected as well, whichever node is the primary then.

A lease ends with a record of the log.  Every node estimates the time of the log by itself, so a lease that is
over for one node may last for another.  The primary decides: a write that is rejected because a lease is
over, and a linearizable read that finds it over, first have the primary append its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from muster.core import clock, errors
from muster.core.telemetry import log as log_
from muster.inform import protocol
from muster.inform import settings as settings_
from muster.inform.node import access as access_control
from muster.inform.node import key_locks, write_attempts
from muster.inform.node.log import context_log
from muster.inform.node.log import executed as requests
from muster.inform.node.log import freshness as log_freshness
from muster.inform.node.replicas import records as replica_records
from muster.inform.node.replicas import replica_table

events = log_.EventLog("inform")

ATTEMPTS = 8


class KeyState(NamedTuple):
    """The state of a key, as far as its next record depends on it."""

    since: int  # the sequence up to which it is known
    version: int
    holders: tuple[str, ...]
    stamp: clock.HybridTimestamp | None
    writer: str | None  # None: no context, so no owner
    live: bool
    expired: bool = False  # its lease is over by the time of this node, but not in the log


@dataclasses.dataclass(eq=False)
class PrimaryWriter:
    node: str
    settings: settings_.InformSettings
    log: context_log.ContextLog
    records: replica_records.ContextRecords
    executed: requests.ExecutedRequests
    freshness: log_freshness.LogFreshness
    access: access_control.ContextAccess
    now_ns: Callable[[], int]
    locks: key_locks.KeyLocks = dataclasses.field(default_factory=key_locks.KeyLocks)

    def __post_init__(self) -> None:
        self._applied: dict[tuple[str, int], tuple[set[str], asyncio.Event]] = {}
        self._attempts = write_attempts.WriteAttempts()

    # Writes.

    async def update(self, update: protocol.UpdateContext) -> protocol.WriteResult:
        """Execute a write as the primary of the context; `protocol.PrimaryMoved` if another node is the
        primary.
        """
        return await self._attempts.run(update.writer, update.write, lambda: self._update(update))

    async def _update(self, update: protocol.UpdateContext) -> protocol.WriteResult:
        write = update.write
        begun_s, key = self.freshness.now_s(), write.key
        async with self.locks.hold(key):
            is_confirmed = False
            for _ in range(ATTEMPTS):
                self.freshness.require_recent(begun_s, key)
                with in_doubt(key, is_repeat=update.write.repeat):
                    base = self.base_here(key) or await self._base(key)
                    first = await self._first_attempt(update)
                    if first is not None:
                        return written(first, 1)
                    try:
                        record = self.next_record(update, base)
                    except protocol.PrimaryMoved:
                        raise
                    except errors.MusterError as rejection:
                        if not is_confirmed:  # this node may have been replaced
                            await self.freshness.refresh(self.settings.timeout_s, confirmed=True)
                            is_confirmed = True
                            continue
                        is_confirmed = False
                        if base.expired:
                            await self._end_lease(key, base)
                        elif (
                            not update.write.repeat
                            or isinstance(rejection, errors.Forbidden)
                            or await self._refuse(update, base)
                        ):
                            raise
                        continue
                    waiting = self._expect(record) if record.acknowledge else None
                    replicas = 1
                    try:
                        position = await self.log.append(record, base.since)
                        if waiting is not None:
                            replicas = await self._replicated(record, waiting)
                    except errors.Conflict:
                        update = _repeated(update)  # if it is stored after all, it is recognised
                        continue
                    finally:
                        self._applied.pop((record.key, record.stamp), None)
                    return written(context_log.ContextLogEntry(record, position), replicas)
        raise errors.TimedOut(
            f"{key!r} had too many concurrent writes; this one may have been stored", retry_after_s=0.1
        )

    def next_record(self, update: protocol.UpdateContext, base: KeyState) -> protocol.ContextRecord:
        write = update.write
        holders = base.holders or update.holders
        if not holders or holders[0] != self.node:
            raise protocol.PrimaryMoved(f"{self.node} is not the primary of {write.key!r}")
        self.access.check(update.writer, "write", write.key, base.writer if base.live else None)
        version = base.version if base.live else 0
        if write.expected_version is not None and write.expected_version != version:
            raise errors.Conflict(
                f"{write.key!r} has the version {version}, not {write.expected_version}", actual=version
            )
        if isinstance(write, protocol.PutContext):
            size = len(write.value) + replica_table.RECORD_BYTES
            is_new = not (base.live and base.writer == update.writer)
            self.access.check_quota(update.writer, size, is_new=is_new)
        now_ns = self.now_ns()
        stamp = (
            self.records.clock.now(now_ns) if base.stamp is None else self._stamp_after(base.stamp, now_ns)
        )
        if isinstance(write, protocol.DeleteContext):
            if not base.live:
                raise errors.NotFound(f"no context {write.key!r}")
            return protocol.ContextRecord(
                write.key,
                holders,
                stamp.time,
                stamp.node,
                expires_at_ns=self.freshness.log_now_ns() + self.records.tombstone_ns,
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
            expires_at_ns=self.freshness.log_now_ns() + int(write.lease_s * 1e9) if write.lease_s else 0,
            writer=update.writer,
            request=write.request,
            acknowledge=write.ack == "replicated" and len(holders) > 1,
        )

    def _stamp_after(self, last: clock.HybridTimestamp, now_ns: int) -> clock.HybridTimestamp:
        try:
            return self.records.clock.observe(last, now_ns)
        except clock.ClockSkewTooLarge:
            # The clock of its writer was wrong: continue the context from there, but not the local clock.
            return clock.HybridTimestamp(last.time + 1, self.node)

    def base_here(self, key: str) -> KeyState | None:
        """The state of a key if it is in memory; None: it may be known all the same."""
        replica = self.records.replicas.index.get(key)
        if replica is None:
            return self._nothing() if self.records.holds_all else None
        if replica.temporary:
            return None
        live = self.freshness.is_live(replica)
        return KeyState(
            self.log.applied,
            replica.version,
            replica.holders,
            clock.HybridTimestamp(replica.stamp, replica.stamped_by),
            replica.writer,
            live,
            expired=not replica.deleted and not live,
        )

    def _nothing(self) -> KeyState:
        return KeyState(self.log.applied, 0, (), None, None, False)

    async def _base(self, key: str) -> KeyState:
        """The state of a key without a permanent replica here."""
        nothing = self._nothing()
        entry = await self.records.current(key)
        if entry is None:
            return nothing
        record = entry.record
        present = record.value is not None
        expired = present and 0 < record.expires_at_ns <= self.freshness.log_now_ns()
        return KeyState(
            nothing.since,
            entry.version,
            record.holders,
            clock.HybridTimestamp(record.stamp, record.stamped_by),
            record.writer,
            live=present and not expired,
            expired=expired,
        )

    async def _first_attempt(self, update: protocol.UpdateContext) -> context_log.ContextLogEntry | None:
        """Return the record of an earlier attempt; None if there is none."""
        write = update.write
        position = self.executed.position(update.writer, write.key, write.request)
        if position is None and (not write.repeat or self.executed.has_all):
            return None
        versions, _ = await self.records.versions(write.key)
        for entry in versions:
            record = entry.record
            if (record.request, record.writer) == (write.request, update.writer):
                if record.reason == "refuse":
                    raise errors.Conflict(f"{write.key!r}: another attempt of this write was rejected")
                return entry
        recent_ms = self.now_ns() // 1_000_000 - int(requests.EXECUTED_S * 1000)
        is_cut_off = len(versions) >= self.settings.history and versions[0].record.stamp >> 16 > recent_ms
        if position is None and not is_cut_off:
            return None
        raise errors.TimedOut(
            f"the outcome of the write of {write.key!r} is unknown: its log is too short",
            hint="read the context and decide again",
        )

    async def _refuse(self, update: protocol.UpdateContext, base: KeyState) -> bool:
        """Make all nodes reject every other attempt of a write that is about to be rejected.

        An attempt may still be under way, and succeed after the client got the error. False: the context has
        changed since ``base``.
        """
        write = update.write
        stamp = self.records.clock.now(self.now_ns())
        record = protocol.ContextRecord(
            write.key,
            (),
            stamp.time,
            stamp.node,
            writer=update.writer,
            request=write.request,
            reason="refuse",
        )
        try:
            await self.log.append(record, base.since)
        except errors.Conflict:
            return False
        return True

    def _expect(self, record: protocol.ContextRecord) -> asyncio.Event:
        done = asyncio.Event()
        self._applied[record.key, record.stamp] = set(record.holders) - {self.node}, done
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
            async with asyncio.timeout(self.settings.timeout_s):
                await done.wait()
        except TimeoutError:
            events.warning("replicas-not-confirmed", key=record.key, nodes=sorted(missing))
        return len(record.holders) - len(missing)

    # Changes of the holders and the primary.

    async def place(self, key: str, holders: tuple[str, ...], *, before: tuple[str, ...]) -> None:
        """Move the replicas to ``holders``, if the current holders are ``before``."""
        async with self.locks.hold(key):
            since, entry = self.log.applied, await self.records.current(key)
            if (
                entry is not None
                and entry.record.holders == before
                and before[0] == self.node
                and entry.record.value is not None
            ):
                with contextlib.suppress(errors.Conflict):
                    await self.log.append(placed(entry, holders), since)

    async def end_lease(self, key: str) -> bool:
        """Append the end of a lease, if it is over by the time of this node. Return whether it is over: then
        the log has its end, or another change of the context, or a fence of this node.

        `protocol.PrimaryMoved` if another node is the primary: then this one does not decide.
        """
        async with self.locks.hold(key):
            base = self.base_here(key) or await self._base(key)
            if base.holders[:1] != (self.node,):
                raise protocol.PrimaryMoved(f"{self.node} is not the primary of {key!r}")
            if base.expired:
                await self._end_lease(key, base)
            return base.expired

    async def _end_lease(self, key: str, base: KeyState) -> None:
        """Not if the context has changed since ``base``."""
        assert base.stamp is not None
        assert base.writer is not None
        stamp = self._stamp_after(base.stamp, self.now_ns())
        record = protocol.ContextRecord(
            key,
            base.holders,
            stamp.time,
            stamp.node,
            expires_at_ns=self.freshness.log_now_ns() + self.records.tombstone_ns,
            writer=base.writer,
            reason="expire",
        )
        with contextlib.suppress(errors.Conflict):
            await self.log.append(record, base.since)

    async def forget(self, key: str, replica: replica_table.Replica) -> None:
        """End the tombstone of a context of this primary."""
        async with self.locks.hold(key):
            if self.records.replicas.index.get(key) is not replica or replica.holders[0] != self.node:
                return
            record = protocol.ContextRecord(key, (), replica.stamp, replica.stamped_by, reason="forget")
            with contextlib.suppress(errors.Conflict):
                await self.log.append(record, self.log.applied)


def written(entry: context_log.ContextLogEntry, replicas: int) -> protocol.WriteResult:
    record = entry.record
    stamp = clock.format_timestamp(record.stamp, record.stamped_by)
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


def placed(entry: context_log.ContextLogEntry, holders: tuple[str, ...]) -> protocol.ContextRecord:
    """The same value with other holders."""
    return msgspec.structs.replace(
        entry.record, holders=holders, version=entry.version, reason="place", acknowledge=False
    )


def _repeated(update: protocol.UpdateContext) -> protocol.UpdateContext:
    return msgspec.structs.replace(update, write=msgspec.structs.replace(update.write, repeat=True))
