"""JMS 2.0, chapters 4 to 8: domains, connections, sending and receiving, on a real broker and dispatcher."""

from __future__ import annotations

import asyncio
import time

import pytest

from muster.bus import api
from muster.bus.client import client
from muster.core import errors
from muster.message import destinations, messages, partitions, settings
from muster.message import errors as message_errors
from muster.message.client import api as client_api
from muster.message.client import consumers as client_consumers
from muster.message.client import outbox
from muster.message.dispatcher import backlog_reader, leadership
from muster.message.dispatcher.log import journal, ledger, message_cache
from muster.testing import eventually, fixtures
from tests.bus import test_client
from tests.message import conftest

ORDERS = destinations.queue("orders")
NEWS = destinations.topic("news/sport")


async def _texts(consumer: client_consumers.Consumer, count: int) -> list[object]:
    bodies: list[object] = []
    for _ in range(count):
        message = await consumer.receive(30)
        assert message is not None, f"only {bodies} came"
        bodies.append(message.body())
    return bodies


async def _shared(consumers: tuple[client_consumers.Consumer, ...], count: int) -> list[object]:
    """``count`` messages, each from any of the consumers."""
    bodies: list[object] = []
    while len(bodies) < count:
        got = [await consumer.receive(0.1) for consumer in consumers]
        bodies += [message.body() for message in got if message is not None]
    return bodies


async def test_7_7_non_persistent_topic_needs_no_dispatcher_and_meets_plain_clients(
    dial: conftest.Dial, bus: api.Bus
):
    session = (await dial()).session()
    consumer = await session.consumer(NEWS, "place = 'home'")
    plain = await bus.subscribe(NEWS.subject)
    producer = session.producer(NEWS, persistent=False)
    await producer.send(messages.TextMessage("lost", properties={"place": "away"}))
    await producer.send(messages.TextMessage("won", properties={"place": "home"}))
    assert await _texts(consumer, 1) == ["won"]
    assert [(await plain.next(timeout_s=30)).data for _ in range(2)] == [b"lost", b"won"]
    await bus.publish(NEWS.subject, b"drawn", headers={"place": "home"})
    assert await _texts(consumer, 1) == ["drawn"]


