"""Writes: the initiator finds the primary, the primary appends to the log and acknowledges.

The node a client asks is the initiator.  For a context that is new it chooses where the copies go; else it
hands the write to the primary, and if that one is silent it has another selected among the holders: a
Primary-Copy Selection Request to the context's topic, the best of those who answer is notified, and makes
itself the primary by an append under compare-and-set.  So two initiators that act at once make one new
primary, and the old one, if it lives after all, cannot append any more: it learns from the conflict that it
has been deposed.

A context that this node has never heard of is most likely new, so it is written as if it were: if it is not,
the log refuses the append, which costs no more than having asked first.

A write has an id of its own, and all of its attempts use it as the message id of the append, so the log
stores it once, whichever primary tries it and whatever others wrote in between.  What is left to us is the
answer.  A repeat that would be refused (its expected version has passed, because of the first attempt) is
looked for in the context's log; where that does not reach back so far, the outcome is reported as unknown.
Where no attempt was stored, the refusal uses up the write's id first: an attempt that is still under way in
another node cannot be stored after the client was refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from muster.bus import api
from muster.core import clock, errors
from muster.inform import protocol
from muster.inform.mounts import base as mounts
from muster.inform.node import state
from muster.inform.node.log import context_log
from muster.inform.node.replicas import placement

ATTEMPTS = 8
HINTS_MAX = 10_000  # equivalent: any number near it bounds the memory as well
REQUEST_CHARACTERS_MAX = 64


class _Base(NamedTuple):
    """What stands in the log of a key, as far as its next record depends on it."""

    sequence: int
    version: int
    holders: tuple[str, ...]
    stamp: clock.HybridTimestamp | None
    writer: str | None  # None: nothing is there to be owned
    request: str
    live: bool


NOTHING = _Base(0, 0, (), None, None, "", False)  # equivalent: a version is read of what is live


class PendingWrite(NamedTuple):
    """A write that is on its way into the log."""

    update: protocol.UpdateContext
    record: protocol.ContextRecord
    stored: asyncio.Future[int]


class ContextWriter:
    def __init__(self, shared: state.NodeState) -> None:
        self._desk = shared
        self._applied: dict[tuple[str, int], tuple[set[str], asyncio.Event]] = {}
        self._hints: dict[str, tuple[str, ...]] = {}  # holders of contexts that are not here

    # The initiator.

    async def write(
        self, write: protocol.PutContext | protocol.DeleteContext, writer: str
    ) -> protocol.WriteResult:
        write = _checked(write, writer)
        shared, key = self._desk, write.key
        may_be_new = isinstance(write, protocol.PutContext) and not write.expected_version
        for _ in range(ATTEMPTS):
            with _in_doubt(key, is_repeat=write.repeat):
                holders = self._known_holders(key)
                if not holders and not may_be_new:
                    entry = await shared.log.last(key)
                    holders = self.heard_of(key, entry.record.holders) if entry is not None else ()
                may_be_new = False
                if holders:
                    update = protocol.UpdateContext(write, writer)
                elif isinstance(write, protocol.DeleteContext) and not write.repeat:
                    raise errors.NotFound(f"no context {key!r}")
                else:
                    holders = tuple(self._choose())
                    update = protocol.UpdateContext(write, writer, holders)
                primary = holders[0]
                try:
                    if primary == shared.name:
                        return await self.update(update)
                    return await shared.ask(primary, "update", update, protocol.WriteResult)
                except protocol.PrimaryMoved:
                    if primary != shared.name:  # we found out ourselves who it is now
                        self._hints.pop(key, None)
                    continue
                except state.Silent:
                    write = msgspec.structs.replace(write, repeat=True)
            with _in_doubt(key):
                self._hints.pop(key, None)
                shared.directory.silent(primary)
                await self._select_primary(key, silent=primary)
        with _in_doubt(key, is_repeat=write.repeat):
            raise errors.Unavailable(
                f"the primary of {key!r} moved {ATTEMPTS} times while it was to be written"
            )

    def begin(self, write: protocol.PutContext | protocol.DeleteContext, writer: str) -> PendingWrite | None:
        """A write as most are: of a context whose primary we are, and that nobody else is writing. It needs
        no task, only `finish` when it is stored.  None: it may be another, for `write`.
        """
        write = _checked(write, writer)
        shared, key = self._desk, write.key
        base = self._base_here(key)
        if base is not None:
            update = protocol.UpdateContext(write, writer)
        elif (
            isinstance(write, protocol.PutContext)
            and not write.expected_version
            and not self._has_heard_of(key)
        ):
            base, update = NOTHING, protocol.UpdateContext(write, writer, tuple(self._choose()))
        else:
            return None
        if (isinstance(write, protocol.PutContext) and write.ack != "logged") or not shared.turns.take_now(
            key
        ):
            return None
        try:
            record = self._next_record(update, base)
            if record is not None:
                stored = shared.log.append_soon(record, base.sequence, timeout_s=shared.settings.timeout_s)
                return PendingWrite(update, record, stored)
        except BaseException:
            shared.turns.give(key)
            raise
        shared.turns.give(key)
        return None

    def finish(self, begun: PendingWrite) -> protocol.WriteResult:
        """It is stored; or what went wrong is raised, and `go_on` is next."""
        shared, record = self._desk, begun.record
        try:
            sequence = begun.stored.result()
        except errors.TimedOut:
            raise  # nobody writes that key before it is known what stands there
        except BaseException:
            shared.turns.give(record.key)
            raise
        if isinstance(sequence, api.Duplicate):
            shared.turns.give(record.key)
            raise errors.Conflict(f"{record.key!r}: this write was stored before")
        entry = context_log.ContextLogEntry(record, sequence)
        shared.apply(entry, just_stamped=True)  # equivalent: to observe our own stamp changes nothing
        shared.appended(sequence, record.key)
        shared.turns.give(record.key)
        return _written(entry, 1)

    async def go_on(self, begun: PendingWrite, error: errors.MusterError) -> protocol.WriteResult:
        """With one that was begun and is not known to be stored."""
        if isinstance(error, errors.TimedOut):
            try:
                return _written(await self._looked_up(begun.record, error), 1)
            finally:
                self._desk.turns.give(begun.record.key)
        if isinstance(error, errors.Conflict):
            write = msgspec.structs.replace(begun.update.write, repeat=True)
            with _in_doubt(write.key):
                await self._base_in_log(write.key)  # what we knew is not what stands there
            return await self.write(write, begun.update.writer)
        raise error

    def _choose(self) -> list[str]:
        shared = self._desk
        candidates = shared.directory.candidates(shared.information())
        return placement.rank(candidates, shared.copies_wanted(), watermark=shared.settings.watermark)

    def _known_holders(self, key: str) -> tuple[str, ...]:
        """The primary first; empty for a context that we have not heard of."""
        copy = self._desk.copies.index.get(key)
        if copy is not None and not copy.temporary:
            return copy.holders
        return self._hints.get(key, ())

    def _has_heard_of(self, key: str) -> bool:
        return key in self._hints or key in self._desk.copies.index

    def heard_of(self, key: str, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Remember where a context is that is not here."""
        if len(self._hints) >= HINTS_MAX:
            self._hints.clear()
        self._hints[key] = holders
        return holders

    async def _select_primary(self, key: str, *, silent: str) -> None:
        shared = self._desk
        entry = await shared.log.last(key)
        if entry is None or entry.record.holders[0] != silent:
            return
        others = [node for node in entry.record.holders if node not in (silent, shared.name)]
        replies = await shared.bus.gather(
            protocol.topic(protocol.bucket(key), "select"),
            protocol.encode(protocol.ContextQuery(key, silent)),
            enough=max(1, len(others)),
            timeout_s=min(1.0, shared.settings.timeout_s),
        )
        answered = [protocol.result_of(message.data, protocol.ServerInformation) for message in replies]
        known = {candidate.node: candidate for candidate in shared.directory.candidates(shared.information())}
        candidates = [
            known.get(
                information.node, placement.ReplicaCandidate(information.node, information.load.ratio, 1000.0)
            )
            for information in answered
        ]
        if shared.name in entry.record.holders:
            candidates.append(known[shared.name])
        for node in placement.rank(candidates, len(candidates)):
            try:
                if node == shared.name:
                    await self.become_primary(key, silent)
                else:
                    await shared.ask(node, "become-primary", protocol.ContextQuery(key, silent), type(None))
            except state.Silent:
                continue
            return
        await self.become_primary(key, silent)  # nobody holds it any more: from the log

    # The primary.

    async def update(self, update: protocol.UpdateContext) -> protocol.WriteResult:
        """Carry out a write as the context's primary; `protocol.Moved` if another node is."""
        shared, write = self._desk, update.write
        async with shared.turns.of(write.key):
            fresh = False
            for _ in range(ATTEMPTS):
                with _in_doubt(write.key, is_repeat=update.write.repeat):
                    base = self._base_here(write.key) if not fresh else None
                    if base is None:
                        # Who sends us holders has not heard of it either.
                        base = NOTHING if update.holders and not fresh else await self._base_in_log(write.key)
                    try:
                        record = self._next_record(update, base)
                    except protocol.PrimaryMoved:
                        raise
                    except errors.MusterError as refusal:
                        if not fresh:  # we may have been deposed: only what the log has is a reason
                            fresh = True
                            continue
                        if not update.write.repeat:
                            raise
                        first = await self._first_attempt(update)
                        if first is not None:
                            return _written(first, 1)
                        if isinstance(refusal, errors.Forbidden) or await self._fence(update, base):
                            raise
                        continue
                    if record is None:  # done already
                        status = "normal" if len(base.holders) == 1 else "updated"
                        return protocol.WriteResult(
                            write.key, base.version, str(base.stamp), shared.name, 1, status
                        )
                    waiting = self._expect(record) if record.acknowledge else None
                    copies = 1
                    try:
                        entry = await self._append(record, base.sequence)
                        if waiting is not None and entry.record == record:
                            copies = await self._replicated(record, waiting)
                    except errors.Conflict:
                        fresh = True  # what we knew is not what stands there
                        update = _repeated(update)
                        continue
                    finally:
                        self._applied.pop((record.key, record.stamp), None)
                    if not _is_attempt(entry, update):
                        raise errors.Conflict(f"{write.key!r}: another attempt of this write was refused")
                    return _written(entry, copies)
        raise errors.TimedOut(
            f"{write.key!r} changes faster than it can be written; it may have been", retry_after_s=0.1
        )

    def _next_record(self, update: protocol.UpdateContext, base: _Base) -> protocol.ContextRecord | None:
        shared, write = self._desk, update.write
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
            expires_at_ns=now_ns + int(write.lease_s * 1e9) if write.lease_s else 0,
            writer=update.writer,
            request=write.request,
            acknowledge=write.ack == "replicated" and len(holders) > 1,
        )

    def _stamp_after(self, last: clock.HybridTimestamp, now_ns: int) -> clock.HybridTimestamp:
        try:
            return self._desk.clock.observe(last, now_ns)
        except clock.ClockSkewTooLarge:
            # Its writer's clock was wrong: the context goes on from there, our clock does not.
            return clock.HybridTimestamp(last.time + 1, self._desk.name)

    def _base_here(self, key: str) -> _Base | None:
        shared = self._desk
        copy = shared.copies.index.get(key)
        if copy is None or copy.temporary:
            return None
        stamp = clock.HybridTimestamp(copy.stamp, copy.stamped_by)
        live = copy.is_live(shared.now_ns())
        return _Base(copy.sequence, copy.version, copy.holders, stamp, copy.writer, copy.request, live)

    async def _base_in_log(self, key: str) -> _Base:
        shared = self._desk
        entry = await shared.log.last(key)
        if entry is None:
            shared.drop(key)
            return NOTHING
        shared.apply(entry)
        record = entry.record
        if shared.name not in record.holders:
            self.heard_of(key, record.holders)
        live = record.value is not None and not 0 < record.expires_at_ns <= shared.now_ns()
        return _Base(
            entry.sequence, entry.version, record.holders, _stamp(record), record.writer, record.request, live
        )

    async def _append(self, record: protocol.ContextRecord, after: int) -> context_log.ContextLogEntry:
        """Append and apply; or what an earlier attempt of the same write stored.

        An unknown outcome is looked up; if it cannot be, `errors.TimedOut`.
        """
        shared = self._desk
        try:
            sequence = await shared.log.append(record, after, timeout_s=shared.settings.timeout_s)
        except errors.TimedOut as error:
            return await self._looked_up(record, error)
        entry = context_log.ContextLogEntry(record, sequence)
        if isinstance(sequence, api.Duplicate):
            with _in_doubt(record.key):
                first = await shared.log.at(sequence, record.key)
            if first is None:
                raise errors.TimedOut(
                    f"whether {record.key!r} was written or refused is not known: its log begins later",
                    hint="read it and decide anew",
                )
            if first.record != record:
                shared.apply(first)
                return first
        shared.apply(entry)
        shared.appended(sequence, record.key)
        return entry

    async def _first_attempt(self, update: protocol.UpdateContext) -> context_log.ContextLogEntry | None:
        """What an earlier attempt stored; None if it is certain that none did."""
        shared, key = self._desk, update.write.key
        number = 0
        try:
            async for entry in shared.log.entries(key):
                if _is_attempt(entry, update):
                    return entry
                number += 1
        except errors.Dropped:  # the oldest went while we read, so there are more than are kept
            number = shared.settings.history
        if number < shared.settings.history:
            return None
        raise errors.TimedOut(
            f"whether {key!r} was written is not known: its log does not reach back so far",
            hint="read it and decide anew",
        )

    async def _fence(self, update: protocol.UpdateContext, base: _Base) -> bool:
        """Make the log reject every other attempt of a write that is about to be refused.

        One of them may still be under way, and succeed after the client got the refusal.  The record changes
        nothing but uses up the id of the write.  False: the log has changed since ``base``.
        """
        shared, write = self._desk, update.write
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
            first = await shared.log.at(sequence, write.key)
            return first is None or not _is_attempt(first, update)
        shared.apply(context_log.ContextLogEntry(record, sequence))
        shared.appended(sequence, write.key)
        return True

    async def _looked_up(
        self, record: protocol.ContextRecord, error: errors.TimedOut
    ) -> context_log.ContextLogEntry:
        shared = self._desk
        with _in_doubt(record.key):
            entry = await shared.log.last(record.key)
        if entry is None or entry.record != record:
            raise errors.TimedOut(
                f"{record.key!r} was not stored within {shared.settings.timeout_s:g} s; it may yet be",
                hint="a broker without room on its disk does not answer: see `muster status`",
            ) from error
        shared.apply(entry)
        return entry

    def _expect(self, record: protocol.ContextRecord) -> asyncio.Event:
        done = asyncio.Event()
        self._applied[record.key, record.stamp] = set(record.holders) - {self._desk.name}, done
        return done

    def applied(self, applied: protocol.ReplicaApplied) -> None:
        """A holder has a record that was to be acknowledged."""
        expected = self._applied.get((applied.key, applied.stamp))
        if expected is not None:
            missing, done = expected
            missing.discard(applied.node)
            if not missing:
                done.set()

    async def _replicated(self, record: protocol.ContextRecord, done: asyncio.Event) -> int:
        missing, _ = self._applied[record.key, record.stamp]
        try:
            async with asyncio.timeout(self._desk.settings.timeout_s):
                await done.wait()
        except TimeoutError:
            state.events.warning("copies-silent", key=record.key, nodes=sorted(missing))
        return len(record.holders) - len(missing)

    # Holders and the primary change.

    async def become_primary(self, key: str, silent: str) -> None:
        """Unless ``silent`` is no longer the primary."""
        shared = self._desk
        async with shared.turns.of(key):
            entry = await shared.log.last(key)
            if entry is None or entry.record.holders[0] != silent:
                return
            kept = [node for node in entry.record.holders if node not in (silent, shared.name)]
            candidates = [
                candidate
                for candidate in shared.directory.candidates(shared.information())
                if candidate.node != silent
            ]
            missing = shared.copies_wanted() - 1 - len(kept)
            rest = [candidate for candidate in candidates if candidate.node not in (shared.name, *kept)]
            holders = (shared.name, *kept, *placement.rank(rest, max(0, missing)))
            await self._place(entry, holders)
            state.events.info("primary-taken", key=key, node=shared.name, silent=silent)

    async def place(self, key: str, holders: tuple[str, ...], *, before: tuple[str, ...]) -> None:
        """Have the copies there, if they are where we thought."""
        async with self._desk.turns.of(key):
            entry = await self._desk.log.last(key)
            if entry is not None and entry.record.holders == before and entry.record.value is not None:
                await self._place(entry, holders)

    async def _place(self, entry: context_log.ContextLogEntry, holders: tuple[str, ...]) -> None:
        try:
            await self._append(_placed(entry, holders), entry.sequence)
        except errors.Conflict:
            last = await self._desk.log.last(entry.record.key)
            if last is not None:
                self._desk.apply(last)

    async def expire(self, key: str) -> None:
        """Its lease has ended: say so in the log, for those who watch."""
        shared = self._desk
        async with shared.turns.of(key):
            entry = await shared.log.last(key)
            if entry is None or entry.record.value is None or entry.record.holders[0] != shared.name:
                return
            now_ns = shared.now_ns()
            if not 0 < entry.record.expires_at_ns <= now_ns:  # equivalent: no lease ends at 1 ns
                return
            stamp = self._stamp_after(_stamp(entry.record), now_ns)
            record = protocol.ContextRecord(
                key, entry.record.holders, stamp.time, stamp.node, writer=entry.record.writer, reason="expire"
            )
            await self._append(record, entry.sequence)


