from __future__ import annotations

import msgspec
import pytest

from muster.bus import message_format
from muster.bus.client import client
from muster.core import errors
from muster.core.reports import columns, packed
from muster.monitor.channel import channel as channel_channel
from muster.simulate import fleet, playback, slot_frames
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
def test_single_reports_are_those_of_the_batch_in_the_form_of_a_sensor(profile):
    """Over an hour, in which machines move, reboot and are silent."""
    made = fleet.VirtualFleet(fleet.FleetPlan(machines=500, groups=2000, profile=profile))
    slot = made.slots[0]
    frames = slot_frames.SlotFrames(slot, "a.b", 10.0)
    moved = 0
    for tick in (0, 2, 100, 101, 360):
        sample = made.sample(slot, tick, 1_700_000_000_000)
        batch = made.batch(slot, tick, 1_700_000_000_000)
        frames.fill(sample)
        reports = frames.reports(sample.reporting)
        assert [packed.decode(data) for data in reports] == columns.from_batch(batch)
        values = {
            row.machine: msgspec.structs.replace(row, metrics=_in_order(row.metrics))
            for row in columns.from_batch(batch)
        }
        assert reports == [packed.encode(row) for row in values.values()]
        sent = [b"".join(message_format.publish_parts("a.b", data)) for data in reports]
        pieces = list(frames.frames(sample.reporting, 120))
        assert len(pieces) == 5
        assert b"".join(data for _, data in pieces) == b"".join(sent)
        assert sum(count for count, _ in pieces) == batch.num_rows
        moved += int((sample.slot.group_numbers != slot.group_numbers).sum())
    assert bool(moved) is (profile == "realistic")


def _in_order(metrics: dict[str, float]) -> dict[str, float]:
    """The standard metrics first."""
    standard = {name: metrics[name] for name in columns.STANDARD_METRICS}
    return standard | metrics
