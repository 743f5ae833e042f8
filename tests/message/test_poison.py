"""Headers that no client library writes: only that message is refused or dropped."""

from __future__ import annotations

import pytest

from muster.bus import api
from muster.core import errors
from muster.message import codec, destinations, messages, protocol, selectors
from muster.message.client import api as client_api
from muster.message.dispatcher import leadership
from muster.testing import eventually
from tests.message import conftest

NEWS = destinations.topic("news")
POISON = (
    "",
    "not JSON",
    "[]",
    '{"t":"t","props":{"a":[1]}}',
    '{"t":"t","props":{"a":{"b":1}}}',
    '{"t":"t","props":{"a":"zz"},"kinds":{"a":"d"}}',
    '{"t":"t","props":{"a":"zz"},"kinds":{"a":"?"}}',
    '{"t":"t","pri":1e99}',
    '{"t":"t","exp":99999999999999999999}',
    '{"t":"t","due":-1}',
    '{"t":"t","at":99999999999999999999}',
    '{"t":"t","reply":"queue:"}',
    '{"t":"t","to":"topic:a/*"}',
    '{"t":"?"}',
    '{"t":"m"}',
    '{"t":"s","body":"??"}',
    '{"t":"t","amqp":"?"}',
    '{"t":"t","amqp":"t!"}',
    "~",
    "~t.",
    "~?x.AAAA",
    "~tAAAA.!",
)
BODY = b'["x"]'


@pytest.mark.parametrize("raw", POISON)
def test_what_cannot_be_read_is_an_error_of_ours(raw: str):
    amqp_codec = pytest.importorskip("muster.message.amqp_format.message_codec")

    def read(raw: str) -> messages.MessageMeta | None:
        try:
            return codec.meta_of(BODY, {messages.HEADER: raw})
        except errors.MusterError:
            return None

    meta = read(raw)
    if meta is None:
        return
    index: selectors.SelectorIndex[int] = selectors.SelectorIndex()
    for number, selector in enumerate(("a = 'x'", "a > 1", "a LIKE 'x%'", "JMSPriority > 3")):
        index.add(number, selector)
        selectors.accepts(selector, meta)
    assert list(index.matching(meta)) is not None
    for attempt in (lambda: codec.message_from_meta(meta, BODY), lambda: amqp_codec.encode(meta, BODY, 0, 1)):
        try:
            attempt()
        except errors.MusterError:
            continue


async def test_poisoned_headers_stop_no_consumer(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, bus: api.Bus
):
    connection = await dial("reader")
    session = connection.session()
    consumers = [
        await session.durable_consumer(NEWS, "few", "a = 'x'"),
        await session.durable_consumer(NEWS, "large", "a IS NULL OR a = 'x'"),
        await session.consumer(NEWS, "a IS NULL OR a > 1 OR a = 'x'"),
    ]
    orders = await session.consumer(destinations.queue("orders"), "a IS NULL OR a = 'x'")
    for raw in POISON:
        await bus.publish(NEWS.subject, BODY, headers={messages.HEADER: raw})
        for to in (NEWS, destinations.queue("orders")):
            try:
                await connection.submit([protocol.SendMessage(str(to), raw, BODY)])
            except errors.MusterError:
                continue
    await bus.flush()
    epoch = (await connection.request(protocol.Ping(connection.name))).epoch
    good = messages.TextMessage("good", properties={"a": "x"})
    for to in (NEWS, destinations.queue("orders")):
        await session.producer(to).send(good)
    for consumer in (*consumers, orders):

        async def receives_good() -> bool:
            message = await consumer.receive(1)  # noqa: B023
            return message is not None and message.body() == "good"

        await eventually.eventually(receives_good)
    assert (await connection.request(protocol.Ping(connection.name))).epoch == epoch, (
        "the same dispatcher goes on"
    )


async def test_what_no_consumer_can_read_is_a_dead_letter_that_can_be_looked_at(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    connection = await dial()
    session = connection.session()
    orders, dead = destinations.queue("orders"), destinations.queue(destinations.DEAD_LETTERS)
    raw = messages.encode_meta(
        messages.MessageMeta(kind="m", destination=str(orders), persistent=True)
    ).decode()
    await connection.submit([protocol.SendMessage(str(orders), raw, BODY)])
    await session.producer(orders).send("good")
    message = await (await session.consumer(orders, prefetch=1)).receive(30)
    assert message is not None, "what it cannot read costs a consumer no credit"
    assert message.body() == "good"

    async def buried() -> list[messages.JmsMessage]:
        return [item async for item in session.browse(dead)]

    (shown,) = await eventually.eventually(buried)
    taken = await (await session.consumer(dead)).receive(30)
    assert taken is not None, "it does not die again and again"
    for actual in (shown, taken):
        assert actual.body() == BODY
        assert actual.properties[messages.DEAD_FROM] == "queue:orders"
        assert "not JSON of the expected type" in str(actual.properties[messages.DEAD_REASON])


async def test_the_largest_message_can_become_a_dead_letter(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    """Its header grows by the reason: a message that did not fit any more would stay where no consumer is."""
    connection = await dial()
    session, orders = connection.session(), destinations.queue("orders")
    producer = session.producer(orders)
    payload = bytes(protocol.LARGE_BYTES)
    large = messages.BytesMessage(payload, properties={"p": "p" * protocol.HEADER_BYTES_MAX})
    with pytest.raises(errors.LimitExceeded, match="properties and headers"):
        await producer.send(large)
    large = messages.BytesMessage(payload, properties={"p": "p" * (protocol.HEADER_BYTES_MAX - 400)})
    await producer.send(large)
    consumer = await connection.session(client_api.AcknowledgeMode.CLIENT).consumer(orders)
    assert await consumer.receive(10) is not None
    dead = await session.consumer(destinations.queue(destinations.DEAD_LETTERS))
    page = await connection.request(protocol.BrowseQueue("orders"))
    numbers = {"q:orders": [page.messages[0].sequence]}
    await connection.notify(protocol.ReleaseMessages(connection.name, numbers, reason="\u20ac" * 9999))
    letter = await dead.receive(10)
    assert letter is not None
    assert letter.body() == payload
    assert len(str(letter.properties[messages.DEAD_REASON])) == 1_000
