"""Reports: sensors of three machines, and the reports that reach the pipeline's stream.

The pure state of the pipeline (`muster.pipeline.fleet`) stands for Spark.
"""

from __future__ import annotations

import asyncio
import time

from muster.bus import api
from muster.core import messages
from muster.core.reports import columns
from muster.monitor.sensor import sensor
from muster.pipeline.fleet import blocks, rollups
from muster.pipeline.fleet import state as fleet_state
from tests.faults import deployment
from tests.faults.workloads import workload

PERIOD_S = 0.5
WINDOW_S = 5.0
BASE = 64  # a machine's value is a power of it, so that a sum shows how often each machine was counted
DELAY_S = 120.0


class NumberedSensor(sensor.Sensor):
    """A sensor with an invented measurement."""

    workload: ReportWorkload
    value: float

    async def sample(self) -> messages.NodeReport:
        self._sequence += 1
        report = messages.NodeReport(
            machine=self.machine,
            group=self._settings.group,
            zone=self._settings.zone,
            boot=self._boot,
            sequence=self._sequence,
            at_ms=time.time_ns() // 1_000_000,
            period_s=PERIOD_S,
            dropped=self._buffer.dropped,
            metrics={"cpu_percent": self.value},
        )
        self.workload.history.event(
            self.machine, "report", key=self.machine, at_ms=report.at_ms, sequence=report.sequence
        )
        return report


class ReportWorkload(workload.Workload):
    name = "reports"
    guarantee = "each report is counted once, or its window is marked as incomplete"
    measured = ("stored",)

    async def start(self) -> None:
        self._sensors: list[NumberedSensor] = []
        self._bus = self.deployment.operator
        stream = await workload.patiently(self._bus.open_stream, columns.REPORTS_STREAM)
        self._from = (await stream.state()).last_sequence + 1
        self._position = self._from - 1
        for number in range(1, deployment.CLIENTS + 1):
            folder = self.deployment.scratch / f"sensor-{self.tag}-{number}"
            folder.mkdir()
            options = sensor.SensorOptions(
                buffer_dir=folder,
                machine=f"user-{number}",
                group=self.tag,
                period_s=PERIOD_S,
            )
            made = NumberedSensor(await self.connect("user", number), options)
            made.workload, made.value = self, float(BASE ** (number - 1))
            self.history.fact("machine", key=made.machine, group=self.tag, value=BASE ** (number - 1))
            await made.start()
            self.stack.push_async_callback(made.stop)
            self._sensors.append(made)
        self.run(self._watch())

    async def _watch(self) -> None:
        """When reports of which machine are stored."""
        await self.repeat(self._read_new)

    async def _read_new(self) -> None:
        try:
            for stored in await self._read(self._position + 1):
                self._position = stored.sequence
                batch, _ = columns.decode(stored.data)
                for name in set(batch.column("machine").to_pylist()):
                    self.history.event(name, "stored", key=name, at_s=asyncio.get_running_loop().time())
        except Exception as error:  # noqa: BLE001  (the reader is no part of the measurement)
            self.history.event("pipeline", "unreadable", error=str(error))

    async def _read(self, first: int) -> list[api.StoredMessage]:
        stream = await self._bus.open_stream(columns.REPORTS_STREAM)
        state = await stream.state()
        return [stored async for stored in stream.read(first, state.last_sequence)]

    async def finish(self) -> None:
        """Wait until the sensors have nothing left to send, and aggregate everything."""
        await asyncio.sleep(5 * PERIOD_S)  # pace
        for made in self._sensors:
            await made.stop()
        await asyncio.sleep(2.0)  # pace
        await self._read_new()
        plan = fleet_state.FleetStatePlan(window_s=WINDOW_S, delay_s=DELAY_S, rules=())
        fleet = fleet_state.FleetState(plan)
        pieces = []
        last_ms = 0
        for stored in await workload.patiently(self._read, self._from):
            batch, facts = columns.decode(stored.data)
            last_ms = stored.stored_at_ns // 1_000_000
            pieces.append(blocks.ReportPiece.from_message(stored.sequence, last_ms, batch, facts))
        outputs = [fleet.feed(pieces, last_ms), fleet.feed([], last_ms + 4 * int(DELAY_S * 1000))]
        for output in outputs:
            for many in rollups.scope_totals(output.closed):
                if many.scope == "group" and many.name == self.tag and not many.gone:
                    self.history.event(
                        "pipeline",
                        "aggregate",
                        key=many.name,
                        from_ms=many.from_ms,
                        window_ms=plan.window_ms,
                        known=many.known,
                        stale=many.stale,
                        machines=many.cell.machine_count(),
                        total=many.cell.total,
                        sum=many.cell.rollups()["cpu_percent"].sum if many.cell.total else 0.0,
                        partial=many.cell.partial,
                        dropped=sum(many.cell.dropped.values()),
                    )
