from __future__ import annotations

import pytest

from muster.bus.client import client
from muster.core import errors
from muster.core.reports import columns, packed
from muster.monitor.channel import channel as channel_channel
from muster.simulate import fleet, playback
from muster.testing.eventually import eventually


async def test_a_fleet_reaches_the_stream_on_time(broker):
    plan = fleet.FleetPlan(machines=5000, period_s=0.5)
    async with await client.connect([broker.url], identity="sim", audit_s=0) as bus:
        player = playback.FleetPlayer(
            bus, fleet.VirtualFleet(plan, faults=(fleet.FleetFault("twice", from_s=0.5),))
        )
        await player.run(ticks=2)
        stream = await bus.open_stream(columns.REPORTS_STREAM)
        actual = [columns.decode(message.data) async for message in stream.read(1)]
    assert player.statistics.rows == 15_000  # the second tick was sent twice
    assert sum(batch.num_rows for batch, _ in actual) == 15_000
    machines = {machine for batch, _ in actual for machine in batch["machine"].to_pylist()}
    assert len(machines) == 5000
    assert {facts.channel for _, facts in actual} == {"sim"}


async def test_single_reports_go_through_a_real_channel_and_garbage_is_counted(broker):
    plan = fleet.FleetPlan(machines=300, period_s=0.3, prefix="sim", rows_per_message=50)
    made = fleet.VirtualFleet(plan, faults=(fleet.FleetFault("garbage", from_s=0.3),))
    async with (
        await client.connect([broker.url], identity="c1", audit_s=0) as above,
        await client.connect([broker.url], identity="sim", audit_s=0) as bus,
        channel_channel.Channel(above, channel_channel.ChannelOptions(hold_s=0.1)) as channel,
    ):
        player = playback.FleetPlayer(bus, made, form="reports", channel="c1")
        await player.run(ticks=2)
        await eventually(lambda: channel.aggregator.received == 600)
        await eventually(lambda: channel.forwarded == 300)
        await eventually(lambda: channel.dropped == {"malformed": 300})
        with pytest.raises(errors.InvalidInput):
            playback.FleetPlayer(above, made, form="reports", channel="c1")


@pytest.mark.parametrize("profile", ["plain", "realistic"])
def test_single_reports_are_those_of_the_batch(profile):
    made = fleet.VirtualFleet(fleet.FleetPlan(machines=500, profile=profile))
    batch = made.batch(made.slots[0], 2, 1_700_000_000_000)
    sent = list(playback.packed_reports(batch))
    assert [packed.decode(data) for data in sent] == columns.from_batch(batch)
