"""The broker is killed under load: sensors buffer, channels wait, and each report arrives once."""

from __future__ import annotations

import asyncio
import collections

from muster.bus import api
from muster.monitor import settings
from muster.monitor.sensor import sensor
from muster.testing.eventually import eventually

OPTIONS = settings.SensorSettings(intake=False, period_s=0.1)


async def test_without_a_broker_a_channel_and_a_sensor_end_at_once(broker, connect, channel, tmp_path):
    started = await channel("c1")
    bus = await connect("m1")
    async with sensor.Sensor(bus, OPTIONS, tmp_path) as running:
        await eventually(lambda: running.sent)
        await broker.kill()
        await eventually(lambda: bus.state is not api.ConnectionState.CONNECTED)
        async with asyncio.timeout(20):
            await started.stop()
            await running.stop()


async def test_a_broker_killed_under_load_costs_no_report(broker, connect, channel, rows, tmp_path):
    await channel("c1")
    buses = [await connect(f"m{number}") for number in range(5)]
    running = []
    for bus in buses:
        running.append(sensor.Sensor(bus, OPTIONS, tmp_path / bus.identity))
        await running[-1].start()
    try:
        await eventually(lambda: all(entry.sent > 3 for entry in running))
        await broker.kill()
        await eventually(lambda: all(bus.state is not api.ConnectionState.CONNECTED for bus in buses))
        await eventually(lambda: all(entry.buffered > 2 for entry in running), timeout_s=30)
        await broker.start()
        await eventually(lambda: all(entry.buffered == 0 for entry in running), timeout_s=40)
        before = [entry.sent for entry in running]
        await eventually(lambda: all(now.sent > was for now, was in zip(running, before, strict=True)))
    finally:
        for item in running:
            await item.stop()
    made = {report.machine: report._sequence - 1 for report in running}  # the last may be on its way

    async def complete():
        counter = collections.Counter((row.machine, row.sequence) for row in await rows(buses[0]))
        assert max(counter.values()) == 1, counter
        expected = {(machine, number) for machine, last in made.items() for number in range(1, last + 1)}
        return expected <= counter.keys()

    await eventually(complete, timeout_s=30)
