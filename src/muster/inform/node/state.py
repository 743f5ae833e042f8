"""What the parts of one information node share: its copies, how far it is in the log, and who waits for what.

Reading, writing and upkeep each get the same desk.  It is the one place where a record becomes a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import weakref
from collections.abc import Callable
from typing import Protocol

from muster.bus import api
from muster.core import clock, errors
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
GAP_S = 0.2  # the follower is slow, or there is nothing to come
HOLDERS_MAX = 1_000  # every record names all of them
MOVED_MAX = 10_000
MOVED_REMEMBERED_S = 10.0  # longer than an answer to a search takes, and a new primary to hear that it is
UNDER_WAY_BYTES_MAX = 64 << 20  # of the memory: records that have come and are not in the view yet


class RoleResolver(Protocol):
    """The role of an identity, if it is known."""

    def __call__(self, identity: str) -> str | None: ...


class Silent(errors.TimedOut):
    """Another node gave no answer. (One that answers "timed out" is not silent.)"""

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
        # Where everybody may be anybody, nobody owns anything.
        self._rules = (*settings.rules, *(access_rules.BUILT_IN if role_of is not None else ()))
        self.mounts = {mount.name: registry.open_mount(mount, mount_backends) for mount in settings.mounts}
        self.zone = zone
        under_way = min(settings.memory_bytes // 8, UNDER_WAY_BYTES_MAX)
        self.copies = replica_table.ReplicaTable(name, memory_bytes_max=settings.memory_bytes - under_way)
        self.directory = peers.NodeDirectory(name, lost_after_s=settings.lost_after_s)
        self.clock = clock.HybridClock(name)
        self.demand = demand.DemandCounts()
        self.requests = 0  # of users, since the load was last looked at
        self.load = protocol.NodeLoad()
        self.due: list[tuple[int, str]] = []  # when an expiry or the end of a tombstone is to be looked at
        self.unsaved = unsaved.UnsavedChanges()
        self.buckets_changed = asyncio.Event()
        self._buckets_generation = 0
        self.short: set[str] = set()  # contexts of ours that have fewer copies than they should
        self.moved: dict[
            str, tuple[float, replica_table.Replica]
        ] = {}  # since when we are not its primary any more
        self.own: dict[int, str] = {}  # what we appended and applied ourselves and shall meet in the log
        self.log_end = shared_rounds.SharedRounds(self._ask_log_end)
        self.position = 0  # of the last record of the log that was seen
        self.fresh_at_s = -float("inf")  # when all that the log then held had been seen
        self.closing = False
        self._advanced: asyncio.Event | None = None  # while somebody waits for the follower
        # An event lives as long as somebody waits for it: a client may name keys that will never be.
        self._waiting: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        self.turns = key_locks.KeyLocks()

    # Records become copies.

    def apply(self, entry: context_log.ContextLogEntry, *, just_stamped: bool = False) -> None:
        """``just_stamped``: by us, so that our clock knows."""
        record = entry.record
        was = self.copies.index.get(record.key) if record.reason == "place" else None
        if not self.copies.apply(record, entry.sequence, self.now_s()):
            return
        if was is not None and was.holders[0] == self.name != record.holders[0] and not was.temporary:
            self._moved_away(record.key, was)
        if not just_stamped:
            with contextlib.suppress(errors.MusterError):  # a clock that runs ahead is counted by ours
                self.clock.observe(clock.HybridTimestamp(record.stamp, record.stamped_by), self.now_ns())
        held = record.key in self.copies.index
        self._note(record.key, entry if held else None)
        if held:
            if record.holders[0] == self.name and len(record.holders) < self.copies_wanted():
                self.short.add(record.key)
            self._expect_end(record)

    def _moved_away(self, key: str, was: replica_table.Replica) -> None:
        now_s, moved = self.now_s(), self.moved
        moved.pop(key, None)
        moved[key] = now_s, was
        while moved and (
            len(moved) > MOVED_MAX or next(iter(moved.values()))[0] < now_s - MOVED_REMEMBERED_S
        ):
            del moved[next(iter(moved))]

    def restore(self, entries: list[context_log.ContextLogEntry]) -> None:
        """Copies as the view has them: nothing of it is news to anybody."""
        now_s = self.now_s()
        latest = max(entries, key=lambda entry: entry.record.stamp).record
        with contextlib.suppress(errors.MusterError):
            self.clock.observe(clock.HybridTimestamp(latest.stamp, latest.stamped_by), self.now_ns())
        for entry in entries:
            if self.copies.apply(entry.record, entry.sequence, now_s):
                self._expect_end(entry.record)  # whether there are enough copies is looked at once, of all

    def forget_all(self) -> None:
        """What was restored. Nothing is noted as gone."""
        for key in list(self.copies.index):
            self.copies.drop(key)
        self.due.clear()

    def _expect_end(self, record: protocol.ContextRecord) -> None:
        end_ns = self._ends_at_ns(record.value is None, record.stamp, record.expires_at_ns)
        if end_ns:
            heapq.heappush(self.due, (end_ns, record.key))
            if len(self.due) > 2 * len(self.copies.index) + DUE_SPARE:  # leases that were renewed since
                self.due = [
                    (end_ns, key)
                    for key, copy in self.copies.index.items()
                    if (end_ns := self._ends_at_ns(copy.deleted, copy.stamp, copy.expires_at_ns))
                ]
                heapq.heapify(self.due)

    def _ends_at_ns(self, deleted: bool, stamp: int, expires_at_ns: int) -> int:
        """0: never."""
        if deleted:
            return (stamp >> 16) * 1_000_000 + int(self.settings.tombstone_s * 1e9)
        return expires_at_ns

    def _note(self, key: str, entry: context_log.ContextLogEntry | None) -> None:
        if self.view is not None:
            self.unsaved.note(key, entry)
        if self._buckets_generation != self.copies.buckets_generation:
            self._buckets_generation = self.copies.buckets_generation
            self.buckets_changed.set()

    def drop(self, key: str) -> None:
        was = self.copies.index.get(key)
        self.copies.drop(key)
        if was is not None and not was.temporary:
            self._note(key, None)

    def seen(self, sequence: int, key: str) -> None:
        """The follower has come to this record."""
        self.position = sequence
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.set()
        if self._advanced is not None:
            self._advanced.set()
            self._advanced = None

    def appended(self, sequence: int, key: str) -> None:
        """By us, and applied: the follower need not look into it."""
        if sequence > self.position:
            self.own[sequence] = key
            if len(self.own) > OWN_MAX:  # some went from the log before the follower came to them
                self.own = {number: own for number, own in self.own.items() if number > self.position}

    def change_of(self, key: str) -> asyncio.Event:
        """Set when the log has a further record of ``key``."""
        return self._waiting.setdefault(key, asyncio.Event())

    def wake_all(self) -> None:
        """We are closing: who waits for a change is told that there was none."""
        self.closing = True
        for waiting in list(self._waiting.values()):
            waiting.set()

    # Freshness.

    async def refresh(self, timeout_s: float) -> None:
        """Know all that the log held when this was called; `errors.Unavailable` if that cannot be."""
        if self.was_deaf_too_long:
            raise errors.Unavailable(f"{self.name} was cut off for long: it looks its copies up first")
        asked_at_s = self.now_s()
        await self.catch_up(timeout_s)
        self.fresh_at_s = max(self.fresh_at_s, asked_at_s)

    @property
    def was_deaf_too_long(self) -> bool:
        """What was deleted meanwhile may have left no trace in the log."""
        deaf_s = self.now_s() - self.fresh_at_s
        return self.settings.tombstone_s < deaf_s < float("inf")

    async def _ask_log_end(self) -> int:
        async with asyncio.timeout(self.settings.timeout_s):
            return await self.log.ends_at()

    async def catch_up(self, timeout_s: float) -> None:
        """Have the follower see all that the log holds now."""
        try:
            async with asyncio.timeout(timeout_s):
                end = await self.log_end.answer()
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
            raise errors.TimedOut(f"the log did not answer {self.name} in {timeout_s:g} s") from None

    def age_s(self, copy: replica_table.Replica) -> float:
        return max(0.0, self.now_s() - (copy.fresh_at_s if copy.temporary else self.fresh_at_s))

    async def value_of(self, key: str, copy: replica_table.Replica) -> bytes | None:
        """The value, from memory or from where it was put; None if the context changed meanwhile."""
        value = copy.read()
        if value is not None:
            return value
        entry = self.unsaved.get(key)
        if entry is None and self.view is not None and not copy.temporary:
            with contextlib.suppress(errors.MusterError):  # a lost or damaged store: the log has it too
                entry = await self.view.value(key)
        if entry is None or entry.sequence != copy.sequence:
            entry = await self.log.last(key)
        if entry is None or entry.version != copy.version or entry.record.value is None:
            return None
        self.copies.keep_value(key, copy, entry.record.value)
        return entry.record.value

    # Others.

    def check(self, identity: str, act: str, key: str, owner: str | None) -> None:
        rule = access_rules.rule_for(self._rules, key)
        if not rule.lets_everybody(act):
            role = self.role_of(identity) if self.role_of is not None else None
            rule.check(key, act, identity=identity, role=role, owner=owner)

    def may_read(self, identity: str, key: str, writer: str) -> bool:
        try:
            self.check(identity, "read", key, writer)
        except errors.Forbidden:
            return False
        return True

    def mounted(self, key: str) -> mounts.MountedRegistry:
        """The registry that a key under `mounts.PREFIX` is of."""
        name = key.removeprefix(mounts.PREFIX).partition("/")[0]
        if name not in self.mounts:
            raise errors.NotFound(f"no context {key!r}: nothing is mounted as {name!r}")
        return self.mounts[name]

    def information(self) -> protocol.ServerInformation:
        held = self.copies
        return protocol.ServerInformation(self.name, self.load, self.zone, held.temporary, held.memory_bytes)

    def copies_wanted(self) -> int:
        if self.settings.full_replication:
            return min(len(self.directory.nodes) + 1, HOLDERS_MAX)
        return self.settings.copies

    async def ask(self, node: str, kind: str, message: object, answer: type[protocol.T]) -> protocol.T:
        """Ask one other node. `Silent` if it does not answer."""
        try:
            reply = await self.bus.request(
                protocol.to_node(node, kind), protocol.encode(message), timeout_s=self.settings.timeout_s
            )
        except (errors.NotConnected, errors.Overloaded):  # that is our own connection
            raise
        except errors.Unavailable as error:
            raise Silent(f"{node} does not answer: {error}") from error
        return protocol.result_of(reply.data, answer)


def stamp_text(stamp: int, stamped_by: str) -> str:
    return clock.format_timestamp(stamp, stamped_by)
