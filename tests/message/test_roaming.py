"""A client that loses its connection: what was on its way to it comes again, and nothing twice."""

from __future__ import annotations

import asyncio

import pytest

from muster.bus import api, line, locator
from muster.bus import client as bus_client
from muster.bus.brokers import network
from muster.message import client, destinations, service
from muster.testing import eventually
from tests.message import conftest

ORDERS = destinations.queue("orders")


async def test_what_was_delivered_into_a_broken_connection_comes_again(
    dispatcher: service.Service, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(line, "RECONNECT_BASE_S", 2.0)  # so that it is away while something is delivered
    receiving, sending = await dial(), await dial()
    session = receiving.session(client.Mode.CLIENT)
    consumer = await session.consumer(ORDERS)
    producer = sending.session().producer(ORDERS)
    await producer.send("held")
    held = await consumer.receive(10)
    assert held is not None
    receiving.bus._wire._transport._io_writer.transport.abort()  # type: ignore[attr-defined]
    await eventually.eventually(lambda: receiving.bus.state is api.ConnectionState.RECONNECTING)
    for number in range(3):
        await producer.send(f"{number}")
    for number in range(3):
        message = await consumer.receive(30)
        assert message is not None, "it was lost on its way"
        assert message.body() == f"{number}", "what the application holds does not come again"
        await message.acknowledge()
    assert [one.body() async for one in session.browse(ORDERS)] == []


@pytest.mark.timeout(180)
async def test_a_locator_in_the_connections_url_and_the_next_best_broker(cluster: network.Network):
    """What was under way when the broker died is stored once."""
    async with (
        locator.Locator(cluster.urls) as guide,
        await client.ConnectionFactory(guide.url).connect() as sending,
        await bus_client.connect(cluster.urls, identity="dispatcher") as bus,
    ):
        running = asyncio.create_task(
            service.Service(bus, max_bytes=64 << 20, lease_ttl_s=2, replicas=3).run()
        )
        try:
            producer = sending.session().producer(ORDERS)
            await producer.send("first")
            assert isinstance(sending.bus, bus_client.Client)
            home = sending.bus.broker
            assert home is not None
            under_way = [producer.submit(f"{number}") for number in range(50)]
            await cluster[home].kill()
            await asyncio.gather(*under_way)
            assert sending.bus.broker not in (home, None)
            found = [one.body() async for one in sending.session().browse(ORDERS)]
            assert found == ["first", *(f"{number}" for number in range(50))]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
