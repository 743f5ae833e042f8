"""Reads: from memory if there is a replica; else from the holders, where the first reply wins; else from what
this node has of the log.

The paper stops at the holders and treats silence until the timeout as "not found".  Here every node has the
records of all contexts in its view.  So a read without a reply from a holder compares the view with the end
of the log after a short time: a missing context is reported at once, and a context can be read when all its
holders are lost.  If the log does not reply either, the read times out: the context may exist.

A node judges by its estimate of the log's time whether a lease is over, and another node may judge otherwise
for some milliseconds.  A linearizable read does not rely on that: it reports a context as missing after the
log has the end of its lease.

With `settings.InformSettings.reads_by_lease` a primary answers a linearizable read from memory for some
seconds after the log had its last page: no other node takes its contexts before (`ContextLog.fence`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
from collections.abc import Mapping

import msgspec

from muster.bus import api
from muster.bus.log import pages
from muster.bus.rpc import server
from muster.core import clock, errors
from muster.inform import protocol
from muster.inform import settings as settings_
from muster.inform.mounts import base
from muster.inform.node import access as access_control
from muster.inform.node import change_events, primary, writes
from muster.inform.node.log import context_log
from muster.inform.node.log import freshness as log_freshness
from muster.inform.node.replicas import demand as demand_
from muster.inform.node.replicas import links as node_links
from muster.inform.node.replicas import peers, replica_table
from muster.inform.node.replicas import records as replica_records

WHERE_TIMEOUT_S = 2.0
SCANNED_MAX = 1_000  # records that are read for one reply, in one step of the event loop


@dataclasses.dataclass(eq=False)
class ContextReader:
    node: str
    bus: api.Bus
    settings: settings_.InformSettings
    log: context_log.ContextLog
    records: replica_records.ContextRecords
    freshness: log_freshness.LogFreshness
    access: access_control.ContextAccess
    directory: peers.NodeDirectory
    links: node_links.NodeLinks
    events: change_events.ChangeEvents
    demand: demand_.DemandCounts
    mounts: Mapping[str, base.MountedRegistry]
    primary: primary.PrimaryWriter
    writer: writes.ContextWriter

    # One context.

    def local(self, key: str, max_staleness_s: float | None = None) -> protocol.Context | None:
        """Read from memory; None: use `get`."""
        replica = self.records.replicas.index.get(key)
        if replica is None or not self.freshness.is_live(replica):
            return None
        if max_staleness_s == 0:
            if replica.temporary or replica.holders[0] != self.node or not self.log.may_answer(key):
                return None
            max_staleness_s = None
        age_s = self.freshness.age_s(replica)
        if not _is_fresh(age_s, max_staleness_s):
            return None
        value = replica.read()
        return None if value is None else self.context(key, replica, value, age_s)

    def is_in_memory(self, key: str) -> bool:
        replica = self.records.replicas.index.get(key)
        return replica is not None and replica.value is not None

    def context(
        self, key: str, replica: replica_table.Replica, value: bytes, age_s: float
    ) -> protocol.Context:
        return protocol.Context(
            key,
            value,
            protocol.attributes_of(replica.attributes),
            replica.version,
            replica.stamp,
            replica.stamped_by,
            age_s,
            self.node,
            self.records.replicas.kind(replica),
            replica.writer,
            replica.expires_at_ns,
            self._lease_left_s(replica.expires_at_ns) if replica.expires_at_ns else 0.0,
        )

    def _lease_left_s(self, expires_at_ns: int) -> float:
        return max(0.0, (expires_at_ns - self.freshness.log_now_ns()) / 1e9) if expires_at_ns else 0.0

    async def get(self, request: protocol.GetContext, identity: str) -> protocol.Context:
        """Read a context; `errors.NotFound` if it does not exist."""
        key = protocol.check_key(request.key)
        if key.startswith(base.PREFIX):
            self.access.check(identity, "read", key, "")  # entries of mounts have no owner here
            return await self._mounted(key).get(key)
        context = await self.from_replica(request)
        if context is None:
            context = await self._from_holders(request)
        self.demand.add(key, self.node)
        self.access.check(identity, "read", key, context.writer)
        return context

    async def from_replica(self, request: protocol.GetContext) -> protocol.Context | None:
        """Read from a local replica that is fresh enough or can be refreshed."""
        context = self.local(request.key, request.max_staleness_s)
        replica = self.records.replicas.index.get(request.key)
        if context is not None or replica is None:
            return context
        if not _is_fresh(self.freshness.age_s(replica), request.max_staleness_s):
            try:
                linearizable = request.max_staleness_s == 0
                await self.freshness.refresh(self.settings.timeout_s, confirmed=linearizable)
            except errors.Unavailable:
                return None
            replica = self.records.replicas.index.get(request.key)
        if replica is None or not self.freshness.is_live(replica):
            return None
        value = await self.records.value_of(request.key, replica)
        return (
            None
            if value is None
            else self.context(request.key, replica, value, self.freshness.age_s(replica))
        )

    async def _from_holders(self, request: protocol.GetContext) -> protocol.Context:
        settings, key = self.settings, request.key
        request_data = protocol.encode(protocol.GetContext(key, request.max_staleness_s, self.node))
        topic = protocol.topic(protocol.bucket(key), "access")
        deadline_s = self.freshness.now_s() + settings.timeout_s
        asks = not self.records.holds_all  # otherwise holders know nothing that the log does not show at once
        while True:
            if asks:
                answers = await self.bus.gather(topic, request_data, enough=1, timeout_s=settings.hedge_s)
                if answers:
                    return protocol.result_of(answers[0].data, protocol.Context)
            left_s = deadline_s - self.freshness.now_s()
            if left_s <= 0:
                raise errors.TimedOut(
                    f"{key!r}: no reply from a holder or the log in {settings.timeout_s:g} s"
                )
            with contextlib.suppress(errors.Unavailable, TimeoutError):
                async with asyncio.timeout(left_s if asks else min(left_s, settings.hedge_s)):
                    return await self._confirmed(request)
            asks = True

    async def _confirmed(self, request: protocol.GetContext) -> protocol.Context:
        """Read what the log has now; for a linearizable read, the primary ends a lease that is over first."""
        key = request.key
        if request.max_staleness_s != 0:
            await self.freshness.refresh(self.settings.timeout_s)
            return await self.logged(key)
        live: context_log.ContextLogEntry | None = None
        while True:
            await self.freshness.refresh(self.settings.timeout_s, confirmed=True)
            entry = await self.records.current(key)
            if (
                entry is None
                or entry.record.value is None
                or not _expired(entry.record, self.freshness.log_now_ns())
            ):
                return self._from_log(key, entry)
            if live is not None and live.position == entry.position:
                return self._context(key, entry)  # it is not over for the primary
            primary_node, query = entry.record.holders[0], protocol.ContextQuery(key)
            try:
                if primary_node == self.node:
                    ended = await self.primary.end_lease(key)
                else:
                    ended = await self.links.request(primary_node, "end-lease", query, bool)
            except protocol.PrimaryMoved:
                continue
            except node_links.Silent as silent:
                await self.writer.fence(primary_node, is_gone=silent.is_gone)
            else:
                live = None if ended else entry

    async def logged(self, key: str) -> protocol.Context:
        """Read what this node has of the log; `errors.NotFound` if the context does not exist."""
        return self._from_log(key, await self.records.current(key))

    def _from_log(self, key: str, entry: context_log.ContextLogEntry | None) -> protocol.Context:
        if entry is None or entry.record.value is None or _expired(entry.record, self.freshness.log_now_ns()):
            raise errors.NotFound(f"no context {key!r}")
        return self._context(key, entry)

    def _context(self, key: str, entry: context_log.ContextLogEntry) -> protocol.Context:
        record = entry.record
        assert record.value is not None
        return protocol.Context(
            key,
            record.value,
            protocol.attributes_of(record.attributes),
            entry.version,
            record.stamp,
            record.stamped_by,
            max(0.0, self.freshness.now_s() - self.freshness.fresh_at_s),
            "log",
            "log",
            record.writer,
            record.expires_at_ns,
            self._lease_left_s(record.expires_at_ns),
        )

    def _mounted(self, key: str) -> base.MountedRegistry:
        """Return the registry of a key under `base.PREFIX`."""
        name = key.removeprefix(base.PREFIX).partition("/")[0]
        if name not in self.mounts:
            raise errors.NotFound(f"no context {key!r}: there is no mount {name!r}")
        return self.mounts[name]

    # Changes.

    async def history(self, request: protocol.WaitForChanges, identity: str) -> protocol.ContextHistory:
        """Return the changes after that version that ``identity`` may read, oldest first."""
        protocol.check_key(request.key)
        await self.freshness.refresh(self.settings.timeout_s)
        return await self._history(request, identity)

    async def _history(self, request: protocol.WaitForChanges, identity: str) -> protocol.ContextHistory:
        """Return as many changes as one reply holds."""
        key, after_version = request.key, request.after_version
        count = len(self.records.unsaved.of(key)) + await self.records.view.count(key)
        first: context_log.ContextLogEntry | None = None  # that is kept
        changes: list[protocol.ContextChange] = []
        size_bytes, more = 0, False
        hidden: str | None = None  # the writer of the last change that the caller may not read
        position, is_cut = after_version, True
        while is_cut and not changes:
            entries, is_cut = await self.records.versions(key, position, 2 * protocol.REPLY_BYTES_MAX)
            for entry in entries:
                position, record = entry.position + 1, entry.record
                if record.reason == "refuse":
                    continue
                if first is None:
                    first = entry
                    if record.reason == "place":  # the write that it repeats was removed
                        record = _as_written(record)
                if record.reason == "place" or entry.version <= after_version:
                    continue
                if not self.access.may_read(identity, key, record.writer):
                    hidden = record.writer
                    continue
                size_bytes += protocol.reply_bytes(record.value, record.attributes)
                more = bool(changes) and size_bytes > protocol.REPLY_BYTES_MAX
                if more:
                    break
                changes.append(_change(context_log.ContextLogEntry(record, entry.position)))
        if hidden is not None and not changes:
            self.access.check(identity, "read", key, hidden)
        # The last record of a context is always kept, so without records a deletion has been forgotten.
        if after_version:
            complete = first is not None and first.version <= after_version
        else:
            complete = count < self.settings.history - 1 and (first is None or first.record.reason != "place")
        return protocol.ContextHistory(changes, complete=complete, more=more or is_cut)

    async def changes(self, request: protocol.WaitForChanges, identity: str) -> protocol.ContextHistory:
        """Like `history`, but wait for a change if there is none."""
        if request.prefix:
            return await self._changes_of_prefix(request, identity)
        key = protocol.check_key(request.key)
        deadline_s = self.freshness.now_s() + request.wait_s
        while True:
            changed = self.events.of_key(key)
            if await self._is_ahead(request.after_version):
                return protocol.ContextHistory([], complete=False)
            replica = self.records.replicas.index.get(key)
            idle = replica is not None and not replica.temporary and replica.version <= request.after_version
            if not idle:
                history = await self._history(request, identity)
                if history.changes or (request.after_version and not history.complete):
                    return history
            left_s = deadline_s - self.freshness.now_s()
            if left_s <= 0 or self.events.closing:
                return protocol.ContextHistory([])
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _changes_of_prefix(
        self, request: protocol.WaitForChanges, identity: str
    ) -> protocol.ContextHistory:
        position = request.after_version
        if request.key:
            protocol.check_key(request.key)
        if position < 0:
            await self.freshness.refresh(self.settings.timeout_s)
            return protocol.ContextHistory([], position=self.records.last_position)
        deadline_s = self.freshness.now_s() + request.wait_s
        while True:
            changed = self.events.of_prefix(request.key)
            if await self._is_ahead(position):
                return protocol.ContextHistory([], complete=False, position=position)
            history = await self._read_prefix(request.key, position, identity)
            left_s, position = deadline_s - self.freshness.now_s(), history.position
            if history.changes or history.more or self.events.closing or left_s <= 0:
                return history
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()

    async def _read_prefix(self, prefix: str, position: int, identity: str) -> protocol.ContextHistory:
        """Read what was applied after this position: at most `SCANNED_MAX` records, and as many as fit."""
        changes: list[protocol.ContextChange] = []
        size_bytes = 0
        entries, reached = await self.records.after(position, SCANNED_MAX, protocol.REPLY_BYTES_MAX)
        for entry in entries:
            record = entry.record
            if (
                record.key.startswith(prefix)
                and record.reason not in ("place", "refuse", "forget")
                and self.access.may_read(identity, record.key, record.writer)
            ):
                size_bytes += protocol.reply_bytes(record.value, record.attributes)
                if changes and size_bytes > protocol.REPLY_BYTES_MAX:
                    return protocol.ContextHistory(changes, more=True, position=position)
                changes.append(_change(entry))
            position = entry.position
        return protocol.ContextHistory(changes, more=reached is None, position=reached or position)

    async def _is_ahead(self, version: int) -> bool:
        """Whether the log has not reached this version: it is of another log, before a restore."""
        log, sequence = self.log, pages.sequence_of(version)
        if sequence > log.applied:
            await self.freshness.refresh(self.settings.timeout_s)
        return sequence > log.applied

    # Replicas.

    async def where(self, request: protocol.Where, identity: str) -> protocol.ReplicaList:
        """Return the replicas, the primary first. Every page queries all nodes again, so it has as many as
        fit.
        """
        key = protocol.check_key(request.key)
        replica = self.records.replicas.index.get(key)
        if replica is None or not self.freshness.is_live(replica):
            writer = (await self.logged(key)).writer
        else:
            writer = replica.writer
        self.access.check(identity, "read", key, writer)
        request_data = protocol.encode(protocol.ContextQuery(key))
        nodes = {self.node, *self.directory.nodes}
        replies = await self.bus.gather(
            protocol.to_all("where"), request_data, enough=len(nodes), timeout_s=WHERE_TIMEOUT_S
        )
        replicas = [
            replica
            for reply in replies
            for replica in protocol.result_of(reply.data, list[protocol.ReplicaInfo])
        ]
        order: dict[str, int] = {kind: place for place, kind in enumerate(demand_.ReplicaKind)}

        def place(replica: protocol.ReplicaInfo) -> str:
            return f"{order[replica.replica_kind]} {replica.node}"

        page = server.page(sorted(replicas, key=place), place, request.after, rows_max=len(replicas))
        silent = sorted(nodes.difference(protocol.responder_of(reply.data) for reply in replies))
        return protocol.ReplicaList(
            page["items"],
            page["next"],
            silent[: protocol.SILENT_MAX],
            len(silent[protocol.SILENT_MAX :]),
        )

    def where_here(self, key: str) -> list[protocol.ReplicaInfo]:
        """Return the local replica, if there is one."""
        replica = self.records.replicas.index.get(key)
        if replica is None or not self.freshness.is_live(replica):
            return []
        kind = self.records.replicas.kind(replica)
        counts = self.demand.by_origin(key)
        most = dict(heapq.nlargest(protocol.DEMAND_MAX, counts.items(), key=lambda count: count[1]))
        others = sum(counts.values()) - sum(most.values())
        return [
            protocol.ReplicaInfo(
                self.node, kind, replica.version, self.freshness.age_s(replica), most, others
            )
        ]


def _is_fresh(age_s: float, max_staleness_s: float | None) -> bool:
    """Whether a value from memory is fresh enough. With 0 the log must always confirm it."""
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
        clock.format_timestamp(record.stamp, record.stamped_by),
        record.value,
        protocol.attributes_of(record.attributes),
        record.writer,
        record.reason,
    )
