"""Deliveries and credit that are lost between connected processes, for example by a route between brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from muster.bus import api as bus_api
from muster.bus.memory import network
from muster.message import destinations, protocol
from muster.message.client import api, consumers, partition_link
from muster.message.dispatcher import leadership
from muster.testing import virtual_clock

pytestmark = pytest.mark.virtual_time

JOBS = destinations.queue("jobs")
Filter = Callable[[str, bytes], int]  # how often a message is published


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


class LossyBus:
    """A bus that publishes some messages never, or twice."""

    def __init__(self, bus: bus_api.Bus) -> None:
        self._bus = bus
        self.times: Filter = lambda subject, data: 1

    async def publish(self, subject: str, data: bytes = b"", **options: Any) -> None:
        for _ in range(self.times(subject, data)):
            await self._bus.publish(subject, data, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


class World:
    def __init__(self, dispatcher: LossyBus, client: LossyBus, connection: api.Connection) -> None:
        self.dispatcher = dispatcher
        self.client = client
        self.connection = connection
        self._registered = 0

    @property
    def repairs(self) -> int:
        """How often the connection registered since its consumer was attached."""
        return self.connection.home._registration_number - self._registered

    async def consumer(
        self, mode: api.AcknowledgeMode = api.AcknowledgeMode.AUTO, prefetch: int = 200
    ) -> consumers.Consumer:
        consumer = await self.connection.session(mode).consumer(JOBS, prefetch=prefetch)
        self._registered = self.connection.home._registration_number
        return consumer

    async def send(self, *texts: str) -> None:
        producer = self.connection.session().producer(JOBS)
        for text in texts:
            await producer.send(text)


@pytest.fixture
async def world(simulated_network: network.SimulatedNetwork) -> AsyncIterator[World]:
    dispatcher = LossyBus(await simulated_network.connect("dispatcher"))
    client = LossyBus(await simulated_network.connect("client"))
    running = asyncio.create_task(leadership.DispatcherLeadership(dispatcher, lease_ttl_s=2).run())
    async with api.Connection(client) as connection:
        yield World(dispatcher, client, connection)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def is_delivery(subject: str) -> bool:
    return ".deliver." in f"{subject}."


def nth(numbers: set[int], times: int, matches: Callable[[str], bool]) -> Filter:
    """These of the messages that match are published so often, the others once."""
    count = 0

    def choose(subject: str, _: bytes) -> int:
        nonlocal count
        if not matches(subject):
            return 1
        count += 1
        return times if count in numbers else 1

    return choose


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_a_lost_delivery_is_repeated(world: World, lost: int):
    consumer = await world.consumer(api.AcknowledgeMode.CLIENT)
    world.dispatcher.times = nth({lost}, 0, is_delivery)
    for text in ("a", "b", "c"):
        await world.send(text)  # a delivery each
    received: list[str] = []
    while len(received) < 3:
        message = await consumer.receive(2 * partition_link.PING_S)
        assert message is not None
        received.append(str(message.body()))
        await message.acknowledge()
    assert received == ["a", "b", "c"], "in order: later ones are repeated as well"
    assert world.repairs == 1
    assert await consumer.receive(1) is None


async def test_a_repeated_delivery_is_received_once(world: World):
    consumer = await world.consumer()
    world.dispatcher.times = nth({2}, 2, is_delivery)
    for text in ("a", "b", "c"):
        await world.send(text)
    received = [str(message.body()) for _ in range(3) if (message := await consumer.receive(5)) is not None]
    assert received == ["a", "b", "c"]
    assert await consumer.receive(1) is None
    assert world.repairs == 0


async def test_a_gap_is_detected_by_the_next_delivery(world: World):
    consumer = await world.consumer()
    world.dispatcher.times = nth({1}, 0, is_delivery)
    await world.send("a", "b")
    for text in ("a", "b"):
        message = await consumer.receive(partition_link.PING_S / 4)
        assert message is not None
        assert message.body() == text


async def test_deliveries_in_several_batches_are_counted(world: World):
    consumer = await world.consumer()
    session = world.connection.session(api.AcknowledgeMode.TRANSACTED)
    for _ in range(5):
        await session.producer(JOBS).send("x" * (300 << 10))
    await session.commit()
    for _ in range(5):
        assert await consumer.receive(partition_link.PING_S / 4) is not None
    await asyncio.sleep(2 * partition_link.PING_S)
    assert world.repairs == 0


async def test_lost_credit_is_granted_again(world: World):
    consumer = await world.consumer(prefetch=2)
    is_notification = protocol.notify_subject("client", 0).__eq__
    world.client.times = nth({1, 2}, 0, is_notification)  # all of it
    await world.send(*"abcdef")
    received = [
        str(message.body())
        for _ in range(6)
        if (message := await consumer.receive(2 * partition_link.PING_S)) is not None
    ]
    assert received == list("abcdef")
    assert world.repairs == 1


async def test_a_client_that_lost_its_connection_does_not_receive_what_went_to_another(
    world: World, simulated_network: network.SimulatedNetwork
):
    """It would receive it later than the other client, and not marked."""
    consumer = await world.consumer(api.AcknowledgeMode.CLIENT, prefetch=1)
    await world.send("a")
    await asyncio.sleep(1)  # it waits at the client
    async with api.Connection(await simulated_network.connect("other")) as other:
        second = await other.session(api.AcknowledgeMode.CLIENT).consumer(JOBS)
        simulated_network.disconnect(world.client._bus)  # type: ignore[arg-type]
        again = await second.receive(10)
        assert again is not None
        assert again.redelivered
        assert await consumer.receive(10) is None
        await again.acknowledge()


async def test_a_connection_that_loses_nothing_registers_once(world: World):
    consumer = await world.consumer(prefetch=10)
    for round_number in range(3):
        await world.send(*(f"{round_number}-{number}" for number in range(50)))
        for number in range(50):
            message = await consumer.receive(5)
            assert message is not None
            assert message.body() == f"{round_number}-{number}"
        await asyncio.sleep(2 * partition_link.PING_S)
    assert world.repairs == 0
