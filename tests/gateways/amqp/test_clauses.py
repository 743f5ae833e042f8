"""Clauses of AMQP 1.0 and JMS 2.0 at the gateway that are easily overlooked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from muster.bus import api as bus_api
from muster.message import destinations, messages, protocol, settings
from muster.message.client import api as client_api
from muster.message.dispatcher import leadership
from muster.message.dispatcher.admin import queue_admin
from tests.message import conftest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from tests.gateways.amqp import raw_client, test_outcomes  # noqa: E402

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway

ORDERS = destinations.queue("orders")
SELECTOR = proton.symbol("apache.org:selector-filter:string")


@pytest.fixture
def clients(gateway: amqp_gateway.AmqpGateway) -> Iterator[Any]:
    opened: list[raw_client.Raw] = []

    def make(name: str) -> raw_client.Raw:
        opened.append(raw_client.Raw(gateway.port, name))
        return opened[-1]

    yield make
    for raw in opened:
        raw.socket.close()


def _sender(raw: raw_client.Raw, address: str | None, name: str = "out") -> Any:
    sender = raw.session.sender(name)
    sender.target.address = address
    sender.open()
    raw.until(lambda: sender.credit > 0 or sender.state & proton.Endpoint.REMOTE_CLOSED)
    return sender


def _send(raw: raw_client.Raw, sender: Any, message: Any) -> Any:
    delivery = sender.delivery("1")
    sender.send(message.encode())
    sender.advance()
    raw.until(lambda: delivery.remote_state)
    return delivery


async def test_3_rcv_settle_mode_second_is_settled_when_the_outcome_is_stored(
    clients: Any, dial: conftest.Dial
):
    connection = await dial()
    await connection.session().producer(ORDERS).send("one")

    def work() -> tuple[object, ...]:
        raw = clients("second")
        receiver = raw.session.receiver("in")
        receiver.source.address = "queue:orders"
        receiver.rcv_settle_mode = proton.Link.RCV_SECOND
        receiver.open()
        receiver.flow(1)
        message, delivery = raw_client.receive(raw, receiver)
        delivery.update(proton.Delivery.ACCEPTED)
        raw.until(lambda: delivery.settled)
        state = delivery.remote_state
        delivery.settle()
        raw.write()
        return message.body, receiver.remote_rcv_settle_mode, state

    assert await asyncio.to_thread(work) == ("one", proton.Link.RCV_SECOND, proton.Delivery.ACCEPTED)
    (row,) = (await connection.request(protocol.ListQueues())).queues
    assert (row.depth, row.in_flight) == (0, 0)


@pytest.mark.parametrize("snd", [proton.Link.SND_UNSETTLED, proton.Link.SND_SETTLED, proton.Link.SND_MIXED])
@pytest.mark.parametrize("rcv", [proton.Link.RCV_FIRST, proton.Link.RCV_SECOND])
async def test_2_7_3_a_sender_gets_the_settle_modes_that_it_requested(
    clients: Any, dial: conftest.Dial, snd: int, rcv: int
):
    """Some clients end a link with other modes."""
    connection = await dial()

    def work() -> tuple[object, ...]:
        raw = clients("modes")
        sender = raw.session.sender("out")
        sender.target.address = "queue:orders"
        sender.snd_settle_mode, sender.rcv_settle_mode = snd, rcv
        sender.open()
        raw.until(lambda: sender.credit > 0)
        modes = sender.remote_snd_settle_mode, sender.remote_rcv_settle_mode
        delivery = sender.delivery("1")
        sender.send(proton.Message("one", durable=True).encode())
        if snd == proton.Link.SND_SETTLED:
            delivery.settle()
            sender.advance()
            raw.write()
            return *modes, None, None
        sender.advance()
        raw.until(lambda: delivery.remote_state)
        return *modes, delivery.remote_state, delivery.settled

    settles_first = rcv == proton.Link.RCV_FIRST
    outcome = (None, None) if snd == proton.Link.SND_SETTLED else (proton.Delivery.ACCEPTED, settles_first)
    assert await asyncio.to_thread(work) == (snd, rcv, *outcome)
    async with connection.session() as session, await session.consumer(ORDERS) as consumer:
        assert await consumer.receive(10) is not None


async def test_2_7_3_a_receiver_gets_no_message_above_its_maximum_size(clients: Any, dial: conftest.Dial):
    connection = await dial()
    producer = connection.session().producer(ORDERS)
    for text in ("x" * 5000, "short"):
        await producer.send(text)

    def work() -> tuple[object, ...]:
        raw = clients("small")
        receiver = raw.session.receiver("in")
        receiver.source.address = "queue:orders"
        receiver.max_message_size = 2000
        receiver.open()
        receiver.flow(10)
        message, delivery = raw_client.receive(raw, receiver)
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
        raw.write()
        return (message.body,)

    assert await asyncio.to_thread(work) == ("short",)
    dead = destinations.queue(destinations.DEAD_LETTERS)
    async with connection.session() as session, await session.consumer(dead) as consumer:
        letter = await consumer.receive(10)
        assert letter is not None
        assert "at most 2000" in str(letter.properties[messages.DEAD_REASON])


async def test_4_5_8_an_unknown_transaction_is_named_as_such(gateway: amqp_gateway.AmqpGateway):
    def work() -> str:
        client = test_outcomes.Transacting(gateway.port)
        delivery = client.say("discharge", [b"nothing", False])
        client.raw.until(lambda: delivery.remote_state)
        condition = delivery.remote.condition.name
        client.raw.socket.close()
        return str(condition)

    assert await asyncio.to_thread(work) == "amqp:transaction:unknown-id"


@pytest.mark.parametrize("receives", [False, True])
async def test_3_5_10_the_lifetime_of_a_dynamic_node_is_that_in_effect(clients: Any, receives: bool):
    """A client that requests `delete-on-no-links` learns that it ends with its link."""

    def work() -> tuple[object, object, object]:
        raw = clients("dynamic")
        link = raw.session.receiver("in") if receives else raw.session.sender("out")
        node = link.source if receives else link.target
        node.dynamic = True
        node.properties.put_dict({proton.symbol("lifetime-policy"): proton.Described(proton.ulong(0x2C), [])})
        link.open()
        raw.until(lambda: link.state & proton.Endpoint.REMOTE_ACTIVE)
        made = link.remote_source if receives else link.remote_target
        made.properties.rewind()
        made.properties.next()
        policy = made.properties.get_dict()[proton.symbol("lifetime-policy")]
        return made.dynamic, bool(made.address), policy.descriptor

    assert await asyncio.to_thread(work) == (True, True, 0x2B)


async def test_3_5_only_filters_that_apply_are_echoed(clients: Any):
    def work() -> list[set[str]]:
        raw, echoed = clients("filters"), []
        for address in ("queue:orders", "topic:news"):
            receiver = raw.session.receiver(address)
            receiver.source.address = address
            receiver.source.filter.put_dict(
                {
                    proton.symbol("mine"): proton.Described(SELECTOR, "amount > 3"),
                    proton.symbol("no-local"): proton.Described(
                        proton.symbol("apache.org:no-local-filter:list"), []
                    ),
                    proton.symbol("other"): proton.Described(proton.symbol("example:xquery"), "//a"),
                }
            )
            receiver.open()
            raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)  # noqa: B023
            data = receiver.remote_source.filter
            data.rewind()
            echoed.append(set(map(str, data.get_dict())) if data.next() else set())
        return echoed

    assert await asyncio.to_thread(work) == [{"mine"}, {"mine", "no-local"}]


async def test_4_a_global_transaction_is_refused(gateway: amqp_gateway.AmqpGateway):
    def work() -> tuple[str, str]:
        client = test_outcomes.Transacting(gateway.port)
        delivery = client.say("declare", [b"global"])
        client.raw.until(lambda: delivery.remote_state)
        declared = client.declare()
        client.raw.socket.close()
        assert declared
        return delivery.remote.condition.name, delivery.remote.condition.description

    condition, description = await asyncio.to_thread(work)
    assert condition == "amqp:not-implemented"
    assert "XA" in description


async def test_4_a_coordinator_of_distributed_transactions_is_refused(clients: Any):
    def work() -> str:
        raw = clients("xa")
        coordinator = raw.session.sender("transactions")
        coordinator.target.type = proton.Terminus.COORDINATOR
        coordinator.target.capabilities.put_symbol("amqp:distributed-transactions")
        coordinator.open()
        raw.until(lambda: coordinator.state & proton.Endpoint.REMOTE_CLOSED)
        return str(coordinator.remote_condition.name)

    assert await asyncio.to_thread(work) == "amqp:not-implemented"


@pytest.mark.parametrize("kind", ["temporary-queue", "temporary-topic"])
async def test_6_3_6_a_deleted_temporary_destination_is_refused(clients: Any, kind: str):
    """By name and by the anonymous relay, persistent or not; and it is no longer there for a new producer."""

    def work() -> list[object]:
        owner, other = clients("owner"), clients("other")
        creator = owner.session.sender("creator")
        creator.target.dynamic = True
        creator.target.capabilities.put_symbol(kind)
        creator.open()
        owner.until(lambda: creator.remote_target.address)
        address = creator.remote_target.address
        target = f"{kind}:{address}"
        attached, relay = _sender(other, target), _sender(other, None, "relay")
        results: list[object] = [_send(other, attached, proton.Message(body="there")).remote_state]
        creator.close()
        owner.until(lambda: creator.state & proton.Endpoint.REMOTE_CLOSED)
        for durable in (False, True):
            for sender in (attached, relay):
                message = proton.Message(body="gone", durable=durable, address=target)
                results.append(_send(other, sender, message).remote.condition.name)
        late = _sender(other, target, "late")
        other.until(lambda: late.state & proton.Endpoint.REMOTE_CLOSED)
        return [*results, late.remote_condition.name]

    assert await asyncio.to_thread(work) == [proton.Delivery.ACCEPTED, *["amqp:not-found"] * 5]


def _dynamic(raw: raw_client.Raw, kind: str, address: str = "") -> Any:
    """A receiver of a new temporary destination, or of the one with this address."""
    made = raw.session.receiver(f"of {address or 'a new one'}")
    made.source.address = address or None
    made.source.dynamic = not address
    made.source.capabilities.put_symbol(kind)
    made.open()
    made.flow(5)
    raw.until(lambda: made.remote_source.address)
    return made


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("kind", ["temporary-queue", "temporary-topic"])
async def test_a_dynamic_source_has_the_kind_that_was_requested(clients: Any, kind: str, stated: bool):
    """Senders need not state the kind. The destination ends with the link."""

    def work() -> list[object]:
        owner, other = clients("owner"), clients("other")
        receivers = [_dynamic(owner, kind)]
        address = receivers[0].remote_source.address
        if kind == "temporary-topic":  # a copy for each
            receivers.append(_dynamic(owner, kind, address))
        sender = _sender(other, f"{kind}:{address}" if stated else address)
        for body in ("a", "b"):
            _send(other, sender, proton.Message(body=body))
        owner.until(lambda: all(made.queued == 2 for made in receivers))
        for made in reversed(receivers):
            made.close()
            owner.until(lambda: made.state & proton.Endpoint.REMOTE_CLOSED)  # noqa: B023
        return [_send(other, sender, proton.Message(body="gone")).remote.condition.name]

    assert await asyncio.to_thread(work) == ["amqp:not-found"]


async def test_3_8_a_boolean_property_is_a_selector(clients: Any, dial: conftest.Dial):
    producer = (await dial()).session().producer(ORDERS)
    for paid in (False, True):
        await producer.send(messages.TextMessage(str(paid), properties={"paid": paid}))

    def work() -> object:
        raw = clients("paid")
        receiver = raw.session.receiver("in")
        receiver.source.address = "queue:orders"
        receiver.source.filter.put_dict({proton.symbol("s"): proton.Described(SELECTOR, "paid")})
        receiver.open()
        receiver.flow(5)
        return raw_client.receive(raw, receiver)[0].body

    assert await asyncio.to_thread(work) == "True"


@pytest.mark.parametrize("address", ["queue:orders", "topic:news"])
@pytest.mark.parametrize(
    ("selector", "refusal"),
    [
        ("paid = = 1", ("amqp:invalid-field", "expected")),
        (" OR ".join(["paid"] * 257), ("amqp:resource-limit-exceeded", "256 clauses")),
        (f"paid = '{'x' * 8192}'", ("amqp:resource-limit-exceeded", "8,192 are allowed")),
    ],
    ids=["syntax", "clauses", "characters"],
)
async def test_3_8_an_invalid_selector_is_refused(
    clients: Any, address: str, selector: str, refusal: tuple[str, str]
):
    def work() -> tuple[str, str]:
        raw = clients("wrong")
        receiver = raw.session.receiver("in")
        receiver.source.address = address
        receiver.source.filter.put_dict({proton.symbol("s"): proton.Described(SELECTOR, selector)})
        receiver.open()
        raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_CLOSED)
        return receiver.remote_condition.name, receiver.remote_condition.description

    condition, description = await asyncio.to_thread(work)
    assert condition == refusal[0]
    assert refusal[1] in description


@pytest.mark.parametrize("name", ["*", "a/>", ">"])
async def test_4_1_3_a_topic_to_send_to_has_no_wildcards(clients: Any, name: str):
    def work() -> tuple[str, str]:
        raw = clients("wild")
        sender = raw.session.sender("out")
        sender.target.address = name
        sender.target.capabilities.put_symbol("topic")
        sender.open()
        raw.until(lambda: sender.state & proton.Endpoint.REMOTE_CLOSED)
        return sender.remote_condition.name, sender.remote_condition.description

    condition, description = await asyncio.to_thread(work)
    assert condition == "amqp:not-found"
    assert "wildcards" in description
    assert "\\*" in description


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        ("*", "b"),
        ("a/>", "a/b"),
        ("a/*", "a/b"),
        ("Courses=*, Session=HPJava", "Courses=CPS616, Session=HPJava"),
        ("Course/*/Session/HPJava", "Course=CPS616,Session=HPJava"),
        ("path:a/*", "a/b"),
    ],
)
@pytest.mark.parametrize("durable", [False, True])
async def test_4_1_3_a_jms_client_subscribes_to_a_pattern(clients: Any, name: str, topic: str, durable: bool):
    """The strings of the paper, without a prefix."""

    def work() -> object:
        raw = clients("wild")
        pattern = _attach_topic(raw, name, durable=durable)
        pattern.flow(1)
        _send(raw, _sender(raw, f"topic:{topic}"), proton.Message(body="x", durable=True))
        return raw_client.receive(raw, pattern)[0].body

    assert await asyncio.to_thread(work) == "x"


async def test_4_1_3_a_pattern_that_may_be_the_path_of_a_topic_is_refused(clients: Any):
    name = "a/b=*"

    def work() -> tuple[str, str, object]:
        raw = clients("wild")
        refused = _attach_topic(raw, name)
        raw.until(lambda: refused.state & proton.Endpoint.REMOTE_CLOSED)
        path = _attach_topic(raw, f"path:{name}")
        path.flow(1)
        _send(raw, _sender(raw, f"topic:path:{name}"), proton.Message(body="x", durable=True))
        condition = refused.remote_condition
        return condition.name, condition.description, raw_client.receive(raw, path)[0].body

    condition, description, body = await asyncio.to_thread(work)
    assert condition == "amqp:not-found"
    assert f"'tags:{name}' or 'path:{name}'" in description
    assert body == "x"


def _attach_topic(raw: raw_client.Raw, address: str, *, durable: bool = False) -> Any:
    """As a JMS client does, which states the kind of the destination."""
    receiver = raw.session.receiver(address)
    receiver.source.address = address
    receiver.source.capabilities.put_symbol("topic")
    if durable:
        receiver.source.durability = proton.Terminus.DELIVERIES
    receiver.open()
    raw.until(lambda: receiver.state & (proton.Endpoint.REMOTE_ACTIVE | proton.Endpoint.REMOTE_CLOSED))
    return receiver


@pytest.mark.parametrize("kind", ["sender", "browser"])
async def test_4_1_4_a_queue_that_clients_may_not_create_does_not_exist(
    gateway: amqp_gateway.AmqpGateway, clients: Any, kind: str
):
    named = settings.MessageSettings(create_queues=False, queues=(settings.QueueSettings(name="orders"),))
    gateway.check_exists = named.check_exists

    def work() -> tuple[str, bool]:
        raw = clients("strict")

        def attach(queue: str) -> Any:
            link = raw.session.sender(queue) if kind == "sender" else raw.session.receiver(queue)
            (link.target if kind == "sender" else link.source).address = f"queue:{queue}"
            if kind == "browser":
                link.source.distribution_mode = proton.Terminus.DIST_MODE_COPY
            link.open()
            raw.until(lambda: link.state & (proton.Endpoint.REMOTE_ACTIVE | proton.Endpoint.REMOTE_CLOSED))
            return link

        known, unknown = attach("orders"), attach("others")
        raw.until(lambda: unknown.state & proton.Endpoint.REMOTE_CLOSED)
        return unknown.remote_condition.name, bool(known.state & proton.Endpoint.REMOTE_ACTIVE)

    assert await asyncio.to_thread(work) == ("amqp:not-found", True)


async def test_4_1_3_a_topic_may_contain_equals_signs(clients: Any, dial: conftest.Dial):
    def work() -> object:
        raw = clients("equals")
        receiver = raw_client.receiver(raw, "topic:a=b=c")
        raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
        _send(raw, _sender(raw, "topic:a=b=c"), proton.Message(body="x"))
        return raw_client.receive(raw, receiver)[0].body

    assert await asyncio.to_thread(work) == "x"


async def test_6_2_7_a_transaction_of_thousands_of_messages(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    count = 3000

    def work() -> int:
        client = test_outcomes.Transacting(gateway.port)
        name = client.declare()
        sender = client.raw.session.sender("out")
        sender.target.address = "queue:done"
        sender.open()
        deliveries = []
        for number in range(count):
            client.raw.until(lambda: sender.credit > 0)
            delivery = sender.delivery(str(number))
            delivery.local.data = [name]
            delivery.update(0x34)
            sender.send(proton.Message(body=number, durable=True).encode())
            sender.advance()
            deliveries.append(delivery)
        client.raw.until(lambda: deliveries[-1].remote_state)
        discharged = client.say("discharge", [name, False])
        client.raw.until(lambda: discharged.remote_state)
        client.raw.socket.close()
        return int(discharged.remote_state)

    assert await asyncio.to_thread(work) == proton.Delivery.ACCEPTED
    (row,) = [
        row for row in (await (await dial()).request(protocol.ListQueues())).queues if row.queue == "done"
    ]
    assert row.depth == count


async def test_6_2_7_a_transaction_has_any_number_of_destinations(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    session = (await dial()).session(client_api.AcknowledgeMode.TRANSACTED)
    producer = session.producer()
    for number in range(1001):
        await producer.send("x", to=destinations.queue(f"q{number}"))
        await producer.send("x", to=ORDERS, delay_s=60)
    await session.commit()
    rows = (await session.connection.request(protocol.ListQueues())).queues
    assert [row.depth for row in rows] == 1001 * [1]


async def test_6_2_6_a_browser_with_a_selector_examines_a_deep_queue_in_parts(
    clients: Any, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue_admin, "BROWSE_SKIPPED_MAX", 5)
    session = (await dial()).session()
    for number in range(30):
        rare = number in (13, 29)
        await session.producer(ORDERS).send(messages.TextMessage(f"{number}", properties={"rare": rare}))
    part = await session.connection.request(protocol.BrowseQueue(ORDERS.name, "rare"))
    assert part.messages == []
    assert part.continue_after
    assert [message.body() async for message in session.browse(ORDERS, "rare")] == ["13", "29"]

    def work() -> list[object]:
        raw = clients("browser")
        receiver = raw.session.receiver("in")
        receiver.source.address = "queue:orders"
        receiver.source.distribution_mode = proton.Terminus.DIST_MODE_COPY
        receiver.source.filter.put_dict({proton.symbol("s"): proton.Described(SELECTOR, "rare")})
        receiver.open()
        receiver.drain(10)
        bodies = [raw_client.receive(raw, receiver)[0].body for _ in range(2)]
        raw.until(lambda: not receiver.credit)
        return bodies

    assert await asyncio.to_thread(work) == ["13", "29"]


async def test_7_9_a_message_whose_delay_is_over_takes_its_place_among_delayed_ones(
    clients: Any, dispatcher: leadership.DispatcherLeadership, bus: bus_api.Bus
):
    """The dispatcher publishes it: directly, it would overtake those that are due before it."""
    topic = destinations.topic("news")
    subscription = await bus.subscribe(topic.subject)

    def work() -> object:
        raw = clients("late")
        message = proton.Message("late", annotations={"x-opt-delivery-time": 1_000})
        return _send(raw, _sender(raw, str(topic)), message).remote_state

    assert await asyncio.to_thread(work) == proton.Delivery.ACCEPTED
    assert protocol.LOGGED in (await subscription.next(timeout_s=30)).headers
