"""Deliveries and credit that are lost between connected processes, for example by a route between brokers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from muster.bus import api as bus_api
from muster.bus.memory import network
from muster.message import destinations, protocol
from muster.message.client import api, consumers, partition_link
from muster.message.dispatcher import leadership
from muster.message.dispatcher.log import ledger
from muster.testing import virtual_clock
from muster.testing.eventually import eventually

pytestmark = pytest.mark.virtual_time

JOBS = destinations.queue("jobs")
OTHER = destinations.queue("other")
Filter = Callable[[str, bytes], int]  # how often a message is published


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


async def no_delay(subject: str) -> None:
    pass


class LossyBus:
    """A bus that publishes some messages never, or twice, or late."""

    def __init__(self, bus: bus_api.Bus) -> None:
        self._bus = bus
        self.times: Filter = lambda subject, data: 1
        self.delay: Callable[[str], Awaitable[None]] = no_delay

    async def publish(self, subject: str, data: bytes = b"", **options: Any) -> None:
        await self.delay(subject)
        for _ in range(self.times(subject, data)):
            await self._bus.publish(subject, data, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


class LossyWorld:
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
        self,
        mode: api.AcknowledgeMode = api.AcknowledgeMode.AUTO,
        prefetch: int = 200,
        queue: destinations.Destination = JOBS,
    ) -> consumers.Consumer:
        consumer = await self.connection.session(mode).consumer(queue, prefetch=prefetch)
        self._registered = self.connection.home._registration_number
        return consumer

    async def send(self, *texts: str) -> None:
        producer = self.connection.session().producer(JOBS)
        for text in texts:
            await producer.send(text)


@contextlib.asynccontextmanager
async def serving(dispatcher: LossyBus) -> AsyncIterator[None]:
    running = asyncio.create_task(leadership.DispatcherLeadership(dispatcher, lease_ttl_s=2).run())
    yield
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def world(simulated_network: network.SimulatedNetwork) -> AsyncIterator[LossyWorld]:
    dispatcher = LossyBus(await simulated_network.connect("dispatcher"))
    client = LossyBus(await simulated_network.connect("client"))
    async with serving(dispatcher), api.Connection(client) as connection:
        yield LossyWorld(dispatcher, client, connection)


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
async def test_a_lost_delivery_is_repeated(world: LossyWorld, lost: int):
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


async def test_a_repeated_delivery_is_received_once(world: LossyWorld):
    consumer = await world.consumer()
    world.dispatcher.times = nth({2}, 2, is_delivery)
    for text in ("a", "b", "c"):
        await world.send(text)
    received = [str(message.body()) for _ in range(3) if (message := await consumer.receive(5)) is not None]
    assert received == ["a", "b", "c"]
    assert await consumer.receive(1) is None
    assert world.repairs == 0


async def test_a_gap_is_detected_by_the_next_delivery(world: LossyWorld):
    consumer = await world.consumer()
    world.dispatcher.times = nth({1}, 0, is_delivery)
    await world.send("a", "b")
    for text in ("a", "b"):
        message = await consumer.receive(partition_link.PING_S / 4)
        assert message is not None
        assert message.body() == text


async def test_a_delivery_on_its_way_does_not_overtake_those_that_are_repeated(
    world: LossyWorld, simulated_network: network.SimulatedNetwork
):
    """The first is lost, which the client detects when it gets the second. The third is on its way then."""
    consumer = await world.consumer()
    count = 0

    async def delay(subject: str) -> None:
        nonlocal count
        count += is_delivery(subject)
        if is_delivery(subject) and count == 2:
            await asyncio.sleep(1)  # the third is the next
        elif is_delivery(subject) and count == 3:
            await eventually(lambda: world.repairs == 1)

    world.dispatcher.times = nth({1}, 0, is_delivery)
    world.dispatcher.delay = delay
    await world.send("a")
    async with (
        api.Connection(await simulated_network.connect("other")) as other,
        asyncio.TaskGroup() as sending,
    ):
        await other.session().producer(OTHER).send("x")  # from now on it is registered
        sending.create_task(world.send("b"))
        await asyncio.sleep(0.5)
        sending.create_task(other.session().producer(JOBS).send("c"))
        received = [message.body() for _ in range(3) if (message := await consumer.receive(10)) is not None]
    assert received == ["a", "b", "c"]
    assert await consumer.receive(10) is None
    assert world.repairs == 1


async def test_what_was_delivered_before_a_connection_registers_again_is_delivered_again(
    world: LossyWorld, simulated_network: network.SimulatedNetwork
):
    """A new dispatcher delivers to the first consumer. Its reply to the second is lost, so the client
    registers again.
    """
    consumer, other = await world.consumer(), await world.consumer(queue=OTHER)
    await world.send("a", "b")
    lost = 0

    def times(subject: str, data: bytes) -> int:
        nonlocal lost
        is_lost = not lost and not is_delivery(subject) and ledger.queue_key(OTHER.name).encode() in data
        lost += is_lost
        return not is_lost

    successor = LossyBus(await simulated_network.connect("successor"))
    successor.times = times
    simulated_network.crash(world.dispatcher._bus)  # type: ignore[arg-type]
    async with serving(successor):
        await eventually(lambda: lost and world.repairs > 1)
        received = [message.body() for _ in range(2) if (message := await consumer.receive(10)) is not None]
        assert received == ["a", "b"]
        assert await other.receive(1) is None


async def test_deliveries_in_several_batches_are_counted(world: LossyWorld):
    consumer = await world.consumer()
    session = world.connection.session(api.AcknowledgeMode.TRANSACTED)
    for _ in range(5):
        await session.producer(JOBS).send("x" * (300 << 10))
    await session.commit()
    for _ in range(5):
        assert await consumer.receive(partition_link.PING_S / 4) is not None
    await asyncio.sleep(2 * partition_link.PING_S)
    assert world.repairs == 0


async def test_lost_credit_is_granted_again(world: LossyWorld):
    consumer = await world.consumer(prefetch=2)
    is_notification = protocol.notify_subject("client", 0).__eq__
    for repairs in (1, 2, 3):
        world.client.times = nth({1, 2}, 0, is_notification)  # all of it
        await world.send(*"abcdef")
        received = [
            str(message.body())
            for _ in range(6)
            if (message := await consumer.receive(2 * partition_link.PING_S)) is not None
        ]
        assert received == list("abcdef")
        assert world.repairs == repairs


async def test_a_client_that_lost_its_connection_does_not_receive_what_went_to_another(
    world: LossyWorld, simulated_network: network.SimulatedNetwork
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


async def test_a_connection_that_loses_nothing_registers_once(world: LossyWorld):
    consumer = await world.consumer(prefetch=10)
    for round_number in range(3):
        await world.send(*(f"{round_number}-{number}" for number in range(50)))
        for number in range(50):
            message = await consumer.receive(5)
            assert message is not None
            assert message.body() == f"{round_number}-{number}"
        await asyncio.sleep(2 * partition_link.PING_S)
    assert world.repairs == 0


async def test_a_client_that_was_disconnected_registers_at_once(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    """Not at the next ping only: until then, its consumers would receive nothing."""
    monkeypatch.setattr(partition_link, "PING_S", 1_000.0)
    dispatcher = LossyBus(await simulated_network.connect("dispatcher"))
    client = await simulated_network.connect("client")
    async with (
        serving(dispatcher),
        api.Connection(client) as connection,
        api.Connection(await simulated_network.connect("sender")) as other,
    ):
        consumer = await connection.session().consumer(JOBS)
        simulated_network.disconnect(client)
        await eventually(lambda: client.state is bus_api.ConnectionState.CONNECTED)
        await other.session().producer(JOBS).send("a")
        message = await consumer.receive(10)
        assert message is not None
