"""Periodic work of a node: discovery of peers, repair of replicas, replication by demand, expiry.

Each round can run at any time and does nothing if there is nothing to do.  A node that was disconnected must
not treat its peers as lost: while its probes of the log fail it removes no peer, and after they succeed again
every peer has the full time to send something.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import heapq
import operator
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import msgspec

from muster.bus import api
from muster.bus.http import client
from muster.core import errors, messages
from muster.core.telemetry import log as log_
from muster.inform import protocol
from muster.inform import settings as settings_
from muster.inform.node import access, change_events, primary, writes
from muster.inform.node.log import context_log, fences, page_order
from muster.inform.node.log import freshness as log_freshness
from muster.inform.node.replicas import demand as demand_
from muster.inform.node.replicas import links as node_links
from muster.inform.node.replicas import peers, placement
from muster.inform.node.replicas import records as replica_records

events = log_.EventLog("inform")

PROBE_S = 1.0
CHUNK = 2_000
CONCURRENT_MAX = 32
APPENDS_MAX = 500  # concurrent appends without a read: as many as share one sync
TRIM_FACTOR = 3
TRIM_BYTES_MIN = 16 << 20  # a smaller log is not trimmed
TRIM_RECORDS = 5_000  # in a round
TRIM_BYTES = 8 << 20  # in a round
TRIM_AT_ONCE = 64  # records: what clients write does not wait for those of a whole round
MEASURE_S = 60.0  # what is live is measured again: that reads the whole view
GROWTH = 1.06  # of the log, before that time
TRIM_PARTS = 4  # of the log: records of the oldest are written again
AGAIN_NS = 5_000_000_000  # retry an expiry that could not be written
READS_REPORTED = 50  # contexts in a report to the sensor: those that are read most
READ_KEY_MAX = 240  # characters of their keys: the name of a metric has at most 256

_Work = Callable[
    [], Coroutine[Any, Any, None]
]  # not started: a round may be cancelled while it collects tasks


@dataclasses.dataclass(eq=False)
class NodeMaintenance:
    node: str
    bus: api.Bus
    settings: settings_.InformSettings
    log: context_log.ContextLog
    records: replica_records.ContextRecords
    freshness: log_freshness.LogFreshness
    directory: peers.NodeDirectory
    links: node_links.NodeLinks
    changes: change_events.ChangeEvents
    demand: demand_.DemandCounts
    primary: primary.PrimaryWriter
    writer: writes.ContextWriter

    def __post_init__(self) -> None:
        self.requests = 0  # of clients, since the last measurement of the load
        self._lost: set[str] = set()  # nodes that are not fenced yet
        self.trim_bytes_min = TRIM_BYTES_MIN
        self._trim_bytes = 0
        self._live_bytes = self._measured_bytes = 0  # of the records; and of the log, when they were measured
        self._measured_at_s = 0.0
        self._adopted = 0  # the sequence of the last fence that was considered
        self._steady_since_s: float | None = None
        self._load_at_s = self.freshness.now_s()
        self._asked_at_s = 0.0
        self._generation = -1  # of the directory when all replicas were last checked
        self.moved = {"migrated": 0, "replicated": 0, "deleted": 0, "repaired": 0, "expired": 0}

    # Discovery.

    async def discover(self) -> None:
        """Send a Server-Information request to all nodes; `on_information_response` handles the replies."""
        self._measure_load()
        self._asked_at_s = self.freshness.now_s()
        await self.bus.publish(
            protocol.to_all("server-information"),
            protocol.encode((self._asked_at_s, self.directory.information())),
        )

    async def on_information_request(self, data: bytes) -> None:
        asked_at_s, information = protocol.decode(data, tuple[float, protocol.ServerInformation])
        if information.node == self.node:
            return
        self.directory.observe(information, self.freshness.now_s())
        await self.bus.publish(
            protocol.to_node(information.node, "server-information"),
            protocol.encode((asked_at_s, self.directory.information())),
        )

    def on_information_response(self, data: bytes) -> None:
        asked_at_s, information = protocol.decode(data, tuple[float, protocol.ServerInformation])
        now_s = self.freshness.now_s()
        self.directory.observe(information, now_s, round_trip_s=max(0.0, now_s - asked_at_s))

    def _measure_load(self) -> None:
        settings = self.settings
        now_s = self.freshness.now_s()
        if now_s - self._load_at_s < 0.5:
            return
        rate = self.requests / (now_s - self._load_at_s)
        self.requests, self._load_at_s = 0, now_s
        held = self.records.replicas.permanent
        ratio = max(held / settings.contexts_max, rate / settings.messages_per_s_max)
        self.directory.load = protocol.NodeLoad(held, round(rate, 1), round(ratio, 4))

    # The log, and lost nodes.

    async def probe(self) -> None:
        if self.freshness.now_s() - self.freshness.fresh_at_s > self.settings.lost_after_s:
            self._steady_since_s = (
                None  # this node was suspended or stopped: silence does not mean that peers are lost
            )
        try:
            await self.freshness.refresh(self.settings.timeout_s)
        except errors.Unavailable:
            self._steady_since_s = None
            return
        now_s = self.freshness.now_s()
        if self._steady_since_s is None:
            self._steady_since_s = now_s
            self.directory.restart_timers(now_s)
            return
        if now_s - self._steady_since_s >= self.settings.lost_after_s:
            for node in self.directory.remove_lost(now_s):
                events.warning("node-lost", lost=node, by=self.node)
                self._lost.add(node)
            await self._fence_lost()
            await self._adopt()
            await self.repair()

    async def _fence_lost(self) -> None:
        """As the first of the live nodes: the contexts of lost nodes need primaries, which repair them."""
        self._lost.difference_update(self.directory.nodes)
        if self.directory.nodes and self.directory.nodes[0] < self.node:
            return
        with contextlib.suppress(errors.Unavailable):  # it appends, though nothing else arrives from it
            for node in sorted(self._lost):
                await self.writer.fence(node, is_gone=False)
                self._lost.discard(node)

    async def _adopt(self) -> None:
        """Hold the contexts of which all holders are lost and fences have made this node the primary."""
        view = self.records.view
        saved = (await view.facts()).position
        news = [fence for fence in self.records.fences if self._adopted < fence.sequence <= saved]
        if any(fences.moved((fence.node,), fence.node, fence.live)[0] == self.node for fence in news):
            async for page in view.load():
                for entry in page:
                    key = entry.record.key
                    if key not in self.records.replicas.index and self.records.present_holders(entry)[:1] == (
                        self.node,
                    ):
                        await self.records.current(key)
                await asyncio.sleep(0)
        self._adopted = saved

    async def repair(self) -> None:
        """Replace replicas that were lost with a node, and create those that a new node makes possible."""
        settings = self.settings
        generation = self.directory.generation
        keys = (
            list(self.records.short) if generation == self._generation else list(self.records.replicas.index)
        )
        self.records.short.clear()
        live = self.directory.candidates()
        work: list[_Work] = []
        for number, key in enumerate(keys, 1):
            if number % CHUNK == 0:
                await asyncio.sleep(0)
            replica = self.records.replicas.index.get(key)
            if replica is None or replica.temporary or replica.holders[0] != self.node:
                continue
            holders = placement.repair_plan(
                replica.holders, live, self.directory.replica_target(), watermark=settings.watermark
            )
            if holders != replica.holders and not replica.deleted:
                work.append(partial(self.primary.place, key, holders, before=replica.holders))
        self.moved["repaired"] += len(work)
        self._generation = generation if await _all(work) else -1

    # Demand.

    async def follow_demand(self) -> None:
        """Evaluate the interval that has ended."""
        counts = self.demand.take()
        now_s = self.freshness.now_s()
        keys = counts.keys()
        if self.records.replicas.temporary:
            keys |= {key for key, replica in self.records.replicas.index.items() if replica.temporary}
        work: list[_Work] = []
        for number, key in enumerate(sorted(keys), 1):
            if number % CHUNK == 0:
                await asyncio.sleep(0)
            replica = self.records.replicas.index.get(key)
            if replica is None or not self.freshness.is_live(replica):
                continue
            kind = self.records.replicas.kind(replica)
            for instruction in demand_.decide(
                self.node, kind, counts.by_origin(key), now_s - replica.since_s, self.settings
            ):
                match instruction:
                    case demand_.DeleteReplica():
                        self.records.drop(key)
                        self.moved["deleted"] += 1
                    case demand_.MigrateReplica(to):
                        self.moved["migrated"] += 1
                        holders = demand_.migrated(replica.holders, self.node, to)
                        work.append(partial(self.primary.place, key, holders, before=replica.holders))
                    case demand_.CreateReplica(to) if to not in replica.holders:
                        self.moved["replicated"] += 1
                        work.append(partial(self._replicate, key, to))
        await _all(work)
        if self.settings.sensor:
            await self._report_reads(counts.of_origin(self.node))

    async def _report_reads(self, counts: Mapping[str, int]) -> None:
        """Send the reads of local clients to the sensor of this machine, as rates: a sensor repeats the last
        report of a service in each of its own."""
        settings = self.settings
        named = ((f"reads.{key}_s", count) for key, count in counts.items() if len(key) <= READ_KEY_MAX)
        most = heapq.nlargest(READS_REPORTED, named, key=operator.itemgetter(1))
        report = messages.ServiceReport(
            name=self.node,
            metrics={name: count / settings.interval_s for name, count in most},
        )
        response = await client.post(
            f"{settings.sensor.rstrip('/')}/report?period={settings.interval_s:g}s",
            msgspec.json.encode(report),
            headers={"Content-Type": "application/json"},
        )
        if response.status != 200:
            reason = response.body[:200].decode("utf-8", "replace")
            raise errors.Unavailable(f"the sensor rejected the reads of contexts: {reason}")

    async def _replicate(self, key: str, to: str) -> None:
        await self.links.request(to, "store", protocol.ContextQuery(key), type(None))

    async def store(self, key: str) -> None:
        """A Context Storage Request: hold a temporary replica.

        From then on the replica follows the log, and is as old as the permanent ones of this node. If the key
        changes while its record is read, it is read again.
        """
        while True:
            changed = self.changes.of_key(key)
            entry = await self.records.current(key)
            if entry is None or entry.record.value is None:
                return
            if not changed.is_set():
                self.records.replicas.install_temporary(
                    entry.record, entry.position, self.freshness.now_s(), fresh_at_s=self.freshness.fresh_at_s
                )
                return

    # Expiry.

    async def expire_due(self) -> None:
        """Delete expired contexts, and purge contexts whose deletion is old enough.

        It works in batches and stops after one that fails: a log that does not reply gets the requests of one
        batch, not of all contexts that are due.
        """
        while await self._expire_batch():
            pass

    async def _expire_batch(self) -> bool:
        """Process up to `CHUNK` due contexts. Return whether all succeeded and more are due."""
        now_ns = self.freshness.log_now_ns()
        work: list[_Work] = []
        for _ in range(CHUNK):
            if not self.records.due or self.records.due[0][0] > now_ns:
                break
            _, key = heapq.heappop(self.records.due)
            replica = self.records.replicas.index.get(key)
            if replica is None or replica.holders[0] != self.node:
                continue
            if replica.deleted:
                if replica.expires_at_ns > now_ns:
                    continue  # there is another entry
                work.append(partial(self.primary.forget, key, replica))
            elif 0 < replica.expires_at_ns <= now_ns and not replica.temporary:
                work.append(partial(self._expire, key))
            else:
                continue
            heapq.heappush(self.records.due, (now_ns + AGAIN_NS, key))
        succeeded = await _all(work, concurrent_max=APPENDS_MAX)
        return succeeded and bool(self.records.due) and self.records.due[0][0] <= now_ns

    async def _expire(self, key: str) -> None:
        with contextlib.suppress(protocol.PrimaryMoved):
            if await self.primary.end_lease(key):
                self.moved["expired"] += 1

    # Trimming.

    async def trim(self) -> None:
        """Write the oldest live records again, remove what is before them.

        So the log is at most `TRIM_FACTOR` times as large as what is live, and smaller near its budget. The
        first of the live nodes does it; the next ones when the log is larger, because that one cannot: its
        disk may be full. A record that is written again counts like any other: not if the context has changed
        meanwhile.
        """
        view, rank = self.records.view, bisect.bisect(self.directory.nodes, self.node)
        log = await self.log.state()
        if log.bytes < max(self._trim_bytes, self.trim_bytes_min):
            return
        since, unsaved = self.log.applied, self.records.unsaved.keys()
        saved = await view.facts()
        now_s = self.freshness.now_s()
        if now_s - self._measured_at_s > MEASURE_S or log.bytes > GROWTH * self._measured_bytes:
            self._live_bytes = await view.live_bytes()
            self._measured_at_s, self._measured_bytes = now_s, log.bytes
        live_bytes = self._live_bytes
        room = int(self.log.max_bytes * (1 - access.LOG_RESERVED))
        most = min(TRIM_FACTOR * live_bytes, (live_bytes + room) // 2)
        most += (room - most) * rank // (rank + 2)
        self._trim_bytes = max(self.trim_bytes_min, most)
        oldest = await view.oldest(TRIM_RECORDS, TRIM_BYTES)
        first = min([entry.sequence for entry in oldest[:1]] + [saved.position]) - page_order.WINDOW
        if first > log.first_sequence:
            await self.log.purge(first)
        if log.bytes < self._trim_bytes:
            return
        until = first + page_order.WINDOW + (log.last_sequence - first) // TRIM_PARTS
        copies = [
            primary.placed(entry, self.records.present_holders(entry))
            for entry in oldest
            if entry.sequence <= until and entry.record.key not in unsaved
        ]
        for first_copy in range(0, len(copies), TRIM_AT_ONCE):
            at_once = copies[first_copy : first_copy + TRIM_AT_ONCE]
            outcomes = await asyncio.gather(
                *(self.log.append(copy, since) for copy in at_once), return_exceptions=True
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException) and not isinstance(outcome, errors.Conflict):
                    raise outcome


async def _all(work: list[_Work], *, concurrent_max: int = CONCURRENT_MAX) -> bool:
    """Run tasks with bounded concurrency. Return whether all succeeded; the next round repeats the others."""
    tasks, failures = iter(work), 0

    async def run() -> None:
        nonlocal failures
        for task in tasks:
            try:
                await task()
            except errors.MusterError as error:  # also for a malformed record: continue with the others
                events.warning("maintenance-failed", error=error)
                failures += 1

    await asyncio.gather(*(run() for _ in range(min(concurrent_max, len(work)))))
    return not failures
