"""Followers and watchers on a real broker that fails under them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import muster
from muster.bus import api
from muster.bus.brokers import broker as brokers
from muster.bus.client import client, reconnection
from muster.bus.streams import ordered_consumer
from muster.core import errors
from muster.testing.eventually import eventually
from tests.bus import contract, sockets


async def test_nothing_is_missed_over_cut_connections_and_a_killed_broker(broker: brokers.Broker):
    async with (
        await muster.connect(broker.url, identity="writer") as writer,
        await muster.connect(broker.url, identity="reader") as reader,
    ):
        stream = await writer.stream(contract.settings())
        bucket = await writer.key_value(api.KeyValueSettings("b"))
        seen: list[int] = []
        values: dict[str, bytes | None] = {}

        async def follow() -> None:
            async with (await reader.open_stream("log")).follow(1) as messages:
                async for message in messages:
                    seen.append(message.sequence)  # noqa: PERF401 - it is cancelled in the middle

        async def watch() -> None:
            async with await (await reader.key_value(api.KeyValueSettings("b"))).watch() as entries:
                async for entry in entries:
                    if entry is not None:
                        values[entry.key] = entry.value

        tasks = [asyncio.create_task(follow()), asyncio.create_task(watch())]

        async def write(first: int) -> None:
            for number in range(first, first + 30):
                await stream.publish("log.a", b"", message_id=str(number))
                await bucket.put(f"k{number % 7}", b"%d" % number)
            await bucket.delete(f"k{first % 7}")

        await write(0)
        sockets.cut(reader)
        await write(100)
        sockets.cut(reader)
        assert broker.pid
        os.kill(broker.pid, signal.SIGKILL)
        await write(200)

        async def same() -> bool:
            there = {key: await bucket.get(key) for key in (f"k{n}" for n in range(7))}
            return values == {key: entry.value if entry else None for key, entry in there.items()}

        await eventually(lambda: len(seen) >= 90, timeout_s=30)
        await eventually(same, timeout_s=30)
        assert seen == list(range(1, 91))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_lost_consumer_is_noticed_and_made_again(bus: client.NatsBus, monkeypatch):
    # A consumer ends with the broker that has it: with an election, its reader continues within 10 s.
    assert ordered_consumer.BEAT_S * ordered_consumer.BEATS_MISSED < 5
    monkeypatch.setattr(ordered_consumer, "BEAT_S", 0.2)
    stream = await bus.stream(contract.settings())
    async with stream.follow(1) as messages:
        reading = asyncio.create_task(contract.take(messages, 2))
        await stream.publish("log.a", b"1")
        await eventually(lambda: messages._consumer_sequence == 1)
        names = (await bus._durable.api.call("CONSUMER.NAMES.log"))["consumers"]
        for name in names:
            await bus._durable.api.call(f"CONSUMER.DELETE.log.{name}")
        await stream.publish("log.a", b"2")
        assert [m.sequence for m in await reading] == [1, 2]


async def test_a_slow_reader_holds_the_broker_back(bus: client.NatsBus):
    stream = await bus.stream(api.StreamSettings("log", ("log.>",), max_bytes=64 << 20))
    await asyncio.gather(*(stream.publish("log.a", b"x" * 20_000) for _ in range(1500)))
    async with stream.follow(1) as messages:
        assert [m.sequence for m in await contract.take(messages, 1)] == [1]
        sizes = [-1]

        def settled() -> bool:
            sizes.append(len(messages._queue))
            return sizes[-1] == sizes[-2] > 0

        await eventually(settled)
        await bus.flush()
        assert len(messages._queue) < 1200, "not all 30 MB wait in our memory"
        assert [m.sequence for m in await contract.take(messages, 1499)] == list(range(2, 1501))


async def test_a_consumer_reports_messages_that_retention_removed(
    bus: client.NatsBus, broker: brokers.Broker, monkeypatch
):
    stream = await bus.stream(contract.settings())
    for _ in range(5):
        await stream.publish("log.a", b"")
    async with (
        await muster.connect(broker.url, identity="reader") as reader,
        (await reader.open_stream("log")).follow(1) as messages,
    ):
        await contract.take(messages, 5)
        monkeypatch.setattr(reconnection, "BASE_S", 2.0)  # long enough for what happens meanwhile
        sockets.cut(reader)
        await stream.publish("log.a", b"")
        await stream.publish("log.a", b"")
        await stream.purge(before=7)
        with pytest.raises(errors.NotFound, match="does not retain 6 to 6"):
            await contract.take(messages, 1)


async def test_a_slow_follower_that_allows_gaps_is_notified_of_missed_messages(bus: client.NatsBus):
    settings = api.StreamSettings("log", ("log.>",), max_bytes=64 << 20)
    stream = await bus.stream(settings)
    await asyncio.gather(*(stream.publish("log.a", b"x" * 20_000) for _ in range(1500)))
    async with stream.follow(1, gaps=True) as messages:
        await contract.take(messages, 1)
        sizes = [-1]

        def held_back() -> bool:
            sizes.append(len(messages._queue))
            return sizes[-1] == sizes[-2] > 0

        await eventually(held_back)
        await stream.purge(before=1500)
        seen: list[int] = []

        async def read() -> None:
            async for message in messages:
                seen.append(message.sequence)  # noqa: PERF401 - it ends in an error

        with pytest.raises(errors.Dropped) as dropped:
            async with asyncio.timeout(60):
                await read()
        assert seen == list(range(2, dropped.value.first))
        assert dropped.value.last == 1499
        assert [m.sequence for m in await contract.take(messages, 1)] == [1500]


async def test_a_watch_reports_a_deletion_while_the_broker_still_replays(bus: client.NatsBus):
    bucket = await bus.key_value(api.KeyValueSettings("b", max_bytes=64 << 20))
    await asyncio.gather(*(bucket.put(f"k{number}", bytes(20_000)) for number in range(1500)))
    seen: dict[str, bool] = {}
    async with await bucket.watch() as watch:
        async for entry in watch:
            if entry is None:
                break
            if not seen:
                await bucket.delete(entry.key)
            seen[entry.key] = entry.value is not None
    assert [key for key, there in seen.items() if not there] == [next(iter(seen))]


async def test_a_watch_reports_keys_that_went_without_a_trace(broker: brokers.Broker):
    async with (
        await muster.connect(broker.url, identity="writer") as writer,
        await muster.connect(broker.url, identity="reader") as reader,
    ):
        bucket = await writer.key_value(api.KeyValueSettings("b"))
        for key in ("gone", "stays"):
            await bucket.put(key, b"1")
        async with await (await reader.key_value(api.KeyValueSettings("b"))).watch() as watch:
            await contract.take(watch, 3)
            await (await writer.open_stream("KV_b")).purge(subject="$KV.b.gone")  # its marker has expired
            sockets.cut(reader)
            assert [(e.key, e.value) for e in await contract.take(watch, 1)] == [("gone", None)]
            await bucket.put("new", b"2")
            assert [(e.key, e.value) for e in await contract.take(watch, 1)] == [("new", b"2")]


async def test_a_closed_connection_ends_it(broker: brokers.Broker):
    bus = await muster.connect(broker.url)
    stream = await bus.stream(contract.settings())
    messages = stream.follow(1)
    reading = asyncio.create_task(contract.take(messages, 1))
    await eventually(lambda: messages._caught_up)
    await bus.close()
    with pytest.raises(errors.NotConnected):
        await reading
    await messages.close()
