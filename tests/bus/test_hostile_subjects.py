"""Messages that the broker delivers and that no client of Muster sends."""

from __future__ import annotations

import asyncio

import pytest

from muster.bus import api
from muster.bus.brokers import broker, config
from muster.bus.client import client
from muster.bus.streams import integrity
from muster.core.telemetry import metrics
from muster.testing.eventually import eventually
from tests.bus import plain_client

MALFORMED = [
    b"\xff",
    b"\xc0\xae",  # an overlong form of a dot
    b"\xed\xa0\x80",  # half a character
    b"a\x7f",
    b"*",
    b">",
    b"a*",
    *(b"a%cb" % byte for byte in range(0x20) if byte not in b"\t\n\r"),
]


@pytest.fixture
async def url(tmp_path):
    async with broker.Broker(config.BrokerConfig(name="b", directory=tmp_path, storage=None)) as running:
        yield running.url


async def test_a_subject_does_not_choose_the_handler(url):
    """The broker separates the words of a line by spaces; other white space is part of a subject."""
    measured = metrics.Metrics()
    async with await client.connect([url], identity="victim", audit_s=0, measure=measured) as bus:
        requests: list[api.Message] = []
        internal: list[api.Message] = []
        await bus.subscribe("muster.inform.from.*.read.any.*", handler=requests.append)
        await bus.subscribe("muster.inform.to.node-1.*", handler=internal.append)
        async with plain_client.connect(url) as mallory:
            subject = b"muster.inform.from.mallory.read.any.update"
            forged = [
                subject + b"%c%d" % (space, number) for space in b"\x0b\x0c\x1c" for number in range(1, 5)
            ]
            await mallory.send(*(plain_client.publish(each, b"forged") for each in forged))
            await mallory.send(*(plain_client.publish(subject, b"forged", each) for each in forged))
            await mallory.send(plain_client.publish(subject, b"genuine"))
        await bus.flush()
        assert internal == []
        assert [message.data for message in requests] == [b"genuine"]
        refused = measured.value("muster_bus_refused_messages_total", reason="malformed-subject")
        assert refused == 2 * len(forged)
        assert bus.statistics().reconnects == 0


@pytest.mark.parametrize("word", MALFORMED)
async def test_a_malformed_subject_costs_its_message_only(url, word, caplog):
    async with await client.connect([url], identity="victim", audit_s=0) as bus:
        received: list[str] = []
        collected: list[bytes] = []
        await bus.subscribe("topic.>", handler=lambda message: received.append(message.subject))
        await bus.subscribe("topic.>", bulk=lambda subjects, _: collected.extend(subjects))
        headers = b"NATS/1.0\r\nA: b\r\n\r\n"
        async with plain_client.connect(url) as mallory:
            await mallory.send(
                plain_client.publish(b"topic.first", b"1"),
                *3 * (plain_client.publish(b"topic." + word, b"MSG topic.forged 1 0\r\n\r\n"),),
                plain_client.publish(b"topic." + word + b".x", b"2", b"", headers),
                plain_client.publish(b"topic.x", b"3", b"reply." + word),
                plain_client.publish(b"topic.x", b"4", b"reply." + word, headers),
                plain_client.publish("topic.Grüße".encode(), b"5", "_R.äpp".encode(), headers),
            )
        await bus.flush()
        assert received == ["topic.first", "topic.Grüße"]
        assert collected == [b"topic.first", "topic.Grüße".encode()]
        assert bus.statistics().reconnects == 0
    refused = [record for record in caplog.records if record.getMessage() == "message-refused"]
    assert len(refused) == 1, "one line, however many arrive"


async def test_a_stored_message_with_a_malformed_subject_stops_no_reader(tmp_path):
    async with (
        broker.Broker(config.BrokerConfig(name="b", directory=tmp_path)) as running,
        await client.connect([running.url], identity="victim", audit_s=0) as bus,
    ):
        stream = await bus.stream(api.StreamSettings("s", subjects=("s.>",), max_bytes=1 << 20, max_age_s=0))
        await stream.publish("s.a", b"1")
        async with plain_client.connect(running.url) as mallory:
            await mallory.send(*(plain_client.publish(b"s." + word, b"x") for word in MALFORMED[:5]))
        assert await stream.publish("s.b", b"7") == 7
        for options in ({}, {"gaps": True}, {"subject": "s.>"}):
            assert [message.sequence async for message in stream.read(1, **options)] == [1, 7]
            async with asyncio.timeout(10), stream.follow(1, **options) as following:
                assert [(await anext(following)).sequence for _ in range(2)] == [1, 7]
        assert await integrity.missing_sequences(bus, "s") == []


async def test_a_repeated_batch_shows_subscribers_no_other_messages(tmp_path):
    """They may receive a repetition, as of every publish that is repeated."""
    async with (
        broker.Broker(config.BrokerConfig(name="b", directory=tmp_path)) as running,
        await client.connect([running.url], identity="a", audit_s=0) as bus,
    ):
        stream = await bus.stream(api.StreamSettings("s", subjects=("s.>",), max_bytes=1 << 20, max_age_s=0))
        received: list[api.Message] = []
        await bus.subscribe("s.>", handler=received.append)
        batch = [api.OutgoingMessage("s.a", b"%d" % n, {"n": str(n)}, message_id=str(n)) for n in range(3)]
        for _ in range(2):
            assert await stream.publish_batch(batch) == 3
        await bus.flush()
        assert {(message.data, message.headers.get("n")) for message in received} == {
            (message.data, message.headers["n"]) for message in batch
        }


async def test_replies_to_foreign_subjects_are_refused_with_one_line(url, caplog):
    """Else a client could fill the log of a service, and so displace what it holds."""
    async with await client.connect([url], identity="victim", audit_s=0) as bus:
        service = await bus.subscribe(
            "muster.inform.from.*.read.x", handler=lambda message: message.respond(b"")
        )
        async with plain_client.connect(url) as mallory:
            subject = b"muster.inform.from.mallory.read.x"
            replies = [b"_R.@inform.ann.s.%d" % number for number in range(100)]
            await mallory.send(*(plain_client.publish(subject, b"", reply) for reply in replies))
        await eventually(lambda: service.statistics().failed == 100)
    failed = [record.facts for record in caplog.records if record.getMessage() == "handler-failed"]
    assert [facts["failed"] for facts in failed] == [1]
