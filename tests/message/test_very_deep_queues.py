"""A queue of hundreds of thousands of messages, with a broker and a dispatcher of its own process."""

from __future__ import annotations

import asyncio
import sys
import time

import psutil
import pytest

from muster.bus.brokers import broker as brokers
from muster.message import destinations, messages
from muster.message.client import api as client_api
from muster.testing import fixtures
from tests.message import conftest

JOBS = destinations.queue("jobs")
DEPTH = 300_000
RARE = 100_000  # every so many messages, one matches the selector
GROUPED = 200  # messages of a group at the end
BATCH = 2_000
WAIT_S = 120.0


async def fill(connection: client_api.Connection) -> None:
    producer = connection.session().producer(JOBS)
    for start in range(0, DEPTH, BATCH):
        sends = [
            producer.submit(messages.TextMessage(f"{number}", properties={"rare": number % RARE == RARE - 1}))
            for number in range(start, start + BATCH)
        ]
        await asyncio.gather(*sends)
    for number in range(GROUPED):
        await producer.submit(messages.TextMessage(f"g{number}", properties={"JMSXGroupID": "g"}), priority=5)
    await producer.send("urgent", priority=9)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_selectors_priorities_groups_and_browsers_in_a_very_deep_queue(
    broker: brokers.Broker, start_process: fixtures.StartProcess, dial: conftest.Dial
):
    steps: dict[str, float] = {}
    began = time.monotonic()

    def note(step: str) -> None:
        nonlocal began
        steps[step], began = round(time.monotonic() - began, 1), time.monotonic()

    process = await start_process(sys.executable, "-m", "tests.message.run_dispatcher", broker.url, "d1")
    connection = await dial()
    await fill(connection)
    note("fill")
    session = connection.session(client_api.AcknowledgeMode.CLIENT)
    rare = await session.consumer(JOBS, "rare = TRUE", prefetch=10)
    expected = [f"{number}" for number in range(RARE - 1, DEPTH, RARE)]
    assert await conftest.take(rare, len(expected), WAIT_S) == expected
    note("selector")
    browsed = asyncio.create_task(browse(connection, "rare = TRUE"))
    first, second = [await session.consumer(JOBS, prefetch=100) for _ in range(2)]
    assert (await conftest.take(first, 1, WAIT_S))[0] == "urgent"
    groups = [text for text in await conftest.take(first, GROUPED, WAIT_S) if text.startswith("g")]
    assert groups == [f"g{number}" for number in range(GROUPED)], "a group has one consumer, in order"
    taken = [*await conftest.take(second, 1000, WAIT_S), *await conftest.take(first, 1000, WAIT_S)]
    assert len(set(taken)) == 2000
    note("priorities, group and 2,000 messages")
    assert await browsed == expected, "held by their consumer, and still in the queue"
    note("browse")
    used = psutil.Process(process.pid).memory_info().rss
    assert used < 300 << 20
    await process.kill()
    await start_process(sys.executable, "-m", "tests.message.run_dispatcher", broker.url, "d2")
    async with (await dial(identity="later")).session() as later:
        again = await later.consumer(JOBS, "rare = TRUE", prefetch=1)
        assert (await conftest.take(again, 1, WAIT_S))[0] in expected
    note("another dispatcher, selector")
    sys.stdout.write(f"{DEPTH:,} messages, dispatcher {used >> 20} MiB, seconds: {steps}\n")


async def browse(connection: client_api.Connection, selector: str) -> list[str]:
    return [str(message.body()) async for message in connection.session().browse(JOBS, selector)]
