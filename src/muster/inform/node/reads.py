"""Access: from memory where there is a copy; else from the holders, the first answer wins; else from the log.

The paper ends with the holders and takes silence until the time-out for "not found".  We have a log that
knows, so a read that no holder has answered for a moment asks it: absence is told at once, and a context is
readable even when all its holders are gone.  When the log does not answer either, the read has timed out: the
context may exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq

import msgspec

from muster.bus.rpc import server
from muster.core import errors
from muster.inform import protocol
from muster.inform.mounts import base as mounts
from muster.inform.node import state
from muster.inform.node.log import context_log
from muster.inform.node.replicas import demand, replica_table

WHERE_TIMEOUT_S = 2.0


class ContextReader:
    def __init__(self, shared: state.NodeState) -> None:
        self._desk = shared

    # One context.

    def local(self, key: str, max_staleness_s: float | None = None) -> protocol.Context | None:
        """From memory, at once, or None: then ask `get`."""
        shared = self._desk
        copy = shared.copies.index.get(key)
        if copy is None or not copy.is_live(shared.now_ns()):
            return None
        age_s = shared.age_s(copy)
        if not _is_fresh(age_s, max_staleness_s):
            return None
        value = copy.read()
        return None if value is None else self.context(key, copy, value, age_s)

    def context(self, key: str, copy: replica_table.Replica, value: bytes, age_s: float) -> protocol.Context:
        return protocol.Context(
            key,
            value,
            protocol.attributes_of(copy.attributes),
            copy.version,
            copy.stamp,
            copy.stamped_by,
            age_s,
            self._desk.name,
            self._desk.copies.kind(copy).value,
            copy.writer,
            copy.expires_at_ns,
        )

    async def get(self, request: protocol.GetContext, identity: str) -> protocol.Context:
        """`errors.NotFound` where there is none."""
        key = protocol.check_key(request.key)
        if key.startswith(mounts.PREFIX):
            self._desk.check(identity, "read", key, "")  # nobody here owns it
            return await self._desk.mounted(key).get(key)
        context = await self.held(request)
        if context is not None:
            self._desk.demand.add(key, self._desk.name)
        else:
            context = await self._from_others(request)
        self._desk.check(identity, "read", key, context.writer)
        return context

    async def held(self, request: protocol.GetContext) -> protocol.Context | None:
        """From a copy of ours that is fresh enough, or can be made so."""
        shared = self._desk
        context = self.local(request.key, request.max_staleness_s)
        copy = shared.copies.index.get(request.key)
        if context is not None or copy is None:
            return context
        if not _is_fresh(shared.age_s(copy), request.max_staleness_s):
            if copy.temporary:
                return None
            try:
                await shared.refresh(shared.settings.timeout_s)
            except errors.Unavailable:
                return None
            copy = shared.copies.index.get(request.key)
        if copy is None or not copy.is_live(shared.now_ns()):
            return None
        value = await shared.value_of(request.key, copy)
        return None if value is None else self.context(request.key, copy, value, shared.age_s(copy))

    async def _from_others(self, request: protocol.GetContext) -> protocol.Context:
        shared, settings = self._desk, self._desk.settings
        question = protocol.encode(protocol.GetContext(request.key, request.max_staleness_s, shared.name))
        topic = protocol.topic(protocol.bucket(request.key), "access")
        deadline_s = shared.now_s() + settings.timeout_s
        while True:
            answers = await shared.bus.gather(topic, question, enough=1, timeout_s=settings.hedge_s)
            if answers:
                return protocol.result_of(answers[0].data, protocol.Context)
            left_s = deadline_s - shared.now_s()
            if left_s <= 0:
                raise errors.TimedOut(
                    f"{request.key!r}: neither a holder nor the log answered in {settings.timeout_s:g} s"
                )
            try:
                async with asyncio.timeout(left_s):
                    entry = await shared.log.last(request.key)
            except (errors.Unavailable, TimeoutError):
                continue
            return self._from_log(request.key, entry)

    async def logged(self, key: str) -> protocol.Context:
        """As the log has it; `errors.NotFound` where there is none."""
        return self._from_log(key, await self._desk.log.last(key))

    def _from_log(self, key: str, entry: context_log.ContextLogEntry | None) -> protocol.Context:
        record = entry.record if entry is not None else None
        if entry is None or record is None or record.value is None or _expired(record, self._desk.now_ns()):
            raise errors.NotFound(f"no context {key!r}")
        return protocol.Context(
            key,
            record.value,
            protocol.attributes_of(record.attributes),
            entry.version,
            record.stamp,
            record.stamped_by,
            0.0,
            "log",
            "log",
            record.writer,
            record.expires_at_ns,
        )

    # What happened to it.

    async def history(self, request: protocol.WaitForChanges, identity: str) -> protocol.ContextHistory:
        """Its changes after that version, oldest first, those that ``identity`` may read."""
        protocol.check_key(request.key)
        while True:
            with contextlib.suppress(errors.Dropped):  # the oldest went while we read: those that are there
                return await self._history(request, identity)

    async def _history(self, request: protocol.WaitForChanges, identity: str) -> protocol.ContextHistory:
        """As many as one answer holds; no more are held in memory, however many the log keeps."""
        shared, key, after_version = self._desk, request.key, request.after_version
        changes: list[protocol.ContextChange] = []
        number, size_bytes, more, reaches_back = 0, 0, False, False
        hidden: str | None = None  # the writer of the last one that must not be read
        async with contextlib.aclosing(shared.log.entries(key, since=max(1, after_version))) as entries:
            async for entry in entries:
                number += 1
                record = entry.record
                if number == 1:
                    reaches_back = entry.version <= after_version
                    if record.reason == "place":  # the write that it repeats has gone
                        record = _as_written(record)
                if record.reason in ("place", "refuse") or entry.version <= after_version:
                    continue
                if not shared.may_read(identity, key, record.writer):
                    hidden = record.writer
                    continue
                size_bytes += protocol.answer_bytes(record.value, record.attributes)
                more = bool(changes) and size_bytes > protocol.ANSWER_BYTES_MAX
                if not more:
                    changes.append(_change(context_log.ContextLogEntry(record, entry.sequence)))
                elif after_version:  # else the rest is counted
                    break
        if hidden is not None and not changes:
            shared.check(identity, "read", key, hidden)
        # The last record stays, so where there is none, a deletion has been forgotten.
        complete = reaches_back if after_version else number < shared.settings.history
        return protocol.ContextHistory(changes, complete=complete, more=more)

    async def changes(self, request: protocol.WaitForChanges, identity: str) -> protocol.ContextHistory:
        """As `history`, waiting for something to happen if nothing has."""
        shared, key = self._desk, protocol.check_key(request.key)
        deadline_s = shared.now_s() + request.wait_s
        while True:
            changed = shared.change_of(key)
            copy = shared.copies.index.get(key)
            idle = copy is not None and not copy.temporary and copy.version <= request.after_version
            if not idle:
                history = await self.history(request, identity)
                if history.changes or (request.after_version and not history.complete):
                    return history
            left_s = deadline_s - shared.now_s()
            if left_s <= 0 or shared.closing:
                return protocol.ContextHistory([])
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                continue

    # Where it is.

    async def where(self, request: protocol.Where) -> protocol.Page[protocol.ReplicaInfo]:
        """The primary first. Every page asks all nodes again, so it has as many as fit."""
        shared, key = self._desk, protocol.check_key(request.key)
        question = protocol.encode(protocol.ContextQuery(key))
        others = shared.directory.nodes
        replies = await shared.bus.gather(
            protocol.to_all("where"), question, enough=len(others) + 1, timeout_s=WHERE_TIMEOUT_S
        )
        order = {kind.value: place for place, kind in enumerate(demand.ReplicaKind)}
        views = [
            view for reply in replies for view in protocol.result_of(reply.data, list[protocol.ReplicaInfo])
        ]
        if not views:
            self._from_log(key, await shared.log.last(key))

        def place(view: protocol.ReplicaInfo) -> str:
            return f"{order[view.copy]} {view.node}"

        page = server.page(sorted(views, key=place), place, request.after, rows_max=len(views))
        return protocol.Page(page["items"], page["next"])

    def where_here(self, key: str) -> list[protocol.ReplicaInfo]:
        """The copy we hold, if we do."""
        shared = self._desk
        copy = shared.copies.index.get(key)
        if copy is None or not copy.is_live(shared.now_ns()):
            return []
        kind = shared.copies.kind(copy).value
        counts = shared.demand.of(key)
        most = dict(heapq.nlargest(protocol.DEMAND_MAX, counts.items(), key=lambda count: count[1]))
        others = sum(counts.values()) - sum(most.values())
        return [protocol.ReplicaInfo(shared.name, kind, copy.version, shared.age_s(copy), most, others)]


def _is_fresh(age_s: float, max_staleness_s: float | None) -> bool:
    """Whether an answer from memory will do. With 0 the log has to confirm it, however young the copy is."""
    return max_staleness_s is None or (max_staleness_s > 0 and age_s <= max_staleness_s)


def _expired(record: protocol.ContextRecord, now_ns: int) -> bool:
    return record.expires_at_ns != 0 and record.expires_at_ns <= now_ns


def _as_written(record: protocol.ContextRecord) -> protocol.ContextRecord:
    return msgspec.structs.replace(record, reason="put" if record.value is not None else "delete")


def _change(entry: context_log.ContextLogEntry) -> protocol.ContextChange:
    record = entry.record
    return protocol.ContextChange(
        record.key,
        entry.version,
        state.stamp_text(record.stamp, record.stamped_by),
        record.value,
        protocol.attributes_of(record.attributes),
        record.writer,
        record.reason,
    )
