"""State that the modules of an information node share: replicas, the position in the log, waiting callers.

This is the only module that turns a record of the log into a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import weakref
from collections.abc import Callable
from typing import Protocol

from muster.bus import api
from muster.bus.rpc import client as rpc_client
from muster.bus.rpc import requests as rpc_requests
from muster.core import clock, errors, quotas
from muster.core.telemetry import log
from muster.inform import access_rules, protocol
from muster.inform import settings as settings_
from muster.inform.mounts import base as mounts
from muster.inform.mounts import registry
from muster.inform.node import key_locks, shared_rounds
from muster.inform.node.log import context_log, unsaved
from muster.inform.node.log import view as log_view
from muster.inform.node.replicas import demand, peers, replica_table

events = log.EventLog("inform")

OWN_MAX = 20_000
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
        view: log_view.ReplicaView | None,
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
        self.unsaved = unsaved.UnsavedChanges()
        self.buckets_changed = asyncio.Event()
        self._buckets_generation = 0
        self.short: set[str] = set()  # contexts of this primary with too few replicas
        self.moved: dict[
            str, tuple[float, replica_table.Replica]
        ] = {}  # when this node stopped being the primary
        self.own: dict[
            int, str
        ] = {}  # records that this node appended and applied and will receive from the log
        self.log_end = shared_rounds.SharedRounds(self._read_log_end)
        self.confirmed_end = shared_rounds.SharedRounds(self._confirm_log_end)
        self.position = 0  # sequence of the last record that was received
        self.fresh_at_s = -float("inf")  # the last time at which all records of the log had been received
        self.closing = False
        self._advanced: asyncio.Event | None = None  # set while a caller waits for the follower
        # Weak references: clients may wait for keys that never exist.
        self._waiting: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        self._waiting_for_prefix: weakref.WeakValueDictionary[str, asyncio.Event]
        self._waiting_for_prefix = weakref.WeakValueDictionary()
        self.key_locks = key_locks.KeyLocks()

    # Applying records.

    def apply(self, entry: context_log.ContextLogEntry, *, just_stamped: bool = False) -> None:
        """Apply a record. ``just_stamped``: by this node, so its clock need not observe the stamp.

        Without a replica, a record that the follower has passed changes nothing: a later one has moved the
        replica away.
        """
        record = entry.record
        was = self.replicas.index.get(record.key)
        if was is None and entry.sequence <= self.position:
            return
        if not self.replicas.apply(record, entry.sequence, self.now_s()):
            return
        placed = was if record.reason == "place" else None
        if placed is not None and placed.holders[0] == self.name != record.holders[0]:
            self._remember_moved(record.key, placed)
        if not just_stamped:
            with contextlib.suppress(
                errors.MusterError
            ):  # the clock counts timestamps that are too far ahead
                self.clock.observe(clock.HybridTimestamp(record.stamp, record.stamped_by), self.now_ns())
        replica = self.replicas.index.get(record.key)
        if was is not None and was.temporary and (replica is None or replica.temporary):
            return  # the view has permanent replicas only
        self._note(record.key, entry if replica is not None else None)
        if replica is not None:
            if record.holders[0] == self.name and len(record.holders) < self.replica_target():
                self.short.add(record.key)
            self._schedule_expiry(record)

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
        for entry in entries:
            if self.replicas.apply(entry.record, entry.sequence, now_s):
                self._schedule_expiry(
                    entry.record
                )  # the number of replicas is checked later for all contexts

    def forget_all(self) -> None:
        """Drop all restored replicas without recording changes."""
        for key in list(self.replicas.index):
            self.replicas.drop(key)
        self.due.clear()

    def _schedule_expiry(self, record: protocol.ContextRecord) -> None:
        end_ns = self._ends_at_ns(record.value is None, record.stamp, record.expires_at_ns)
        if end_ns:
            heapq.heappush(self.due, (end_ns, record.key))
            if len(self.due) > 2 * len(self.replicas.index) + DUE_SPARE:  # it has entries of renewed leases
                self.due = [
                    (end_ns, key)
                    for key, replica in self.replicas.index.items()
                    if (end_ns := self._ends_at_ns(replica.deleted, replica.stamp, replica.expires_at_ns))
                ]
                heapq.heapify(self.due)

    def _ends_at_ns(self, deleted: bool, stamp: int, expires_at_ns: int) -> int:
        """When a context expires or its tombstone ends. 0: never. A tombstone may end later: the clock of its
        writer may have been behind, and the log knows when it was stored."""
        if deleted:
            return (stamp >> 16) * 1_000_000 + self.tombstone_ns
        return expires_at_ns

    @property
    def tombstone_ns(self) -> int:
        return int(self.settings.tombstone_s * 1e9)

    def _note(self, key: str, entry: context_log.ContextLogEntry | None) -> None:
        if self.view is not None:
            self.unsaved.note(key, entry)
        if self._buckets_generation != self.replicas.buckets_generation:
            self._buckets_generation = self.replicas.buckets_generation
            self.buckets_changed.set()

    def drop(self, key: str) -> None:
        was = self.replicas.index.get(key)
        self.replicas.drop(key)
        if was is not None and not was.temporary:
            self._note(key, None)

    def remember_holders(self, key: str, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Remember the holders of a context that has no replica here."""
        if len(self.holder_hints) >= HINTS_MAX:
            self.holder_hints.clear()
        self.holder_hints[key] = holders
        return holders

    def seen(self, sequence: int, key: str, size: int = 0) -> None:
        """Called when the follower of the log has reached this record, which has ``size``."""
        self.position = sequence
        self._log_bytes += size
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.set()
        for prefix in [prefix for prefix in self._waiting_for_prefix if key.startswith(prefix)]:
            self._waiting_for_prefix.pop(prefix).set()
        if self._advanced is not None:
            self._advanced.set()
            self._advanced = None

    def appended(self, sequence: int, key: str) -> None:
        """Called after this node appended and applied a record: the follower skips it.

        Not if it moved the replica away: the follower may be behind, and install it once more before that.
        """
        if sequence > self.position and key in self.replicas.index:
            self.own[sequence] = key
            if (
                len(self.own) > OWN_MAX
            ):  # some records were removed from the log before the follower reached them
                self.own = {number: own for number, own in self.own.items() if number > self.position}

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
        if self.was_offline_too_long:
            raise errors.Unavailable(
                f"{self.name} was disconnected for too long: it checks its replicas first"
            )
        started_at_s = self.now_s()
        await self.catch_up(timeout_s, confirmed=confirmed)
        self.fresh_at_s = max(self.fresh_at_s, started_at_s)

    @property
    def was_offline_too_long(self) -> bool:
        """Whether deletions may have been purged from the log in the meantime."""
        offline_s = self.now_s() - self.fresh_at_s
        return self.settings.tombstone_s < offline_s < float("inf")

    async def _read_log_end(self) -> int:
        async with asyncio.timeout(self.settings.timeout_s):
            sent_at_s = self.now_s()
            end = await self.log.state()
        self._observe_log_time(sent_at_s, end.now_ns, self.now_s())
        self._log_bytes = end.bytes
        return end.last_sequence

    async def _confirm_log_end(self) -> int:
        return await self.log.end(timeout_s=self.settings.timeout_s)

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
        rounds = self.confirmed_end if confirmed and self.log.is_replicated else self.log_end
        try:
            async with asyncio.timeout(timeout_s):
                end = await rounds.result()
                while self.position < end:
                    if self._advanced is None:
                        self._advanced = asyncio.Event()
                    try:
                        async with asyncio.timeout(GAP_S):
                            await self._advanced.wait()
                    except TimeoutError:
                        if not await self.log.has_any(self.position + 1, end) and self.position < end:
                            self.seen(end, "")
        except TimeoutError:
            raise errors.TimedOut(f"no reply from the log to {self.name} in {timeout_s:g} s") from None

    def age_s(self, replica: replica_table.Replica) -> float:
        fresh_at_s = self.fresh_at_s
        if replica.fresh_at_s > fresh_at_s:
            fresh_at_s = replica.fresh_at_s
        return max(0.0, self.now_s() - fresh_at_s)

    async def value_of(self, key: str, replica: replica_table.Replica) -> bytes | None:
        """Return the value from memory, the view or the log; None if the context has changed since."""
        value = replica.read()
        if value is not None:
            return value
        entry = self.unsaved.get(key)
        if entry is None and self.view is not None and not replica.temporary:
            with contextlib.suppress(errors.MusterError):  # if the view fails, the log has the value too
                entry = await self.view.value(key)
        if entry is None or entry.sequence != replica.sequence:
            entry = await self.log.last(key)
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
                rpc_requests.count_refusal(protocol.PART, "quota")
                raise

    def may_read(self, identity: str, key: str, writer: str) -> bool:
        try:
            self.check(identity, "read", key, writer)
        except errors.Forbidden:
            return False
        return True

    def mounted(self, key: str) -> mounts.MountedRegistry:
        """Return the registry of a key under `mounts.PREFIX`."""
        name = key.removeprefix(mounts.PREFIX).partition("/")[0]
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
                    return await rpc_client.exchange_once(
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
            await rpc_client.exchange_once(
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
