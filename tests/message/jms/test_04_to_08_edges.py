"""JMS 2.0, chapters 4 to 8: combinations of clauses that are easy to overlook, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from muster.bus.memory import network
from muster.message import destinations, messages, protocol
from muster.message import errors as message_errors
from muster.message.client import api, consumers
from muster.message.dispatcher import leadership
from muster.testing import virtual_clock
from tests.message.test_partitions import connected

pytestmark = pytest.mark.virtual_time

JOBS = destinations.queue("jobs")
OTHER = destinations.queue("other")
NEWS = destinations.topic("news")
MODES = api.AcknowledgeMode


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


@pytest.fixture
async def net(simulated_network: network.SimulatedNetwork) -> AsyncIterator[network.SimulatedNetwork]:
    bus = await simulated_network.connect("dispatcher")
    running = asyncio.create_task(leadership.DispatcherLeadership(bus, lease_ttl_s=2).run())
    yield simulated_network
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def send(connection: api.Connection, to: destinations.Destination, *texts: str) -> None:
    producer = connection.session().producer(to)
    for text in texts:
        await producer.send(text)


async def received(consumer: consumers.Consumer, most: int = 100) -> list[tuple[object, int, bool]]:
    """Body, delivery count and whether it is marked, of all that arrive."""
    rows: list[tuple[object, int, bool]] = []
    while len(rows) < most and (message := await consumer.receive(2)) is not None:
        rows.append((message.body(), message.delivery_count, message.redelivered))
    return rows


async def depths(connection: api.Connection) -> dict[str, tuple[int, int]]:
    rows = (await connection.request(protocol.ListQueues())).queues
    return {row.queue: (row.depth, row.in_flight) for row in rows}


async def test_3_5_11_recover_counts_what_was_received_and_not_what_was_prefetched(
    net: network.SimulatedNetwork,
):
    async with connected(net) as connection:
        await send(connection, JOBS, "a", "b", "c")
        session = connection.session(MODES.CLIENT)
        consumer = await session.consumer(JOBS, prefetch=10)
        assert await received(consumer, 2) == [("a", 1, False), ("b", 1, False)]
        await session.recover()
        assert await received(consumer, 1) == [("a", 2, True)]
        await session.recover()
        assert await received(consumer) == [("a", 3, True), ("b", 2, True), ("c", 1, False)]


async def test_3_5_11_the_count_goes_on_at_the_next_consumer(net: network.SimulatedNetwork):
    async with connected(net) as connection, connected(net, "other") as other:
        await send(connection, JOBS, "a")
        session = connection.session(MODES.TRANSACTED)
        consumer = await session.consumer(JOBS)
        assert await received(consumer, 1) == [("a", 1, False)]
        await session.rollback()
        assert await received(consumer, 1) == [("a", 2, True)]
        await session.close()
        assert await received(await other.session().consumer(JOBS)) == [("a", 3, True)]


async def test_6_2_7_what_a_closed_consumer_received_goes_to_no_other_before_the_rollback(
    net: network.SimulatedNetwork,
):
    async with connected(net) as connection, connected(net, "other") as other:
        await send(connection, JOBS, "a", "b")
        session = connection.session(MODES.TRANSACTED)
        consumer = await session.consumer(JOBS)
        assert await received(consumer, 1) == [("a", 1, False)]
        await consumer.close()
        second = await other.session().consumer(JOBS)
        assert await received(second) == [("b", 1, False)]
        await session.rollback()
        assert await received(second) == [("a", 2, True)]


async def test_8_3_3_a_subscription_with_unacknowledged_messages_is_not_ended(
    net: network.SimulatedNetwork,
):
    async with connected(net, client_id="app") as connection:
        session = connection.session(MODES.CLIENT)
        consumer = await session.durable_consumer(NEWS, "all")
        await send(connection, NEWS, "a")
        message = await consumer.receive(2)
        assert message is not None
        await consumer.close()
        with pytest.raises(message_errors.IllegalState):
            await session.unsubscribe("all")
        await message.acknowledge()
        await session.unsubscribe("all")


async def test_7_9_a_message_that_expires_in_a_prefetch_goes_to_no_one(net: network.SimulatedNetwork):
    async with connected(net) as connection, connected(net, "other") as other:
        consumer = await connection.session(MODES.CLIENT).consumer(JOBS, prefetch=10)
        await connection.session().producer(JOBS, ttl_s=5).send("short")
        await send(connection, JOBS, "long")
        await asyncio.sleep(10)
        assert await received(consumer, 1) == [("long", 1, False)]
        assert await received(await other.session().consumer(JOBS)) == []
        await asyncio.sleep(1)
        assert await depths(connection) == {"jobs": (1, 1)}


async def test_7_9_a_message_that_expires_in_a_transaction_is_committed(net: network.SimulatedNetwork):
    async with connected(net) as connection:
        await connection.session().producer(JOBS, ttl_s=5).send("short")
        session = connection.session(MODES.TRANSACTED)
        consumer = await session.consumer(JOBS)
        assert len(await received(consumer, 1)) == 1
        await asyncio.sleep(60)
        await session.producer(OTHER).send("done")
        await session.commit()
        assert await depths(connection) == {"jobs": (0, 0), "other": (1, 0)}


async def test_7_9_a_message_that_expires_in_a_transaction_does_not_return(net: network.SimulatedNetwork):
    async with connected(net) as connection:
        await connection.session().producer(JOBS, ttl_s=5).send("short")
        session = connection.session(MODES.TRANSACTED)
        consumer = await session.consumer(JOBS)
        assert len(await received(consumer, 1)) == 1
        await asyncio.sleep(60)
        await session.rollback()
        assert await received(consumer) == []
        assert (await depths(connection))["jobs"] == (0, 0)


async def test_4_1_6_a_browser_shows_each_message_once_while_they_are_moved_there_and_back(
    net: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(api, "BROWSE_PAGE", 10)
    async with connected(net) as connection, connected(net, "admin") as admin:
        await send(connection, JOBS, *(f"{number}" for number in range(50)))
        shown: list[object] = []
        async for message in connection.session().browse(JOBS):
            shown.append(message.body())
            if len(shown) == 15:
                await admin.request(protocol.MoveMessages(JOBS.name, to=str(OTHER), limit=30))
        assert shown[:15] == [f"{number}" for number in range(15)]
        assert len(set(shown)) == len(shown)
        assert shown[-20:] == [f"{number}" for number in range(30, 50)]
        await admin.request(protocol.MoveMessages(OTHER.name, to=str(JOBS)))
        everything = [message.body() async for message in connection.session().browse(JOBS)]
        assert sorted(map(str, everything), key=int) == [f"{number}" for number in range(50)]


async def test_8_3_2_a_shared_subscription_can_be_redefined_after_its_last_consumer(
    net: network.SimulatedNetwork,
):
    async with connected(net) as connection, connected(net) as other:
        first = await connection.session().shared_consumer(NEWS, "ours", "n = 1")
        second = await other.session().shared_consumer(NEWS, "ours", "n = 1")
        await first.close()
        with pytest.raises(message_errors.IllegalState):
            await connection.session().shared_consumer(NEWS, "ours", "n = 2")
        await second.close()
        await send(connection, NEWS, "missed")
        again = await connection.session().shared_consumer(NEWS, "ours", "n = 2")
        producer = connection.session().producer(NEWS)
        for number in (1, 2):
            await producer.send(messages.TextMessage(f"{number}", properties={"n": number}))
        assert await received(again) == [("2", 1, False)]


async def test_8_3_4_what_a_closed_consumer_had_goes_to_those_it_shares_with_in_order(
    net: network.SimulatedNetwork,
):
    async with connected(net) as connection, connected(net) as other:
        session = connection.session(MODES.CLIENT)
        first = await session.shared_durable_consumer(NEWS, "ours", prefetch=10)
        await send(connection, NEWS, "a", "b", "c")
        assert await received(first, 1) == [("a", 1, False)]
        second = await other.session().shared_durable_consumer(NEWS, "ours")
        await session.close()
        assert await received(second) == [("a", 2, True), ("b", 1, False), ("c", 1, False)]


async def test_3_5_9_a_group_keeps_its_order_when_its_consumer_closes(net: network.SimulatedNetwork):
    async with connected(net) as connection, connected(net, "other") as other:
        producer = connection.session().producer(JOBS)
        first = await connection.session(MODES.CLIENT).consumer(JOBS, prefetch=2)
        for number in range(4):
            await producer.send(messages.TextMessage(f"{number}", properties={"JMSXGroupID": "g"}))
        second = await other.session().consumer(JOBS)
        assert await received(second) == [], "the group has a consumer"
        await first.close()
        assert await received(second) == [(f"{number}", 1, False) for number in range(4)]


async def test_6_2_10_messages_of_all_consumers_of_a_session_are_acknowledged_together(
    net: network.SimulatedNetwork,
):
    async with connected(net) as connection:
        await send(connection, JOBS, "a")
        await send(connection, OTHER, "b")
        session = connection.session(MODES.CLIENT)
        first, second = await session.consumer(JOBS), await session.consumer(OTHER)
        assert await first.receive(2) is not None
        message = await second.receive(2)
        assert message is not None
        await first.close()
        await message.acknowledge()
        assert await depths(connection) == {"jobs": (0, 0), "other": (0, 0)}


async def test_7_9_a_delayed_message_expires_after_its_delay(net: network.SimulatedNetwork):
    """The time to live counts from the time of sending (7.9), so that it can end before the delay does."""
    async with connected(net) as connection:
        consumer = await connection.session().consumer(JOBS)
        producer = connection.session().producer(JOBS)
        await producer.send("expired", delay_s=10, ttl_s=5)
        await producer.send("late", delay_s=10, ttl_s=15)
        await asyncio.sleep(20)
        assert await received(consumer) == []
        await producer.send("in time", delay_s=10, ttl_s=15)
        await asyncio.sleep(9)
        assert await received(consumer) == [("in time", 1, False)]
