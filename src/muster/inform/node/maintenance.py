"""What a node does by itself: know the others, keep enough copies, follow the demand, end what has expired.

Each is a round that can be run at any time and does nothing where nothing is to be done.  A node that was
cut off must not take the others for dead: as long as its probes of the log fail it judges nobody, and after
they succeed again everybody has the full time to be heard.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from muster.core import errors
from muster.inform import protocol
from muster.inform.node import state, writes
from muster.inform.node.replicas import demand, placement, replica_table

PROBE_S = 1.0
CHUNK = 2_000
TOGETHER = 32
AGAIN_NS = 5_000_000_000  # an end that could not be written

_Work = Callable[[], Coroutine[Any, Any, None]]  # not begun: a round may be cancelled while it makes its list


class NodeMaintenance:
    def __init__(self, shared: state.NodeState, writer: writes.ContextWriter) -> None:
        self._desk = shared
        self._writer = writer
        self._steady_since_s: float | None = None
        self._load_at_s = shared.now_s()
        self._asked_at_s = 0.0
        self._generation = -1  # of the directory when all copies were last looked at
        self.moved = {"migrated": 0, "replicated": 0, "deleted": 0, "mended": 0, "expired": 0}

    # Discovery.

    async def discover(self) -> None:
        """A Server-Information request to all; what they answer comes to `heard_response`."""
        shared = self._desk
        self._measure_load()
        self._asked_at_s = shared.now_s()
        await shared.bus.publish(
            protocol.to_all("server-information"), protocol.encode((self._asked_at_s, shared.information()))
        )

    async def heard_request(self, data: bytes) -> None:
        shared = self._desk
        asked_at_s, information = protocol.decode(data, tuple[float, protocol.ServerInformation])
        if information.node == shared.name:
            return
        shared.directory.heard(information, shared.now_s())
        await shared.bus.publish(
            protocol.to_node(information.node, "server-information"),
            protocol.encode((asked_at_s, shared.information())),
        )

    def heard_response(self, data: bytes) -> None:
        asked_at_s, information = protocol.decode(data, tuple[float, protocol.ServerInformation])
        now_s = self._desk.now_s()
        self._desk.directory.heard(information, now_s, round_trip_s=max(0.0, now_s - asked_at_s))

    def _measure_load(self) -> None:
        shared, settings = self._desk, self._desk.settings
        now_s = shared.now_s()
        if now_s - self._load_at_s < 0.5:
            return
        rate = shared.requests / (now_s - self._load_at_s)
        shared.requests, self._load_at_s = 0, now_s
        held = shared.copies.permanent
        ratio = max(held / settings.contexts_max, rate / settings.messages_per_s_max)
        shared.load = protocol.NodeLoad(held, round(rate, 1), round(ratio, 4))

    # The log, and who is gone.

    async def probe(self) -> None:
        shared = self._desk
        if shared.now_s() - shared.fresh_at_s > shared.settings.lost_after_s:
            self._steady_since_s = None  # the machine slept, or we were stopped: the others are not to blame
        try:
            if shared.was_deaf_too_long:
                await self.drop_forgotten()
            await shared.refresh(shared.settings.timeout_s)
        except errors.Unavailable:
            self._steady_since_s = None
            return
        now_s = shared.now_s()
        if self._steady_since_s is None:
            self._steady_since_s = now_s
            shared.directory.excuse(now_s)
            return
        if now_s - self._steady_since_s >= shared.settings.lost_after_s:
            for node in shared.directory.lose(now_s):
                state.events.warning("node-lost", lost=node, by=shared.name)
            await self.mend()

    async def drop_forgotten(self) -> None:
        """Copies whose deletion we have not heard, and whose log is gone."""
        shared = self._desk
        asked_at_s = shared.now_s()
        await shared.catch_up(shared.settings.timeout_s)  # what is deleted from now on, the follower hears

        async def look_up(key: str) -> None:
            if await shared.log.last(key) is None:
                shared.drop(key)

        keys = list(shared.copies.index)
        for first in range(0, len(keys), CHUNK):
            if not await _all([partial(look_up, key) for key in keys[first : first + CHUNK]]):
                raise errors.Unavailable("the log went silent again")
        shared.fresh_at_s = asked_at_s

    async def mend(self) -> None:
        """Make copies again that went with a lost node, and those that a new node makes possible."""
        shared, settings = self._desk, self._desk.settings
        generation = shared.directory.generation
        keys = list(shared.short) if generation == self._generation else list(shared.copies.index)
        shared.short.clear()
        live = shared.directory.candidates(shared.information())
        members = [candidate.node for candidate in live]
        work: list[_Work] = []
        for number, key in enumerate(keys, 1):
            if number % CHUNK == 0:
                await asyncio.sleep(0)
            copy = shared.copies.index.get(key)
            if copy is None or copy.temporary:
                continue
            if placement.repair_owner(copy.holders, members) != shared.name:
                continue
            holders = placement.repair_plan(
                copy.holders, live, shared.copies_wanted(), watermark=settings.watermark
            )
            if holders != copy.holders and not copy.deleted:
                work.append(partial(self._writer.place, key, holders, before=copy.holders))
        self.moved["mended"] += len(work)
        self._generation = generation if await _all(work) else -1

    # Demand.

    async def follow_demand(self) -> None:
        """Look at the interval that has ended."""
        shared, thresholds = self._desk, self._desk.settings.thresholds
        counts, shared.demand = shared.demand, demand.DemandCounts()
        now_s = shared.now_s()
        keys = counts.keys()
        if shared.copies.temporary:
            keys |= {key for key, copy in shared.copies.index.items() if copy.temporary}
        work: list[_Work] = []
        for number, key in enumerate(sorted(keys), 1):
            if number % CHUNK == 0:
                await asyncio.sleep(0)
            copy = shared.copies.index.get(key)
            if copy is None or not copy.is_live(shared.now_ns()):
                continue
            kind = shared.copies.kind(copy)
            for instruction in demand.decide(
                shared.name, kind, counts.of(key), now_s - copy.since_s, thresholds
            ):
                match instruction:
                    case demand.DeleteReplica():
                        shared.drop(key)
                        self.moved["deleted"] += 1
                    case demand.MigrateReplica(to):
                        self.moved["migrated"] += 1
                        holders = demand.migrated(copy.holders, shared.name, to)
                        work.append(partial(self._writer.place, key, holders, before=copy.holders))
                    case demand.CreateReplica(to) if to not in copy.holders:
                        self.moved["replicated"] += 1
                        work.append(partial(self._replicate, key, to))
        await _all(work)

    async def _replicate(self, key: str, to: str) -> None:
        await self._desk.ask(to, "store", protocol.ContextQuery(key), type(None))

    async def store(self, key: str) -> None:
        """A Context Storage Request: hold a temporary copy.

        It is read from the log here, so that its age counts from a moment of this node's own clock: a record
        in the request would be as old as the request took.
        """
        shared = self._desk
        asked_at_s = shared.now_s()
        entry = await shared.log.last(key)
        if entry is not None and entry.record.value is not None:
            shared.copies.install_temporary(
                entry.record, entry.sequence, shared.now_s(), fresh_at_s=asked_at_s
            )

    # Ends.

    async def end_what_is_due(self) -> None:
        """Expired contexts become deleted ones; what was deleted long ago is forgotten."""
        shared = self._desk
        now_ns = shared.now_ns()
        members = [shared.name, *shared.directory.nodes]
        work: list[_Work] = []
        forgets: list[tuple[str, replica_table.Replica]] = []
        while shared.due and shared.due[0][0] <= now_ns:
            _, key = heapq.heappop(shared.due)
            copy = shared.copies.index.get(key)
            if copy is None:
                continue
            if copy.deleted:
                if (copy.stamp >> 16) * 1_000_000 + shared.settings.tombstone_s * 1e9 <= now_ns:
                    if not copy.temporary and placement.repair_owner(copy.holders, members) == shared.name:
                        forgets.append((key, copy))
                        heapq.heappush(shared.due, (now_ns + AGAIN_NS, key))
                    else:
                        shared.drop(key)
            elif 0 < copy.expires_at_ns <= now_ns:
                if copy.temporary:
                    shared.drop(key)
                elif copy.holders[0] == shared.name:
                    self.moved["expired"] += 1
                    work.append(partial(self._writer.expire, key))
                    heapq.heappush(shared.due, (now_ns + AGAIN_NS, key))
        if forgets:
            last = max(copy.sequence for _, copy in forgets)
            if await _all([partial(shared.log.will_forget, last, timeout_s=shared.settings.timeout_s)]):
                work += [partial(self._forget, key, copy) for key, copy in forgets]
        await _all(work)

    async def _forget(self, key: str, copy: replica_table.Replica) -> None:
        shared = self._desk
        await shared.log.forget(key, copy.sequence)
        if shared.copies.index.get(key) is copy:
            shared.drop(key)


async def _all(work: list[_Work]) -> bool:
    """Some at a time. Whether all of it could be done; what could not is found again by the next round."""
    tasks, failures = iter(work), 0

    async def run() -> None:
        nonlocal failures
        for task in tasks:
            try:
                await task()
            except errors.MusterError as error:  # also of a record that nobody can read: the others go on
                state.events.warning("upkeep-failed", error=error)
                failures += 1

    await asyncio.gather(*(run() for _ in range(min(TOGETHER, len(work)))))
    return not failures
