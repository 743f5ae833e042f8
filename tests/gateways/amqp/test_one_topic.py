"""One topic, four kinds of clients: MQTT, JMS over AMQP, JMS in Python, and the plain bus."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from proton import utils as proton_utils  # noqa: E402

from muster.bus import api  # noqa: E402
from muster.bus.brokers import broker as brokers  # noqa: E402
from muster.bus.brokers import config  # noqa: E402
from muster.core import topics  # noqa: E402
from muster.gateways.amqp import gateway as amqp_gateway  # noqa: E402
from muster.message import destinations, messages  # noqa: E402
from muster.message.client import api as client_api  # noqa: E402
from muster.message.dispatcher import leadership  # noqa: E402
from muster.testing import fixtures  # noqa: E402
from muster.trust.login import passwords  # noqa: E402

TOPIC = destinations.topic("hall/seats")
SUBJECT = topics.Topic.parse("hall/seats").subject


@pytest_asyncio.fixture
async def broker(tmp_path: Path) -> AsyncIterator[brokers.Broker]:
    settings = config.BrokerConfig(name="broker", directory=tmp_path / "broker")
    async with brokers.Broker(dataclasses.replace(settings, mqtt=config.BrokerListener())) as started:
        yield started


class Mqtt:
    """The least of MQTT 3.1.1 that publishes and subscribes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Mqtt:
        made = cls(*await asyncio.open_connection("127.0.0.1", port))
        made._send(0x10, b"\x00\x04MQTT\x04\x02\x00\x3c\x00\x04test")
        assert await made._read() == (0x20, b"\x00\x00")
        return made

    def _send(self, kind: int, body: bytes) -> None:
        assert len(body) < 128
        self._writer.write(bytes((kind, len(body))) + body)

    async def _read(self) -> tuple[int, bytes]:
        async with asyncio.timeout(30):
            kind, size = await self._reader.readexactly(2)
            if size >= 128:
                size = size - 128 + 128 * (await self._reader.readexactly(1))[0]
            return kind, await self._reader.readexactly(size)

    async def subscribe(self, topic: str) -> None:
        self._send(0x82, b"\x00\x01" + len(topic).to_bytes(2, "big") + topic.encode() + b"\x00")
        assert (await self._read())[0] == 0x90

    def publish(self, topic: str, data: bytes) -> None:
        self._send(0x30, len(topic).to_bytes(2, "big") + topic.encode() + data)

    async def received(self) -> tuple[str, bytes]:
        kind, body = await self._read()
        assert kind & 0xF0 == 0x30
        size = int.from_bytes(body[:2], "big")
        return body[2 : 2 + size].decode(), body[2 + size :]

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def test_a_message_on_a_topic_reaches_all_subscribers(
    broker: brokers.Broker, dispatcher: leadership.DispatcherLeadership, connect: fixtures.Connect
):
    numbers = iter(range(100))

    async def dial(login: passwords.PasswordLogin) -> api.Bus:
        return await connect(f"{login.name}-{next(numbers)}")

    assert broker.config.mqtt is not None
    mqtt = await Mqtt.connect(broker.config.mqtt.port)
    await mqtt.subscribe("topic/hall/seats")
    plain = await connect("plain")
    async with (
        amqp_gateway.AmqpGateway(dial, None, anonymous="nobody") as gateway,
        client_api.Connection(await connect("python")) as python,
        await plain.subscribe(SUBJECT) as heard_plain,
    ):
        session = python.session()
        heard_python = await session.consumer(TOPIC)
        loop = asyncio.get_running_loop()
        heard_amqp: asyncio.Queue[object] = asyncio.Queue()
        event: asyncio.Event = asyncio.Event()

        def amqp() -> None:
            made = proton_utils.BlockingConnection(
                f"amqp://127.0.0.1:{gateway.port}", timeout=30, allowed_mechs="ANONYMOUS"
            )
            receiver = made.create_receiver("topic:hall/seats")
            sender = made.create_sender("topic:hall/seats")
            loop.call_soon_threadsafe(event.set)
            for _ in range(4):
                got = receiver.receive(timeout=30)
                receiver.accept()
                loop.call_soon_threadsafe(heard_amqp.put_nowait, got.body)
                if got.body == "from plain":
                    sender.send(proton.Message(body="from amqp", properties={"row": proton.int32(4)}))
            made.close()

        working = asyncio.create_task(asyncio.to_thread(amqp))
        await event.wait()

        async def all_hear(text: str) -> messages.JmsMessage:
            async with asyncio.timeout(30):
                assert (await heard_plain.next()).data == text.encode()
                assert await heard_amqp.get() == text
                assert await mqtt.received() == ("topic/hall/seats", text.encode())
                first = await heard_python.receive(20)
            assert first is not None
            assert first.body() == text
            return first

        mqtt.publish("topic/hall/seats", b"from mqtt")
        await all_hear("from mqtt")
        await session.producer(TOPIC, persistent=False).send("from python")
        await all_hear("from python")
        await plain.publish(SUBJECT, b"from plain")
        await all_hear("from plain")
        message = await all_hear("from amqp")
        assert message.properties["row"] == 4, "what JMS knows besides travels with it"
        await working
    await mqtt.close()
