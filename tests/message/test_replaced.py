"""Subscriptions and consumers that are replaced or closed while something is still done for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.bus import api
from muster.bus.memory import network, streams
from muster.message import destinations, messages, protocol
from muster.message.client import api as client_api
from muster.message.client import bodies
from muster.message.dispatcher import delivery
from muster.message.dispatcher.log import log_reader
from muster.testing import virtual_clock
from tests.message import test_races

pytestmark = pytest.mark.virtual_time

JOBS = destinations.queue("jobs")
NEWS = destinations.topic("news/a")
NEW = ["new 0", "new 1", "new 2"]


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


class SlowReads:
    """The dispatcher's reads of topics wait for ``may``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may, self.begun = asyncio.Event(), asyncio.Event()
        read = log_reader.LogReader.read_pages

        async def slow_read(
            here: log_reader.LogReader, first: int, subject: str | None = None, *last: Any
        ) -> AsyncIterator[api.StoredMessage]:
            if subject is not None and ".topic." in subject:
                self.begun.set()
                await self.may.wait()
            async for page in read(here, first, subject, *last):
                yield page

        patch.setattr(log_reader.LogReader, "read_pages", slow_read)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_subscription_is_replaced_while_its_old_index_is_read(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, ends: bool
):
    net = simulated_network
    connection = client_api.Connection(await net.connect("a"), client_id="a")
    session = connection.session()
    producer = session.producer(NEWS)
    async with test_races.serving(net):
        await (await session.durable_consumer(NEWS, "all")).close()
        for number in range(50):
            await producer.send(f"old {number}")
    reads = SlowReads(monkeypatch)
    async with test_races.serving(net):
        old = await session.durable_consumer(NEWS, "all")
        await reads.begun.wait()
        await old.close()
        if ends:
            await session.unsubscribe("all")
        replacement = await session.durable_consumer(NEWS, "all", None if ends else "n IS NULL")
        for body in NEW:
            await producer.send(body)
        await asyncio.sleep(1)
        reads.may.set()
        assert await test_races.received(replacement) == NEW
        await connection.close()


async def test_an_idle_subscription_is_unloaded_while_it_is_read_and_continues_with_its_next_consumer(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    net = simulated_network
    connection = client_api.Connection(await net.connect("a"), client_id="a")
    session = connection.session()
    async with test_races.serving(net):
        await (await session.durable_consumer(NEWS, "all")).close()
        for body in NEW:
            await session.producer(NEWS).send(body)
    reads = SlowReads(monkeypatch)
    async with test_races.serving(net):
        first = await session.durable_consumer(NEWS, "all")
        await reads.begun.wait()
        await first.close()
        await asyncio.sleep(2 * delivery.IDLE_S)
        second = await session.durable_consumer(NEWS, "all")
        reads.may.set()
        assert await test_races.received(second) == NEW
        await connection.close()


async def test_what_was_trimmed_after_its_subscription_was_replaced_is_not_missing(
    simulated_network: network.SimulatedNetwork,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """The old index may have been about to read it."""
    net = simulated_network
    monkeypatch.setattr("muster.message.dispatcher.log.message_cache.LAST_MAX", 1)
    connection = client_api.Connection(await net.connect("a"), client_id="a")
    session = connection.session()
    get = streams.SimulatedStream.get
    reading, may = asyncio.Event(), asyncio.Event()

    async def slow_get(stream: streams.SimulatedStream, sequence: int) -> api.StoredMessage:
        reading.set()
        await may.wait()
        return await get(stream, sequence)

    async with test_races.serving(net, checkpoint_records=1):
        consumer = await session.durable_consumer(NEWS, "all", prefetch=1)
        for body in NEW:
            await session.producer(NEWS).send(body)
        await asyncio.sleep(2)
        monkeypatch.setattr(streams.SimulatedStream, "get", slow_get)
        assert await consumer.receive() is not None
        await reading.wait()
        await consumer.close()
        again = await session.durable_consumer(NEWS, "all", "n IS NULL", prefetch=1)
        await session.producer(NEWS).send("after")
        await asyncio.sleep(5)  # a checkpoint trims the log
        may.set()
        assert await test_races.received(again) == ["after"]
        await connection.close()
    assert "messages-missing" not in caplog.text


async def test_a_consumer_that_is_closed_while_its_connection_registers_is_not_attached_again(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    net = simulated_network
    async with (
        test_races.serving(net),
        client_api.Connection(await net.connect("a"), client_id="a") as connection,
    ):
        session = connection.session()
        await session.consumer(JOBS)
        news = await session.durable_consumer(NEWS, "all")
        request_once = connection.home.request_once

        async def close_meanwhile(request: Any, *id: str) -> protocol.DispatcherReply:
            if isinstance(request, protocol.AttachConsumer) and request.destination == str(JOBS):
                await news.close()
            return await request_once(request, *id)

        monkeypatch.setattr(connection.home, "request_once", close_meanwhile)
        connection.home._discard_registration()
        await connection.home.register()
        await session.unsubscribe("all")


@pytest.mark.parametrize("rolled_back", [False, True])
async def test_credit_for_a_consumer_that_is_being_attached_again_is_not_lost(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, rolled_back: bool
):
    net, disk = simulated_network, test_races.Disk(monkeypatch)
    async with test_races.serving(net), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(JOBS)
        await connection.session().producer(JOBS).send("job")
        assert await test_races.received(consumer) == ["job"]
        await session.commit()
        if rolled_back:
            await consumer.pause()
        connection.home._discard_registration()
        disk.ready.clear()
        registration = asyncio.create_task(connection.home.register())
        await asyncio.sleep(0.1)
        if rolled_back:
            await consumer.resume()
        else:
            await connection.request(protocol.StopDelivery(connection.name, [consumer.number]))  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        disk.ready.set()
        await registration
        await connection.session().producer(JOBS).send("next")
        assert await test_races.received(consumer) == (["next"] if rolled_back else [])


async def test_a_large_message_that_is_read_while_its_connection_registers_is_received_once(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    """It was not received when the dispatcher was told what was, so that it is delivered again."""
    net = simulated_network
    load = bodies.load

    async def slow_load(*arguments: Any) -> messages.JmsMessage:
        loaded = await load(*arguments)
        await asyncio.sleep(1)
        return loaded

    monkeypatch.setattr(bodies, "load", slow_load)
    async with test_races.serving(net), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(JOBS)
        await session.producer(JOBS).send("x" * (1 << 20))
        await session.commit()
        receiving = asyncio.create_task(test_races.received(consumer))
        await asyncio.sleep(0.5)
        connection.home._discard_registration()
        await connection.home.register()
        assert len(await receiving) == 1


async def test_credit_does_not_arrive_after_the_request_to_stop(
    simulated_network: network.SimulatedNetwork,
):
    """A rollback would put back what the consumer has in the wrong order."""
    net = simulated_network
    async with test_races.serving(net), client_api.Connection(await net.connect("a")) as connection:
        for number in range(6):
            await connection.session().producer(JOBS).send(f"{number}")
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(JOBS, prefetch=1)
        for _ in range(5):
            assert await consumer.receive(3) is not None
            await consumer.pause()
            await asyncio.sleep(1)
            assert not consumer._arrived
            await consumer.resume()
