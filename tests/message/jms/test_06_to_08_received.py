"""JMS 2.0, chapters 6 to 8: what becomes of a message between its receipt and its acknowledgement."""

from __future__ import annotations

import asyncio

import pytest

from muster.core import errors
from muster.message import destinations, messages, protocol
from muster.message import errors as message_errors
from muster.message.client import api, consumers
from muster.message.dispatcher import leadership
from muster.testing import fixtures
from tests.message import conftest

ORDERS = destinations.queue("orders")
NEWS = destinations.topic("news/sport")
KEEPING = (api.AcknowledgeMode.CLIENT, api.AcknowledgeMode.TRANSACTED)


async def _next(consumer: consumers.Consumer) -> messages.JmsMessage:
    message = await consumer.receive(30)
    assert message is not None, "nothing came"
    return message


async def _left(session: api.Session) -> list[object]:
    return [message.body() async for message in session.browse(ORDERS)]


async def _acknowledge(session: api.Session, message: messages.JmsMessage) -> None:
    await (session.commit() if session.transacted else message.acknowledge())


async def _give_back(session: api.Session) -> None:
    await (session.rollback() if session.transacted else session.recover())


async def test_8_7_a_listener_acknowledges_and_commits_what_it_was_handed(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    plain = connection.session()
    for mode in KEEPING:
        session = connection.session(mode)
        received: list[tuple[object, bool]] = []

        async def handle(
            message: messages.JmsMessage,
            session: api.Session = session,
            log: list[tuple[object, bool]] = received,
        ) -> None:
            log.append((message.body(), message.redelivered))
            if message.body() == "bad" and not message.redelivered:
                raise ValueError("not this one")
            if len(log) == 2:
                await _give_back(session)
                return
            await _acknowledge(session, message)
            if len(log) == 4:
                await session.close()

        for body in ("bad", "good"):
            await plain.producer(ORDERS).send(body)
        await (await session.consumer(ORDERS)).listen(handle)
        # The one that it failed with is not repeated at once: it is the session's, as the next one is.
        assert received == [("bad", False), ("good", False), ("bad", True), ("good", True)]
        assert await _left(plain) == []


async def test_8_7_what_a_listener_had_when_it_was_stopped_has_been_seen(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session()
    await session.producer(ORDERS).send("one")
    began = asyncio.Event()

    async def handle(_: messages.JmsMessage) -> None:
        began.set()
        await asyncio.Event().wait()

    consumer = await session.consumer(ORDERS)
    listening = asyncio.create_task(consumer.listen(handle))
    await asyncio.wait_for(began.wait(), 30)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await consumer.close()
    consumer = await session.consumer(ORDERS)
    async for message in consumer:
        assert (message.body(), message.redelivered) == ("one", True)
        await consumer.close()  # and with that the loop ends


async def test_6_2_7_what_a_closed_consumer_received_is_still_its_sessions(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial("archive")
    plain, other = connection.session(), await (await dial()).session().consumer(ORDERS, prefetch=1)
    for mode in KEEPING:
        session = connection.session(mode)
        await plain.producer(ORDERS).send("ahead of the others")
        assert (await _next(other)).body() == "ahead of the others"
        await other.close()
        for body in ("mine", "yours"):
            await plain.producer(ORDERS).send(body)
        async with await session.consumer(ORDERS) as consumer:
            message = await _next(consumer)
        assert message.body() == "mine"
        other = await (await dial()).session().consumer(ORDERS, prefetch=1)
        assert (await _next(other)).body() == "yours"  # it had not seen this one; no consumer gets "mine"
        await _acknowledge(session, message)
        assert await _left(plain) == []
        await plain.producer(ORDERS).send("again")
        await other.close()
        async with await session.consumer(ORDERS) as consumer:
            assert (await _next(consumer)).body() == "again"
        await _give_back(session)
        other = await (await dial()).session().consumer(ORDERS, prefetch=1)
        again = await _next(other)
        assert (again.body(), again.redelivered) == ("again", True)
        async with await session.durable_consumer(NEWS, "kept") as subscriber:
            await plain.producer(NEWS).send("goal")
            message = await _next(subscriber)
        with pytest.raises(message_errors.IllegalState):
            await session.unsubscribe("kept")
        await _acknowledge(session, message)
        await session.unsubscribe("kept")
        assert not session.closing


async def test_6_2_7_a_commit_without_a_reply_is_not_reported_as_rolled_back(
    dial: conftest.Dial, connect: fixtures.Connect
):
    async with conftest.serving(connect):
        connection = await dial()
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        await connection.session().producer(ORDERS).send("there is one")
    await session.producer(ORDERS).send("in doubt")
    connection.in_doubt_s = 0.1
    with pytest.raises(errors.TimedOut, match="may still be"):
        await session.commit()


async def test_8_2_what_is_there_now_is_all_that_waits(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    """Also what the dispatcher has to read from the log first, and more than it holds at one time."""
    producer = (await dial()).session().producer(ORDERS)
    await asyncio.gather(*(producer.send(f"{number}") for number in range(2500)))
    consumer = await (await dial()).session().consumer(ORDERS, prefetch=100)
    count = 0
    while await consumer.receive_nowait() is not None:
        count += 1
    assert count == 2500


async def test_6_2_2_a_temporary_destination_is_its_connections(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    owner, stranger = await dial(), (await dial("stranger")).session()
    first = owner.session()
    queue, topic = await first.temporary_queue(), await first.temporary_topic()
    await first.close()
    session = owner.session()
    await session.producer(queue).send("kept")
    consumer = await session.consumer(queue)
    assert (await _next(consumer)).body() == "kept"
    for foreign in (queue, destinations.queue(queue.name), topic, destinations.topic(topic.name)):
        with pytest.raises(errors.Forbidden):
            await stranger.consumer(foreign)
    received = await session.consumer(topic)
    await stranger.producer(topic).send("for you")
    assert (await _next(received)).body() == "for you"
    with pytest.raises(errors.MusterError):
        await session.connection.request(
            protocol.AttachConsumer(owner.name, 99, str(topic), subscription="x", durable=True, shared=True)
        )
    with pytest.raises(message_errors.IllegalState):
        await session.delete_temporary(queue)
    await consumer.close()
    await session.delete_temporary(queue)
    with pytest.raises(errors.Forbidden):
        await session.delete_temporary(ORDERS)