async def test_4_1_queue_survives_and_shares(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session()
    producer = session.producer(ORDERS)
    for number in range(10):
        await producer.send(f"order {number}")
    first = await (await dial()).session().consumer(ORDERS, prefetch=1)
    second = await (await dial()).session().consumer(ORDERS, prefetch=1)
    actual: set[object] = set()
    while len(actual) < 10:
        for consumer in (first, second):
            if (message := await consumer.receive(0.2)) is not None:
                actual.add(message.body())
    assert actual == {f"order {number}" for number in range(10)}


async def test_8_3_3_a_durable_subscription_receives_messages_sent_while_it_was_inactive(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, bus: api.Bus
):
    away = await dial("reader")
    consumer = await away.session().durable_consumer(NEWS, "all", "size > 1")
    await consumer.close()
    await away.close()
    session = (await dial()).session()
    producer = session.producer(NEWS)
    for size in (1, 2, 3):
        await producer.send(messages.TextMessage(f"size {size}", properties={"size": size}))
    back = await (await dial("reader")).session().durable_consumer(NEWS, "all", "size > 1")
    assert await _texts(back, 2) == ["size 2", "size 3"]
    assert await back.receive_nowait() is None
    await producer.send(messages.TextMessage("live", properties={"size": 9}))
    assert await _texts(back, 1) == ["live"]


async def test_4_2_topics_are_named_by_paths_and_by_tags_with_wildcards(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial("student")).session()
    every = destinations.topic("Course=*,Session=HPJava")
    consumers = [
        await session.consumer(every),
        await session.durable_consumer(every, "java"),
        await session.durable_consumer(destinations.topic("Course/CPS616/>"), "course"),
    ]
    producer = (await dial()).session().producer()
    await producer.send("C++", to=destinations.topic("Course=CPS616,Session=C++"))
    await producer.send("by tags", to=destinations.topic("Course=CPS616,Session=HPJava"))
    await producer.send("by path", to=destinations.topic("Course/CPS714/Session/HPJava"))
    assert [await _texts(consumer, 2) for consumer in consumers] == [
        ["by tags", "by path"],
        ["by tags", "by path"],
        ["C++", "by tags"],
    ]


async def test_8_3_3_durable_subscriptions_are_no_consumers_of_the_broker(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, connect: fixtures.Connect
):
    session = (await dial("reader")).session()
    consumers = [await session.durable_consumer(NEWS, f"{number}") for number in range(5)]
    await session.producer(NEWS).send("one")
    assert [await _texts(consumer, 1) for consumer in consumers] == 5 * [["one"]]
    looking = await connect("looking")
    assert (await looking.storage.call(f"STREAM.INFO.{partitions.stream(0)}"))["state"]["consumer_count"] == 0


async def test_4_10_who_lost_the_log_cannot_write_to_it(bus: api.Bus):
    stream = await bus.stream(api.StreamSettings(partitions.stream(0), partitions.LogSubjects().all))
    failed: list[errors.MusterError] = []
    old = journal.Journal(stream, 0, lambda record, last, placed: None)
    old.add(journal.JournalItem([], ledger.LogRecord(consumed=["q:x"])))
    await old._store(old._next_batch())
    new = journal.Journal(stream, old.head, lambda record, last, placed: None)
    new.add(journal.JournalItem([], ledger.LogRecord(consumed=["q:y"])))
    await new._store(new._next_batch())
    old.add(journal.JournalItem([], ledger.LogRecord(consumed=["q:z"]), failed=failed.append))
    with pytest.raises(errors.Conflict):
        await old._store(old._next_batch())
    assert [type(error) for error in failed] == [errors.NotConnected], "its client asks the next one"
    assert (await stream.state()).last_sequence == 2


async def test_4_10_a_batch_whose_acknowledgement_is_lost_is_stored_once(
    bus: client.NatsBus, monkeypatch: pytest.MonkeyPatch
):
    """Without it the dispatcher gives up after `journal.STORE_S`, and reads its log again."""
    subjects = partitions.LogSubjects()
    stream = await bus.stream(api.StreamSettings(partitions.stream(0), subjects.all))
    writer = journal.Journal(stream, 0, lambda record, last, placed: None)
    queue = destinations.queue("a")
    body = bytes(300 << 10)
    copy = journal.JournalMessage(queue, messages.MessageMeta(), "{}", body, subjects.queue(queue.name))
    writer.add(journal.JournalItem([copy] * 3))  # larger than a page
    test_client.lose_acknowledgements(bus, monkeypatch, 1)
    await writer._store(writer._next_batch())
    assert (writer.head, (await stream.state()).messages) == (3, 3)


async def test_6_2_7_commit_is_atomic_and_rollback_brings_back_in_order(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    feeding = (await dial()).session().producer(ORDERS)
    for number in range(4):
        await feeding.send(f"{number}")
    session = (await dial()).session(client_api.AcknowledgeMode.TRANSACTED)
    consumer = await session.consumer(ORDERS)
    done = session.producer(destinations.queue("done"))
    assert await _texts(consumer, 2) == ["0", "1"]
    await done.send("never")
    await session.rollback()
    again = [await consumer.receive(30) for _ in range(2)]
    assert [(m.body(), m.redelivered, m.delivery_count) for m in again if m] == [
        ("0", True, 2),
        ("1", True, 2),
    ]
    await done.send("both")
    await session.commit()
    watcher = (await dial()).session()
    assert [m.body() async for m in watcher.browse(destinations.queue("done"))] == ["both"]
    await consumer.close()
    rest = await (await dial()).session().consumer(ORDERS)
    assert await _texts(rest, 2) == ["2", "3"]


async def test_7_8_and_7_9_priority_expiry_and_delay(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session()
    producer = session.producer(ORDERS)
    await producer.send("gone", ttl_s=0.001)
    await producer.send("low", priority=1)
    await producer.send("high", priority=9)
    await asyncio.sleep(0.01)  # pace: a time to live passes
    consumer = await session.consumer(ORDERS)
    assert await _texts(consumer, 2) == ["high", "low"]
    sent_at = time.monotonic()
    await producer.send("late", delay_s=0.3)
    assert await _texts(consumer, 1) == ["late"]
    assert time.monotonic() - sent_at >= 0.3
    both = messages.TextMessage("both")
    await producer.send(both, ttl_s=60, delay_s=30)
    assert both.expiration_ms == both.timestamp_ms + 60_000, "a time to live counts from the sending"


@pytest.mark.parametrize("destination", [ORDERS, NEWS], ids=["queue", "topic"])
async def test_7_9_a_message_that_expires_at_its_consumer_is_not_received(
    dispatcher: leadership.DispatcherLeadership,
    dial: conftest.Dial,
    destination: destinations.Destination,
    monkeypatch: pytest.MonkeyPatch,
):
    session = (await dial()).session()
    consumer = await session.consumer(destination)
    producer = (await dial()).session().producer(destination)
    await producer.send("gone", ttl_s=60)
    await eventually.eventually(lambda: consumer._arrived)
    in_an_hour_ms = messages.now_ms() + 3_600_000
    monkeypatch.setattr(messages, "now_ms", lambda: in_an_hour_ms)
    await producer.send("stays")
    assert await _texts(consumer, 1) == ["stays"]
    if destination is ORDERS:  # the expired message is acknowledged, too

        async def empty() -> bool:
            return [message async for message in session.browse(ORDERS)] == []

        await eventually.eventually(empty)


async def test_3_5_11_failed_deliveries_end_as_a_dead_letter(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session(client_api.AcknowledgeMode.TRANSACTED)
    consumer = await session.consumer(ORDERS)
    await (await dial()).session().producer(ORDERS).send("poison")
    for _ in range(10):
        assert await consumer.receive(30) is not None
        await session.rollback()
    dead = await (await dial()).session().consumer(destinations.queue(destinations.DEAD_LETTERS))
    message = await dead.receive(30)
    assert message is not None
    assert message.body() == "poison"
    assert "10 times" in str(message.properties["JMS_MUSTER_DEAD_REASON"])


async def test_6_1_2_client_ids_are_exclusive(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    first = await dial("only")
    with pytest.raises(message_errors.InvalidClientId):
        await dial("only")
    await first.close()
    await dial("only")


async def test_6_2_10_unacknowledged_messages_go_to_others_when_their_connection_dies(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    dying = await dial()
    session = dying.session(client_api.AcknowledgeMode.CLIENT)
    consumer = await session.consumer(ORDERS)
    await (await dial()).session().producer(ORDERS).send("one")
    assert await _texts(consumer, 1) == ["one"]
    other = await (await dial()).session().consumer(ORDERS)
    await dying.close()
    message = await other.receive(30)
    assert message is not None
    assert message.redelivered


async def test_4_10_a_new_dispatcher_takes_over_with_nothing_lost(
    dial: conftest.Dial, connect: fixtures.Connect
):
    async with conftest.serving(connect, "first") as first:
        await first.acting.wait()
        connection = await dial("keeper")
        session = connection.session(client_api.AcknowledgeMode.CLIENT)
        consumer = await session.consumer(ORDERS)
        durable = await session.durable_consumer(NEWS, "all")
        sending = await dial()
        producer = sending.session().producer()
        for number in range(5):
            await producer.send(f"{number}", to=ORDERS)
            await producer.send(f"n{number}", to=NEWS)
        message = await consumer.receive(30)
        assert message is not None
        await message.acknowledge()
    async with conftest.serving(connect, "second"):
        assert await _texts(consumer, 4) == ["1", "2", "3", "4"]
        assert await _texts(durable, 5) == [f"n{number}" for number in range(5)]
        await producer.send("more", to=ORDERS)
        assert await _texts(consumer, 1) == ["more"]
        await connection.close()
        await sending.close()


async def test_6_2_2_temporary_queue_serves_requests(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    asking = await dial()
    session = asking.session()
    replies = await session.temporary_queue()
    answers = await session.consumer(replies)
    request = messages.TextMessage("how many?")
    request.reply_to = replies
    await session.producer(ORDERS).send(request)
    serving = (await dial()).session()
    message = await (await serving.consumer(ORDERS)).receive(30)
    assert message is not None
    assert message.reply_to == replies
    await serving.producer(message.reply_to).send("four")
    assert await _texts(answers, 1) == ["four"]
    with pytest.raises(errors.Forbidden):
        await serving.consumer(replies)


async def test_3_5_9_a_group_stays_with_its_consumer(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    producer = (await dial()).session().producer(ORDERS)
    first = await (await dial()).session().consumer(ORDERS)
    second = await (await dial()).session().consumer(ORDERS)
    for number in range(10):
        await producer.send(messages.TextMessage(str(number), properties={"JMSXGroupID": "g"}))

    async def whoever_has_some() -> client_consumers.Consumer | None:
        for consumer in (first, second):
            if await consumer.receive(0.1) is not None:
                return consumer
        return None

    taker = await eventually.eventually(whoever_has_some)
    assert taker is not None
    assert len(await _texts(taker, 9)) == 9
    assert await (second if taker is first else first).receive(0.1) is None


async def test_8_3_1_no_local(dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial):
    connection = await dial("me")
    session = connection.session()
    consumer = await session.durable_consumer(NEWS, "others", no_local=True)
    tap = await session.consumer(NEWS, no_local=True)
    await session.producer(NEWS).send("mine")
    await (await dial()).session().producer(NEWS).send("yours")
    assert await _texts(consumer, 1) == ["yours"]
    assert await _texts(tap, 1) == ["yours"]


async def test_8_3_4_shared_durable_subscription(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    consumer = await (await dial()).session().shared_durable_consumer(NEWS, "share", prefetch=1)
    two = await (await dial()).session().shared_durable_consumer(NEWS, "share", prefetch=1)
    with pytest.raises(message_errors.IllegalState):
        await (await dial()).session().shared_durable_consumer(NEWS, "share", "size > 1")
    producer = (await dial()).session().producer(NEWS)
    for number in range(6):
        await producer.send(str(number))
    actual = await _shared((consumer, two), 6)
    assert sorted(map(str, actual)) == [str(number) for number in range(6)]


async def test_8_3_2_shared_non_durable_subscription(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    consumer = await (await dial()).session().shared_consumer(NEWS, "share")
    two = await (await dial()).session().shared_consumer(NEWS, "share")
    producer = (await dial()).session().producer(NEWS, persistent=False)
    for number in range(20):
        await producer.send(str(number))
    actual = await _shared((consumer, two), 20)
    assert len(set(actual)) == 20


async def test_8_3_3_one_active_consumer_and_unsubscribe(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial("solo")).session()
    consumer = await session.durable_consumer(NEWS, "all")
    with pytest.raises(message_errors.IllegalState):
        await session.durable_consumer(NEWS, "all")
    with pytest.raises(message_errors.IllegalState):
        await session.unsubscribe("all")
    await consumer.close()
    await session.unsubscribe("all")
    with pytest.raises(message_errors.InvalidDestination):
        await session.unsubscribe("all")


async def test_8_3_3_plain_messages_reach_a_durable_subscription_once(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, bus: api.Bus
):
    connection = await dial("reader")
    wide = await connection.session().durable_consumer(destinations.topic("news/>"), "wide")
    exact = await connection.session().durable_consumer(NEWS, "exact")
    await wide.close()
    await exact.close()
    await bus.publish(NEWS.subject, b"said plainly")
    for pattern, name in ((destinations.topic("news/>"), "wide"), (NEWS, "exact")):
        consumer = await connection.session().durable_consumer(pattern, name)
        assert await _texts(consumer, 1) == ["said plainly"]
        assert await consumer.receive_nowait() is None


async def test_6_2_10_recover_redelivers_in_order(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session(client_api.AcknowledgeMode.CLIENT)
    producer = session.producer(ORDERS)
    for number in range(4):
        await producer.send(str(number))
    consumer = await session.consumer(ORDERS)
    assert await _texts(consumer, 2) == ["0", "1"]
    await session.recover()
    assert await _texts(consumer, 4) == ["0", "1", "2", "3"]
    await session.recover()
    message = await consumer.receive(30)
    assert message is not None
    assert message.delivery_count == 3
    await message.acknowledge()


async def test_4_1_6_a_browser_takes_nothing_and_selects(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session()
    producer = session.producer(ORDERS)
    for number in range(5):
        await producer.send(messages.TextMessage(str(number), properties={"n": number}))
    assert [message.body() async for message in session.browse(ORDERS, "n > 2")] == ["3", "4"]
    assert await _texts(await session.consumer(ORDERS), 5) == ["0", "1", "2", "3", "4"]


async def test_4_1_6_a_browser_goes_on_while_others_consume(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    """It may show what is taken meanwhile; it shows all that stays, each once and in order."""
    monkeypatch.setattr(client_api, "BROWSE_PAGE", 100)
    total = 250  # several pages of the dispatcher's answers
    session = (await dial()).session()
    producer = session.producer(ORDERS, persistent=False)
    for number in range(total):
        await producer.send(messages.TextMessage(f"{number:03}", properties={"n": number % 2}))
    consumer = await (await dial()).session().consumer(ORDERS, "n = 1")
    shown: list[str] = []
    async for message in session.browse(ORDERS):
        shown.append(str(message.body()))
        if len(shown) == 1:
            await _texts(consumer, total // 2)
            await consumer.session.connection.outbox.wait_idle()
    assert shown == sorted(set(shown))
    assert {f"{number:03}" for number in range(0, total, 2)} <= set(shown)
    assert len(shown) < total, "what was taken before its page was asked for is not shown"
    assert [str(browsed.body()) async for browsed in session.browse(ORDERS)] == [
        f"{number:03}" for number in range(0, total, 2)
    ]


async def test_4_1_6_a_browser_sees_what_its_session_did_before(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session()
    producer = session.producer(ORDERS, persistent=False)
    consumer = await session.consumer(ORDERS, "n = 0")
    for number in range(20):
        await producer.send(messages.TextMessage(str(number), properties={"n": 0}))
        await producer.send(messages.TextMessage(f"kept {number}", properties={"n": 1}))
        assert await _texts(consumer, 1) == [str(number)]
        shown = [message.body() async for message in session.browse(ORDERS)]
        assert shown == [f"kept {other}" for other in range(number + 1)]


async def test_a_backlog_larger_than_the_memory_is_delivered_whole(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(message_cache, "LAST_MAX", 5)
    monkeypatch.setattr(backlog_reader, "READ_AHEAD", 10)
    async with conftest.serving(connect, message_settings=settings.MessageSettings(checkpoint_records=10)):
        connection = await dial()
        session = connection.session(client_api.AcknowledgeMode.CLIENT)
        producer = session.producer(ORDERS)
        for start in range(0, 100, 20):
            await asyncio.gather(*(producer.send(str(start + number)) for number in range(20)))
        consumer = await session.consumer(ORDERS, prefetch=5)
        for number in range(100):
            message = await consumer.receive(30)
            assert message is not None
            assert message.body() == str(number)
            await message.acknowledge()
        await connection.close()


async def test_a_full_log_refuses_messages_and_takes_acknowledgements(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    async with conftest.serving(connect, max_bytes=2 << 20):
        connection = await dial()
        monkeypatch.setattr(outbox, "FULL_S", 0.3)
        session = connection.session(client_api.AcknowledgeMode.CLIENT)
        producer = session.producer(ORDERS)

        async def fill() -> None:
            for _ in range(200):
                await producer.send(bytes(20_000))

        with pytest.raises(errors.LimitExceeded):
            await fill()
        consumer = await session.consumer(ORDERS)
        while (message := await consumer.receive(1)) is not None:
            await message.acknowledge()

        async def accepted() -> bool:
            try:
                await producer.send("there is room again")
            except errors.LimitExceeded:
                return False
            return True

        await eventually.eventually(accepted, timeout_s=30)
        await connection.close()
