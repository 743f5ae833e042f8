from __future__ import annotations

import time

import pytest

from muster.bus import api
from muster.core import messages
from muster.core.reports import columns
from muster.monitor import client, protocol
from muster.monitor.channel import channel as channel_channel
from muster.monitor.channel import interpreters
from muster.testing.eventually import eventually
from tests.monitor import conftest


async def say(bus: api.Bus, channel: str, *rows: messages.NodeReport) -> None:
    for row in rows:
        await bus.publish(protocol.report(bus.identity, channel), messages.encode(row))
    await bus.flush()


async def test_reports_reach_the_stream_through_one_channel(connect, channel, report, rows):
    await channel("c1")
    sensor = await connect("m1")
    sent = [report("m1", 1), report("m1", 2, metrics={"own": 3.0}), report("m1.vm", 1)]
    await say(sensor, "c1", *sent, sent[0])

    async def there():
        return sorted(await rows(sensor), key=lambda row: (row.machine, row.sequence)) == sent

    await eventually(there)


@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
async def test_a_channel_compresses_batches_as_configured(connect, channel, report, compression):
    await channel("c1", compression=compression)
    sensor = await connect("m1")
    await say(sensor, "c1", *(report("m1", number) for number in range(500)))
    stream = await sensor.open_stream(columns.REPORTS_STREAM)

    async def there():
        last = (await stream.state()).last_sequence
        stored = [message.data async for message in stream.read(1, last)] if last else []
        return stored if sum(columns.decode(data)[0].num_rows for data in stored) == 500 else None

    stored = await eventually(there)
    plain = [columns.encode(*columns.decode(data), compression=None) for data in stored]
    size, plain_size = sum(map(len, stored)), sum(map(len, plain))
    assert size < 0.9 * plain_size if compression else size == plain_size


async def test_a_tree_of_three_levels(connect, channel, report, rows):
    await channel("top")
    await channel("middle", parents=("top",), sensors=False)
    leaf = await channel("leaf", parents=("middle",))
    sensor = await connect("m1")
    await say(sensor, "leaf", report("m1", 1))

    async def there():
        actual = await conftest.stored(sensor)
        return actual and actual[0][1]

    facts = await eventually(there)
    assert (facts.channel, facts.level, facts.machines) == ("top", 3, 1)
    await eventually(lambda: leaf._waiting_bytes == 0, what="the parent's beat confirms what it was sent")


async def test_merge_ends_in_the_other_stream(connect, channel, report):
    await channel("top", interpreter="merge")
    await channel("leaf", parents=("top",), interpreter="merge")
    sensor = await connect("m1")
    await say(sensor, "leaf", *(report(f"m1.{i}") for i in range(10)))

    async def there():
        actual = await conftest.stored(sensor, columns.SUMMARIES_STREAM)
        return actual and actual[0][0].to_pylist()

    summaries = {row["metric"]: interpreters.MetricSummary.from_row(row) for row in await eventually(there)}
    assert summaries["cpu_percent"].sum == 50.0
    assert summaries[interpreters.ALL_REPORTS].machines.count() == 10


async def test_what_a_parent_had_when_it_died_goes_through_another(connect, channel, report, rows):
    """The first parent dies with everything it received still held; nothing is lost or counted twice."""
    first = await channel("p1", hold_s=600.0)
    await channel("p2")
    leaf = await channel("leaf", parents=("p1", "p2"))
    sensor = await connect("m1")
    await eventually(lambda: leaf._parents["up"].choose(_now()) == "p1")
    await say(sensor, "leaf", report("m1", 1), report("m1", 2))
    await eventually(lambda: first.aggregator.held == 2)
    first._tasks.cancel()  # as if killed: no beat, no flush, no word to its children
    first._receiving.clear()

    async def there():
        return sorted(row.sequence for row in await rows(sensor))

    assert await eventually(there) == [1, 2]


async def test_rubbish_on_every_subject_stops_nothing(connect, channel, report, rows):
    started = await channel("c1")
    hostile = await connect("h")
    for data in (b"", b"\xff" * 1000, b"{}", b"x" * 900_000, b'{"kind":"node-report/2"}'):
        await hostile.publish(protocol.report("h", "c1"), data)
        await hostile.publish("muster.monitor.from.h.batch.c1", data)
        await hostile.publish("muster.monitor.from.h.summary.c1", data)
        await hostile.publish("muster.monitor.all.channel.h", data)
    await say(hostile, "c1", report("h", 1), report("somebody-else", 1))

    async def there():
        return [row.machine for row in await rows(hostile)]

    assert await eventually(there) == ["h"]
    assert started.dropped["forged"] == 1
    assert started.dropped["unknown-kind"] >= 1
    assert started.dropped["malformed"] >= 10
    assert started.dropped["too-large"] == 1
    assert any(reason.startswith("beat-") for reason in started.dropped)


async def test_consumers_find_producers(connect, channel, report):
    await channel("top")
    await channel("leaf", parents=("top",))
    sensor = await connect("m1")
    await say(sensor, "leaf", report("m1", 1, group="web"))

    async def there():
        matches = await client.find(sensor, group="web")
        return {match.name: match for match in matches} if len(matches) == 2 else None

    actual = await eventually(there)
    assert actual["top"].stream == columns.REPORTS_STREAM
    assert actual["leaf"].subject == "muster.monitor.from.leaf.batch.top"
    assert [match.name for match in await client.find(sensor, level=2)] == ["top"]
    assert await client.find(sensor, group="db") == []


async def test_a_channel_that_stops_forwards_what_it_holds(connect, channel, report, rows):
    started = await channel("c1", hold_s=600.0)
    sensor = await connect("m1")
    await say(sensor, "c1", report("m1", 1))
    await eventually(lambda: started.aggregator.held == 1)
    await started.stop()
    assert [row.sequence for row in await rows(sensor)] == [1]


def _now() -> float:
    return time.monotonic()


@pytest.fixture(autouse=True)
def _uses(broker):
    """Every test here has a broker of its own."""


async def test_a_message_above_the_limit_is_divided(connect, channel, report, monkeypatch):
    """The broker would refuse it."""
    monkeypatch.setattr(channel_channel, "MESSAGE_BYTES_MAX", 20_000)
    top = await channel("c1", compression=None)
    sensor = await connect("m1")
    metrics = {f"metric-{number}": 1.0 for number in range(100)}
    await say(sensor, "c1", *(report(f"m1.{machine}", 1, metrics=metrics) for machine in range(100)))
    stream = await sensor.open_stream(columns.REPORTS_STREAM)

    async def there():
        last = (await stream.state()).last_sequence
        stored = [message.data async for message in stream.read(1, last)] if last else []
        return stored if sum(columns.decode(data)[0].num_rows for data in stored) == 100 else None

    stored = await eventually(there)
    assert max(map(len, stored)) <= 20_000
    assert len({columns.decode(data)[1].sequence for data in stored}) == len(stored)
    assert not top.dropped
