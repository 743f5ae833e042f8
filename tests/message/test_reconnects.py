"""A client that loses its connection: undelivered messages come again, and none twice."""

from __future__ import annotations

import asyncio

import pytest

import muster
from muster.bus import api
from muster.bus.brokers import network
from muster.bus.client import client as bus_client
from muster.bus.client import reconnection
from muster.bus.locator import server as locator_server
from muster.message import destinations
from muster.message.client import api as client_api
from muster.message.client import partition_link
from muster.message.dispatcher import leadership, works
from muster.testing import eventually, fixtures
from muster.trust.login import passwords
from tests.bus import sockets
from tests.message import conftest

ORDERS = destinations.queue("orders")


async def test_what_was_delivered_into_a_broken_connection_comes_again(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reconnection, "BASE_S", 2.0)  # so that it is away while something is delivered
    receiving, sending = await dial(), await dial()
    session = receiving.session(client_api.AcknowledgeMode.CLIENT)
    consumer = await session.consumer(ORDERS)
    producer = sending.session().producer(ORDERS)
    await producer.send("held")
    held = await consumer.receive(30)
    assert held is not None
    sockets.cut(receiving.bus)
    await eventually.eventually(lambda: receiving.bus.state is api.ConnectionState.RECONNECTING)
    for number in range(3):
        await producer.send(f"{number}")
    for number in range(3):
        message = await consumer.receive(30)
        assert message is not None, "it was lost on its way"
        assert message.body() == f"{number}", "what the application holds does not come again"
        await message.acknowledge()
    assert [browsed.body() async for browsed in session.browse(ORDERS)] == []


async def test_what_was_asked_of_a_dispatcher_that_died_is_asked_of_the_next_at_once(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(partition_link, "REQUEST_S", 600.0)
    event = asyncio.Event()
    connection = await dial()
    session = connection.session()
    with monkeypatch.context() as deaf:
        deaf.setattr(works.Works, "share", lambda *_: event.set())
        async with conftest.serving(connect, "first"):
            sending = asyncio.ensure_future(session.producer(ORDERS).send("one"))
            await asyncio.wait_for(event.wait(), 30)
    async with conftest.serving(connect, "second"):
        await asyncio.wait_for(sending, 60)
        assert [message.body() async for message in session.browse(ORDERS)] == ["one"]
        await connection.close()


async def test_a_durable_subscription_roams_between_gateways_and_the_python_api(
    dispatcher: leadership.DispatcherLeadership, connect: fixtures.Connect, dial: conftest.Dial
):
    """Nothing is lost, and nothing whose acknowledgement is confirmed comes again."""
    proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")
    from muster.gateways.amqp import gateway as amqp_gateway
    from tests.gateways.amqp import raw_client

    async def join(login: passwords.PasswordLogin) -> api.Bus:
        return await connect(login.name)

    def read(port: int, count: int) -> tuple[raw_client.Raw, list[str]]:
        """Two more than it acknowledges."""
        raw = raw_client.Raw(port, "roamer")
        receiver = raw.session.receiver("all")
        receiver.source.address = "topic:news"
        receiver.source.durability = proton.Terminus.DELIVERIES
        receiver.source.expiry_policy = proton.Terminus.EXPIRE_NEVER
        receiver.open()
        receiver.flow(count)
        raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
        got = []
        for at in range(count):
            message, delivery = raw_client.receive(raw, receiver)
            got.append(f"{message.body}{' again' if message.delivery_count else ''}")
            if at < count - 2:
                delivery.update(proton.Delivery.ACCEPTED)
                delivery.settle()
        raw.write()
        return raw, got

    async def at(gateway: amqp_gateway.AmqpGateway, count: int) -> list[str]:
        raw, bodies = await asyncio.to_thread(read, gateway.port, count)
        (bridge,) = gateway.connections
        await eventually.eventually(lambda: len(bridge.outcomes._unsettled) == min(count, 2))
        await bridge.jms.outbox.wait_idle()  # confirmed; and then it vanishes
        raw.socket.close()
        await eventually.eventually(lambda: not gateway.connections and not gateway.tasks.pending)
        return bodies

    news = destinations.topic("news")
    async with (
        amqp_gateway.AmqpGateway(join, None, anonymous="client") as near_gateway,
        amqp_gateway.AmqpGateway(join, None, anonymous="client") as two,
    ):
        assert await at(near_gateway, 0) == []
        producer = (await dial()).session().producer(news)
        for number in range(12):
            await producer.send(f"{number}")
        assert await at(near_gateway, 5) == ["0", "1", "2", "3", "4"]
        assert await at(two, 5) == ["3 again", "4 again", "5", "6", "7"]
        session = (await dial("roamer")).session(client_api.AcknowledgeMode.CLIENT)
        consumer = await session.durable_consumer(news, "all")
        rest = [await consumer.receive(30) for _ in range(6)]
        assert [(m.body(), m.redelivered) for m in rest if m] == [
            ("6", True), ("7", True), ("8", False), ("9", False), ("10", False), ("11", False),
        ]  # fmt: skip


@pytest.mark.timeout(180)
async def test_a_locator_in_the_connections_url_and_the_next_best_broker(cluster: network.BrokerNetwork):
    """What was under way when the broker died is stored once."""
    async with (
        locator_server.Locator(cluster.urls) as guide,
        await muster.connect(locator=guide.url) as sending_bus,
        client_api.Connection(sending_bus) as sending,
        await bus_client.connect(cluster.urls, identity="dispatcher") as bus,
    ):
        running = asyncio.create_task(
            leadership.DispatcherLeadership(bus, max_bytes=64 << 20, lease_ttl_s=2, replicas=3).run()
        )
        try:
            producer = sending.session().producer(ORDERS)
            await producer.send("first")
            assert isinstance(sending.bus, bus_client.NatsBus)
            home = sending.bus.broker
            assert home is not None
            under_way = [producer.submit(f"{number}") for number in range(50)]
            await cluster[home].kill()
            await asyncio.gather(*under_way)
            assert sending.bus.broker not in (home, None)
            bodies = [message.body() async for message in sending.session().browse(ORDERS)]
            assert bodies == ["first", *(f"{number}" for number in range(50))]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
