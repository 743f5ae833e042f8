from __future__ import annotations

import time

import pytest

from muster.bus import api
from muster.cli.monitoring import report as report_command
from muster.core import errors, messages
from muster.core.reports import columns
from muster.monitor import client, protocol
from muster.testing.eventually import eventually


async def test_a_consumer_finds_a_producer(connect, channel):
    await channel("c1")
    consumer = await connect("consumer")

    async def registered():
        return await client.find(consumer, produces=columns.NODE_SCHEMA)

    (producer,) = await eventually(registered)
    assert producer.name == "c1"


async def test_the_last_minutes_are_found_by_time(connect, channel, report, monkeypatch):
    started = await channel("c1")
    sensor = await connect("m1")
    sent: list[int] = []
    for sequence in range(1, 6):
        sent.append(sequence)
        await sensor.publish(protocol.report("m1", "c1"), messages.encode(report("m1", sequence)))
        await eventually(lambda: started.forwarded == len(sent))
    await started.stop()
    everything = await client.recent(sensor)
    assert [reports.batch["sequence"].to_pylist() for reports in everything] == [[1], [2], [3], [4], [5]]
    middle = everything[2].stored_at_ms
    until = await client.recent(sensor, at_ms=middle + 1)
    assert len(until) >= 3
    assert all(reports.stored_at_ms <= middle + 1 for reports in until)
    assert await client.recent(sensor, at_ms=everything[0].stored_at_ms - 5000) == []
    monkeypatch.setattr(client, "RECENT_BYTES_MAX", 2 * everything[0].batch.nbytes)
    with pytest.raises(errors.LimitExceeded, match="of 60 s are too many"):
        await client.recent(sensor)


async def test_the_report_of_a_pipeline_is_preferred_to_one_made_here(connect, channel, report):
    bus = await connect("p1")
    settings = api.StreamSettings(columns.SYSTEM_STREAM, subjects=("muster.pipeline.from.*.report.>",))
    stream = await bus.stream(settings)
    now_ms = time.time_ns() // 1_000_000
    for to_ms in (now_ms - 2000, now_ms - 1000):
        made = columns.SystemReport(from_ms=0, to_ms=to_ms, machines=7)
        await stream.publish(columns.result_subject("p1", "system"), messages.encode(made))
    web = columns.GroupReport(group="w.e b", from_ms=0, to_ms=now_ms - 3, machines=2)
    await stream.publish(columns.result_subject("p1", "group", "w.e b"), messages.encode(web))
    assert (await report_command.find(bus, "system", "", None, 600.0)).to_ms == now_ms - 1000
    assert (await report_command.find(bus, "system", "", now_ms - 1500, 600.0)).to_ms == now_ms - 2000
    assert await report_command.find(bus, "group", "w.e b", None, 600.0) == web
