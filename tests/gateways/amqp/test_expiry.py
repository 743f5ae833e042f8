"""Messages that expire while they wait at the gateway are not handed to its clients."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from typing import Any

import pytest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.core.telemetry import metrics  # noqa: E402
from muster.gateways.amqp import connection  # noqa: E402
from muster.gateways.amqp import gateway as amqp_gateway  # noqa: E402
from muster.gateways.amqp.links import consumers, topics  # noqa: E402
from muster.gateways.amqp.protocol import engine  # noqa: E402
from muster.message import destinations  # noqa: E402
from muster.message.amqp_format import amqp_types  # noqa: E402
from muster.testing import eventually  # noqa: E402
from tests.gateways.amqp import raw_client  # noqa: E402
from tests.message import conftest  # noqa: E402

WAIT_S = 30


def _outlet(gateway: amqp_gateway.AmqpGateway) -> Any:
    (link,) = [
        outgoing_link for bridge in gateway.connections for outgoing_link in bridge.outgoing_links.values()
    ]
    assert isinstance(link, topics.TopicLink | consumers.DispatcherLink)
    return link


async def _open(gateway: amqp_gateway.AmqpGateway, address: str, credit: int) -> tuple[raw_client.Raw, Any]:
    raw = await asyncio.to_thread(raw_client.Raw, gateway.port, "slow")
    receiver = raw_client.receiver(raw, address, credit)
    await asyncio.to_thread(raw.until, lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
    return raw, receiver


async def _bodies_until_last(raw: raw_client.Raw, receiver: Any) -> list[str]:
    got: list[str] = []

    def work() -> None:
        while not got or got[-1] != "last":
            message, delivery = raw_client.receive(raw, receiver)
            delivery.update(proton.Delivery.ACCEPTED)
            delivery.settle()
            got.append(message.body)

    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(work)
    raw.socket.close()
    return got


async def test_a_message_with_only_a_time_to_live_is_received_and_expires(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, measured: metrics.Metrics
):
    """A time to live counts from when it came; Qpid JMS also says when that is over, others do not."""
    consumer = await (await dial()).session().consumer(destinations.topic("hall"))
    raw, receiver = await _open(gateway, "topic:hall", 0)
    other = await asyncio.to_thread(raw_client.Raw, gateway.port, "says")

    def say(text: str, ttl_s: float) -> None:
        sender = other.session.sender(text)
        sender.target.address = "topic:hall"
        sender.open()
        other.until(lambda: sender.credit > 0)
        delivery = sender.delivery("1")
        sender.send(proton.Message(body=text, ttl=ttl_s).encode())
        sender.advance()
        other.until(lambda: delivery.settled)

    before_ms = time.time_ns() // 1_000_000
    await asyncio.to_thread(say, "long", 60)
    message = await consumer.receive(WAIT_S)
    assert message is not None, "it was taken for expired"
    assert before_ms < message.expiration_ms - 59_000 < before_ms + 60_000
    await asyncio.to_thread(say, "short", 0.05)
    await asyncio.to_thread(say, "last", 0)
    tap = _outlet(gateway)
    await eventually.eventually(lambda: len(tap._waiting) == 3)
    await asyncio.sleep(0.05)  # pace: a time to live passes
    receiver.flow(10)
    assert await _bodies_until_last(raw, receiver) == ["long", "last"]
    assert measured.value("muster_amqp_dropped_messages_total", reason="expired") == 1
    other.socket.close()


@pytest.mark.parametrize("address", ["topic:hall", "queue:hall"])
async def test_a_client_that_does_not_read_is_handed_no_more_than_its_socket_takes(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, measured: metrics.Metrics, address: str
):
    """It has given unlimited credit, as rhea and proton may; messages on the socket cannot be taken back."""
    count, size, ttl_s = 200, 20_000, 0.6
    raw, receiver = await _open(gateway, address, 1_000_000)
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    session = (await dial()).session()
    producer = session.producer(destinations.Destination.parse(address), persistent=False)
    for number in range(count):
        await producer.send(f"{number}".ljust(size), ttl_s=ttl_s)
    outlet = _outlet(gateway)
    await eventually.eventually(lambda: outlet.engine.stopped)
    await asyncio.sleep(ttl_s)  # pace: a time to live passes
    await producer.send("last")
    got = await _bodies_until_last(raw, receiver)
    handed = sum(map(len, got))
    assert handed < engine.OUT_BYTES_MAX + connection.UNSENT_BYTES, "it was handed all there was"
    assert count - len(got) > count // 4
    if address.startswith("topic"):
        expired = measured.value("muster_amqp_dropped_messages_total", reason="expired")
        assert expired == count - len(got) + 1


def test_when_a_message_expires_is_read_as_proton_reads_it():
    chance = random.Random(7)

    def sometimes(choices: list[Any]) -> Any:
        return chance.choice([None, None, *choices])

    for _ in range(1000):
        made = proton.Message(body="x", id=sometimes(["a", "ID:" + "y" * chance.randrange(300), 7]))
        made.creation_time = sometimes([chance.randrange(1, 1 << 40) / 1000]) or 0
        # A time whose last byte looks like a null, too.
        made.expiry_time = sometimes([1.6e9, (chance.randrange(1 << 30) << 8 | 0x40) / 1000]) or 0
        made.ttl = sometimes([chance.randrange(1, 10**6) / 1000]) or 0
        made.group_id, made.content_type = sometimes(["g"]), sometimes(["text/plain"])
        made.annotations = sometimes([{proton.symbol("x"): "z" * chance.randrange(400)}])
        expected = round(made.expiry_time * 1000) or (5 + round(made.ttl * 1000) if made.ttl else 0)
        assert amqp_types.expires_ms(bytes(made.encode()), 5) == expected, made
    assert amqp_types.expires_ms(b"", 5) == amqp_types.expires_ms(b"\0Sp\xc0", 5) == 0


async def test_the_remaining_time_to_live_is_sent(gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial):
    producer = (await dial()).session().producer(destinations.queue("hall"))
    await producer.send("last", ttl_s=60)
    raw, receiver = await _open(gateway, "queue:hall", 1)
    async with asyncio.timeout(WAIT_S):
        message, _ = await asyncio.to_thread(raw_client.receive, raw, receiver)
    assert 0 < message.ttl <= 60
    assert message.expiry_time > time.time()
    raw.socket.close()
