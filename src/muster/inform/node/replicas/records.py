"""The records that a node has: in memory its replicas, in its view those of all contexts.

This is the only module that turns a record of the log into a replica.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import heapq
from collections.abc import Callable, Sequence

import msgspec

from muster.bus.log import pages
from muster.core import clock, errors
from muster.core.telemetry import log as log_
from muster.inform import protocol
from muster.inform.node.log import context_log, executed, fences, unsaved
from muster.inform.node.log import view as log_view
from muster.inform.node.replicas import peers, replica_table

events = log_.EventLog("inform")

DUE_SPARE = 10_000
HINTS_MAX = 10_000
MOVED_MAX = 10_000
MOVED_REMEMBERED_S = 10.0  # longer than a search takes, and a new primary to receive the record


class ContextRecords:
    def __init__(
        self,
        node: str,
        log: context_log.ContextLog,
        view: log_view.ReplicaView,
        replicas: replica_table.ReplicaTable,
        directory: peers.NodeDirectory,
        requests: executed.ExecutedRequests,
        *,
        history: int,
        tombstone_s: float,
        now_ns: Callable[[], int],
        now_s: Callable[[], float],
    ) -> None:
        self.log = log
        self.view = view
        self.replicas = replicas
        self.directory = directory
        self.executed = requests
        self.clock = clock.HybridClock(node)
        self.holder_hints: dict[str, tuple[str, ...]] = {}  # holders of contexts without a local replica
        self.due: list[tuple[int, str]] = []  # times of expiry and ends of tombstones
        self.unsaved = unsaved.UnsavedChanges(history)
        self.fences: list[fences.NodeFence] = []
        self.holds_all = True  # every context that exists has a replica here
        self.buckets_changed = asyncio.Event()
        self.short: set[str] = set()  # contexts of this primary with too few replicas
        # When this node stopped being the primary; in a dict, the first item is found after all deleted ones.
        self.moved = collections.OrderedDict[str, tuple[float, replica_table.Replica]]()
        self._node = node
        self._tombstone_s = tombstone_s
        self._now_ns = now_ns
        self._now_s = now_s
        self._restarts = 0
        self._buckets_generation = 0

    def apply(
        self, entry: context_log.ContextLogEntry, stored_at_ns: int, *, just_stamped: bool = False
    ) -> None:
        """Apply a record that counts. ``just_stamped``: by this node, whose clock need not observe it."""
        record = entry.record
        self.executed.remember(entry)
        self.unsaved.note(entry)
        if record.reason == "refuse":
            return
        was = self.replicas.index.get(record.key)
        if record.reason == "forget":
            self.holder_hints.pop(record.key, None)
            self.drop(record.key)
            return
        if self._node not in record.holders:
            self.holds_all = False
            self.remember_holders(record.key, record.holders)
        if not self.replicas.apply(record, entry.position, self._now_s()):
            return
        placed = was if record.reason == "place" else None
        if placed is not None and placed.holders[0] == self._node != record.holders[0]:
            self._remember_moved(record.key, placed)
        if not just_stamped:
            with contextlib.suppress(
                errors.MusterError
            ):  # the clock counts timestamps that are too far ahead
                self.clock.observe(clock.HybridTimestamp(record.stamp, record.stamped_by), self._now_ns())
        self._note_buckets()
        replica = self.replicas.index.get(record.key)
        if replica is not None and not replica.temporary:
            if record.holders[0] == self._node and len(record.holders) < self.directory.replica_target():
                self.short.add(record.key)
            if replica.deleted and not replica.expires_at_ns and record.reason != "place":
                replica.expires_at_ns = stored_at_ns + self.tombstone_ns
            self._schedule_expiry(record.key, replica)

    def fence(self, node: str, live: list[protocol.FenceCandidate], sequence: int) -> None:
        """The contexts of ``node`` have other primaries from here on."""
        first = self.log.first_sequence  # no record is older
        self.fences = [fence for fence in self.fences if fence.sequence >= first]
        self.fences.append(fences.NodeFence(sequence, node, live))
        if node == self._node:
            self.log.fenced(sequence)
        self.directory.remove(node)  # until it sends something
        moved: dict[tuple[str, ...], tuple[str, ...]] = {}
        for key, replica in list(self.replicas.index.items()):
            holders = replica.holders
            if holders[0] == node and replica.position < pages.position(sequence):  # the view may be ahead
                if holders not in moved:
                    moved[holders] = fences.moved(holders, node, live)
                if node == self._node and len(self.moved) < MOVED_MAX:
                    self._remember_moved(key, replica)
                replica.holders = moved[holders]
                if self._node not in replica.holders and not replica.temporary:
                    self.holds_all = False
                    self.drop(key)
                elif replica.holders[0] == self._node and not replica.temporary:
                    self.short.add(key)
                    self._schedule_expiry(key, replica)
        for key, holders in self.holder_hints.items():
            if holders[0] == node:
                self.holder_hints[key] = fences.moved(holders, node, live)
        events.warning("node-fenced", fenced=node, by_page=sequence, node=self._node)

    def present_holders(self, entry: context_log.ContextLogEntry) -> tuple[str, ...]:
        return fences.holders_now(self.fences, entry.record.holders, entry.sequence)

    def _now(self, entry: context_log.ContextLogEntry) -> context_log.ContextLogEntry:
        """The entry with its present holders."""
        holders = self.present_holders(entry)
        if holders is entry.record.holders:
            return entry
        return entry._replace(record=msgspec.structs.replace(entry.record, holders=holders))

    async def current(self, key: str) -> context_log.ContextLogEntry | None:
        """The last record of a key that was applied, wherever its replicas are."""
        began = self._restarts
        entries = await self.loaded(key, self.unsaved.of(key))
        states = [entry for entry in entries if entry.record.reason != "refuse"]
        if not states:
            entry = await self.view.value(key)
            if changes := self.unsaved.of(key):  # it changed meanwhile, or was saved
                entries = await self.loaded(key, changes)
            states = [each for each in entries if each.record.reason != "refuse"] or [
                each for each in [entry] if each is not None
            ]
        self._require_no_restart(began)
        if not states or states[-1].record.reason == "forget":
            return None
        entry = self._now(states[-1])
        if self._node in entry.record.holders and key not in self.replicas.index:
            # No holder was left, and a fence has made this node the primary.
            self.replicas.apply(entry.record, entry.position, self._now_s())
            self._note_buckets()
            self.short.add(key)
            self._schedule_expiry(key, self.replicas.index[key])
        return entry

    async def versions(
        self, key: str, since: int = 0, bytes_max: float = float("inf")
    ) -> tuple[list[context_log.ContextLogEntry], bool]:
        """The last records of a key that were applied, from a position on, oldest first; and whether those
        after the first ``bytes_max`` are missing."""
        began = self._restarts
        changes = [change for change in self.unsaved.of(key) if unsaved.position(change) >= since]
        saved, entries = [], await self.loaded(key, changes)
        if entries and entries[0].record.reason == "forget":
            del entries[0]
        else:
            saved = await self.view.versions(key, since, bytes_max)
        self._require_no_restart(began)
        if sum(map(unsaved.size, saved)) > bytes_max:
            return saved, True
        known = {entry.position: entry for entry in (*saved, *entries)}
        return [known[position] for position in sorted(known)], False

    @property
    def last_position(self) -> int:
        """The greatest position that any record can have that was applied."""
        return pages.position(self.log.applied + 1) - 1

    async def after(
        self, position: int, count: int, bytes_max: int
    ) -> tuple[list[context_log.ContextLogEntry], int | None]:
        """The records that were applied after a position, in order, as far as they are kept; and up to where
        these are all. None: there are more."""
        began, last = self._restarts, self.last_position
        unsaved_changes = self.unsaved.after(position)
        saved = await self.view.after(position, count, bytes_max)
        is_cut = len(saved) >= count or sum(map(unsaved.size, saved)) > bytes_max
        known = {entry.position: entry for entry in saved}
        for key, change in unsaved_changes:
            at = unsaved.position(change)
            if at not in known and not (is_cut and at > saved[-1].position):
                known |= {entry.position: entry for entry in await self.loaded(key, [change])}
        self._require_no_restart(began)
        return [known[at] for at in sorted(known)], None if is_cut else last

    def _require_no_restart(self, began: int) -> None:
        if self._restarts != began:
            raise errors.Unavailable(f"{self._node} reads the log from its beginning")

    async def loaded(self, key: str, changes: Sequence[unsaved.Change]) -> list[context_log.ContextLogEntry]:
        """The entries, with those from the log that are not in memory."""
        entries: list[context_log.ContextLogEntry] = []
        for change in changes:
            entry = await self.log.get(change, key) if isinstance(change, int) else change
            if entry is not None:  # otherwise a later one is there, too
                entries.append(entry)
        return entries

    def _remember_moved(self, key: str, was: replica_table.Replica) -> None:
        now_s, moved = self._now_s(), self.moved
        moved.pop(key, None)
        moved[key] = now_s, was
        while moved and (
            len(moved) > MOVED_MAX or next(iter(moved.values()))[0] < now_s - MOVED_REMEMBERED_S
        ):
            moved.popitem(last=False)

    def restore(self, entries: list[context_log.ContextLogEntry]) -> None:
        """Add replicas from the view; no watcher is notified."""
        now_s = self._now_s()
        latest = max(entries, key=lambda entry: entry.record.stamp).record
        with contextlib.suppress(errors.MusterError):
            self.clock.observe(clock.HybridTimestamp(latest.stamp, latest.stamped_by), self._now_ns())
        recent = latest.stamp - (int(executed.EXECUTED_S * 1000) << 16)
        for entry in map(self._now, entries) if self.fences else entries:
            record = entry.record
            if record.stamp > recent:
                self.executed.remember(entry)
            if self._node not in record.holders:
                self.holds_all = False
            elif self.replicas.apply(record, entry.position, now_s):
                self._schedule_expiry(record.key, self.replicas.index[record.key])
                # the number of replicas is checked later for all contexts
        self._note_buckets()

    def restart(self) -> None:
        """Forget everything: the log is read from its beginning."""
        self._restarts += 1
        for key in list(self.replicas.index):
            self.replicas.drop(key)
        self.due.clear()
        self.unsaved.clear()
        self.fences = []
        self.holder_hints.clear()
        self.log.restart()

    def _schedule_expiry(self, key: str, replica: replica_table.Replica) -> None:
        if end_ns := self._ends_at_ns(replica):
            heapq.heappush(self.due, (end_ns, key))
            if len(self.due) > 2 * len(self.replicas.index) + DUE_SPARE:  # it has entries of renewed leases
                self.due = [
                    (end_ns, key)
                    for key, replica in self.replicas.index.items()
                    if (end_ns := self._ends_at_ns(replica))
                ]
                heapq.heapify(self.due)

    def _ends_at_ns(self, replica: replica_table.Replica) -> int:
        """When a context expires or its tombstone ends. 0: never."""
        if replica.deleted and not replica.expires_at_ns:  # of the former release, and no longer in its log
            return (replica.stamp >> 16) * 1_000_000 + self.tombstone_ns
        return replica.expires_at_ns

    @property
    def tombstone_ns(self) -> int:
        return int(self._tombstone_s * 1e9)

    def _note_buckets(self) -> None:
        if self._buckets_generation != self.replicas.buckets_generation:
            self._buckets_generation = self.replicas.buckets_generation
            self.buckets_changed.set()

    def drop(self, key: str) -> None:
        self.replicas.drop(key)
        self._note_buckets()

    def remember_holders(self, key: str, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Remember the holders of a context that has no replica here."""
        if len(self.holder_hints) >= HINTS_MAX:
            self.holder_hints.clear()
        self.holder_hints[key] = holders
        return holders

    async def value_of(self, key: str, replica: replica_table.Replica) -> bytes | None:
        """Return the value from memory or the view; None if the context has changed since."""
        value = replica.read()
        if value is not None:
            return value
        entry = await self.current(key)
        if entry is None or entry.version != replica.version or entry.record.value is None:
            return None
        self.replicas.store_value(key, replica, entry.record.value)
        return entry.record.value
