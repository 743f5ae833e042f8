"""State that the modules of an information node share: replicas, the position in the log, waiting callers.

This is the only module that turns a record of the log into a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from muster.bus import api
from muster.bus.log import pages
from muster.bus.rpc import client, requests
from muster.core import clock, errors, quotas
from muster.core.telemetry import log
from muster.inform import access_rules, protocol
from muster.inform import settings as settings_
from muster.inform.mounts import base, registry
from muster.inform.node import key_locks, shared_rounds
from muster.inform.node.log import context_log, fences, unsaved
from muster.inform.node.log import view as log_view
from muster.inform.node.replicas import demand, peers, replica_table

events = log.EventLog("inform")

EXECUTED_S = 180.0  # how long requests are recognised: longer than any node tries a write
EXECUTED_MAX = 500_000
DUE_SPARE = 10_000
GAP_S = 0.2  # after this time, check whether the follower is slow or at a gap
HINTS_MAX = 10_000
HOLDERS_MAX = 1_000  # every record lists all of them
MOVED_MAX = 10_000
MOVED_REMEMBERED_S = 10.0  # longer than a search takes, and a new primary to receive the record
PING_AFTER_S = 1.5  # a node that has not replied for so long is pinged
PING_TIMEOUT_S = 3.0
LOG_RESERVED = 0.05  # of the log
STALLED_S = 20.0  # a node that the log did not reply to for so long does not know how old its requests are
UNDER_WAY_BYTES_MAX = 64 << 20  # memory for records that are not in the view yet
WRITE_S = 40.0  # how long a node tries a write; its client waits for 30 s


class RoleResolver(Protocol):
    """Returns the role of an identity, if it is known."""

    def __call__(self, identity: str) -> str | None: ...


class Silent(errors.TimedOut):
    """Another node did not reply. (A node that replies "timed out" is not silent.)"""

    code = "silent"


class NodeState:
    def __init__(
        self,
        name: str,
        bus: api.Bus,
        log_: context_log.ContextLog,
        *,
        settings: settings_.InformSettings,
        view: log_view.ReplicaView,
        now_ns: Callable[[], int],
        uptime_s: Callable[[], float],
        role_of: RoleResolver | None,
        zone: str,
        mount_backends: registry.Backends,
    ) -> None:
        self.name = name
        self.bus = bus
        self.log = log_
        self.settings = settings
        self.view = view
        self.now_ns = now_ns
        self.now_s = uptime_s
        self.role_of = role_of
        # Without trust, identities are not verified, so contexts have no owners.
        self._rules = (*settings.rules, *(access_rules.BUILT_IN if role_of is not None else ()))
        self.mounts = {mount.name: registry.open_mount(mount, mount_backends) for mount in settings.mounts}
        self.zone = zone
        under_way = min(settings.memory_bytes // 8, UNDER_WAY_BYTES_MAX)
        self.replicas = replica_table.ReplicaTable(
            name, memory_bytes_max=settings.memory_bytes - under_way, history=settings.history
        )
        self.quota = quotas.Quota(
            "contexts",
            settings.contexts_per_identity,
            "inform.contexts_per_identity",
            int(settings.share_per_identity * log_.max_bytes),
            "inform.share_per_identity",
        )
        self._log_bytes = 0  # of the log at its last report, and of the records since
        self.directory = peers.NodeDirectory(name, lost_after_s=settings.lost_after_s)
        self.holder_hints: dict[str, tuple[str, ...]] = {}  # holders of contexts without a local replica
        self.clock = clock.HybridClock(name)
        # Of the clock of the log, before `now_s`, which is never set. The wall clock is a first guess.
        self._log_ahead_ns = now_ns() - _ns(uptime_s())
        self.demand = demand.DemandCounts()
        self.requests = 0  # of clients, since the last measurement of the load
        self.load = protocol.NodeLoad()
        self.due: list[tuple[int, str]] = []  # times of expiry and ends of tombstones
        self.unsaved = unsaved.UnsavedChanges(settings.history)
        self.fences: list[fences.NodeFence] = []
        self._restarts = 0
        self.holds_all = True  # every context that exists has a replica here
        self._executed: dict[int, int] = {}  # positions of requests, by a hash of their ids
        self._executed_at: deque[tuple[float, int]] = deque()
        self.remembers_from_s = uptime_s()  # all requests since then are among them
        self.buckets_changed = asyncio.Event()
        self._buckets_generation = 0
        self.short: set[str] = set()  # contexts of this primary with too few replicas
        self.moved: dict[
            str, tuple[float, replica_table.Replica]
        ] = {}  # when this node stopped being the primary
        self.log_end = shared_rounds.SharedRounds(self._read_log_end)
        self.confirmed_end = shared_rounds.SharedRounds(self._confirm_log_end)
        self.fresh_at_s = -float("inf")  # the last time at which all records of the log had been received
        self.closing = False
        # Weak references: clients may wait for keys that never exist.
        self._waiting: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        self._waiting_for_prefix: weakref.WeakValueDictionary[str, asyncio.Event]
        self._waiting_for_prefix = weakref.WeakValueDictionary()
        self.key_locks = key_locks.KeyLocks()

    # Applying records.

    def apply(
        self, entry: context_log.ContextLogEntry, stored_at_ns: int, *, just_stamped: bool = False
    ) -> None:
        """Apply a record that counts. ``just_stamped``: by this node, whose clock need not observe it."""
        record = entry.record
        self.remember_request(entry)
        self.unsaved.note(entry)
        if record.reason == "refuse":
            return
        was = self.replicas.index.get(record.key)
        if record.reason == "forget":
            self.holder_hints.pop(record.key, None)
            self.drop(record.key)
            return
        if self.name not in record.holders:
            self.holds_all = False
            self.remember_holders(record.key, record.holders)
        if not self.replicas.apply(record, entry.position, self.now_s()):
            return
        placed = was if record.reason == "place" else None
        if placed is not None and placed.holders[0] == self.name != record.holders[0]:
            self._remember_moved(record.key, placed)
        if not just_stamped:
            with contextlib.suppress(
                errors.MusterError
            ):  # the clock counts timestamps that are too far ahead
                self.clock.observe(clock.HybridTimestamp(record.stamp, record.stamped_by), self.now_ns())
        self._note_buckets()
        replica = self.replicas.index.get(record.key)
        if replica is not None and not replica.temporary:
            if record.holders[0] == self.name and len(record.holders) < self.replica_target():
                self.short.add(record.key)
            if replica.deleted and not replica.expires_at_ns and record.reason != "place":
                replica.expires_at_ns = stored_at_ns + self.tombstone_ns
            self._schedule_expiry(record.key, replica)

    def fence(self, node: str, live: list[protocol.FenceCandidate], sequence: int) -> None:
        """The contexts of ``node`` have other primaries from here on."""
        self.fences.append(fences.NodeFence(sequence, node, live))
        if node == self.name:
            self.log.fenced(sequence)
        self.directory.remove(node)  # until it sends something
        moved: dict[tuple[str, ...], tuple[str, ...]] = {}
        for key, replica in list(self.replicas.index.items()):
            holders = replica.holders
            if holders[0] == node and replica.position < pages.position(sequence):  # the view may be ahead
                if holders not in moved:
                    moved[holders] = fences.moved(holders, node, live)
                replica.holders = moved[holders]
                if self.name not in replica.holders and not replica.temporary:
                    self.holds_all = False
                    self.drop(key)
                elif replica.holders[0] == self.name and not replica.temporary:
                    self.short.add(key)
                    self._schedule_expiry(key, replica)
        for key, holders in self.holder_hints.items():
            if holders[0] == node:
                self.holder_hints[key] = fences.moved(holders, node, live)
        events.warning("node-fenced", fenced=node, by_page=sequence, node=self.name)

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
        if self.name in entry.record.holders and key not in self.replicas.index:
            # No holder was left, and a fence has made this node the primary.
            self.replicas.apply(entry.record, entry.position, self.now_s())
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
        before = [change for change in self.unsaved.of(key) if unsaved.position(change) >= since]
        saved = await self.view.versions(key, since, bytes_max)
        if sum(map(unsaved.size, saved)) > bytes_max:
            self._require_no_restart(began)
            return saved, True
        entries = await self.loaded(key, before)
        self._require_no_restart(began)
        if entries and entries[0].record.reason == "forget":
            saved, entries = [], entries[1:]
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
            raise errors.Unavailable(f"{self.name} reads the log from its beginning")

    async def loaded(self, key: str, changes: Sequence[unsaved.Change]) -> list[context_log.ContextLogEntry]:
        """The entries, with those from the log that are not in memory."""
        entries: list[context_log.ContextLogEntry] = []
        for change in changes:
            entry = await self.log.get(change, key) if isinstance(change, int) else change
            if entry is not None:  # otherwise a later one is there, too
                entries.append(entry)
        return entries

    def remember_request(self, entry: context_log.ContextLogEntry) -> None:
        """Recognise it if it is repeated."""
        record = entry.record
        if not record.request or record.reason not in ("put", "delete", "refuse"):
            return
        executed, at, now_s = self._executed, self._executed_at, self.now_s()
        id = hash((record.writer, record.key, record.request))
        executed[id] = entry.position
        at.append((now_s, id))
        while at[0][0] < now_s - EXECUTED_S or len(at) > EXECUTED_MAX:
            at_s, oldest = at.popleft()
            executed.pop(oldest, None)
            self.remembers_from_s = max(self.remembers_from_s, at_s)

    @property
    def remembers_all(self) -> bool:
        """Whether a request that `executed` does not know was not executed in the last minutes."""
        return self.now_s() - self.remembers_from_s >= EXECUTED_S

    def executed(self, writer: str, key: str, request: str) -> int | None:
        """The position of a request that was executed, or rejected for good, in the last minutes."""
        return self._executed.get(hash((writer, key, request)))

    def _remember_moved(self, key: str, was: replica_table.Replica) -> None:
        now_s, moved = self.now_s(), self.moved
        moved.pop(key, None)
        moved[key] = now_s, was
        while moved and (
            len(moved) > MOVED_MAX or next(iter(moved.values()))[0] < now_s - MOVED_REMEMBERED_S
        ):
            del moved[next(iter(moved))]

    def restore(self, entries: list[context_log.ContextLogEntry]) -> None:
        """Add replicas from the view; no watcher is notified."""
        now_s = self.now_s()
        latest = max(entries, key=lambda entry: entry.record.stamp).record
        with contextlib.suppress(errors.MusterError):
            self.clock.observe(clock.HybridTimestamp(latest.stamp, latest.stamped_by), self.now_ns())
        recent = latest.stamp - (int(EXECUTED_S * 1000) << 16)
        for entry in map(self._now, entries) if self.fences else entries:
            record = entry.record
            if record.stamp > recent:
                self.remember_request(entry)
            if self.name not in record.holders:
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
        self.fresh_at_s = -float("inf")
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
        return int(self.settings.tombstone_s * 1e9)

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

    def received(self, entries: Sequence[tuple[context_log.ContextLogEntry, bool]], size: int) -> None:
        """A page of that size has been applied."""
        self._log_bytes += size
        if self._waiting or self._waiting_for_prefix:
            for entry, _ in entries:
                key = entry.record.key
                waiting = self._waiting.pop(key, None)
                if waiting is not None:
                    waiting.set()
                for prefix in [prefix for prefix in self._waiting_for_prefix if key.startswith(prefix)]:
                    self._waiting_for_prefix.pop(prefix).set()

    def change_event(self, key: str) -> asyncio.Event:
        """Return an event that is set when the log has another record of ``key``."""
        return self._waiting.setdefault(key, asyncio.Event())

    def prefix_event(self, prefix: str) -> asyncio.Event:
        """Return an event that is set when the log has another record of a key with this prefix."""
        return self._waiting_for_prefix.setdefault(prefix, asyncio.Event())

    def wake_all(self) -> None:
        """Wake all waiting callers because the node is closing."""
        self.closing = True
        for waiting in [*self._waiting.values(), *self._waiting_for_prefix.values()]:
            waiting.set()

    # Freshness.

    def require_recent(self, begun_s: float, key: str) -> None:
        """Reject a write that may be older than the log recognises repeated writes; ``begun_s``: when it
        arrived here.

        A process that was frozen, or a machine that was suspended, continues with requests of that time.
        Their clients have long got a reply from another node, and other clients have written since.
        """
        if self.is_stalled or self.now_s() - begun_s > WRITE_S:
            raise errors.TimedOut(f"{key!r} was not stored in time; it may be stored by another node")

    @property
    def is_stalled(self) -> bool:
        """Whether the log has not replied for long: then requests that arrive may be as old.

        The next reply of the log comes after all requests that the connection had buffered.
        """
        return self.now_s() - self.fresh_at_s > STALLED_S

    async def refresh(self, timeout_s: float, *, confirmed: bool = False) -> None:
        """Receive all records that the log had when this was called; `errors.Unavailable` if that fails.

        ``confirmed``: by most replicas of the log. Otherwise a leader may be believed that was cut off from
        them within the last seconds.
        """
        started_at_s = self.now_s()
        await self.catch_up(timeout_s, confirmed=confirmed)
        self.fresh_at_s = max(self.fresh_at_s, started_at_s)

    async def _read_log_end(self) -> int:
        async with asyncio.timeout(self.settings.timeout_s):
            sent_at_s = self.now_s()
            end = await self.log.state()
        self._observe_log_time(sent_at_s, end.now_ns, self.now_s())
        self._log_bytes = end.bytes
        if self.fences and self.fences[0].sequence < end.first_sequence:  # no record is older
            self.fences = [fence for fence in self.fences if fence.sequence >= end.first_sequence]
        return end.last_sequence

    async def _confirm_log_end(self) -> int:
        return await self.log.confirm()

    # Leases.

    def _observe_log_time(self, sent_at_s: float, log_ns: int, received_at_s: float) -> None:
        """The log's clock was read between two readings of this node's. Change the difference no more than
        these three require: the round trip is not a difference."""
        least_ns, most_ns = log_ns - _ns(received_at_s), log_ns - _ns(sent_at_s)
        self._log_ahead_ns = max(least_ns, min(self._log_ahead_ns, most_ns))

    def log_now_ns(self) -> int:
        """The time by the clock of the log. All nodes measure leases by it, whatever their wall clocks say,
        and also while these are being set."""
        return _ns(self.now_s()) + self._log_ahead_ns

    def is_live(self, replica: replica_table.Replica) -> bool:
        """Whether its context exists now. The time is read only for a lease: most contexts have none."""
        return replica.is_live(self.log_now_ns() if replica.expires_at_ns else 0)

    async def catch_up(self, timeout_s: float, *, confirmed: bool = False) -> None:
        """Wait until the follower has received all current records of the log."""
        log = self.log
        try:
            async with asyncio.timeout(timeout_s):
                if confirmed and (log.is_replicated or self.settings.reads_by_lease):
                    await self.confirmed_end.result()
                    return
                end = await self.log_end.result()
                while log.applied < end:
                    try:
                        async with asyncio.timeout(GAP_S):
                            await log.advanced()
                    except TimeoutError:
                        if await log.is_gap(log.applied + 1, end):
                            log.advance(end)
        except TimeoutError:
            raise errors.TimedOut(f"no reply from the log to {self.name} in {timeout_s:g} s") from None

    def age_s(self, replica: replica_table.Replica) -> float:
        fresh_at_s = self.fresh_at_s
        if replica.fresh_at_s > fresh_at_s:
            fresh_at_s = replica.fresh_at_s
        return max(0.0, self.now_s() - fresh_at_s)

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

    # Other nodes.

    def check(self, identity: str, act: str, key: str, owner: str | None) -> None:
        rule = access_rules.rule_for(self._rules, key)
        if not rule.allows_all(act):
            role = self.role_of(identity) if self.role_of is not None else None
            rule.check(key, act, identity=identity, role=role, owner=owner)

    def check_quota(self, writer: str, size: int, *, is_new: bool) -> None:
        """Raise `errors.LimitExceeded` for a value that would exceed the quota of its writer, or that needs
        space of the log that is kept for deletions and operators."""
        records, size_under_way = self.log.under_way.of(writer)
        used, most = self._log_bytes + self.log.under_way.bytes, self.log.max_bytes
        try:
            self.replicas.stored.check(writer, self.quota, is_new * (1 + records), size + size_under_way)
            if used + size > (1 - LOG_RESERVED) * most:
                raise errors.LimitExceeded(
                    f"the log of contexts has {used:,} bytes of {most:,}, the rest of which is kept for "
                    "deletions and operators",
                    hint="raise retention.contexts.max_bytes; deleted contexts leave the log after "
                    "inform.tombstone_s",
                )
        except errors.LimitExceeded:
            role = self.role_of(writer) if self.role_of is not None else None
            if role not in quotas.EXEMPT_ROLES:
                requests.count_refusal(protocol.PART, "quota")
                raise

    def may_read(self, identity: str, key: str, writer: str) -> bool:
        try:
            self.check(identity, "read", key, writer)
        except errors.Forbidden:
            return False
        return True

    def mounted(self, key: str) -> base.MountedRegistry:
        """Return the registry of a key under `base.PREFIX`."""
        name = key.removeprefix(base.PREFIX).partition("/")[0]
        if name not in self.mounts:
            raise errors.NotFound(f"no context {key!r}: there is no mount {name!r}")
        return self.mounts[name]

    def information(self) -> protocol.ServerInformation:
        held = self.replicas
        return protocol.ServerInformation(self.name, self.load, self.zone, held.temporary, held.memory_bytes)

    def replica_target(self) -> int:
        if self.settings.full_replication:
            return min(len(self.directory.nodes) + 1, HOLDERS_MAX)
        return self.settings.replicas

    async def request(self, node: str, kind: str, message: object, result: type[protocol.T]) -> protocol.T:
        """Send a request to another node. `Silent` if it does not reply.

        A node that waits for the log replies late, but to a ping at once; a frozen one replies to neither.
        """
        subject, data = protocol.to_node(node, kind), protocol.encode(message)
        try:
            reply = await self._exchange(node, subject, data)
        except (errors.NotConnected, errors.Overloaded):  # an error of this node's own connection
            raise
        except errors.Unavailable as error:
            raise Silent(f"no reply from {node}: {error}") from error
        return protocol.result_of(reply.data, result)

    async def _exchange(self, node: str, subject: str, data: bytes) -> api.Message:
        """Without a task of its own, because most replies come before the ping."""
        loop = asyncio.get_running_loop()
        pings: list[asyncio.Task[errors.Unavailable | None]] = []
        try:
            async with asyncio.timeout(None) as limit:
                timer = loop.call_later(
                    PING_AFTER_S, lambda: pings.append(loop.create_task(self._ping(node, limit)))
                )
                try:
                    return await client.exchange_once(
                        self.bus, subject, data, timeout_s=self.settings.timeout_s
                    )
                finally:
                    timer.cancel()
                    for ping in pings:
                        ping.cancel()
        except TimeoutError:
            failure = pings[0].result()
            assert failure is not None
            raise failure from None

    async def _ping(self, node: str, limit: asyncio.Timeout) -> errors.Unavailable | None:
        """If the node does not reply to a ping, end ``limit`` and return the error."""
        try:
            await client.exchange_once(
                self.bus, protocol.to_node(node, protocol.PING), b"", timeout_s=PING_TIMEOUT_S
            )
        except errors.Unavailable as error:
            limit.reschedule(asyncio.get_running_loop().time())
            return error
        return None


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def stamp_text(stamp: int, stamped_by: str) -> str:
    return clock.format_timestamp(stamp, stamped_by)
