"""Loss of a channel: the time until its sensors have moved; their reports are counted once."""

from __future__ import annotations

import collections
import time

from muster.core.reports import packed
from muster.monitor import settings
from muster.monitor.sensor import sensor
from muster.pipeline.fleet import blocks, rollups, state
from muster.testing.eventually import eventually
from tests.monitor import conftest

PERIOD_S = 0.5
SENSORS = 6


async def test_the_children_of_a_dead_channel_move_within_two_periods_and_nothing_counts_twice(
    connect, channel, tmp_path
):
    """Time is measured in what each sensor reports: one period is one report."""
    victim = await channel("c1", beat_s=0.4 * PERIOD_S)
    await channel("c2", beat_s=0.4 * PERIOD_S)
    received: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)

    def hear(message) -> None:
        row = packed.decode(message.data)
        received[row.machine].append((row.sequence, message.subject.rpartition(".")[2]))

    watcher = await connect("watcher")
    await watcher.subscribe("muster.monitor.from.*.report.*", handler=hear)
    running = []
    for number in range(SENSORS):
        bus = await connect(f"m{number}")
        options = settings.SensorSettings(intake=False, period_s=PERIOD_S, channels=("c1", "c2"))
        running.append(sensor.Sensor(bus, options, tmp_path / bus.identity))
        await running[-1].start()
    try:
        await eventually(
            lambda: len(received) == SENSORS and all(len(entry) > 2 for entry in received.values())
        )
        # As kill -9 would: no word of it, and what it holds is gone.
        for subscription in victim._subscriptions:
            await subscription.close()
        victim._tasks.cancel()
        died_at = {report.machine: report._sequence for report in running}
        known = set(died_at)

        def moved() -> bool:
            return all(any(to == "c2" for _, to in received[machine]) for machine in known)

        await eventually(moved, timeout_s=30)
        for machine, replies in received.items():
            first_new = next(n for n, to in replies if to == "c2" and n > died_at[machine])
            assert first_new - died_at[machine] <= 2, (machine, replies)
            again = {n for n, to in replies if to == "c2"}  # with what may have died with the channel
            assert set(range(min(again), max(again) + 1)) == again
    finally:
        for item in running:
            await item.stop()
    last = {report.machine: report._sequence for report in running}

    async def all_there() -> bool:
        actual = {
            (machine, number)
            for batch, _ in await conftest.stored(watcher)
            for machine, number in zip(
                batch.column("machine").to_pylist(), batch.column("sequence").to_pylist(), strict=True
            )
        }
        # The last one may have been on its way when the sensors were stopped.
        return {(name, n) for name, end in last.items() for n in range(1, end)} <= actual

    await eventually(all_there, timeout_s=30)
    now_ms = int(time.time() * 1000)
    known_fleet = state.FleetState(state.FleetStatePlan(window_s=3600, delay_s=0, stale_after=1e9))
    arrivals = [
        blocks.ReportPiece.from_message(place, now_ms, batch, facts)
        for place, (batch, facts) in enumerate(await conftest.stored(watcher))
    ]
    output = known_fleet.feed(arrivals, now_ms)
    totals = rollups.scope_totals(known_fleet.feed([], now_ms + 7_200_000).closed)
    counted = sum(many.cell.total for many in totals if many.scope == "system")
    names = [name for arrival in arrivals for name in arrival.batch.column("machine").to_pylist()]
    numbers = [number for arrival in arrivals for number in arrival.batch.column("sequence").to_pylist()]
    distinct = set(zip(names, numbers, strict=True))
    assert counted == len(distinct)
    assert sum(arrival.batch.num_rows for arrival in arrivals) == counted + output.counts.get("duplicated", 0)
