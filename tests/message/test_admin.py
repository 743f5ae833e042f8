"""Queue administration: requests are atomic, and only permitted ones are executed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import time
from typing import Any

import pytest

from muster.bus import api
from muster.bus.rpc import admission, requests
from muster.bus.streams import stream as streams_stream
from muster.core import errors, subjects
from muster.message import destinations, messages, partitions, protocol, selectors, settings
from muster.message import errors as message_errors
from muster.message.client import api as client_api
from muster.message.client import consumers
from muster.message.dispatcher import dispatcher, leadership
from muster.message.dispatcher.admin import queue_admin
from muster.message.dispatcher.log import ledger
from muster.testing import eventually, fixtures
from muster.trust.permissions import roles
from tests.message import conftest

ORDERS = destinations.queue("orders")
SECRET = destinations.topic("secret/plans")


def _may(identity: str, action: str, subject: str) -> bool:
    return not subject.startswith("topic.secret.")


async def test_no_client_reaches_a_forbidden_topic_through_the_dispatcher(
    dial: conftest.Dial, connect: fixtures.Connect, bus: api.Bus
):
    subscription = await bus.subscribe(SECRET.subject)
    async with conftest.serving(connect, may=_may):
        connection = await dial()
        session = connection.session()
        producer = session.producer(ORDERS)
        with pytest.raises(errors.Forbidden):
            await session.producer(SECRET).send("straight")
        await producer.send(messages.TextMessage("moved", properties={messages.DEAD_FROM: str(SECRET)}))
        for to, refusal in ((str(SECRET), errors.Forbidden), (None, errors.InvalidInput)):
            with pytest.raises(refusal):
                await connection.request(protocol.MoveMessages("orders", to))
        due_ms = time.time_ns() // 1_000_000 + 100
        disguised = messages.MessageMeta(
            kind="t", destination=str(SECRET), delivery_time_ms=due_ms, persistent=True
        )
        raw = messages.encode_meta(disguised).decode()
        await connection.submit([protocol.SendMessage(str(ORDERS), raw, b"delayed")])
        consumer = await session.consumer(ORDERS)
        got = [await consumer.receive(30) for _ in range(2)]
        assert [message.body() for message in got if message] == ["moved", "delayed"], (
            "it is where it was, and goes on"
        )
        with pytest.raises(errors.TimedOut):
            await subscription.next(timeout_s=0.1)
        await connection.close()


async def test_what_cannot_be_moved_stays_with_its_consumers(dial: conftest.Dial, connect: fixtures.Connect):
    async with conftest.serving(connect):
        connection = await dial()
        session = connection.session(client_api.AcknowledgeMode.CLIENT)
        consumer = await session.consumer(ORDERS, "n = 2")
        for number in range(3):
            await session.producer(ORDERS).send(messages.TextMessage(f"{number}", properties={"n": number}))
        assert await consumer.receive(30) is not None
        with pytest.raises(errors.MusterError):
            await connection.request(protocol.MoveMessages("orders", "topic:a/*"))
        with pytest.raises(errors.InvalidInput):
            await connection.request(protocol.MoveMessages("orders"))
        others = await session.consumer(ORDERS)
        got = [await others.receive(30) for _ in range(2)]
        assert [message.body() for message in got if message] == ["0", "1"]
        await connection.close()


async def test_an_unknown_queue_is_named_with_a_similar_one(dial: conftest.Dial, connect: fixtures.Connect):
    async with conftest.serving(connect):
        connection = await dial()
        session = connection.session()
        await session.producer(ORDERS).send("waits")
        misspelt = destinations.queue("ordres")
        for request in (protocol.PurgeQueue("ordres"), protocol.MoveMessages("ordres", "queue:later")):
            with pytest.raises(message_errors.InvalidDestination, match="no queue 'ordres'") as refused:
                await connection.request(request)
            assert refused.value.hint == "did you mean orders?"
        with pytest.raises(errors.NotFound, match="no queue 'ordres'"):
            await anext(aiter(session.browse(misspelt, must_exist=True)))
        assert [message async for message in session.browse(misspelt)] == [], "as JMS clients expect"
        dead = destinations.queue(destinations.DEAD_LETTERS)
        assert [message async for message in session.browse(dead, must_exist=True)] == []
        assert (await connection.request(protocol.PurgeQueue("orders"))).count == 1
        assert [message async for message in session.browse(ORDERS, must_exist=True)] == [], (
            "empty, and exists"
        )
        await connection.close()


async def test_queues_tell_their_rates(
    monkeypatch: pytest.MonkeyPatch, connect: fixtures.Connect, dial: conftest.Dial
):
    monkeypatch.setattr(dispatcher, "WATCH_S", 0.1)
    async with conftest.serving(connect):
        await _rates(await dial())


async def _rates(connection: client_api.Connection) -> None:
    session = connection.session()
    producer = session.producer(ORDERS)
    consumer = await session.consumer(ORDERS)

    async def in_and_out() -> bool:
        await producer.send("one")
        assert await consumer.receive(30) is not None
        (row,) = (await connection.request(protocol.ListQueues())).queues
        return row.in_per_s > 0 and row.out_per_s > 0

    await eventually.eventually(in_and_out, timeout_s=30)
    await connection.close()


async def test_a_confirmed_acknowledgement_counts_although_another_consumer_has_the_message(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    """As when a new dispatcher knows of the second consumer before it knows of the first."""
    first, second = await dial(), await dial()
    session = first.session(client_api.AcknowledgeMode.CLIENT)
    consumer = await session.consumer(ORDERS, prefetch=1)
    await session.producer(ORDERS).send("one")
    message = await consumer.receive(30)
    assert message is not None
    other = await second.session(client_api.AcknowledgeMode.CLIENT).consumer(ORDERS)
    (arguments,) = session.unacknowledged.values()
    assert isinstance(consumer, consumers.DispatchedConsumer)
    await first.request(protocol.StopDelivery(first.name, [consumer.number]))
    await first.request(protocol.ReleaseMessages(first.name, {arguments.key: [arguments.sequence]}))
    again = await other.receive(30)
    assert again is not None
    assert again.redelivered
    await message.acknowledge()
    await second.close()
    assert [browsed.body() async for browsed in session.browse(ORDERS)] == []


async def test_no_client_acknowledges_messages_of_another_client(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    news = destinations.topic("news")
    reader = await dial("reader")
    consumer = await reader.session().durable_consumer(news, "all")
    await consumer.close()
    every = [number << 10 for number in range(1, 50)]
    await (await dial()).session().producer(news).send("one")
    for other in (await dial("other"), await dial("reader", "other")):
        await other.submit([], {ledger.subscription_key("client", "reader", "all"): every})
    again = await reader.session().durable_consumer(news, "all")
    message = await again.receive(30)
    assert message is not None, "another consumer acknowledged it"


async def test_a_repeated_work_is_done_once_however_much_came_between(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ledger, "WORKS_KEPT", 3)
    slow, busy = await dial(), await dial()
    await slow.session().producer(ORDERS).send("once")
    for number in range(5):
        await busy.session().producer(destinations.queue("other")).send(f"{number}")
    meta = messages.encode_meta(messages.MessageMeta(kind="t")).decode()
    for number in (1, 1):  # the answer got lost; and the first comes once more, late, behind a second
        await slow.shared.home.request(
            protocol.SharedWork(slow.shared.name, number, [protocol.SendMessage(str(ORDERS), meta, b"again")])
        )
        await slow.session().producer(destinations.queue("other")).send("another")
    assert [message.body() async for message in busy.session().browse(ORDERS)] == ["once"]


async def test_a_delayed_message_that_was_released_is_forgotten_by_the_next_dispatcher(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    """The one before died before it had deleted it from the log."""

    async def never(stream: streams_stream.NatsStream, sequence: int) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(streams_stream.NatsStream, "delete", never)
        async with conftest.serving(connect, "first"):
            connection = await dial()
            session = connection.session()
            consumer = await session.consumer(ORDERS)
            await session.producer(ORDERS).send("late", delay_s=0.1)
            assert await consumer.receive(30) is not None
            await connection.outbox.wait_idle()
    async with conftest.serving(connect, "second"):
        await session.producer(ORDERS).send("more")
        message = await consumer.receive(30)
        assert message is not None
        assert message.body() == "more"
        stream = await (await connect("looker")).open_stream(partitions.stream(0))
        assert await stream.last_for(partitions.LogSubjects().delay) is None
        await connection.close()


async def test_an_unused_queue_is_forgotten_and_starts_empty(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatcher, "WATCH_S", 0.05)
    monkeypatch.setattr(queue_admin, "FORGET_S", 0.0)
    names = [f"for-{number}" for number in range(20)]
    message_settings = settings.MessageSettings(checkpoint_records=10)
    async with conftest.serving(connect, "first", message_settings):
        connection = await dial()
        session = connection.session()
        await session.producer(ORDERS).send("waits")
        for name in names:
            await session.producer(destinations.queue(name)).send("done")
            async with await session.consumer(destinations.queue(name)) as consumer:
                assert await consumer.receive(30) is not None
        held = await session.consumer(destinations.queue("consumed"))

        async def listed() -> list[str]:
            await session.producer(ORDERS).send("another record: a checkpoint comes after some")
            return [row.queue for row in (await connection.request(protocol.ListQueues())).queues]

        async def only_orders() -> bool:
            return await listed() == ["orders"]

        await eventually.eventually(only_orders)
        await session.producer(destinations.queue(names[0])).send("again")
        await session.producer(destinations.queue("consumed")).send("to whom it may concern")
        assert await held.receive(30) is not None
        await connection.outbox.wait_idle()
    async with conftest.serving(connect, "second", message_settings):
        consumer = await session.consumer(destinations.queue(names[0]))
        message = await consumer.receive(30)
        assert message is not None
        assert message.body() == "again"
        others = [await session.consumer(destinations.queue(name)) for name in names]
        assert [await item.receive_nowait() for item in others] == [None] * 20
        assert (await anext(aiter(session.browse(ORDERS)))).body() == "waits"
        await connection.close()


async def test_a_queue_is_not_forgotten_while_the_log_has_something_of_it(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    """No checkpoint has cut what is done: a queue that began anew would hand it out again."""
    looks = 0
    forget = queue_admin.QueueAdmin.forget_idle_queues

    async def look(self: queue_admin.QueueAdmin, now: float) -> None:
        nonlocal looks
        await forget(self, now)
        looks += 1

    monkeypatch.setattr(dispatcher, "WATCH_S", 0.05)
    monkeypatch.setattr(queue_admin, "FORGET_S", -1.0)
    monkeypatch.setattr(queue_admin.QueueAdmin, "forget_idle_queues", look)
    async with conftest.serving(connect):
        connection = await dial()
        session = connection.session()
        await session.producer(ORDERS).send("done")
        async with await session.consumer(ORDERS) as consumer:
            assert await consumer.receive(30) is not None
        looks = 0
        await eventually.eventually(lambda: looks > 1)
        assert await (await session.consumer(ORDERS)).receive_nowait() is None
        await connection.close()


def test_a_viewer_may_look_at_queues_and_do_nothing_to_them():
    allowed = roles.limits(roles.Role.VIEWER, "looker").pub.allow

    def may(subject: str) -> bool:
        return any(subjects.matches(pattern, subject) for pattern in allowed)

    assert may(protocol.read_subject("looker"))
    assert not may(protocol.request_subject("looker"))
    assert not may(protocol.notify_subject("looker"))


@pytest.mark.parametrize("reads", ["a queue", "a list"])
async def test_browsing_uses_up_the_share_of_its_identity_only(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, reads: str
):
    """Clients wait then, and send their request again."""
    ann = (await dial(identity="ann")).session()
    bob = (await dial(identity="bob")).session()
    for number in range(50):
        await bob.producer(ORDERS).send(messages.TextMessage("x", properties={"n": number}))
    admission.of_loop(asyncio.get_running_loop()).share = 0.02

    def refused() -> int:
        return requests.refusals().get((protocol.PART, "rate"), 0)

    async def search(session: client_api.Session) -> list[object]:
        return [message.body() async for message in session.browse(ORDERS, "n = 3 OR n = -1")]

    async def search_forever() -> None:
        while True:
            if reads == "a queue":
                await search(ann)
            else:
                await ann.connection.request(protocol.ListQueues())

    before = refused()
    searching = asyncio.create_task(search_forever())
    await eventually.eventually(lambda: refused() > before)
    async with asyncio.timeout(10):
        assert await search(bob) == ["x"]
    searching.cancel()
    await asyncio.wait([searching])


async def test_selectors_use_up_the_share_of_their_identity_only(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    ann, bob = await dial(identity="ann"), (await dial(identity="bob")).session()
    admission.of_loop(asyncio.get_running_loop()).share = 0.02

    def refused() -> int:
        return requests.refusals().get((protocol.PART, "rate"), 0)

    async def attach_forever() -> None:
        for number in itertools.count():
            selector = " OR ".join(f"p{clause} = {number}" for clause in range(200))
            with contextlib.suppress(errors.MusterError):
                await ann.request(protocol.AttachConsumer(ann.name, number, str(ORDERS), selector=selector))

    before = refused()
    attaching = asyncio.create_task(attach_forever())
    await eventually.eventually(lambda: refused() > before)
    async with asyncio.timeout(10):
        await bob.producer(ORDERS).send(messages.TextMessage("x"))
    attaching.cancel()
    await asyncio.wait([attaching])


async def test_browsing_gives_others_their_turn(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    session = (await dial()).session()
    producer = session.producer(ORDERS)
    await asyncio.gather(*(producer.submit(messages.TextMessage("x")) for _ in range(100)))
    accepts, turn, in_turn = selectors.accepts, 0, collections.Counter[int]()

    def count(*arguments: Any) -> bool:
        in_turn[turn] += 1
        return accepts(*arguments)

    async def pass_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(selectors, "accepts", count)
    turns = asyncio.create_task(pass_turns())
    assert [message async for message in session.browse(ORDERS, "n = 3")] == []
    turns.cancel()
    await asyncio.wait([turns])
    assert in_turn.total() == 100
    assert max(in_turn.values()) <= queue_admin.AT_ONCE