def _written(entry: context_log.ContextLogEntry, copies: int) -> protocol.WriteResult:
    record = entry.record
    stamp = state.stamp_text(record.stamp, record.stamped_by)
    status = "normal" if copies >= len(record.holders) else "updated"
    return protocol.WriteResult(record.key, entry.version, stamp, record.holders[0], copies, status)


@contextlib.contextmanager
def _in_doubt(key: str, *, is_repeat: bool = True) -> Iterator[None]:
    """While an earlier attempt may have been stored, every failure leaves the outcome unknown."""
    try:
        yield
    except errors.TimedOut:
        raise
    except errors.Unavailable as error:
        if not is_repeat:
            raise
        raise errors.TimedOut(f"{key!r} may have been written: {error}") from error


def _placed(entry: context_log.ContextLogEntry, holders: tuple[str, ...]) -> protocol.ContextRecord:
    """The same value, with its copies there."""
    return msgspec.structs.replace(
        entry.record, holders=holders, version=entry.version, reason="place", acknowledge=False
    )


def _is_attempt(entry: context_log.ContextLogEntry, update: protocol.UpdateContext) -> bool:
    """Whether the record is of this write; a copy that was moved later still is."""
    return (entry.record.request, entry.record.writer) == (update.write.request, update.writer)


def _repeated(update: protocol.UpdateContext) -> protocol.UpdateContext:
    return msgspec.structs.replace(update, write=msgspec.structs.replace(update.write, repeat=True))


