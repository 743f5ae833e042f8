"""The broker sends its replies to the subject that a client names, also into the log of messages."""

from __future__ import annotations

from muster.message import destinations, partitions, settings
from muster.testing import fixtures
from muster.testing.eventually import eventually
from tests.message import conftest

ORDERS = destinations.queue("orders")
NEWS = destinations.topic("news/eu")
FOREIGN = (b"", b'{"stream":"reports", "seq":7}')


def _subjects() -> list[str]:
    log = partitions.LogSubjects()
    return [
        log.layout,
        log.record,
        log.checkpoint,
        log.delay,
        log.shared,
        log.queue("orders"),
        log.queue("unknown"),
        log.topic(NEWS.subject),
        log.body("a" * 32),
        log.sorted(log.queue("orders")),
    ]


async def test_messages_that_are_no_pages_cost_neither_the_log_nor_a_message(
    connect: fixtures.Connect, dial: conftest.Dial
) -> None:
    other = await connect("other")
    made = settings.MessageSettings(checkpoint_records=10)

    async def interfere() -> None:
        for subject in _subjects():
            for data in FOREIGN:
                await other.publish(subject, data)
        await other.flush()

    sent: list[str] = []
    async with conftest.serving(connect, message_settings=made) as first:
        await interfere()
        await first.acting.wait()
        connection = await dial("client")
        session = connection.session()
        producer = session.producer(ORDERS)
        durable = await session.durable_consumer(NEWS, "all")
        for number in range(30):
            await other.publish(partitions.LogSubjects().record, FOREIGN[number % 2])
            await producer.send(f"{number}")
            sent.append(f"{number}")
        await session.producer(NEWS).send("news")
        await interfere()
        assert first.owned, "the dispatcher has not lost its log"
    await interfere()
    async with conftest.serving(connect, "second", message_settings=made) as second:
        await second.acting.wait()
        await interfere()
        assert await conftest.take(await session.consumer(ORDERS), 30) == sent
        assert await conftest.take(durable, 1) == ["news"]
        stream = await other.open_stream(partitions.stream(partitions.HOME))

        async def has_pages_only() -> bool:
            last = (await stream.state()).first_sequence
            return all([message.data[:1] > b"\x7f" async for message in stream.read(last, gaps=True)])

        await eventually(has_pages_only)
        await connection.close()
