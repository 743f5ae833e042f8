"""Reports: sensors of three machines, and the reports that reach the pipeline's stream.

The pure state of the pipeline (`muster.pipeline.fleet`) stands for Spark.
"""

from __future__ import annotations

import asyncio

from muster.bus import api
from muster.core.reports import columns
from muster.monitor import settings
from muster.pipeline.fleet import blocks
from muster.pipeline.fleet import state as fleet_state
from tests.faults import deployment
from tests.faults.workloads import workload
from tests.sim.parts import reports as sim_reports

PERIOD_S = 0.5
WINDOW_S = 5.0
BASE = 64  # a machine's value is a power of it, so that a sum shows how often each machine was counted
DELAY_S = 120.0


class ReportWorkload(workload.Workload):
    name = "reports"
    guarantee = "each report is counted once, or its window is marked as incomplete"
    measured = ("stored",)

    async def start(self) -> None:
        self._sensors: list[sim_reports.InventedSensor] = []
        self._bus = self.deployment.operator
        stream = await workload.patiently(self._bus.open_stream, columns.REPORTS_STREAM)
        self._from = (await stream.state()).last_sequence + 1
        self._position = self._from - 1
        for number in range(1, deployment.CLIENTS + 1):
            folder = self.deployment.scratch / f"sensor-{self.tag}-{number}"
            folder.mkdir()
            options = settings.SensorSettings(intake=False, group=self.tag, period_s=PERIOD_S)
            made = sim_reports.InventedSensor(await self.connect("user", number), options, folder)
            made.history, made.value = self.history, float(BASE ** (number - 1))
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
            sim_reports.record_windows(self.history, "pipeline", output, plan.window_ms, self.tag)
