"""JMS over UDP: keys by the bus, encryption, loss and counters."""

from __future__ import annotations

import asyncio
import types

import msgspec
import pytest

from muster.core import topics
from muster.gateways import udp
from muster.message import destinations, messages
from muster.testing import eventually
from tests.message import conftest

TOPIC = destinations.topic("light/news")
NEWS = topics.Topic.parse("light/news")


async def test_datagrams_arrive_forged_and_repeated_ones_do_not_and_loss_is_counted(dial: conftest.Dial):
    async with (
        udp.UdpReceiver(await dial(), TOPIC) as receiver,
        udp.UdpSender(await dial(), TOPIC) as sender,
    ):
        await eventually.eventually(lambda: sender.receivers == 1, timeout_s=30)
        seen: list[bytes] = []
        taken = receiver.datagram_received

        def copy(data: bytes, addr: object) -> None:
            seen.append(data)
            taken(data, addr)

        receiver.datagram_received = copy  # type: ignore[method-assign]
        sender.send(messages.TextMessage("feather", properties={"grams": 1}))
        message = await asyncio.wait_for(anext(receiver), 5)
        assert (message.body(), message.properties["grams"]) == ("feather", 1)
        data = next(row for row in seen if row[12] == 1)
        assert b"feather" not in data, "it is encrypted"
        taken(data, None)
        taken(data[:-1] + bytes((data[-1] ^ 1,)), None)
        taken(b"short", None)
        assert (receiver.received, receiver.refused) == (1, 3)
        await _lose_and_reorder(sender, receiver)
        assert (receiver.received, receiver.lost, receiver.reordered) == (1 + 7, 1, 1)


async def _lose_and_reorder(sender: udp.UdpSender, receiver: udp.UdpReceiver) -> None:
    transport, sent = sender._socket, list[tuple[bytes, tuple[str, int]]]()

    class LossyLine:
        """Loses the third, and lets the sixth pass the fifth."""

        def sendto(self, data: bytes, peer: tuple[str, int]) -> None:
            sent.append((data, peer))
            if len(sent) not in (3, 5):
                transport.sendto(data, peer)
            if len(sent) == 6:
                transport.sendto(*sent[4])

        close = transport.close

    sender._socket = LossyLine()  # type: ignore[assignment]
    for number in range(1, 9):
        sender.send(f"{number}")
    got = [(await asyncio.wait_for(anext(receiver), 15)).body() for _ in range(7)]
    assert got == ["1", "2", "4", "6", "5", "7", "8"]


async def take(receiver: udp.UdpReceiver, count: int) -> list[object]:
    async with asyncio.timeout(30):
        return [(await anext(receiver)).body() for _ in range(count)]


async def test_a_session_has_publishers_and_subscribers_with_wildcards_and_selectors(dial: conftest.Dial):
    """The first publisher is there before the subscribers, which hear of it when it repeats itself."""
    async with udp.UdpSession(await dial()) as senders, udp.UdpSession(await dial()) as receivers:
        news = await senders.publisher(TOPIC)
        light = await receivers.subscriber(destinations.topic("light/>"), "grams < 5")
        tagged = await receivers.subscriber(destinations.topic("tags:kind=feather"))
        tags = await senders.publisher(destinations.topic("colour=white,kind=feather"))
        for publisher in (news, tags):
            assert await publisher.wait_for_receiver(60)
        for grams in (1, 9):
            news.send(messages.TextMessage(f"news {grams}", properties={"grams": grams}))
        assert await take(light, 1) == ["news 1"]
        tags.send("white")
        assert await take(tagged, 1) == ["white"]
        await eventually.eventually(lambda: light.rejected == 1, timeout_s=30)
        assert (light.lost, light.refused, tagged.received) == (0, 0, 1)


async def test_a_key_is_good_for_its_topic_only(dial: conftest.Dial):
    async with udp.UdpSession(await dial()) as session:
        publisher = await session.publisher(TOPIC)
        subscriber = await session.subscriber(destinations.topic("light/*"))
        assert await publisher.wait_for_receiver(60)
        publisher._destination = destinations.topic("light/orders")  # as another holder of the key would
        publisher.send("forged")
        publisher._destination = TOPIC
        publisher.send("news")
        assert await take(subscriber, 1) == ["news"]
        assert (subscriber.refused, subscriber.lost) == (1, 0)


def test_loss_and_order_are_counted(monkeypatch):
    receiver = udp.UdpReceiver.__new__(udp.UdpReceiver)
    receiver.lost = receiver.reordered = 0
    known = udp._SenderState(udp._Key(1, bytes(32), 0), NEWS)
    assert [receiver._accept_number(known, number) for number in (0, 1, 4, 3, 3, 6)] == [
        True,
        True,
        True,
        True,
        False,
        True,
    ]
    assert (receiver.lost, receiver.reordered) == (2, 1)


def test_a_datagram_from_before_the_first_one_was_not_lost():
    receiver = udp.UdpReceiver.__new__(udp.UdpReceiver)
    receiver.lost = receiver.reordered = 0
    known = udp._SenderState(udp._Key(1, bytes(32), 0), NEWS)
    assert [receiver._accept_number(known, number) for number in (5, 4, 4, 7)] == [True, True, False, True]
    assert (receiver.lost, receiver.reordered) == (1, 1)


class Reply:
    """A message over the bus, and what is replied to it."""

    def __init__(self, **fields: object) -> None:
        self.data = msgspec.json.encode(fields)
        self.replies: list[bytes] = []

    async def respond(self, data: bytes) -> None:
        self.replies.append(data)


@pytest.mark.parametrize(
    "offer",
    [
        {"host": "localhost", "port": 9},  # to resolve a name would block the event loop
        {"host": "", "port": 9},
        {"host": "::1", "port": 9},
        {"host": "127.0.0.1", "port": 65536},
        {"host": "127.0.0.1", "port": 0},
        {"host": "127.0.0.1", "port": -1},
    ],
)
async def test_an_offer_without_an_address_gets_neither_datagrams_nor_a_key(offer):
    sender = udp.UdpSender(None, TOPIC)  # type: ignore[arg-type]
    sent: list[tuple[str, int]] = []
    sender._socket = types.SimpleNamespace(sendto=lambda data, peer: sent.append(peer))  # type: ignore[assignment]
    message = Reply(**offer)
    await sender._on_offer(message)  # type: ignore[arg-type]
    assert (sent, message.replies) == ([], [])
    good = Reply(host="127.0.0.1", port=9, tokens=[])
    await sender._on_offer(good)  # type: ignore[arg-type]
    assert (sent, len(good.replies)) == ([("127.0.0.1", 9)], 1)
    await sender._on_offer(Reply(host="127.0.0.1", port=9, tokens=["é"]))  # type: ignore[arg-type]
    assert sender.receivers == 0


def test_a_key_that_is_none_and_too_many_senders_are_ignored(monkeypatch):
    monkeypatch.setattr(udp, "SENDERS_MAX", 2)
    receiver = udp.UdpReceiver(types.SimpleNamespace(bus=None), TOPIC)  # type: ignore[arg-type]
    for number, key in ((1, b"short"), (2, bytes(32)), (1 << 32, bytes(32)), (3, bytes(32)), (4, bytes(32))):
        receiver._on_key(Reply(sender=number, key=key, first=0), NEWS)  # type: ignore[arg-type]
    assert list(receiver._senders) == [2, 3]
