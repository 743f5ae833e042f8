"""JMS 2.0, chapters 4 to 8: further clauses, the same as in the tests of Qpid JMS and the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from muster.bus import api
from muster.core import errors
from muster.message import destinations, messages, protocol
from muster.message import errors as message_errors
from muster.message.client import api as client_api
from muster.message.client import consumers
from muster.message.dispatcher import leadership
from muster.testing import eventually, fixtures
from tests.message import conftest

ORDERS = destinations.queue("orders")
NEWS = destinations.topic("news/sport")


async def _text(consumer: consumers.Consumer) -> object:
    message = await consumer.receive(30)
    assert message is not None, "nothing came"
    return message.body()


async def test_6_1_and_6_2_closed_objects_raise_an_error(dial: conftest.Dial):
    connection = await dial()
    session = connection.session()
    consumer = await session.consumer(NEWS)
    await consumer.close()
    with pytest.raises(message_errors.IllegalState):
        await consumer.receive(1)
    producer = session.producer(NEWS, persistent=False)
    await session.close()
    await session.close()
    with pytest.raises(message_errors.IllegalState):
        await producer.send("x")
    with pytest.raises(message_errors.IllegalState):
        session.producer(NEWS)
    await connection.close()
    with pytest.raises(message_errors.IllegalState):
        await connection.session().consumer(NEWS)


async def test_6_1_a_connection_keeps_nothing_of_sessions_that_are_closed(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    for _ in range(3):
        async with connection.session() as session:
            await session.producer(ORDERS).send("one")
            assert await (await session.consumer(ORDERS)).receive(10) is not None
    assert not connection._closers
    assert not connection._unacknowledged
    assert not connection.home._consumers


async def test_6_2_7_and_6_2_10_each_mode_has_its_own_verbs(dial: conftest.Dial):
    connection = await dial()
    for mode in (
        client_api.AcknowledgeMode.AUTO,
        client_api.AcknowledgeMode.CLIENT,
        client_api.AcknowledgeMode.DUPS_OK,
    ):
        with pytest.raises(message_errors.IllegalState):
            await connection.session(mode).commit()
        with pytest.raises(message_errors.IllegalState):
            await connection.session(mode).rollback()
    with pytest.raises(message_errors.IllegalState):
        await connection.session(client_api.AcknowledgeMode.TRANSACTED).recover()


async def test_6_2_7_a_transaction_may_be_larger_than_a_message_of_the_bus(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session(client_api.AcknowledgeMode.TRANSACTED)
    done = destinations.queue("done"), destinations.queue("told")
    await (await dial()).session().producer(ORDERS).send("go")
    assert await _text(await session.consumer(ORDERS)) == "go"
    producer = session.producer()

    async def send(count: int, size: int) -> None:
        for number in range(count):
            await producer.send(f"{number} " + "x" * size, to=done[number % 2])

    await send(120, 300_000)
    with pytest.raises(message_errors.TransactionRolledBack, match="the maximum is"):
        await session.commit()
    await send(12, 300_000)
    await session.rollback()
    await send(12, 300_000)
    await session.commit()
    watching = (await dial()).session()
    for place, out in enumerate(done):
        actual = [str(message.body()).split()[0] async for message in watching.browse(out)]
        assert actual == [str(number) for number in range(place, 12, 2)]
    await session.close()


async def test_4_2_and_6_2_7_topics_copies_wildcards_and_rollback(dial: conftest.Dial):
    transacted = (await dial()).session(client_api.AcknowledgeMode.TRANSACTED)
    first = await transacted.consumer(NEWS)
    session = (await dial()).session()
    second = await session.consumer(destinations.topic("news/*"))
    producer = (await dial()).session().producer(NEWS, persistent=False)
    for number in range(3):
        await producer.send(f"{number}")
    assert [await _text(second) for _ in range(3)] == ["0", "1", "2"]
    assert [await _text(first) for _ in range(2)] == ["0", "1"]
    await transacted.rollback()
    again = [await first.receive(30) for _ in range(3)]
    assert [(message.body(), message.redelivered) for message in again if message] == [
        ("0", True),
        ("1", True),
        ("2", False),
    ]
    await transacted.commit()


async def test_6_2_10_dups_ok_acknowledges_at_the_latest_when_it_closes(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    producer = connection.session().producer(ORDERS)
    for number in range(5):
        await producer.send(f"{number}")
    session = connection.session(client_api.AcknowledgeMode.DUPS_OK)
    consumer = await session.consumer(ORDERS)
    assert [await _text(consumer) for _ in range(5)] == ["0", "1", "2", "3", "4"]
    await session.close()
    assert [message async for message in connection.session().browse(ORDERS)] == []


async def test_7_9_a_delayed_message_is_not_browsed_before_its_time(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session()
    await session.producer(ORDERS).send("much later", delay_s=3600)
    await session.producer(ORDERS).send("now")
    assert [message.body() async for message in session.browse(ORDERS)] == ["now"]


async def test_6_2_9_2_delayed_messages_of_a_session_keep_their_order(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    producer = (await dial()).session().producer(ORDERS, delay_s=0.2)
    consumer = await (await dial()).session().consumer(ORDERS)
    for number in range(200):
        producer.submit(f"{number}")
        if number % 10 == 9:
            await asyncio.sleep(0.001)  # pace: they become due one after the other
    assert [await _text(consumer) for _ in range(200)] == [f"{number}" for number in range(200)]


async def test_8_3_3_and_8_3_4_subscriptions_in_use_and_changed(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial("clerk")
    session = connection.session()
    producer = (await dial()).session().producer(NEWS)
    consumer = await session.durable_consumer(NEWS, "mine", "n = 1")
    with pytest.raises(message_errors.IllegalState):
        await session.unsubscribe("mine")
    await consumer.close()
    await producer.send(messages.TextMessage("for the old one", properties={"n": 1}))
    changed = await session.durable_consumer(NEWS, "mine", "n = 2")
    await producer.send(messages.TextMessage("for the new one", properties={"n": 2}))
    assert await _text(changed) == "for the new one"
    await changed.close()

    shared = await session.shared_durable_consumer(NEWS, "ours", "n = 1")
    with pytest.raises(message_errors.IllegalState):
        await session.shared_durable_consumer(NEWS, "ours", "n = 2")
    with pytest.raises(errors.MusterError):
        await session.durable_consumer(NEWS, "ours")  # the name of a shared one
    await shared.close()
    await session.unsubscribe("ours")
    await session.unsubscribe("mine")
    with pytest.raises(message_errors.InvalidDestination):
        await session.unsubscribe("mine")


async def test_8_3_2_a_shared_name_stands_for_one_topic_and_one_selector(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    here, there = (await dial()).session(), (await dial()).session()
    first = await here.shared_consumer(NEWS, "group", "n = 1")
    second = await there.shared_consumer(NEWS, "group", "n = 1")
    for topic, selector in ((NEWS, "n = 2"), (NEWS, None), (destinations.topic("news/>"), "n = 1")):
        with pytest.raises(message_errors.IllegalState, match="another topic or selector"):
            await there.shared_consumer(topic, "group", selector)
    await first.close()
    with pytest.raises(message_errors.IllegalState):
        await here.shared_consumer(NEWS, "group", "n = 2")
    await second.close()
    await here.shared_consumer(NEWS, "group", "n = 2")

    await (await dial("clerk")).session().shared_consumer(NEWS, "group", "n = 3")
    await there.shared_durable_consumer(NEWS, "group", "n = 4")


async def test_a_message_whose_listener_fails_after_its_consumer_was_closed_goes_to_the_others(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    first = await connection.session().shared_consumer(NEWS, "group")
    begun, closed = asyncio.Event(), asyncio.Event()

    async def fail(_: messages.JmsMessage) -> None:
        begun.set()
        await closed.wait()
        raise ValueError("a failure of the application")

    listening = asyncio.create_task(first.listen(fail))
    await connection.session().producer(NEWS, persistent=False).send("news")
    await asyncio.wait_for(begun.wait(), 30)
    second = await connection.session().shared_consumer(NEWS, "group")
    await first.close()
    closed.set()
    await listening
    message = await second.receive(30)
    assert message is not None
    assert message.redelivered


async def test_8_3_2_what_waits_at_a_consumer_that_closes_reaches_those_that_share_its_subscription(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    first, second, third = [await connection.session().shared_consumer(NEWS, "group") for _ in range(3)]
    producer = (await dial()).session().producer(NEWS, persistent=False)
    for number in range(30):
        await producer.send(messages.TextMessage(str(number)))
    await eventually.eventually(lambda: sum(len(each._arrived) for each in (first, second, third)) == 30)
    await first.close()
    await second.close()
    assert {await _text(third) for _ in range(30)} == set(map(str, range(30)))
    await third.close()


async def test_8_3_2_a_shared_name_is_free_when_its_client_is_gone(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    gone = await dial()
    await gone.session().shared_consumer(NEWS, "group", "n = 1")
    await gone.close(lost=True)
    await (await dial()).session().shared_consumer(NEWS, "group", "n = 2")


async def test_8_3_2_a_new_dispatcher_knows_who_shares_what(dial: conftest.Dial, connect: fixtures.Connect):
    connection, other = await dial(), await dial()
    async with conftest.serving(connect, "first"):
        consumer = await connection.session().shared_consumer(NEWS, "group", "n = 1")
    async with conftest.serving(connect, "second") as second:
        await second.acting.wait()
        await connection.request(protocol.Ping(connection.name))
        with pytest.raises(message_errors.IllegalState):
            await other.session().shared_consumer(NEWS, "group", "n = 2")
        producer = other.session().producer(NEWS, persistent=False)
        await producer.send(messages.TextMessage("still heard", properties={"n": 1}))
        assert await _text(consumer) == "still heard"
        for client in (connection, other):
            await client.close()


async def test_8_3_2_the_first_client_at_a_new_dispatcher_keeps_the_name(
    dial: conftest.Dial, connect: fixtures.Connect
):
    late = await dial()
    complaints: list[errors.MusterError] = []
    late.on_error = complaints.append
    async with conftest.serving(connect, "first"):
        shared = await late.session().shared_consumer(NEWS, "group", "n = 1")
        durable = await late.session().shared_durable_consumer(NEWS, "kept", "n = 1")
        orders = await late.session().consumer(ORDERS)
        hello = late.home._registration
        await hello.acquire()  # it does not come back at once
    async with conftest.serving(connect, "second"):
        quick = (await dial()).session()
        await quick.shared_consumer(NEWS, "group", "n = 2")
        await quick.shared_durable_consumer(NEWS, "kept", "n = 2")
        hello.release()
        await eventually.eventually(lambda: len(complaints) == 2, timeout_s=30)
        assert (shared.closed, durable.closed, orders.closed) == (True, True, False)
        await late.session().producer(ORDERS).send("the rest goes on")
        assert await _text(orders) == "the rest goes on"
        for client in (late, quick.connection):
            await client.close()


async def test_8_3_3_and_8_3_4_of_two_who_ask_at_once_both_are_judged(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial("clerk")).session()

    async def outcome(requests: Awaitable[consumers.Consumer]) -> bool:
        try:
            await requests
        except message_errors.IllegalState:
            return False
        return True

    unshared = [session.durable_consumer(NEWS, "mine") for _ in range(3)]
    assert sorted(await asyncio.gather(*map(outcome, unshared))) == [False, False, True]
    shared = [session.shared_durable_consumer(NEWS, "ours", f"n = {number}") for number in range(3)]
    assert sorted(await asyncio.gather(*map(outcome, shared))) == [False, False, True]
    alike = await asyncio.gather(*(session.shared_durable_consumer(NEWS, "alike") for _ in range(3)))
    producer = session.producer(NEWS)
    for number in range(6):
        await producer.send(f"{number}")
    async with asyncio.timeout(30):
        actual: set[object] = set()
        while len(actual) < 6:
            got = [await consumer.receive(0.1) for consumer in alike]
            actual |= {message.body() for message in got if message is not None}


async def test_8_3_3_a_client_id_with_a_colon_is_no_other_client(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    first = await (await dial("a")).session().durable_consumer(NEWS, "b:c")
    second = await (await dial("a:b")).session().durable_consumer(NEWS, "c", "n = 1")
    await (await dial()).session().producer(NEWS).send(messages.TextMessage("both", properties={"n": 1}))
    assert [await _text(first), await _text(second)] == ["both", "both"]


async def test_6_2_a_consumer_whose_maker_gave_up_takes_nothing(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, bus: api.Bus
):
    session = (await dial()).session()
    making = asyncio.create_task(session.consumer(ORDERS))

    def give_up(message: api.Message) -> None:
        if isinstance(protocol.decode_request(message.data), protocol.AttachConsumer):
            making.cancel()

    async with await bus.subscribe("muster.message.from.*.request", handler=give_up):
        (made,) = await asyncio.gather(making, return_exceptions=True)
    if isinstance(made, consumers.Consumer):  # the dispatcher was quicker
        await made.close()
    await session.producer(ORDERS).send("for the next one")
    assert await _text(await session.consumer(ORDERS)) == "for the next one"


async def test_8_3_2_a_shared_subscription_ends_with_its_last_consumer(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session, sending = (await dial()).session(), await dial()
    producer = sending.session().producer(NEWS, persistent=False)
    await (await session.shared_consumer(NEWS, "group")).close()
    await producer.send("nobody hears it")
    await sending.bus.flush()
    later = await session.shared_consumer(NEWS, "group")
    await producer.send("heard")
    assert await _text(later) == "heard"
