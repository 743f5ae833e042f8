"""AMQP messages arrive as they were sent, and readers of other protocols get a translation of every body."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from muster.message import codec, destinations, errors, messages, protocol
from muster.message.amqp_format import amqp_types, bodies, message_codec
from muster.testing import fixtures
from tests.message import conftest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from tests.gateways.amqp import raw_client  # noqa: E402

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway

ORDERS = destinations.queue("orders")
ULONG = (1 << 63) + 5
CONTENT = {
    "text": "four chairs",
    "empty text": "",
    "binary value": b"\x00\xff",
    "boolean": True,
    "ubyte": proton.ubyte(200),
    "byte": proton.byte(-3),
    "ushort": proton.ushort(60000),
    "short": proton.short(-3),
    "uint": proton.uint(4_000_000_000),
    "int": proton.int32(-3),
    "ulong": proton.ulong(7),
    "ulong above a Java long": proton.ulong(ULONG),
    "long": -(1 << 62),
    "float": proton.float32(1.5),
    "double": 2.25,
    "not a number": float("nan"),
    "char": proton.char("\u00fc"),
    "timestamp": proton.timestamp(1_700_000_000_000),
    "uuid": uuid.UUID(int=5),
    "symbol": proton.symbol("red"),
    "decimal32": proton.decimal32(0x32000065),
    "decimal64": proton.decimal64(0x31A0000000000065),
    "decimal128": proton.decimal128(bytes.fromhex("303e0000000000000000000000000065")),
    "flat map": {"a": 1, "b": "two", "c": proton.ubyte(3), "d": b"\x04", "e": proton.char("f")},
    "map with integer keys": {1: "a", 2: "b"},
    "map with equal keys": {1: "a", "1": "b"},
    "nested map": {"a": {"b": [1, {"c": None}]}},
    "list": [1, "two", proton.uint(3), uuid.UUID(int=4)],
    "nested list": [[1, 2], [], {"a": proton.symbol("b")}],
    "array": proton.Array(proton.UNDESCRIBED, proton.Data.INT, 1, 2, 3),
    "described array": proton.Array(proton.symbol("m"), proton.Data.UINT, proton.uint(1)),
    "described": proton.Described(proton.symbol("point"), [1, 2]),
    "described map": proton.Described(proton.ulong(77), {"x": proton.Described(proton.ulong(1), "y")}),
}
SECTIONS = {  # which the client's library cannot send
    "no body": b"",
    "null": b"\0Sw\x40",
    "several data sections": b"\0Su\xa0\x01a\0Su\xa0\x02bc",
    "long encodings": b"\0Su\xb0\0\0\0\x01a\0Su\xb0\0\0\0\x01b",
    "sequence": b"\0Sv\xc0\x05\x02\x54\x01\xa1\x00",
    "several sequences": b"\0Sv\xc0\x03\x01\x54\x01\0Sv\x45\0Sv\xc0\x03\x01\xa1\x00",
    "footer": b"\0Su\xa0\x01a\0Sx\xc1\x08\x02\xa3\x03sum\x54\x05",
    "empty data": b"\0Su\xa0\x00",
    "array of lists": b"\0Sw\xe0\x08\x02\xc0\x03\x01\x54\x01\x01\x00",
    "map with a list as key": b"\0Sw\xc1\x07\x02\xc0\x03\x01\x54\x01\x41",
}
PROPERTIES: dict[str, Any] = {
    "amount": 4,
    "wide": proton.ulong(ULONG),
    "id": uuid.UUID(int=9),
    "raw": b"\x01",
    "flag": True,
    "letter": proton.char("x"),
    "at": proton.timestamp(5),
    "ratio": proton.float32(0.5),
    "name": proton.symbol("red"),
}


def _message(body: Any = None) -> Any:
    return proton.Message(
        body=body,
        inferred=False,
        id=proton.ulong(ULONG),
        correlation_id=uuid.UUID(int=3),
        user_id=b"\xff\x00",
        subject="furniture",
        reply_to="queue:replies",
        content_type="application/x-thing",
        content_encoding="gzip",
        group_id="g",
        group_sequence=7,
        reply_to_group_id="back",
        creation_time=12.5,
        priority=200,
        durable=True,
        annotations={proton.symbol("x-opt-colour"): proton.ubyte(5)},
        instructions={proton.symbol("x-opt-hop"): 1},
        properties=PROPERTIES,
    )


def _all() -> dict[str, bytes]:
    """Encoded messages by the name of their body."""
    head = bytes(_message().encode())
    made = {name: bytes(_message(body).encode()) for name, body in CONTENT.items()}
    inferred = _message(b"data")
    inferred.inferred = True
    made["data"] = bytes(inferred.encode())
    return made | {name: head + body for name, body in SECTIONS.items()}


def _bare(data: bytes) -> bytes:
    """Everything that must not change on the way."""
    kept = (amqp_types.HEADER, amqp_types.DELIVERY_ANNOTATIONS)
    return b"".join(data[at:end] for code, at, _, end in amqp_types.split(data) if code not in kept)


def _exchange(port: int, address: str, sent: dict[str, bytes]) -> dict[str, bytes]:
    """Send all messages to an address and receive them there; for the refused ones, the condition."""
    raw = raw_client.Raw(port, f"both-ends-of-{address}")
    receiver = raw_client.receiver(raw, address, 200)
    raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
    sender = raw.session.sender("out")
    sender.target.address = address
    sender.open()
    raw.until(lambda: sender.credit > 0)
    deliveries = {}
    for name, data in sent.items():
        deliveries[name] = sender.delivery(name)
        sender.send(data)
        sender.advance()
    raw.until(lambda: all(delivery.remote_state for delivery in deliveries.values()))
    received = {
        name: str(delivery.remote.condition).encode()
        for name, delivery in deliveries.items()
        if delivery.remote_state != proton.Delivery.ACCEPTED
    }
    for name in [name for name in sent if name not in received]:
        raw.until(lambda: receiver.current is not None and receiver.current.readable)
        delivery = receiver.current
        received[name] = bytes(receiver.recv(delivery.pending))
        receiver.advance()
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
    raw.write()
    raw.socket.close()
    return received


@pytest.mark.parametrize("address", ["queue:orders", "topic:news/sport"])
async def test_bodies_and_properties_arrive_as_they_were_sent(
    gateway: amqp_gateway.AmqpGateway, address: str
):
    sent = _all()
    received = await asyncio.to_thread(_exchange, gateway.port, address, sent)
    changed = {name: received[name] for name in sent if _bare(received[name]) != _bare(sent[name])}
    assert not changed
    del received["map with a list as key"]  # which the client's library cannot represent
    for data in received.values():
        header = proton.Message()
        header.decode(data)
        assert (header.durable, header.priority, header.delivery_count) == (True, 200, 0)
        assert not header.instructions  # delivery annotations are for the next hop only


async def test_python_readers_get_a_translation_of_every_body(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    sent = _all()

    def send(raw: raw_client.Raw) -> None:
        sender = raw.session.sender("out")
        sender.target.address = "queue:orders"
        sender.open()
        raw.until(lambda: sender.credit > 0)
        deliveries = []
        for name, data in sent.items():
            deliveries.append(sender.delivery(name))
            sender.send(data)
            sender.advance()
        raw.until(lambda: deliveries[-1].remote_state)
        raw.socket.close()

    await asyncio.to_thread(lambda: send(raw_client.Raw(gateway.port, "sender")))
    consumer = await (await dial()).session().consumer(ORDERS, "wide > 9223372036854775807 AND amount = 4")
    received: dict[str, messages.JmsMessage] = {}
    for name in sent:
        message = await consumer.receive(30)
        assert message is not None, name
        received[name] = message
        if name not in ("map with equal keys", "map with a list as key"):
            assert bodies.ENCODED not in message.properties, name
        assert message.properties["amount"] == 4
        assert message.properties["id"] == str(uuid.UUID(int=9))
        assert "raw" not in message.properties
        assert message.type == "furniture"
    read = {name: message.body() for name, message in received.items()}
    assert read["text"] == "four chairs"
    assert read["null"] is None
    assert read["data"] == b"data"
    assert read["binary value"] == b"\x00\xff"
    assert read["several data sections"] == b"abc"
    assert read["ulong above a Java long"] == ULONG
    assert read["decimal32"] == read["decimal64"] == read["decimal128"] == "10.1"
    assert read["flat map"] == {"a": 1, "b": "two", "c": 3, "d": b"\x04", "e": "f"}
    assert read["map with integer keys"] == {"1": "a", "2": "b"}
    assert read["nested map"] == {"a": {"b": [1, {"c": None}]}}
    assert read["list"] == [1, "two", 3, str(uuid.UUID(int=4))]
    assert read["array"] == [1, 2, 3]
    assert read["described"] == {"descriptor": "point", "value": [1, 2]}
    assert read["several sequences"] == [1, ""]
    assert read["not a number"] == "NaN"
    unreadable = received["map with a list as key"]
    assert unreadable.properties[bodies.ENCODED] is True
    assert unreadable.body() == SECTIONS["map with a list as key"]


@pytest.mark.parametrize("address", ["", "queue:", "x" * 400])
@pytest.mark.parametrize("body", ["text", {"nested": {"list": [1, 2]}}], ids=["text", "map"])
def test_addresses_that_are_not_ours_change_nothing(body: object, address: str):
    """AMQP readers get the message as it is, and others without these addresses."""
    data = bytes(proton.Message(body, address=address, reply_to=address).encode())
    meta, payload, to = message_codec.decode(data, ORDERS, 0)
    assert to == ORDERS
    assert _bare(message_codec.encode(meta, payload, 0, 0)) == _bare(data)
    message = codec.message_from_meta(meta, payload, ORDERS)
    assert (message.body(), message.destination, message.reply_to) == (body, ORDERS, None)
    assert message_codec.decode(data, None, 0)[2] is None, "there is nowhere to send it to"


async def test_plain_clients_of_a_topic_read_json(
    gateway: amqp_gateway.AmqpGateway, connect: fixtures.Connect
):
    sent = {"map": bytes(proton.Message(body={"a": [1, {"b": "c"}]}).encode())}
    bus = await connect("plain")
    async with await bus.subscribe("topic.news.sport") as subscription:
        await bus.flush()
        await asyncio.to_thread(_exchange, gateway.port, "topic:news/sport", sent)
        async for message in subscription:
            assert msgspec.json.decode(message.data) == {"a": [1, {"b": "c"}]}
            break


async def test_a_dead_letter_and_its_return_keep_the_message(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    sent = bytes(_message({"a": {"b": proton.ubyte(1)}}).encode())

    def reject() -> None:
        raw = raw_client.Raw(gateway.port, "rejects")
        sender = raw.session.sender("out")
        sender.target.address = "queue:orders"
        sender.open()
        receiver = raw_client.receiver(raw, "queue:orders")
        raw.until(lambda: sender.credit > 0)
        sender.delivery("one")
        sender.send(sent)
        sender.advance()
        _, delivery = raw_client.receive(raw, receiver)
        delivery.update(proton.Delivery.REJECTED)
        delivery.settle()
        raw.write()
        receiver.close()
        raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_CLOSED)
        raw.socket.close()

    def receive(address: str, outcome: int) -> bytes:
        raw = raw_client.Raw(gateway.port, f"reads-{address}")
        receiver = raw_client.receiver(raw, address)
        raw.until(lambda: receiver.current is not None and receiver.current.readable)
        data = bytes(receiver.recv(receiver.current.pending))
        receiver.current.update(outcome)
        receiver.current.settle()
        receiver.close()
        raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_CLOSED)
        raw.socket.close()
        return data

    await asyncio.to_thread(reject)
    dead = proton.Message()
    dead.decode(await asyncio.to_thread(receive, "queue:dead-letters", proton.Delivery.RELEASED))
    assert dead.body == {"a": {"b": 1}}
    assert isinstance(dead.body["a"]["b"], proton.ubyte)
    assert dead.properties[messages.DEAD_FROM] == "queue:orders"
    assert dead.properties["wide"] == ULONG
    assert dead.content_encoding == "gzip"
    connection = await dial()
    assert (await connection.request(protocol.MoveMessages("dead-letters"))).count == 1
    back = await asyncio.to_thread(receive, "queue:orders", proton.Delivery.ACCEPTED)
    again, first = proton.Message(), proton.Message()
    again.decode(back)
    first.decode(sent)
    assert again.properties == first.properties
    assert (again.body, again.content_encoding, again.annotations["x-opt-colour"]) == (first.body, "gzip", 5)


async def test_an_amqp_reader_gets_every_json_value(gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial):
    value = {"large": 1 << 63, "larger": 1 << 70, "nested": [None, {"a": 1.5}]}
    await (await dial()).session().producer(ORDERS).send(messages.ObjectMessage(value))

    def receive() -> Any:
        raw = raw_client.Raw(gateway.port, "reader")
        message, _ = raw_client.receive(raw, raw_client.receiver(raw, "queue:orders"))
        raw.socket.close()
        return message

    message = await asyncio.to_thread(receive)
    assert message.body == {"large": 1 << 63, "larger": float(1 << 70), "nested": [None, {"a": 1.5}]}


@pytest.mark.parametrize(
    "malformed",
    [
        b"\0Sw\xc0\x05\x02\x54\x01",  # a list longer than the message
        b"\0Sw\xc0\x03\x02\x54\x01",  # a list of fewer elements than it states
        b"\0Sw\xc1\x03\x01\x54\x01",  # a key without a value
        b"\0Sw\xa1\x01\xff",  # not UTF-8
        b"\0Su\x54\x01",  # data that is a number
        b"\0Sw\x41\0Su\xa0\x00",  # sections in the wrong order
        b"\0Sw\x41\0Sw\x41",  # two values
        b"\0Sw\xf0\x00\x00\x00\x05\xff\xff\xff\xff\x40",  # four billion elements in ten bytes
        b"\0Sw" + b"\xc0\x03\x01" * 100 + b"\x40",
        b"\0S\x79\x40",
        b"garbage",
    ],
)
def test_malformed_messages_are_refused(malformed: bytes):
    with pytest.raises(errors.FormatError):
        message_codec.decode(malformed, ORDERS, 0)