def _stamp(record: protocol.ContextRecord) -> clock.HybridTimestamp:
    return clock.HybridTimestamp(record.stamp, record.stamped_by)


def _checked(
    write: protocol.PutContext | protocol.DeleteContext, writer: str
) -> protocol.PutContext | protocol.DeleteContext:
    if not write.request:
        write = msgspec.structs.replace(write, request=uuid.uuid4().hex)
    elif len(write.request) > REQUEST_CHARACTERS_MAX:  # each context keeps its last one
        raise errors.InvalidInput(f"the id of a request has at most {REQUEST_CHARACTERS_MAX} characters")
    if write.key.startswith(mounts.PREFIX):
        raise errors.Refused(f"{write.key!r} is of another registry, where we only read")
    if isinstance(write, protocol.DeleteContext):
        protocol.check_key(write.key)
        return write
    if write.key:
        protocol.check_key(write.key)
    else:
        # The same for each attempt.
        name = hashlib.blake2b(f"{writer}\0{write.request}".encode(), digest_size=16).digest()
        write = msgspec.structs.replace(write, key=str(uuid.UUID(bytes=name, version=4)))
    if len(write.value) > protocol.VALUE_BYTES_MAX:
        raise errors.LimitExceeded(
            f"a context of {len(write.value)} bytes: the most is {protocol.VALUE_BYTES_MAX}",
            hint="keep the large thing elsewhere, and its address in the context",
        )
    if write.attributes and len(protocol.encode(write.attributes)) > protocol.ATTRIBUTES_BYTES_MAX:
        raise errors.LimitExceeded(f"the attributes take over {protocol.ATTRIBUTES_BYTES_MAX} bytes")
    if not (write.lease_s == 0 or 0.001 <= write.lease_s <= 100 * 365 * 86400):
        raise errors.InvalidInput(f"a lease of {write.lease_s!r} s: from a millisecond to a hundred years")
    return write
