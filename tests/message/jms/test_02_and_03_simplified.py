"""JMS 2.0, bodies of a type (2.8), read-only messages (3.10), asynchronous sends (7.3), flow control."""

from __future__ import annotations

import asyncio

import pytest

from muster.core import errors
from muster.message import codec, destinations, messages, values
from muster.message import errors as message_errors
from muster.message.client import api, flow_control, topic_consumers
from muster.message.dispatcher import leadership
from muster.testing import eventually
from tests.message import conftest

QUEUE = destinations.queue("orders")
TOPIC = destinations.topic("news")


async def test_8_2_receive_body_of_another_type_leaves_the_message(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session()
    await session.producer(QUEUE).send("text")
    consumer = await session.consumer(QUEUE)
    with pytest.raises(message_errors.FormatError, match="str, not a bytes"):
        await consumer.receive_body(bytes, 5)
    assert await consumer.receive_body(str, 5) == "text"
    await consumer.close()
    transacted = (await dial()).session(api.AcknowledgeMode.TRANSACTED)
    for text in ("wrong", "right"):
        await session.producer(QUEUE).send(text)
    consumer = await transacted.consumer(QUEUE)
    with pytest.raises(message_errors.FormatError):
        await consumer.receive_body(bytes, 5)
    assert await consumer.receive_body(str, 5) == "right"  # the other is part of the transaction
    await transacted.rollback()
    assert await consumer.receive_body(str, 5) == "wrong"


def _received(message: messages.JmsMessage) -> messages.JmsMessage:
    return codec.message_from_meta(*message.meta())


@pytest.mark.parametrize(
    ("message", "write"),
    [
        (messages.TextMessage("a"), lambda value: setattr(value, "text", "b")),
        (messages.BytesMessage(b"a"), lambda value: setattr(value, "data", b"b")),
        (messages.MapMessage({"a": 1}), lambda value: value.items.set("a", 2)),
        (messages.StreamMessage(["a"]), lambda value: value.write("b")),
        (messages.ObjectMessage(["a"]), lambda value: setattr(value, "value", ["b"])),
    ],
)
def test_3_10_a_received_body_is_read_only_until_it_is_cleared(message, write):
    actual = _received(message)
    with pytest.raises(message_errors.NotWriteable):
        write(actual)
    assert actual.body() == message.body()
    actual.clear_body()
    write(actual)
    assert actual.body() != message.body()


def test_3_10_received_properties_are_read_only_until_they_are_cleared():
    message = _received(messages.TextMessage("a", properties={"n": 1}))
    with pytest.raises(message_errors.NotWriteable):
        message.properties["n"] = 2
    with pytest.raises(message_errors.NotWriteable):
        del message.properties["n"]
    message.clear_properties()
    message.properties["n"] = 2
    assert message.body() == "a", "clearing the properties leaves the body"


def test_3_11_3_a_stream_is_written_then_reset_then_read():
    stream = messages.StreamMessage()
    stream.write(7)
    with pytest.raises(message_errors.NotReadable):
        stream.read(values.JavaType.INT)
    stream.reset()
    assert stream.read(values.JavaType.INT) == 7
    with pytest.raises(message_errors.NotWriteable):
        stream.write(8)


async def test_7_3_listeners_are_notified_of_each_message_in_the_order_of_sending(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session()
    producer = session.producer(QUEUE)
    received: list[tuple[object, errors.MusterError | None]] = []
    sent = [
        producer.submit(f"{number}", listener=lambda message, error: received.append((message.body(), error)))
        for number in range(20)
    ]
    await asyncio.gather(*sent)
    await eventually.eventually(lambda: len(received) == 20)
    assert received == [(f"{number}", None) for number in range(20)]


async def test_7_3_a_listener_gets_the_reason_why_a_message_was_not_accepted(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session = (await dial()).session()
    failures: list[errors.MusterError | None] = []
    temporary = await session.temporary_queue()
    await session.delete_temporary(temporary)
    sending = session.producer(temporary).submit("x", listener=lambda message, error: failures.append(error))
    with pytest.raises(message_errors.InvalidDestination):
        await sending
    await eventually.eventually(lambda: failures)
    assert isinstance(failures[0], errors.MusterError)


async def test_a_slow_consumer_of_a_topic_slows_its_producers_and_misses_nothing(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    sending, receiving = await dial(), await dial()
    consumer = await receiving.session().consumer(TOPIC)
    producer = sending.session().producer(TOPIC, persistent=False)
    await eventually.eventually(lambda: receiving.home.is_registered)  # before it has to report anything
    total = 3 * flow_control.WAITING_SLOW
    sent = 0

    async def send() -> None:
        nonlocal sent
        for number in range(total):
            await producer.send(f"{number}")
            sent += 1
            if number % 50 == 0:
                await sending.bus.flush()  # others get their turn

    working = asyncio.create_task(send())
    await eventually.eventually(lambda: sending.holds.hold_count > 0, timeout_s=30)
    assert sent < total, "the producer waits"
    actual: list[object] = []
    while len(actual) < total:
        message = await consumer.receive(30)
        assert message is not None, f"only {len(actual)} of {total} came"
        actual.append(message.body())
    await working
    assert actual == [f"{number}" for number in range(total)]
    assert isinstance(consumer, topic_consumers.TopicConsumer)
    assert consumer.dropped == 0
