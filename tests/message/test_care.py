"""What people do to queues: it happens as a whole, and only where they may."""

from __future__ import annotations

import time

import pytest

from muster.bus import api
from muster.core import errors, subjects
from muster.message import client, delivering, destinations, messages, protocol
from muster.testing import fixtures
from muster.trust import roles
from tests.message import conftest

ORDERS = destinations.queue("orders")
SECRET = destinations.topic("secret/plans")


def _may(identity: str, action: str, subject: str) -> bool:
    return not subject.startswith("topic.secret.")


async def test_nobody_reaches_a_forbidden_topic_by_way_of_the_dispatcher(
    dial: conftest.Dial, connect: fixtures.Connect, bus: api.Bus
):
    heard = await bus.subscribe(SECRET.subject)
    async with conftest.serving(connect, may=_may):
        connection = await dial()
        session = connection.session()
        producer = session.producer(ORDERS)
        with pytest.raises(errors.Forbidden):
            await session.producer(SECRET).send("straight")
        await producer.send(messages.TextMessage("moved", properties={delivering.FROM: str(SECRET)}))
        for to in (str(SECRET), None):
            with pytest.raises(errors.Forbidden):
                await connection.ask(protocol.Move("orders", to))
        due_ms = time.time_ns() // 1_000_000 + 100
        disguised = messages.Meta(kind="t", destination=str(SECRET), delivery_time_ms=due_ms, persistent=True)
        raw = messages.encode_meta(disguised).decode()
        await connection.submit([protocol.Send(str(ORDERS), raw, b"delayed")])
        consumer = await session.consumer(ORDERS)
        got = [await consumer.receive(30) for _ in range(2)]
        assert [one.body() for one in got if one] == ["moved", "delayed"], "it is where it was, and goes on"
        with pytest.raises(errors.TimedOut):
            await heard.next(timeout_s=0.1)
        await connection.close()


async def test_what_cannot_be_moved_stays_with_its_consumers(dial: conftest.Dial, connect: fixtures.Connect):
    async with conftest.serving(connect):
        connection = await dial()
        session = connection.session(client.Mode.CLIENT)
        consumer = await session.consumer(ORDERS, "n = 2")
        for number in range(3):
            await session.producer(ORDERS).send(messages.TextMessage(f"{number}", properties={"n": number}))
        assert await consumer.receive(30) is not None
        with pytest.raises(errors.MusterError):
            await connection.ask(protocol.Move("orders", "topic:a/*"))
        with pytest.raises(errors.InvalidInput):
            await connection.ask(protocol.Move("orders"))
        others = await session.consumer(ORDERS)
        got = [await others.receive(30) for _ in range(2)]
        assert [one.body() for one in got if one] == ["0", "1"]
        await connection.close()


def test_a_viewer_may_look_at_queues_and_do_nothing_to_them():
    allowed = roles.limits(roles.Role.VIEWER, "looker").pub.allow

    def may(subject: str) -> bool:
        return any(subjects.matches(pattern, subject) for pattern in allowed)

    assert may(protocol.read_subject("looker"))
    assert not may(protocol.ask_subject("looker"))
    assert not may(protocol.tell_subject("looker"))
