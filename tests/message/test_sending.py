"""What a sender and a receiver are promised: order, errors, and messages without prefetch."""

from __future__ import annotations

import asyncio
import time

import pytest

from muster.bus.memory import network
from muster.core import errors
from muster.message import destinations, messages
from muster.message.client import api as client_api
from muster.message.client import consumers
from muster.testing import virtual_clock
from tests.message import test_races

pytestmark = pytest.mark.virtual_time

JOBS = destinations.queue("jobs")
NEWS = destinations.topic("news/a")
LARGE = "x" * (1 << 20)


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


@pytest.mark.parametrize("how", ["send plain", "send message", "submit", "mixed"])
async def test_a_small_message_overtakes_no_large_one_of_its_producer(
    simulated_network: network.SimulatedNetwork, how: str
):
    net = simulated_network
    async with (
        test_races.serving(net),
        client_api.Connection(await net.connect("a")) as receiver,
        client_api.Connection(await net.connect("b")) as sender,
    ):
        consumer = await receiver.session().consumer(NEWS)
        producer = sender.session().producer(NEWS, persistent=False)
        if how == "send plain":
            for body in (LARGE, "1", "2", "3"):
                await producer.send(body)
        elif how == "send message":
            for body in (LARGE, "1", "2", "3"):
                await producer.send(messages.TextMessage(body))
        elif how == "submit":
            await asyncio.gather(*(producer.submit(body) for body in (LARGE, "1", "2", "3")))
        else:
            sent = [producer.submit(LARGE), producer.submit("1")]
            await producer.send("2")
            await producer.send(messages.TextMessage("3"))
            await asyncio.gather(*sent)
        assert await test_races.received(consumer) == [LARGE, "1", "2", "3"]


async def test_a_submitted_message_is_not_overtaken_by_one_that_is_sent(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with (
        test_races.serving(net),
        client_api.Connection(await net.connect("a")) as receiver,
        client_api.Connection(await net.connect("b")) as sender,
    ):
        consumer = await receiver.session().consumer(NEWS)
        producer = sender.session().producer(NEWS, persistent=False)
        await producer.send("begin")
        first = producer.submit("first")
        await producer.send("second")
        await first
        assert await test_races.received(consumer) == ["begin", "first", "second"]


async def test_a_message_to_a_forbidden_queue_fails_although_it_is_not_persistent(
    simulated_network: network.SimulatedNetwork,
):
    def may(identity: str, action: str, subject: str) -> bool:
        return (action, subject) != ("send", "jobs")

    net = simulated_network
    async with test_races.serving(net, may=may), client_api.Connection(await net.connect("a")) as connection:
        producer = connection.session().producer(JOBS, persistent=False)
        for body in ("plain", messages.TextMessage("message")):
            with pytest.raises(errors.Forbidden):
                await producer.send(body)


async def test_without_prefetch_a_message_is_requested_when_the_application_waits(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with (
        test_races.serving(net),
        client_api.Connection(await net.connect("a")) as connection,
        client_api.Connection(await net.connect("b")) as other,
    ):
        for body in ("1", "2", "3", "4"):
            await connection.session().producer(JOBS).send(body)
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(JOBS, prefetch=0)
        first = await consumer.receive(3)
        assert first is not None
        assert first.body() == "1"
        second = await consumer.receive_nowait()
        assert second is not None
        assert second.body() == "2"
        async with await other.session().consumer(JOBS) as rest:
            assert await test_races.received(rest) == ["3", "4"]
        await session.rollback()
        assert await test_races.received(consumer) == ["1", "2"]
        connection.home._discard_registration()
        waiting = asyncio.create_task(consumer.receive(20))
        await connection.session().producer(JOBS).send("5")
        message = await waiting
        assert message is not None
        with pytest.raises(errors.InvalidInput, match="at least 0"):
            await session.consumer(JOBS, prefetch=-1)


def test_a_repeated_message_is_found_without_a_scan():
    """A new dispatcher repeats all that a session holds."""
    session = client_api.Session.__new__(client_api.Session)
    held = [consumers.ReceivedDelivery(None, None, "q:a", number) for number in range(100_000)]  # type: ignore[arg-type]
    session._ending, session.unacknowledged = {}, {entry.place: entry for entry in held}
    began = time.perf_counter()
    assert all(session.has("q:a", number) for number in range(0, 100_000, 100))
    assert time.perf_counter() - began < 1, "a scan takes 5 s"
