"""Dispatchers killed under load; a checker reads the whole history."""

from __future__ import annotations

import asyncio
import sys

import pytest

from muster.bus.brokers import broker as brokers
from muster.message import destinations, errors
from muster.message.client import api
from muster.testing import child_process, fixtures
from tests.message import conftest

IN = destinations.queue("in")
OUT = destinations.queue("out")
NEWS = destinations.topic("news")


@pytest.mark.slow
@pytest.mark.timeout(110)
async def test_kill_9_of_dispatchers_loses_nothing_and_keeps_transactions_whole(
    broker: brokers.Broker, start_process: fixtures.StartProcess, dial: conftest.Dial
):
    async def begin(name: str) -> child_process.ChildProcess:
        return await start_process(sys.executable, "-m", "tests.message.run_dispatcher", broker.url, name)

    current = await begin("d0")
    total = 120
    sending, moving, reading = await dial("sender"), await dial("mover"), await dial("reader")
    durable = await reading.session().durable_consumer(NEWS, "all")
    reached = [asyncio.Event() for _ in range(3)]

    async def feed() -> None:
        producer = sending.session().producer()
        for number in range(total):
            await producer.send(f"{number}", to=IN)
            await producer.send(f"n{number}", to=NEWS)
            if number % 30 == 29 and number < 90:
                reached[number // 30].set()

    async def move() -> None:
        """Each message from one queue to the other, in a transaction."""
        session = moving.session(api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(IN, prefetch=10)
        producer = session.producer(OUT)
        moved = 0
        while moved < total:
            message = await consumer.receive(30)
            assert message is not None, f"only {moved} of {total} came"
            await producer.send(message.body())
            try:
                await session.commit()
                moved += 1
            except errors.TransactionRolledBack:
                continue

    async def kill() -> None:
        nonlocal current
        for number in range(3):
            await reached[number].wait()
            await current.kill()
            current = await begin(f"d{number + 1}")

    async with asyncio.TaskGroup() as work:
        for coroutine in (feed(), move(), kill()):
            work.create_task(coroutine)

    watching = (await dial()).session()
    out = [message.body() async for message in watching.browse(OUT)]
    assert sorted(map(int, out)) == list(range(total)), "each once: neither lost nor moved twice"
    assert [message.body() async for message in watching.browse(IN)] == []
    news: list[object] = []
    while len(set(news)) < total:
        message = await durable.receive(30)
        assert message is not None, f"only {len(set(news))} of {total} came"
        news.append(message.body())
    assert list(dict.fromkeys(news)) == [f"n{number}" for number in range(total)], "in order"
    for connection in (sending, moving, reading):
        await connection.close()
