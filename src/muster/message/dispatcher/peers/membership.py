"""The processes that can own partitions, and which of them should own each.

Every process announces itself periodically, and computes the same owner for every partition from the members
it knows. A partition therefore moves only if its owner changes: when a process joins, it receives its share
from the others; when one leaves, its partitions are divided among the rest. The lease of the partition
decides who owns it in fact. This only decides who gives way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterable

from muster.bus import api, leases
from muster.core import errors
from muster.message.dispatcher.peers import peer_protocol

BEAT_S = 1.0
SILENT_S = 4.0  # a member that was silent for this long has left
SETTLE_S = 2.0  # how long a change of owners has to last before a partition moves


def owners(count: int, members: Iterable[str]) -> dict[int, str]:
    """The owner of each partition: the first in an order by hash that does not have its share already."""
    all_members = sorted(members)
    share = -(-count // len(all_members))
    loads = dict.fromkeys(all_members, 0)
    chosen: dict[int, str] = {}
    for partition in range(count):
        owner = max(
            (member for member in all_members if loads[member] < share),
            key=lambda member: hashlib.blake2b(f"{member}/{partition}".encode()).digest(),
        )
        loads[owner] += 1
        chosen[partition] = owner
    return chosen


class Membership:
    def __init__(self, bus: api.Bus, partition_count: int) -> None:
        self._bus = bus
        self._count = partition_count
        self.name = secrets.token_hex(8)
        self._loop = asyncio.get_running_loop()
        self._seen_at: dict[str, float] = {}
        self._connections: dict[str, tuple[str, int]] = {}
        self._owners = owners(partition_count, [self.name])
        self._since = dict.fromkeys(self._owners, 0.0)  # by partition: when its owner changed
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Announce this process and observe the others. Runs until cancelled."""
        subscriptions = [await self._bus.subscribe(peer_protocol.MEMBERS, handler=self._announced)]
        with contextlib.suppress(errors.Forbidden):  # then it takes `SILENT_S`
            subscriptions.append(await self._bus.subscribe(leases.DISCONNECTED, handler=self._disconnected))
        try:
            while True:
                at = self._bus.connection
                member = peer_protocol.DispatcherMember(
                    self.name, broker=at.broker if at else "", connection=at.number if at else 0
                )
                await self._publish(member)
                await asyncio.sleep(BEAT_S)
                self._forget(
                    [name for name, at_s in self._seen_at.items() if self._loop.time() - at_s > SILENT_S]
                )
        finally:
            for subscription in subscriptions:
                await subscription.close()
            if self._bus.state is api.ConnectionState.CONNECTED:
                await self._publish(peer_protocol.DispatcherMember(self.name, leaving=True))

    async def _publish(self, member: peer_protocol.DispatcherMember) -> None:
        try:
            await self._bus.publish(peer_protocol.MEMBERS, peer_protocol.encode(member))
        except errors.Unavailable:
            return

    def _announced(self, message: api.Message) -> None:
        member = peer_protocol.decode_member(message.data)
        if member.name == self.name:
            return
        if member.leaving:
            self._forget([member.name])
            return
        is_new = member.name not in self._seen_at
        self._seen_at[member.name] = self._loop.time()
        self._connections[member.name] = (member.broker, member.connection)
        if is_new:
            self._update()

    def _disconnected(self, message: api.Message) -> None:
        """A broker reports a closed connection."""
        try:
            report = json.loads(message.data)
            closed = (report["server"]["id"], int(report["client"]["id"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        self._forget([name for name, connection in self._connections.items() if connection == closed])

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self._seen_at.pop(name, None)
            self._connections.pop(name, None)
        if names:
            self._update()

    def _update(self) -> None:
        updated = owners(self._count, [self.name, *self._seen_at])
        for partition, owner in updated.items():
            if owner != self._owners[partition]:
                self._since[partition] = self._loop.time()
        self._owners = updated
        self._changed.set()
        self._changed = asyncio.Event()

    def should_own(self, partition: int) -> bool:
        return self._owners[partition] == self.name

    async def wait_for_change(self, partition: int, timeout_s: float) -> None:
        """Wait until this process should own the partition, at most for a time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.should_own(partition):
                    await self._changed.wait()
        except TimeoutError:
            return

    async def wait_to_give_way(self, partition: int) -> None:
        """Wait until another process should own the partition, and that has lasted for a while."""
        while True:
            if self.should_own(partition):
                await self._changed.wait()
                continue
            left_s = self._since[partition] + SETTLE_S - self._loop.time()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)
