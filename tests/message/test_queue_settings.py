"""Settings of single queues, and messages that are scheduled for later."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.bus import api
from muster.bus.memory import network, streams
from muster.core import errors
from muster.message import destinations, messages, protocol, settings
from muster.message import errors as message_errors
from muster.message.client import api as client_api
from muster.message.client import consumers
from muster.message.dispatcher import dispatcher as dispatcher_module
from muster.message.dispatcher.log import message_log
from muster.testing import fixtures, virtual_clock
from tests.message import conftest

ORDERS, OTHER = destinations.queue("orders-1"), destinations.queue("other")
HOUR_S = 3600.0


@contextlib.asynccontextmanager
async def _connected(
    connect: fixtures.Connect,
    message_settings: settings.MessageSettings | None = None,
    name: str = "dispatcher",
) -> AsyncIterator[client_api.Connection]:
    """A connection to a dispatcher with these settings."""
    async with conftest.serving(connect, name, message_settings) as started:
        await started.acting.wait()
        async with client_api.Connection(await connect("client")) as connection:
            yield connection


async def _text(consumer: consumers.Consumer) -> str:
    message = await consumer.receive(30)
    assert message is not None
    return str(message.body())


async def _fail(connection: client_api.Connection, queue: destinations.Destination) -> None:
    """Receive a message once and roll back."""
    session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
    consumer = await session.consumer(queue, prefetch=1)
    await _text(consumer)
    await session.rollback()
    await session.close()


def _queue(**fields: object) -> settings.MessageSettings:
    entry = settings.QueueSettings(name="orders-*", **fields)  # type: ignore[arg-type]
    return settings.MessageSettings(queues=(entry,))


async def test_a_queue_has_its_own_dead_letters_and_number_of_deliveries(
    connect: fixtures.Connect,
):
    expected = _queue(dead_letters="orders-dead", max_deliveries=1)
    async with _connected(connect, expected) as connection:
        session = connection.session()
        for queue in (ORDERS, OTHER):
            await session.producer(queue).send("chairs")
            await _fail(connection, queue)
        dead = await session.consumer(destinations.queue("orders-dead"))
        message = await dead.receive(30)
        assert message is not None
        assert message.properties[messages.DEAD_FROM] == "queue:orders-1"
        assert await _text(await session.consumer(OTHER)) == "chairs"  # it has ten


@pytest.fixture
def virtual_connect(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> fixtures.Connect:
    """Connections without brokers, in virtual time."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)
    return simulated_network.connect  # type: ignore[return-value]


@pytest.mark.virtual_time
@pytest.mark.parametrize("found_by", ["delivery", "consumer", "search", "search of a full log"])
async def test_expired_messages_move_to_the_queue_for_them(
    virtual_connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch, found_by: str
):
    if found_by == "search of a full log":
        monkeypatch.setattr(message_log.MessageLog, "is_short_of_room", lambda *_: True)
    async with _connected(virtual_connect, _queue(expired="late", expiry_s=5)) as connection:
        session = connection.session()
        early = await session.consumer(ORDERS, prefetch=1) if found_by == "consumer" else None
        if early is not None:
            await session.producer(ORDERS).send("first")  # the others wait behind it
        await session.producer(ORDERS).send("without a time to live")
        await session.producer(ORDERS, ttl_s=4).send("with one")
        await session.producer(OTHER).send("kept")
        if found_by.startswith("search"):
            await asyncio.sleep(5 + dispatcher_module.SWEEP_S)
        else:
            await asyncio.sleep(6)
            consumer = early or await session.consumer(ORDERS)
            assert await consumer.receive_nowait() is None
        late = await session.consumer(destinations.queue("late"))
        actual = {}
        for _ in range(3 if early else 2):
            message = await late.receive(1)
            assert message is not None
            actual[message.body()] = message
        assert set(actual) - {"first"} == {"without a time to live", "with one"}
        assert {message.properties[messages.DEAD_REASON] for message in actual.values()} == {"expired"}
        assert await _text(await session.consumer(OTHER)) == "kept"


def test_settings_of_queues_that_cannot_work_are_refused():
    for fields in ({"name": ""}, {"name": "a", "expiry_s": -1.0}, {"name": "*", "expired": "late"}):
        with pytest.raises(errors.InvalidInput):
            settings.QueueSettings(**fields)
    chosen = settings.MessageSettings(
        queues=(settings.QueueSettings(name="a*", dead_letters="x"), settings.QueueSettings(name="*"))
    )
    assert chosen.queue("ab").dead_letters == "x"
    assert chosen.queue("b").dead_letters == chosen.queue("dead-letters").dead_letters == "dead-letters"


async def test_queues_that_clients_may_not_create_do_not_exist(connect: fixtures.Connect):
    named = settings.QueueSettings(name="orders-1", dead_letters="orders-dead")
    strict = settings.MessageSettings(create_queues=False, queues=(named, settings.QueueSettings(name="*")))
    async with _connected(connect, strict) as connection:
        session = connection.session()
        await session.producer(ORDERS).send("chairs")
        for text in ("orders-dead", "dead-letters"):
            await session.consumer(destinations.queue(text))
        await session.producer(await session.temporary_queue()).send("an answer")
        for unknown in (
            session.producer(OTHER).send("chairs"),
            session.producer(OTHER).send("chairs", persistent=False),
            session.consumer(OTHER),
            anext(session.browse(OTHER)),
            connection.request(protocol.MoveMessages(ORDERS.name, str(OTHER))),
        ):
            with pytest.raises(message_errors.InvalidDestination, match="there is no queue"):
                await unknown
        assert await _text(await session.consumer(ORDERS)) == "chairs"


