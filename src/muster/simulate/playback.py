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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from muster.bus import api
from muster.core import errors, subjects
from muster.core.reports import columns as reports_columns
from muster.core.reports import packed
from muster.monitor import protocol
from muster.simulate import fleet
from muster.supervision import tasks

IN_FLIGHT_MAX = 512
AT_ONCE = 100  # single reports


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
                    await self._play(slot, tick)
                tick += 1
            if ticks is not None and slots:
                await asyncio.sleep(max(0.0, start_s + ticks * period_s - time.monotonic()))
            await self._in_flight.wait_idle()
        finally:
            await self._in_flight.close()

    async def _play(self, slot: fleet.FleetSlot, tick: int) -> None:
        self._at_s = tick * self._fleet.plan.period_s
        batch = self._fleet.batch(slot, tick, time.time_ns() // 1_000_000)
        if not batch.num_rows:
            return
        if self._form == "reports":
            await self._say(batch)
            return
        self._sequence += 1
        facts = reports_columns.BatchInfo(
            channel=self._bus.identity,
            boot=self._boot,
            sequence=self._sequence,
            machines=len(slot.names),
            missing=len(slot.names) - batch.num_rows,
            partial=batch.num_rows < len(slot.names),
            held_to_ms=time.time_ns() // 1_000_000,
        )
        data = reports_columns.encode(batch, facts, compression=self._compression)
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

    async def _say(self, batch: pa.RecordBatch) -> None:
        subject = protocol.report(self._bus.identity, subjects.token(self._channel))
        copies = 2 if self._fleet.active(self._at_s, "twice") else 1
        broken = self._fleet.active(self._at_s, "garbage")
        reports: list[tuple[str, bytes, api.Headers]] = [
            (subject, data[: len(data) // 2] if broken else data, {})
            for data in packed_reports(batch)
            for _ in range(copies)
        ]
        for start in range(0, len(reports), AT_ONCE):
            chunk = reports[start : start + AT_ONCE]
            sent = len(chunk)
            if not self._bus.publish_now(chunk):
                sent = 0
                with contextlib.suppress(errors.Unavailable):
                    for _, data, _ in chunk:
                        await self._bus.publish(subject, data)
                        sent += 1
            self.statistics.messages += sent
            self.statistics.bytes += sum(len(data) for _, data, _ in chunk[:sent])
        self.statistics.rows += batch.num_rows


def packed_reports(batch: pa.RecordBatch) -> Iterator[bytes]:
    """As `packed.encode`, for generated batches: without checks, services and null values."""
    texts = zip(
        *(
            [name.encode() for name in batch.column(text).to_pylist()]
            for text in ("machine", "group", "zone")
        ),
        strict=True,
    )
    at_ms = batch.column("reported_at").cast(pa.int64()).to_numpy() // 1000
    boot, sequence, period_s, dropped = (
        batch.column(name).to_numpy().tolist() for name in ("boot", "sequence", "period_s", "dropped")
    )
    numbers = zip(boot, sequence, at_ms.tolist(), period_s, dropped, strict=True)
    standard = np.stack([batch.column(name).to_numpy() for name in reports_columns.STANDARD_METRICS], axis=1)
    extra = batch.column(reports_columns.EXTRA)
    ends = np.zeros(batch.num_rows + 1, np.int64)
    codes, values, names = b"", b"", list[str]()
    if not extra.null_count:
        ends = extra.offsets.to_numpy().astype(np.int64)
        codes = extra.keys.indices.to_numpy().astype(np.int32).tobytes()
        values = extra.items.to_numpy().tobytes()
        names = extra.keys.dictionary.to_pylist()
    blocks: dict[bytes, bytes] = {}
    for row_texts, row_numbers, own, start, end in zip(
        texts, numbers, standard, ends[:-1].tolist(), ends[1:].tolist(), strict=True
    ):
        coded = codes[4 * start : 4 * end]
        block = blocks.get(coded)
        if block is None:
            more = (names[code] for code in np.frombuffer(coded, np.int32).tolist())
            block = blocks[coded] = packed.pack_names((*reports_columns.STANDARD_METRICS, *more))
        yield packed.pack(row_numbers, row_texts, block, own.tobytes() + values[8 * start : 8 * end])
