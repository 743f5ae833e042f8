"""Messages that expire on their way, and those that one consumer returns for others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muster.bus.memory import network
from muster.message import destinations, messages, protocol, settings
from muster.message.client import api as client_api
from muster.message.client import bodies
from muster.testing import virtual_clock
from tests.message import test_races

pytestmark = pytest.mark.virtual_time

JOBS = destinations.queue("jobs")
DEAD = destinations.queue(destinations.DEAD_LETTERS)


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> virtual_clock.FakeClock:
    """Goes with the loop."""
    clock = virtual_clock.FakeClock()
    monkeypatch.setattr("time.time_ns", clock.time_ns)
    return clock


async def browsed(session: client_api.Session, queue: destinations.Destination) -> list[messages.JmsMessage]:
    return [message async for message in session.browse(queue)]


async def release(connection: client_api.Connection, session: client_api.Session, **options: Any) -> None:
    (held,) = session.unacknowledged.values()
    session.unacknowledged.clear()
    request = protocol.ReleaseMessages(connection.name, {held.key: [held.sequence]}, **options)
    await connection.request(request)


@pytest.mark.parametrize("reason", [None, "unreadable"])
@pytest.mark.parametrize("expired_queue", [None, "expired"])
async def test_an_expired_message_is_no_dead_letter(
    simulated_network: network.SimulatedNetwork, reason: str | None, expired_queue: str | None
):
    net = simulated_network
    queues = (settings.QueueSettings(name="jobs", expired=expired_queue),) if expired_queue else ()
    async with (
        test_races.serving(net, max_deliveries=1, queues=queues),
        client_api.Connection(await net.connect("a")) as connection,
    ):
        session = connection.session(client_api.AcknowledgeMode.CLIENT)
        await session.producer(JOBS, ttl_s=5).send("late")
        consumer = await session.consumer(JOBS)
        assert await consumer.receive(3) is not None
        await asyncio.sleep(6)
        await release(connection, session, reason=reason)
        await asyncio.sleep(1)
        assert await browsed(session, DEAD) == []
        assert await browsed(session, JOBS) == []
        moved = [message.body() for message in await browsed(session, destinations.queue("expired"))]
        assert moved == (["late"] if expired_queue else [])
        (row, *_) = (await connection.request(protocol.ListQueues())).queues
        assert (row.depth, row.expired) == ((0, 1) if not expired_queue else (1, 0))


async def test_what_one_consumer_returns_for_others_is_no_dead_letter(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with (
        test_races.serving(net),
        client_api.Connection(await net.connect("a")) as first,
        client_api.Connection(await net.connect("b")) as second,
    ):
        session = first.session(client_api.AcknowledgeMode.CLIENT)
        consumer = await session.consumer(JOBS)
        await session.producer(JOBS).send("job")
        assert await consumer.receive(3) is not None
        await release(first, session, elsewhere=True)
        assert await consumer.receive(3) is None
        assert await browsed(session, DEAD) == []
        other = await second.session().consumer(JOBS)
        message = await other.receive(3)
        assert message is not None
        assert (message.body(), message.redelivered) == ("job", True)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_large_message_that_expires_while_it_is_read_is_not_received(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, waits: bool
):
    net = simulated_network
    load = bodies.load

    async def slow_load(*arguments: Any) -> messages.JmsMessage:
        loaded = await load(*arguments)
        await asyncio.sleep(6)
        return loaded

    monkeypatch.setattr(bodies, "load", slow_load)
    async with test_races.serving(net), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session()
        await session.producer(JOBS, ttl_s=5).send(b"x" * (1 << 20))
        consumer = await session.consumer(JOBS)
        await asyncio.sleep(1)
        assert await (consumer.receive(10) if waits else consumer.receive_nowait()) is None
        assert await browsed(session, DEAD) == []


async def test_a_delayed_message_is_not_late_when_the_clock_was_wrong_for_a_while(
    simulated_network: network.SimulatedNetwork, wall_clock: virtual_clock.FakeClock
):
    net = simulated_network
    async with test_races.serving(net), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session()
        consumer = await session.consumer(JOBS)
        await session.producer(JOBS, delay_s=8).send("one")
        wall_clock.step_back(3600)
        await session.producer(JOBS, delay_s=8).send("two")
        wall_clock.advance(3600)
        assert await test_races.received(consumer, 60) == ["two", "one"]