def test_the_example_in_the_guide_is_valid():
    guide = Path(__file__).parents[2] / "docs" / "guides" / "jms.md"
    (example,) = re.findall(r"```text\n(\[\[message\.queues.*?)```", guide.read_text(), re.DOTALL)
    (entry,) = tomllib.loads(example)["message"]["queues"]
    assert settings.QueueSettings(**entry).expired


async def test_scheduled_messages_are_listed_and_cancelled(
    dispatcher: object, connect: fixtures.Connect, dial: conftest.Dial
):
    connection = await dial()
    session = connection.session()
    for number in range(3):
        await session.producer(ORDERS, delay_s=HOUR_S * (3 - number)).send(f"{number}")
    await session.producer(destinations.topic("news"), delay_s=HOUR_S).send("news")
    listed = (await connection.request(protocol.ListScheduled())).scheduled
    assert [row.destination for row in listed].count("queue:orders-1") == 3
    ours = (await connection.request(protocol.ListScheduled(str(ORDERS)))).scheduled
    assert [row.delivery_time_ms for row in ours] == sorted(row.delivery_time_ms for row in ours)
    after = (ours[0].delivery_time_ms, ours[0].number)
    assert (await connection.request(protocol.ListScheduled(str(ORDERS), after))).scheduled == ours[1:]
    assert (await connection.request(protocol.CancelScheduled(ours[0].number))).count == 1
    assert (await connection.request(protocol.CancelScheduled(ours[0].number))).count == 0
    assert (await connection.request(protocol.CancelScheduled(id=ours[1].id or ""))).count == 1
    assert (await connection.request(protocol.ListScheduled(str(ORDERS)))).scheduled == ours[2:]
    with pytest.raises(errors.InvalidInput):
        await connection.request(protocol.CancelScheduled())
    again = client_api.Connection(await connect("other"))
    async with again:
        assert len((await again.request(protocol.ListScheduled(str(ORDERS)))).scheduled) == 1


@pytest.mark.virtual_time
async def test_a_cancelled_message_stays_cancelled(virtual_connect: fixtures.Connect):
    """A later dispatcher does not deliver it, and another delay ends as usual."""
    async with _connected(virtual_connect) as connection:
        for text in ("cancelled", "delivered"):
            await connection.session().producer(ORDERS, delay_s=60).send(text)
        first = (await connection.request(protocol.ListScheduled())).scheduled[0]
        assert (await connection.request(protocol.CancelScheduled(first.number))).count == 1
    async with _connected(virtual_connect, name="second") as connection:
        consumer = await connection.session().consumer(ORDERS)
        message = await consumer.receive(100)
        assert message is not None
        assert message.body() == "delivered"
        assert await consumer.receive(100) is None


async def test_only_the_sender_and_administrators_cancel(connect: fixtures.Connect):
    def may(identity: str, action: str, subject: str) -> bool:
        return identity in ("client", "boss", "dispatcher") or action in ("browse", "sub")

    async with conftest.serving(connect, may=may) as started, contextlib.AsyncExitStack() as stack:
        await started.acting.wait()
        sender, reader, boss = [
            await stack.enter_async_context(client_api.Connection(await connect(identity)))
            for identity in ("client", "reader", "boss")
        ]
        for destination in (ORDERS, destinations.topic("news")):
            await sender.session().producer(destination, delay_s=HOUR_S).send("x")
        rows = (await reader.request(protocol.ListScheduled())).scheduled
        assert len(rows) == 2
        for row in rows:
            with pytest.raises(errors.Forbidden):
                await reader.request(protocol.CancelScheduled(row.number))
        assert (await boss.request(protocol.CancelScheduled(rows[0].number))).count == 1
        assert (await sender.request(protocol.CancelScheduled(rows[1].number))).count == 1


@pytest.mark.virtual_time
async def test_scheduled_messages_that_a_caller_may_not_see_are_not_read_from_the_log(
    virtual_connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    def may(identity: str, action: str, subject: str) -> bool:
        return identity != "viewer" or (action == "browse" and subject == OTHER.name)

    async with (
        conftest.serving(virtual_connect, may=may) as started,
        client_api.Connection(await virtual_connect("client")) as sender,
        client_api.Connection(await virtual_connect("viewer")) as viewer,
    ):
        await started.acting.wait()
        for number in range(20):
            await sender.session().producer(ORDERS, delay_s=HOUR_S).send(f"{number}")
        await sender.session().producer(OTHER, delay_s=HOUR_S).send("visible")
        reads: list[int] = []
        get = streams.SimulatedStream.get

        async def counted(stream: streams.SimulatedStream, sequence: int) -> api.StoredMessage:
            reads.append(sequence)
            return await get(stream, sequence)

        monkeypatch.setattr(streams.SimulatedStream, "get", counted)
        (row,) = (await viewer.request(protocol.ListScheduled())).scheduled
        assert (row.destination, len(reads)) == (str(OTHER), 1)
        assert (await viewer.request(protocol.CancelScheduled(id="unknown"))).count == 0
        with pytest.raises(errors.Forbidden):
            await viewer.request(protocol.CancelScheduled(id=row.id or ""))
        assert len(reads) == 1
        page = (await sender.request(protocol.ListScheduled(limit=5))).scheduled
        assert (len(page), len(reads)) == (5, 6)
