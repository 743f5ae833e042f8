"""Publishes the reports of a simulated fleet on the real bus, evenly distributed over each period.

``batches``: like the output of first-level channels, a thousand machines in a message, to the top-level
stream; ``reports``: like the single reports of sensors, to a channel.

It follows the wall clock: it keeps the requested rate or reports how far behind it is.  Messages that could
not be stored in time wait in a bounded queue; those that are dropped are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from muster.bus import api
from muster.bus.client import client
from muster.core import errors, subjects
from muster.core.reports import columns
from muster.monitor import protocol
from muster.simulate import fleet, slot_frames
from muster.supervision import tasks

IN_FLIGHT_MAX = 512
AT_ONCE = 250  # single reports


@dataclass(slots=True)
class PlaybackStatistics:
    messages: int = 0
    rows: int = 0
    bytes: int = 0
    failed: int = 0  # messages that could not be stored
    behind_s: float = 0.0  # delay of the last message
    behind_max_s: float = 0.0


class FleetPlayer:
    def __init__(
        self,
        bus: api.Bus,
        played: fleet.VirtualFleet,
        *,
        form: Literal["batches", "reports"] = "batches",
        channel: str = "",
        shard: int = 0,
        compression: str | None = "lz4",
    ) -> None:
        if form == "reports" and not channel:
            raise errors.InvalidInput("single reports need the name of a channel")
        if form == "reports" and played.plan.prefix != bus.identity:
            raise errors.InvalidInput(f"names of machines must begin with {bus.identity}.")
        self._bus = bus
        self._fleet = played
        self._form = form
        self._channel = channel
        self._shard = shard
        self._compression = compression
        self._boot = time.time_ns() // 1_000_000
        self._sequence = 0
        self._stream: api.Stream | None = None
        self._in_flight = tasks.TaskSupervisor("player")
        self._room = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._at_s = 0.0
        self._frames: dict[int, slot_frames.SlotFrames] = {}  # by slot
        self.statistics = PlaybackStatistics()

    @property
    def at_s(self) -> float:
        """The time of the fleet at the last message."""
        return self._at_s

    async def run(self, *, ticks: int | None = None) -> None:
        """Run for ``ticks`` periods, or without end."""
        if self._form == "batches":
            for settings in protocol.streams():
                opened = await self._bus.stream(settings)
                self._stream = self._stream or opened
        slots, period_s = self._fleet.slots, self._fleet.plan.period_s
        start_s = time.monotonic()
        tick = 0
        try:
            while slots and (ticks is None or tick < ticks):
                for place, slot in enumerate(slots):
                    due_s = start_s + (tick + place / len(slots)) * period_s
                    early_s = due_s - time.monotonic()
                    if early_s > 0.001:
                        await asyncio.sleep(early_s)
                    self.statistics.behind_s = max(0.0, -early_s)
                    self.statistics.behind_max_s = max(self.statistics.behind_max_s, self.statistics.behind_s)
                    self._at_s = tick * period_s
                    if self._form == "reports":
                        await self._report(slot, tick, due_s, period_s / len(slots))
                    else:
                        await self._play(slot, tick)
                tick += 1
            if ticks is not None and slots:
                await asyncio.sleep(max(0.0, start_s + ticks * period_s - time.monotonic()))
            await self._in_flight.wait_idle()
        finally:
            await self._in_flight.close()

    async def _play(self, slot: fleet.FleetSlot, tick: int) -> None:
        batch = self._fleet.batch(slot, tick, time.time_ns() // 1_000_000)
        if not batch.num_rows:
            return
        self._sequence += 1
        facts = columns.BatchInfo(
            channel=self._bus.identity,
            boot=self._boot,
            sequence=self._sequence,
            machines=len(slot.names),
            missing=len(slot.names) - batch.num_rows,
            partial=batch.num_rows < len(slot.names),
            held_to_ms=time.time_ns() // 1_000_000,
        )
        data = columns.encode(batch, facts, compression=self._compression)
        if self._fleet.active(self._at_s, "garbage"):
            data = data[: len(data) // 2]
        for copy in range(2 if self._fleet.active(self._at_s, "twice") else 1):
            await self._room.acquire()
            name = f"{self._boot}-{self._sequence}-{copy}"
            self._in_flight.spawn("store", self._store(data, batch, name))

    async def _store(self, data: bytes, batch: pa.RecordBatch, name: str) -> None:
        assert self._stream is not None
        subject = protocol.batch(self._bus.identity, protocol.ROOT, shard=self._shard)
        try:
            await self._stream.publish(subject, data, message_id=f"{self._bus.identity}-{name}")
        except errors.MusterError:
            self.statistics.failed += 1
        else:
            self.statistics.messages += 1
            self.statistics.rows += batch.num_rows
            self.statistics.bytes += len(data)
        finally:
            self._room.release()

    async def _report(self, slot: fleet.FleetSlot, tick: int, due_s: float, lasts_s: float) -> None:
        """Publish single reports: evenly from ``due_s`` on."""
        made = self._fleet.sample(slot, tick, time.time_ns() // 1_000_000)
        frames = self._frames.get(slot.number)
        if frames is None:
            subject = protocol.report(self._bus.identity, subjects.token(self._channel))
            frames = self._frames[slot.number] = slot_frames.SlotFrames(
                slot, subject, self._fleet.plan.period_s
            )
        frames.fill(made)
        if isinstance(self._bus, client.NatsBus) and not self._fleet.active(self._at_s, "twice", "garbage"):
            pieces = -(-len(slot.names) // AT_ONCE)
            for place, (count, data) in enumerate(frames.frames(made.reporting, AT_ONCE)):
                early_s = due_s + lasts_s * place / pieces - time.monotonic()
                if early_s > 0.001:
                    await asyncio.sleep(early_s)
                await self._send(count, data)
        else:
            await self._send_each(frames.reports(made.reporting))
        self.statistics.rows += int(np.count_nonzero(made.reporting))

    async def _send(self, count: int, data: bytes) -> None:
        assert isinstance(self._bus, client.NatsBus)
        with contextlib.suppress(errors.Unavailable):
            await self._bus.publish_frames(data)
            self.statistics.messages += count
            self.statistics.bytes += len(data)

    async def _send_each(self, reports: list[bytes]) -> None:
        subject = protocol.report(self._bus.identity, subjects.token(self._channel))
        copies = 2 if self._fleet.active(self._at_s, "twice") else 1
        broken = self._fleet.active(self._at_s, "garbage")
        with contextlib.suppress(errors.Unavailable):
            for report in reports:
                data = report[: len(report) // 2] if broken else report
                for _ in range(copies):
                    await self._bus.publish(subject, data)
                    self.statistics.messages += 1
                    self.statistics.bytes += len(data)
