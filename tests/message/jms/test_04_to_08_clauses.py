"""JMS 2.0, chapters 4 to 8: further clauses, the same that Qpid JMS is asked through the gateway."""

from __future__ import annotations

import pytest

from muster.core import errors
from muster.message import client, consuming, destinations, faults, messages, service
from tests.message import conftest

ORDERS = destinations.queue("orders")
NEWS = destinations.topic("news/sport")


async def _text(consumer: consuming.Consumer) -> object:
    message = await consumer.receive(10)
    assert message is not None, "nothing came"
    return message.body()


async def test_6_1_and_6_2_what_is_closed_says_so(dial: conftest.Dial):
    connection = await dial()
    session = connection.session()
    consumer = await session.consumer(NEWS)
    await consumer.close()
    with pytest.raises(faults.IllegalState):
        await consumer.receive(1)
    producer = session.producer(NEWS, persistent=False)
    await session.close()
    await session.close()
    with pytest.raises(faults.IllegalState):
        await producer.send("x")
    with pytest.raises(faults.IllegalState):
        session.producer(NEWS)
    await connection.close()
    with pytest.raises(faults.IllegalState):
        await connection.session().consumer(NEWS)


async def test_6_2_7_and_6_2_10_each_mode_has_its_own_verbs(dial: conftest.Dial):
    connection = await dial()
    for mode in (client.Mode.AUTO, client.Mode.CLIENT, client.Mode.DUPS_OK):
        with pytest.raises(faults.IllegalState):
            await connection.session(mode).commit()
        with pytest.raises(faults.IllegalState):
            await connection.session(mode).rollback()
    with pytest.raises(faults.IllegalState):
        await connection.session(client.Mode.TRANSACTED).recover()


async def test_4_2_and_6_2_7_topics_copies_wildcards_and_rollback(dial: conftest.Dial):
    transacted = (await dial()).session(client.Mode.TRANSACTED)
    first = await transacted.consumer(NEWS)
    session = (await dial()).session()
    second = await session.consumer(destinations.topic("news/*"))
    producer = (await dial()).session().producer(NEWS, persistent=False)
    for number in range(3):
        await producer.send(f"{number}")
    assert [await _text(second) for _ in range(3)] == ["0", "1", "2"]
    assert [await _text(first) for _ in range(2)] == ["0", "1"]
    await transacted.rollback()
    again = [await first.receive(10) for _ in range(3)]
    assert [(one.body(), one.redelivered) for one in again if one] == [("0", True), ("1", True), ("2", False)]
    await transacted.commit()


async def test_6_2_10_dups_ok_acknowledges_at_the_latest_when_it_closes(
    dispatcher: service.Service, dial: conftest.Dial
):
    connection = await dial()
    producer = connection.session().producer(ORDERS)
    for number in range(5):
        await producer.send(f"{number}")
    session = connection.session(client.Mode.DUPS_OK)
    consumer = await session.consumer(ORDERS)
    assert [await _text(consumer) for _ in range(5)] == ["0", "1", "2", "3", "4"]
    await session.close()
    assert [message async for message in connection.session().browse(ORDERS)] == []


async def test_7_9_a_delayed_message_is_not_browsed_before_its_time(
    dispatcher: service.Service, dial: conftest.Dial
):
    session = (await dial()).session()
    await session.producer(ORDERS).send("much later", delay_s=3600)
    await session.producer(ORDERS).send("now")
    assert [message.body() async for message in session.browse(ORDERS)] == ["now"]


async def test_8_3_3_and_8_3_4_subscriptions_in_use_and_changed(
    dispatcher: service.Service, dial: conftest.Dial
):
    connection = await dial("clerk")
    session = connection.session()
    producer = (await dial()).session().producer(NEWS)
    consumer = await session.durable_consumer(NEWS, "mine", "n = 1")
    with pytest.raises(faults.IllegalState):
        await session.unsubscribe("mine")
    await consumer.close()
    await producer.send(messages.TextMessage("for the old one", properties={"n": 1}))
    changed = await session.durable_consumer(NEWS, "mine", "n = 2")
    await producer.send(messages.TextMessage("for the new one", properties={"n": 2}))
    assert await _text(changed) == "for the new one"
    await changed.close()

    shared = await session.shared_durable_consumer(NEWS, "ours", "n = 1")
    with pytest.raises(faults.IllegalState):
        await session.shared_durable_consumer(NEWS, "ours", "n = 2")
    with pytest.raises(errors.MusterError):
        await session.durable_consumer(NEWS, "ours")  # the name of a shared one
    await shared.close()
    await session.unsubscribe("ours")
    await session.unsubscribe("mine")
    with pytest.raises(faults.InvalidDestination):
        await session.unsubscribe("mine")


async def test_8_3_2_a_shared_subscription_ends_with_its_last_consumer(dial: conftest.Dial):
    session, sending = (await dial()).session(), await dial()
    producer = sending.session().producer(NEWS, persistent=False)
    await (await session.shared_consumer(NEWS, "group")).close()
    await producer.send("nobody hears it")
    await sending.bus.flush()
    later = await session.shared_consumer(NEWS, "group")
    await producer.send("heard")
    assert await _text(later) == "heard"
