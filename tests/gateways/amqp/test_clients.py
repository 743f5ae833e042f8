"""AMQP clients with unusual behaviour at a gateway: what they leave behind, and what they omit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from muster.message import destinations, protocol
from muster.message.client import dispatcher_connection
from muster.testing import eventually
from tests.message import conftest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.gateways.amqp.links import consumers as links_consumers  # noqa: E402
from muster.gateways.amqp.links import topics  # noqa: E402 - where proton is not, these cannot be had
from muster.gateways.amqp.protocol import endpoints  # noqa: E402 - where proton is not, these cannot be had
from tests.gateways.amqp import raw_client  # noqa: E402

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway

ORDERS = destinations.queue("orders")
NEWS = destinations.topic("news/sport")


def _closed(raw: raw_client.Raw, *ended: Any) -> None:
    raw.until(lambda: all(endpoint.state & proton.Endpoint.REMOTE_CLOSED for endpoint in ended))


async def test_links_and_sessions_that_were_closed_leave_nothing_behind(gateway: amqp_gateway.AmqpGateway):
    """A client that opens one for each message does so a million times over one connection."""

    def work() -> raw_client.Raw:
        raw = raw_client.Raw(gateway.port, "one-for-each")
        sessions = []  # of which the client's library is not to free any while it has links
        for number in range(20):
            session = raw.connection.session() if number % 2 else raw.session
            session.open()
            sender = session.sender(f"out-{number}")
            sender.target.address = "queue:orders"
            receiver = session.receiver(f"in-{number}")
            receiver.source.address = "queue:orders" if number % 4 else "topic:news/sport"
            sender.open()
            receiver.open()
            receiver.flow(5)
            raw.until(lambda: sender.credit > 0)  # noqa: B023 - it is called here and now
            sender.close()
            if number % 2:
                sessions.append((session, sender, receiver))
                session.close()
                _closed(raw, session)
            else:
                receiver.close()
                _closed(raw, sender, receiver)
        return raw

    raw = await asyncio.to_thread(work)
    (connection,) = gateway.connections
    await eventually.eventually(lambda: not connection.running._links)
    assert (connection.producer_links, connection.outgoing_links, len(connection.running._sessions)) == (
        {},
        {},
        1,
    )
    raw.socket.close()


async def test_a_session_that_ends_at_once_takes_nothing_with_it(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    """Its links come, and it ends, in one and the same packet."""

    def work() -> raw_client.Raw:
        raw = raw_client.Raw(gateway.port, "hasty")
        raw.until(lambda: raw.session.state & proton.Endpoint.REMOTE_ACTIVE)
        subscriber = raw.session.receiver("kept")
        subscriber.source.address = "topic:news/sport"
        subscriber.source.durability = proton.Terminus.DELIVERIES
        subscriber.open()
        subscriber.flow(5)
        raw.session.close()
        _closed(raw, raw.session)
        other = raw.connection.session()
        other.open()
        again = other.receiver("kept")  # it does not exist: the first was never created
        again.source.address = "topic:news/sport"
        again.source.durability = proton.Terminus.DELIVERIES
        again.open()
        again.flow(5)
        raw.until(lambda: again.state & proton.Endpoint.REMOTE_ACTIVE)
        assert again.remote_source.address == "topic:news/sport"
        return raw

    raw = await asyncio.to_thread(work)
    assert len(next(iter(gateway.connections)).outgoing_links) == 1
    raw.socket.close()


async def test_a_drained_link_has_got_all_that_waited(gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial):
    producer = (await dial()).session().producer(ORDERS)
    for number in range(5):
        await producer.send(f"{number}")

    def work() -> int:
        raw = raw_client.Raw(gateway.port, "what-is-there-now")
        receiver = raw.session.receiver("in")
        receiver.source.address = "queue:orders"
        receiver.open()
        receiver.drain(20)  # at once: the dispatcher has yet to read them from its log
        raw.until(lambda: not receiver.draining())
        raw.socket.close()
        return int(receiver.queued)

    assert await asyncio.to_thread(work) == 5


async def test_a_drain_with_a_large_credit_asks_the_dispatcher_for_a_part_at_a_time(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    """What waits in the gateway costs memory, however long the queue is."""
    monkeypatch.setattr(links_consumers, "AHEAD_MAX", 4)
    granted: list[int] = []
    notify = dispatcher_connection.DispatcherConnection.notify

    async def record(jms: Any, request: Any) -> None:
        if isinstance(request, protocol.GrantCredit):
            granted.append(request.more)
        await notify(jms, request)

    monkeypatch.setattr(dispatcher_connection.DispatcherConnection, "notify", record)
    producer = (await dial()).session().producer(ORDERS)
    for number in range(15):
        await producer.send(f"{number}")

    def work() -> int:
        raw = raw_client.Raw(gateway.port, "greedy")
        receiver = raw.session.receiver("in")
        receiver.source.address = "queue:orders"
        receiver.open()
        receiver.drain(2_000_000_000)
        raw.until(lambda: not receiver.draining())
        raw.socket.close()
        return int(receiver.queued)

    assert await asyncio.to_thread(work) == 15
    assert max(granted) <= 4


async def test_a_forwarded_message_has_the_values_of_its_last_sender(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    def work() -> tuple[raw_client.Raw, Any]:
        raw = raw_client.Raw(gateway.port, "first-and-last")
        sender = raw.session.sender("out")
        sender.target.address = "queue:orders"
        sender.open()
        receiver = raw_client.receiver(raw, "queue:done")
        raw.until(lambda: sender.credit > 0)
        delivery = sender.delivery("one")
        output = proton.Message(id="mine", body="chairs", properties={"amount": 4}, priority=9, durable=True)
        sender.send(output.encode())
        sender.advance()
        raw.until(lambda: delivery.remote_state)
        return raw, receiver

    raw, receiver = await asyncio.to_thread(work)
    session = (await dial()).session()
    message = await (await session.consumer(ORDERS)).receive(30)
    assert message is not None
    message.clear_properties()
    message.properties["paid"] = True
    await session.producer(destinations.queue("done"), priority=2).send(message)
    got, _ = await asyncio.to_thread(raw_client.receive, raw, receiver)
    assert (got.body, got.properties, got.priority, got.id) == (
        "chairs",
        {"paid": True},
        2,
        message.message_id,
    )
    raw.socket.close()


async def test_what_was_acknowledged_just_before_its_link_ended_does_not_come_again(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    session = (await dial()).session()
    for number in range(5):
        await session.producer(ORDERS).send(f"{number}")
    raw = await asyncio.to_thread(raw_client.Raw, gateway.port, "in-one-packet")
    receiver = raw_client.receiver(raw, "queue:orders", 5)

    def take() -> list[Any]:
        return [raw_client.receive(raw, receiver)[1] for _ in range(5)]

    deliveries = await asyncio.to_thread(take)
    other = await session.consumer(ORDERS)

    def leave() -> None:
        for delivery in deliveries:
            delivery.update(proton.Delivery.ACCEPTED)
            delivery.settle()
        receiver.close()
        _closed(raw, receiver)
        raw.socket.close()

    await asyncio.to_thread(leave)
    assert await other.receive_nowait() is None
    assert [message.body() async for message in session.browse(ORDERS)] == []


async def test_who_never_settles_costs_bounded_memory(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(endpoints, "UNSETTLED_BYTES_MAX", 30_000)
    raw = await asyncio.to_thread(raw_client.Raw, gateway.port, "forgetful")
    receiver = raw_client.receiver(raw, "topic:news/sport", 1000)
    await asyncio.to_thread(raw.until, lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
    producer = (await dial()).session().producer(NEWS, persistent=False)
    for number in range(100):
        await producer.send(f"{number} " + "x" * 1000)
    (connection,) = gateway.connections
    (tap,) = connection.outgoing_links.values()
    assert isinstance(tap, topics.TopicLink)
    session = tap.link.session
    await eventually.eventually(lambda: len(session.unsettled) + len(tap._waiting) == 100)
    assert session.unsettled_bytes < 40_000

    def settle() -> list[str]:
        bodies = []
        for _ in range(100):
            message, delivery = raw_client.receive(raw, receiver)
            delivery.update(proton.Delivery.ACCEPTED)
            delivery.settle()
            bodies.append(str(message.body).split()[0])
        raw.write()
        return bodies

    assert await asyncio.to_thread(settle) == [f"{number}" for number in range(100)]
    await eventually.eventually(lambda: session.unsettled_bytes == 0)
    raw.socket.close()


@pytest.mark.parametrize("commit", [True, False])
async def test_a_transaction_may_refuse_a_message(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, commit: bool
):
    session = (await dial()).session()
    for body in ("accepted", "released", "rejected"):
        await session.producer(ORDERS).send(body)

    def say(raw: raw_client.Raw, coordinator: Any, kind: str, values: list[Any]) -> Any:
        delivery = coordinator.delivery(kind)
        body = proton.Described(proton.symbol(f"amqp:{kind}:list"), values)
        coordinator.send(proton.Message(body=body).encode())
        coordinator.advance()
        raw.until(lambda: delivery.remote_state)
        return delivery

    def work() -> None:
        raw = raw_client.Raw(gateway.port, "choosy")
        receiver = raw_client.receiver(raw, "queue:orders", 3)
        coordinator = raw.session.sender("transactions")
        coordinator.target.type = proton.Terminus.COORDINATOR
        coordinator.open()
        raw.until(lambda: coordinator.credit > 0)
        (name,) = say(raw, coordinator, "declare", [None]).remote.data
        for outcome in (proton.Delivery.ACCEPTED, proton.Delivery.RELEASED, proton.Delivery.REJECTED):
            _, delivery = raw_client.receive(raw, receiver)
            delivery.local.data = [name, proton.Described(proton.ulong(outcome), [])]
            delivery.update(0x34)
            delivery.settle()
        discharged = say(raw, coordinator, "discharge", [name, not commit])
        assert discharged.remote_state == proton.Delivery.ACCEPTED
        raw.connection.close()
        raw.until(lambda: raw.connection.state & proton.Endpoint.REMOTE_CLOSED)
        raw.socket.close()

    await asyncio.to_thread(work)

    async def left(queue: destinations.Destination) -> list[object]:
        return [message.body() async for message in session.browse(queue)]

    dead = destinations.queue(destinations.DEAD_LETTERS)

    async def came_about() -> bool:
        if commit:
            return await left(ORDERS) == ["released"] and await left(dead) == ["rejected"]
        return await left(ORDERS) == ["accepted", "released", "rejected"] and not await left(dead)

    await eventually.eventually(came_about)
