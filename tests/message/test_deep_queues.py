"""Queues and subscriptions that are much deeper than what is in memory, with the real broker."""

from __future__ import annotations

import asyncio
import sys

import psutil
import pytest

from muster.bus.brokers import broker as brokers
from muster.message import destinations, messages, protocol
from muster.message.client import api as client_api
from muster.message.dispatcher import leadership
from muster.testing import fixtures
from tests.message import conftest

JOBS = destinations.queue("jobs")
NEWS = destinations.topic("news")
DEEP = 2500
WAIT_S = 30.0


async def fill(
    connection: client_api.Connection,
    to: destinations.Destination,
    count: int,
    priority: int = 4,
    **properties: int,
) -> None:
    producer = connection.session().producer(to, priority=priority)
    sent = [
        producer.submit(messages.TextMessage(f"{number}", properties=properties)) for number in range(count)
    ]
    await asyncio.gather(*sent)


async def test_a_transaction_receives_more_messages_than_are_held_in_memory(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    await fill(connection, JOBS, 3000)
    session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
    consumer = await session.consumer(JOBS)
    assert await conftest.take(consumer, 3000) == [f"{number}" for number in range(3000)]
    await session.commit()
    assert [row.depth for row in (await connection.request(protocol.ListQueues())).queues] == [0]


async def test_a_durable_subscriber_receives_everything_before_it_acknowledges(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial("reader")
    session = connection.session(client_api.AcknowledgeMode.CLIENT)
    await (await session.durable_consumer(NEWS, "all")).close()
    await fill(await dial(), NEWS, DEEP)
    consumer = await session.durable_consumer(NEWS, "all")
    assert await conftest.take(consumer, DEEP) == [f"{number}" for number in range(DEEP)]


async def test_idle_consumers_with_a_large_prefetch_do_not_starve_another(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    await fill(connection, JOBS, DEEP)
    for _ in range(2):
        await connection.session().consumer(JOBS, prefetch=1000)
    third = await (await dial()).session().consumer(JOBS)
    assert len(await conftest.take(third, DEEP - 2000)) == DEEP - 2000


async def test_messages_that_no_consumer_selects_do_not_hide_others(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    await fill(connection, JOBS, 2000, n=1)
    await fill(connection, JOBS, 4000, n=2)
    consumer = await connection.session().consumer(JOBS, "n = 2")
    assert await conftest.take(consumer, 4000) == [f"{number}" for number in range(4000)]


async def test_a_high_priority_goes_first_although_it_is_far_behind(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    await fill(connection, JOBS, DEEP)
    await fill(connection, JOBS, 1, priority=9, n=9)
    consumer = await connection.session().consumer(JOBS, prefetch=1)
    message = await consumer.receive(WAIT_S)
    assert message is not None
    assert message.priority == 9


DEEPER = 20_000


async def test_selectors_priorities_and_browsers_see_all_of_a_deep_queue(
    dial: conftest.Dial, connect: fixtures.Connect
):
    """Before and after a new dispatcher has indexed it."""
    async with conftest.serving(connect):
        sender = await dial()
        await fill(sender, JOBS, DEEPER, n=0)
        await fill(sender, JOBS, 1, n=1)
        await fill(sender, JOBS, DEEPER // 4, n=0)
        await fill(sender, JOBS, 1, priority=9, n=2)
        await read_everywhere(await dial())
    async with conftest.serving(connect, "next"):
        await read_everywhere(await dial())


async def read_everywhere(connection: client_api.Connection) -> None:
    session = connection.session(client_api.AcknowledgeMode.CLIENT)

    async def browse() -> list[str]:
        return [str(message.body()) async for message in connection.session().browse(JOBS)]

    browsing = asyncio.create_task(browse())
    rare = await session.consumer(JOBS, "n = 1", prefetch=1)
    assert await conftest.take(rare, 1) == ["0"]
    first = await session.consumer(JOBS, prefetch=1)
    message = await first.receive(WAIT_S)
    assert message is not None
    assert message.properties["n"] == 2
    assert await conftest.take(first, 1000) == [f"{number}" for number in range(1000)]
    assert len(await browsing) == DEEPER + DEEPER // 4 + 2
    assert await rare.receive_nowait() is None
    await connection.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_memory_of_a_dispatcher_does_not_grow_with_the_bodies_of_a_queue(
    broker: brokers.Broker, start_process: fixtures.StartProcess, dial: conftest.Dial
):
    process = await start_process(sys.executable, "-m", "tests.message.run_dispatcher", broker.url, "d")
    connection = await dial()
    producer = connection.session().producer(JOBS)
    body = bytes(10_000)
    for _ in range(30):
        await asyncio.gather(*(producer.submit(body) for _ in range(1000)))
    session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
    consumer = await session.consumer(JOBS, prefetch=1000)
    for _ in range(30_000):
        assert await consumer.receive(WAIT_S) is not None
    await session.commit()
    used = psutil.Process(process.pid).memory_info().rss
    assert used < 200 << 20, "300 MB went through it"
