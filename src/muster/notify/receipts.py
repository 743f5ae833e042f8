"""Durable events that a process received: each is handled once, then acknowledged.

A notifier delivers again what was not acknowledged, and the next holder of a shard repeats what the former
one may have delivered already.  So received events are remembered until their shard reports that they will
not be sent again.  Deliveries of a former holder are rejected by their epoch.

A domain that was restored from a backup counts epochs and events from lower numbers.  Its notifiers repeat
their deliveries, which a former holder does not do for long.  So a lower epoch is accepted when deliveries
were repeated with it for `RESTORED_S`, and none had the higher one.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib

from muster.bus import api, leases
from muster.core import errors, messages, subjects
from muster.notify import protocol
from muster.supervision import tasks

RESTORED_S = 60.0


class EventReceipts:
    def __init__(self, bus: api.Bus) -> None:
        self._bus = bus
        self._fences = collections.defaultdict[int, leases.EpochFence](leases.EpochFence)
        self._lower: dict[int, tuple[float, float]] = {}  # by shard: first and last of repeated lower epochs
        # Shard -> sequence -> receivers. Ordered: the first of a plain dict is found by reading past all that
        # were deleted before it.
        self._received = collections.defaultdict[int, collections.OrderedDict[int, set[str]]](
            collections.OrderedDict
        )
        self._acks: dict[int, dict[int, list[str]]] = {}
        self._tasks = tasks.TaskSupervisor(f"acknowledgements of {bus.identity}")
        self._acking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """The number of remembered events."""
        return sum(map(len, self._received.values()))

    async def close(self) -> None:
        if self._acking is not None:
            await asyncio.gather(self._acking, return_exceptions=True)

    def is_stale(self, delivered: protocol.EventDelivery) -> bool:
        """Whether the sending notifier no longer holds the shard."""
        shard, now_s = delivered.shard, asyncio.get_running_loop().time()
        try:
            self._fences[shard].check(delivered.epoch)
        except errors.StaleEpoch:
            first_s, last_s = self._lower.get(shard, (now_s, now_s))
            if now_s - last_s > RESTORED_S:
                first_s = now_s
            self._lower[shard] = first_s, now_s
            if now_s - first_s < RESTORED_S:
                return True
            self._fences[shard] = leases.EpochFence(delivered.epoch)
            self._received.pop(shard, None)
        self._lower.pop(shard, None)
        return False

    def has(self, name: str, delivered: protocol.EventDelivery) -> bool:
        received = self._received[delivered.shard]
        while received and (first := next(iter(received))) < delivered.floor:
            del received[first]
        return name in received.get(delivered.sequence, ())

    def add(self, name: str, delivered: protocol.EventDelivery) -> None:
        received = self._received[delivered.shard]
        received.setdefault(delivered.sequence, set()).add(name)

    def acknowledge(self, shard: int, sequence: int, name: str) -> None:
        self._acks.setdefault(shard, {}).setdefault(sequence, []).append(name)
        if self._acking is None or self._acking.done():
            self._acking = self._tasks.spawn("send", self._send())

    async def _send(self) -> None:
        while self._acks:
            await asyncio.sleep(0)  # collect more acknowledgements of this iteration of the loop
            acks, self._acks = self._acks, {}
            for shard, events in acks.items():
                subject = subjects.from_identity(protocol.PART, self._bus.identity, "ack", str(shard))
                for part in protocol.split_receivers(events):
                    with contextlib.suppress(errors.Unavailable):  # it is delivered and acknowledged again
                        await self._bus.publish(subject, messages.encode(protocol.EventAcks(events=part)))
