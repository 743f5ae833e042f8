"""Messages that are too large for one message of the bus."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from muster.core import messages as core_messages
from muster.message import destinations, messages, protocol, settings
from muster.message.client import api as client_api
from muster.message.dispatcher import large_bodies, leadership
from muster.testing import eventually, fixtures
from tests.message import conftest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from tests.gateways.amqp import raw_client, test_outcomes  # noqa: E402

if TYPE_CHECKING:
    from muster.gateways.amqp import connection as amqp_connection
    from muster.gateways.amqp import gateway as amqp_gateway

ORDERS = destinations.queue("orders")
LARGE = random.Random(7).randbytes(5 << 20)


@pytest.fixture
def clients(gateway: amqp_gateway.AmqpGateway) -> Iterator[Any]:
    opened: list[raw_client.Raw] = []

    def make(name: str) -> raw_client.Raw:
        opened.append(raw_client.Raw(gateway.port, name))
        return opened[-1]

    yield make
    for raw in opened:
        raw.socket.close()


def _sender(raw: raw_client.Raw, address: str, name: str = "out") -> Any:
    sender = raw.session.sender(name)
    sender.target.address = address
    sender.open()
    raw.until(lambda: sender.credit > 0)
    return sender


def _begin(sender: Any, message: Any, tag: str = "1", *, settled: bool = False) -> Any:
    delivery = sender.delivery(tag)
    sender.send(message.encode())
    if settled:
        delivery.settle()
    sender.advance()
    return delivery


def _send(raw: raw_client.Raw, sender: Any, message: Any) -> Any:
    delivery = _begin(sender, message)
    raw.until(lambda: delivery.remote_state)
    return delivery


def _copied(body: Any) -> Any:
    """The body without memory that the client's library frees."""
    match body:
        case memoryview():
            return bytes(body)
        case dict():
            return {key: _copied(value) for key, value in body.items()}
        case list():
            return [_copied(value) for value in body]
    return body


def _receive(raw: raw_client.Raw, receiver: Any) -> Any:
    """The next message, acknowledged."""
    raw.until(lambda: receiver.current is not None and not receiver.current.partial)
    delivery, message = receiver.current, proton.Message()
    message.decode(receiver.recv(delivery.pending))
    message.body = _copied(message.body)
    receiver.advance()
    delivery.update(proton.Delivery.ACCEPTED)
    delivery.settle()
    raw.write()
    return message


@pytest.mark.parametrize("address", ["queue:orders", "topic:news"])
@pytest.mark.parametrize("durable", [False, True])
async def test_a_large_message_passes_in_its_place(clients: Any, address: str, durable: bool):
    def work() -> list[object]:
        raw = clients("both")
        receiver = raw_client.receiver(raw, address)
        raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
        sender = _sender(raw, address)
        deliveries = [
            _begin(sender, proton.Message(body=body, durable=durable, subject=tag), tag)
            for tag, body in (("1", "before"), ("2", {"data": [LARGE, "x"]}), ("3", "after"))
        ]
        raw.until(lambda: deliveries[-1].remote_state)
        assert deliveries[-1].remote_state == proton.Delivery.ACCEPTED
        received = [_receive(raw, receiver) for _ in range(3)]
        assert [message.subject for message in received] == ["1", "2", "3"]
        return [message.body for message in received]

    assert await asyncio.to_thread(work) == ["before", {"data": [LARGE, "x"]}, "after"]


async def test_python_and_amqp_exchange_large_messages(
    gateway: amqp_gateway.AmqpGateway, clients: Any, dial: conftest.Dial
):
    session = (await dial()).session()

    def to_python() -> None:
        raw = clients("sender")
        _send(raw, _sender(raw, "queue:orders"), proton.Message(body=LARGE, inferred=True, durable=True))

    await asyncio.to_thread(to_python)
    consumer = await session.consumer(ORDERS, prefetch=1)
    message = await consumer.receive(30)
    assert isinstance(message, messages.BytesMessage)
    assert message.data == LARGE
    await consumer.close()
    text = LARGE.hex()
    for body in (LARGE, text, messages.MapMessage({"a": text, "b": 4})):
        await session.producer(ORDERS).send(body)

    def to_amqp() -> list[object]:
        raw = clients("reader")
        receiver = raw_client.receiver(raw, "queue:orders")
        return [_receive(raw, receiver).body for _ in range(3)]

    assert await asyncio.to_thread(to_amqp) == [LARGE, text, {"a": text, "b": 4}]


