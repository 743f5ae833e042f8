"""Overload slows the senders, and memory stays bounded."""

from __future__ import annotations

import asyncio
import time

import pytest

from muster.core import errors
from muster.message import destinations, messages, protocol
from muster.message.client import api, consumers, flow_control, outbox, topic_consumers
from muster.message.dispatcher import dispatcher, leadership
from muster.message.dispatcher.log import journal
from muster.testing import eventually, fixtures
from tests.message import conftest

ORDERS = destinations.queue("orders")


async def test_a_full_log_holds_senders_until_something_is_consumed(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    total = 120
    async with conftest.serving(connect, max_bytes=2 << 20):
        connection = await dial()
        monkeypatch.setattr(outbox, "FULL_S", 60)
        session = connection.session(api.AcknowledgeMode.CLIENT)
        sent = 0

        async def fill() -> None:
            nonlocal sent
            producer = session.producer(ORDERS)
            for _ in range(total):
                await producer.send(bytes(20_000))
                sent += 1

        working = asyncio.create_task(fill())
        await eventually.eventually(lambda: connection.outbox.log_is_full, timeout_s=30)
        assert sent < total, "the sender waits"
        consumer = await session.consumer(ORDERS)  # over the same connection: acknowledgements overtake
        for number in range(total):
            message = await consumer.receive(30)
            assert message is not None, f"only {number} of {total} came"
            await message.acknowledge()
        await working
        await connection.close()


async def test_a_full_log_has_space_again_when_an_unconsumed_queue_is_purged(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatcher, "WATCH_S", 0.1)
    async with conftest.serving(connect, max_bytes=2 << 20):
        connection = await dial()
        monkeypatch.setattr(outbox, "FULL_S", 60)
        producer = connection.session().producer(ORDERS)
        sending = [producer.submit(bytes(20_000)) for _ in range(120)]
        await eventually.eventually(lambda: connection.outbox.log_is_full)
        assert (await connection.request(protocol.PurgeQueue("orders"))).count > 0
        await asyncio.gather(*sending)
        await connection.close()


@pytest.mark.parametrize("kind", ["queue", "topic"])
async def test_expired_messages_without_a_consumer_do_not_fill_the_log(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setattr(dispatcher, "WATCH_S", 0.1)
    monkeypatch.setattr(dispatcher, "SWEEP_S", 0.1)
    async with conftest.serving(connect, max_bytes=2 << 20):
        connection = await dial("reader")
        monkeypatch.setattr(outbox, "FULL_S", 60)
        session = connection.session()
        target = ORDERS if kind == "queue" else destinations.topic("news")

        async def consume() -> consumers.Consumer:
            if kind == "queue":
                return await session.consumer(target)
            return await session.durable_consumer(target, "away")

        await (await consume()).close()
        producer = session.producer(target)
        for _ in range(120):
            await producer.send(bytes(20_000), ttl_s=0.2)
        for row in (await connection.request(protocol.ListQueues())).queues:
            assert row.depth < 120
        await producer.send("it lives")
        consumer = await consume()
        while (message := await consumer.receive(30)) is not None and message.body() != "it lives":
            continue
        assert message is not None
        await connection.close()


@pytest.mark.parametrize("kind", ["queue", "topic"])
async def test_an_unconsumed_message_does_not_keep_later_ones_in_the_log(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setattr(dispatcher, "WATCH_S", 0.1)
    monkeypatch.setattr(dispatcher, "SWEEP_S", 0.1)
    async with conftest.serving(connect, max_bytes=2 << 20):
        connection = await dial("reader")
        monkeypatch.setattr(outbox, "FULL_S", 60)
        session = connection.session()
        if kind == "queue":
            kept, busy = ORDERS, ORDERS
            consumer = await session.consumer(ORDERS, "n = 1")
        else:
            kept, busy = destinations.topic("kept"), destinations.topic("busy")
            await (await session.durable_consumer(kept, "away")).close()
            consumer = await session.durable_consumer(busy, "here")
        await session.producer(kept).send(messages.TextMessage("kept", properties={"n": 0}))
        producer = session.producer(busy)
        for number in range(120):
            await producer.send(messages.BytesMessage(bytes(20_000), properties={"n": 1}))
            assert await consumer.receive(30) is not None, f"only {number} came"
        await consumer.close()
    async with conftest.serving(connect, "second"):
        if kind == "topic":
            consumer = await session.durable_consumer(kept, "away")
        else:
            consumer = await session.consumer(ORDERS)
        message = await consumer.receive(30)
        assert message is not None
        assert message.body() == "kept"
        await connection.close()


async def test_senders_who_do_not_wait_are_refused_before_memory_is_full(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outbox, "UNSENT_MAX", 50)
    connection = await dial()
    producer = connection.session().producer(ORDERS)
    accepted = [producer.submit(f"{number}") for number in range(100)]
    with pytest.raises(errors.Overloaded):
        producer.submit("one too many")
    waiting = asyncio.create_task(producer.send("one that waits"))
    async with conftest.serving(connect):
        await asyncio.gather(*accepted, waiting)
        bodies = [message.body() async for message in connection.session().browse(ORDERS)]
        assert bodies == [*(f"{number}" for number in range(100)), "one that waits"]
        await connection.close()


async def test_a_flood_of_producers_waits_for_the_dispatcher(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal, "QUEUED_BYTES_MAX", 2_000)
    sessions = [(await dial()).session() for _ in range(8)]

    async def send(session: api.Session) -> None:
        producer = session.producer(ORDERS)
        await asyncio.gather(*(producer.send("x" * 1000) for _ in range(10)))

    async with asyncio.timeout(60):
        await asyncio.gather(*map(send, sessions))
    assert len([message async for message in sessions[0].browse(ORDERS)]) == 80


@pytest.mark.parametrize("message_s", [0.0, 2 * consumers.TURN_S / consumers.BURST])
async def test_a_quick_consumer_takes_what_has_arrived_and_a_slow_one_lets_others_run(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, message_s: float
):
    """The task that reads takes a thousand messages in its turn: a consumer must not take fewer."""
    connection = await dial()
    consumer = await connection.session().consumer(destinations.topic("news"))
    bursts = 20
    for _ in range(bursts * consumers.BURST):
        consumer._put(consumers.ReceivedDelivery(messages.TextMessage(), consumer, "", 1))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    for _ in range(bursts * consumers.BURST):
        assert await consumer.receive(5) is not None
        until_s = time.perf_counter() + message_s
        while time.perf_counter() < until_s:
            pass  # an application that computes
    counting.cancel()
    assert turns > bursts // 2 if message_s else turns < bursts // 2
    await connection.close()


@pytest.mark.parametrize("in_properties", [False, True])
async def test_large_messages_displace_as_many_small_ones_as_they_need(
    dispatcher: leadership.DispatcherLeadership,
    dial: conftest.Dial,
    monkeypatch: pytest.MonkeyPatch,
    in_properties: bool,
):
    monkeypatch.setattr(flow_control, "WAITING_SLOW", 1)
    monkeypatch.setattr(flow_control, "WAITING_BYTES_MAX", 10_000)
    receiving = await dial()
    monkeypatch.setattr(receiving, "report_slow", lambda consumer: None)
    reported: list[errors.MusterError] = []
    receiving.on_error = reported.append
    news = destinations.topic("news")
    consumer = await receiving.session().consumer(news)
    assert isinstance(consumer, topic_consumers.TopicConsumer)
    producer = (await dial()).session().producer(news, persistent=False)
    for size in (*[1] * 50, *[1_000] * 20):
        properties = {"p": "p" * size} if in_properties else {}
        await producer.send(messages.BytesMessage(bytes(0 if in_properties else size), properties=properties))
    await eventually.eventually(lambda: consumer.dropped + len(consumer._arrived) == 70)
    assert len(consumer._arrived) <= 10
    assert consumer._bytes == sum(received.sequence for received in consumer._arrived) <= 10_000
    assert ["too slow" in str(error) for error in reported] == [True]