async def test_topic_subscribers_and_browsers_of_the_python_api_get_large_messages(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial
):
    session, news = (await dial()).session(), destinations.topic("news")
    live = await session.consumer(news)
    for persistent in (False, True):
        await session.producer(news, persistent=persistent).send(LARGE)
        message = await live.receive(30)
        assert message is not None
        assert message.body() == LARGE
    await session.producer(ORDERS).send(LARGE)
    assert [actual.body() async for actual in session.browse(ORDERS)] == [LARGE]
    taken = await (await session.consumer(ORDERS)).receive_nowait()
    assert taken is not None
    assert taken.body() == LARGE


async def test_a_body_is_deleted_with_its_last_message(
    connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    """Also of a message that was a dead letter, and that an earlier dispatcher stored."""
    monkeypatch.setattr(large_bodies, "SWEEP_S", 0.02)
    made: list[large_bodies.LargeBodies] = []
    before = large_bodies.LargeBodies.__init__

    def record(bodies: large_bodies.LargeBodies, *arguments: Any) -> None:
        made.append(bodies)
        before(bodies, *arguments)

    monkeypatch.setattr(large_bodies.LargeBodies, "__init__", record)

    async def received(consumer: Any) -> int:
        message = await consumer.receive(30)
        return len(message.data)

    async def swept() -> None:
        """The dispatcher has looked for unused bodies once more, from the beginning."""
        sweeps = len(looked)
        await eventually.eventually(lambda: len(looked) > sweeps + 1)

    looked: list[float] = []
    delete = large_bodies.LargeBodies.delete_unused

    async def look(bodies: large_bodies.LargeBodies, now: float) -> None:
        await delete(bodies, now)
        looked.append(now)

    monkeypatch.setattr(large_bodies.LargeBodies, "delete_unused", look)
    async with conftest.serving(connect) as started, contextlib.AsyncExitStack() as stack:
        await started.acting.wait()
        connection = await stack.enter_async_context(client_api.Connection(await connect("client")))
        session = connection.session(client_api.AcknowledgeMode.CLIENT)
        await session.producer(ORDERS).send(LARGE)
        await session.producer(ORDERS).send(LARGE[: 1 << 20])
        assert len(made[-1]._ledger.bodies) == 2
        consumer = await session.consumer(ORDERS, prefetch=1)
        assert await received(consumer) == len(LARGE)
        (held,) = session.unacknowledged.values()
        await connection.request(
            protocol.ReleaseMessages(connection.name, {held.key: [held.sequence]}, reason="broken")
        )
        await consumer.close()
        await swept()
    async with conftest.serving(connect, "second") as started, contextlib.AsyncExitStack() as stack:
        await started.acting.wait()
        connection = await stack.enter_async_context(client_api.Connection(await connect("client")))
        assert (await connection.request(protocol.MoveMessages(destinations.DEAD_LETTERS))).count == 1
        await swept()
        assert len(made[-1]._ledger.bodies) == 2
        consumer = await connection.session().consumer(ORDERS)
        assert {await received(consumer), await received(consumer)} == {len(LARGE), 1 << 20}
        await eventually.eventually(lambda: not made[-1]._ledger.bodies)
        await connection.session().producer(ORDERS).send("goes on")


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("address", ["queue:orders", "topic:news"])
@pytest.mark.parametrize(("limit", "sent"), [(2 << 20, 3 << 20), (2 << 20, 4 << 20), (100, 1000)])
async def test_a_message_above_the_limit_ends_its_link_at_once(
    gateway: amqp_gateway.AmqpGateway, clients: Any, address: str, durable: bool, limit: int, sent: int
):
    """Before its end: ``sent`` bytes are all that the gateway gets. Other links of the connection go on."""
    gateway.max_message_bytes = limit
    whole = proton.Message(body=LARGE if sent > 1000 else LARGE[:900], durable=durable).encode()

    def work() -> tuple[Any, ...]:
        raw = clients("limits")
        sender = _sender(raw, address)
        assert sender.remote_max_message_size == limit
        sender.delivery("1")
        sender.stream(whole[:sent])
        if len(whole) <= sent:
            sender.advance()
        raw.until(lambda: sender.state & proton.Endpoint.REMOTE_CLOSED)
        small = _send(raw, _sender(raw, address, "next"), proton.Message(body="s", durable=durable))
        return sender.remote_condition, small.remote_state

    condition, outcome = await asyncio.to_thread(work)
    assert condition.name == "amqp:link:message-size-exceeded"
    assert str(limit) in condition.description
    assert outcome == proton.Delivery.ACCEPTED


@pytest.mark.parametrize("address", ["queue:orders", "topic:news"])
@pytest.mark.parametrize("durable", [False, True])
async def test_settled_messages_before_a_close_arrive(
    clients: Any, dial: conftest.Dial, address: str, durable: bool
):
    """Also those behind a large one, which is stored while the close arrives, but not an incomplete one."""
    session = (await dial()).session()
    consumer = await session.consumer(destinations.Destination.parse(address))

    def work() -> None:
        raw = clients("settled")
        sender, half = _sender(raw, address), _sender(raw, address, "half")
        for body in ("before", LARGE[: 2 << 20], *map(str, range(30))):
            _begin(sender, proton.Message(body=body, durable=durable), str(body)[:9], settled=True)
        half.delivery("1")
        half.stream(proton.Message(body=LARGE, durable=durable).encode()[: 1 << 20])
        raw.connection.close()
        raw.until(lambda: raw.connection.state & proton.Endpoint.REMOTE_CLOSED)

    await asyncio.to_thread(work)
    received: list[object] = []
    while len(received) < 32 and (message := await consumer.receive(5)) is not None:
        received.append(message.body())
    assert received == ["before", LARGE[: 2 << 20], *map(str, range(30))]
    assert await consumer.receive_nowait() is None


async def test_a_transaction_with_a_message_above_the_limit_is_rolled_back(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    gateway.max_message_bytes = 2 << 20

    def work() -> tuple[object, ...]:
        client = test_outcomes.Transacting(gateway.port)
        results = []
        for body in (LARGE, LARGE[: 1 << 20]):
            name = client.declare()
            sender = _sender(client.raw, "queue:done", str(len(body)))
            delivery = sender.delivery("1")
            delivery.local.data = [name]
            delivery.update(0x34)
            sender.send(proton.Message(body=body, durable=True).encode())
            sender.advance()
            discharged = client.say("discharge", [name, False])
            client.raw.until(lambda: discharged.remote_state)  # noqa: B023
            results.append(discharged.remote_state)
        client.raw.socket.close()
        return tuple(results)

    assert await asyncio.to_thread(work) == (proton.Delivery.REJECTED, proton.Delivery.ACCEPTED)
    queues = (await (await dial()).request(protocol.ListQueues())).queues
    assert [row.depth for row in queues if row.queue == "done"] == [1]


async def test_the_dispatcher_refuses_what_a_client_does_not_limit(connect: fixtures.Connect):
    message_settings = settings.MessageSettings(max_message_bytes=1 << 20)
    async with (
        conftest.serving(connect, message_settings=message_settings) as started,
        contextlib.AsyncExitStack() as stack,
    ):
        await started.acting.wait()
        connection = await stack.enter_async_context(client_api.Connection(await connect("client")))
        producer = connection.session().producer(ORDERS)
        with pytest.raises(core_messages.MessageTooLarge, match="at most 1048576"):
            await producer.send(LARGE)
        await producer.send("small")


async def test_many_incomplete_large_messages_cost_bounded_memory_and_block_nothing(
    gateway: amqp_gateway.AmqpGateway, clients: Any
):
    """Together they are more than a connection may have in transit, and each is less than a chunk."""

    def work() -> int:
        raw = clients("beginner")
        senders = [_sender(raw, "queue:orders", f"out{number}") for number in range(30)]
        data = bytes(proton.Message(body=LARGE[: 1 << 20], inferred=True, durable=True).encode())
        parts = data[: 1 << 20], data[1 << 20 :]
        deliveries = []
        for sender in senders:
            deliveries.append(sender.delivery("1"))
            sender.stream(parts[0])
            raw.write()
        for sender in senders:
            sender.stream(parts[1])
            sender.advance()
        raw.until(lambda: all(delivery.remote_state for delivery in deliveries))
        return sum(delivery.remote_state == proton.Delivery.ACCEPTED for delivery in deliveries)

    assert await asyncio.to_thread(work) == 30


@pytest.mark.slow
async def test_a_hundred_megabytes_pass_with_little_memory(gateway: amqp_gateway.AmqpGateway, clients: Any):
    size = 100 << 20
    body = random.Random(3).randbytes(1 << 20) * 99

    def held(connection: amqp_connection.AmqpConnection) -> int:
        return connection._in_transit_bytes + connection.running._out_bytes

    most = 0

    def work() -> str:
        raw = clients("hundred")
        receiver = raw_client.receiver(raw, "queue:orders", 1)
        _send(raw, _sender(raw, "queue:orders"), proton.Message(body=body, inferred=True, durable=True))
        return hashlib.sha256(_receive(raw, receiver).body).hexdigest()

    def measure() -> bool:
        nonlocal most
        opened = [connection for connection in gateway.connections if connection.opened.is_set()]
        most = max([most, *map(held, opened)])
        return working.done()

    working = asyncio.create_task(asyncio.to_thread(work))
    await eventually.eventually(measure, timeout_s=240)
    assert await working == hashlib.sha256(body).hexdigest()
    assert most < size // 2
