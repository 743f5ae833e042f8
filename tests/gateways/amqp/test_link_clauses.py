"""Clauses of AMQP 1.0 about links, by frames most of which proton does not write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from muster.message import destinations, protocol
from muster.testing import eventually
from tests.message import conftest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.gateways.amqp.protocol import frames  # noqa: E402
from muster.message.amqp_format import amqp_types  # noqa: E402
from muster.message.client import api as client_api  # noqa: E402
from muster.message.client import outbox  # noqa: E402
from tests.gateways.amqp import raw_client, test_outcomes  # noqa: E402

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway

ORDERS = destinations.queue("orders")
NULL, TRUE = raw_client.NULL, b"\x41"
QUEUE = [amqp_types.text("queue:orders")]
DURABLE = [amqp_types.text("topic:news"), amqp_types.uint(2)]  # its deliveries survive


@pytest.fixture
async def client(gateway: amqp_gateway.AmqpGateway) -> AsyncIterator[raw_client.Raw]:
    made = await asyncio.to_thread(raw_client.Raw, gateway.port, "thief")
    yield made
    made.socket.close()


@pytest.fixture
async def frame_client(gateway: amqp_gateway.AmqpGateway) -> AsyncIterator[raw_client.FrameClient]:
    made = await asyncio.to_thread(raw_client.FrameClient, gateway.port, "frames")
    yield made
    made.socket.close()


def _second_session(client: raw_client.Raw) -> Any:
    session = client.connection.session()
    session.incoming_capacity = 1 << 20
    session.open()
    return session


def _is_attached(link: Any) -> bool:
    return bool(link.remote_source.address or link.remote_target.address)


async def test_2_6_1_a_receiver_with_the_same_name_steals_the_link(
    client: raw_client.Raw, dial: conftest.Dial
):
    await (await dial()).session().producer(ORDERS).send("one")

    def work() -> tuple[object, ...]:
        first = raw_client.receiver(client, "queue:orders")
        raw_client.receive(client, first)
        second = _second_session(client).receiver("in")
        second.source.address = "queue:orders"
        second.open()
        second.flow(1)
        client.until(lambda: first.state & proton.Endpoint.REMOTE_CLOSED)
        message, delivery = raw_client.receive(client, second)
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
        first.close()
        client.write()
        return first.remote_condition.name, message.body, second.state & proton.Endpoint.REMOTE_ACTIVE

    stolen, body, active = await asyncio.to_thread(work)
    assert (stolen, body) == ("amqp:link:stolen", "one")
    assert active


async def test_2_6_1_a_sender_with_the_same_name_steals_the_link(client: raw_client.Raw):
    def work() -> tuple[object, ...]:
        first, second = client.session.sender("out"), _second_session(client).sender("out")
        opposite = client.session.receiver("out")  # a name may be used once in each direction
        opposite.source.address = "queue:orders"
        opposite.open()
        for sender in (first, second):
            sender.target.address = "queue:orders"
            sender.open()
            client.until(lambda: sender.credit > 0)  # noqa: B023
        client.until(lambda: first.state & proton.Endpoint.REMOTE_CLOSED)
        delivery = second.delivery("1")
        second.send(proton.Message("one", durable=True).encode())
        second.advance()
        client.until(lambda: delivery.remote_state and _is_attached(opposite))
        closed = opposite.state & proton.Endpoint.REMOTE_CLOSED
        return first.remote_condition.name, delivery.remote_state, closed

    assert await asyncio.to_thread(work) == ("amqp:link:stolen", proton.Delivery.ACCEPTED, 0)


async def test_2_6_1_a_stolen_coordinator_rolls_its_transactions_back(client: raw_client.Raw):
    def work() -> tuple[object, object]:
        deliveries: list[Any] = []
        for session in (client.session, _second_session(client)):
            coordinator = session.sender("transactions")
            coordinator.target.type = proton.Terminus.COORDINATOR
            coordinator.open()
            client.until(lambda: coordinator.credit > 0)  # noqa: B023
            name = deliveries[0].remote.data[0] if deliveries else None
            kind, values = ("discharge", [name, False]) if name else ("declare", [None])
            deliveries.append(coordinator.delivery(kind))
            body = proton.Described(proton.symbol(f"amqp:{kind}:list"), values)
            coordinator.send(proton.Message(body=body).encode())
            coordinator.advance()
            client.until(lambda: deliveries[-1].remote_state)
        return deliveries[1].remote_state, deliveries[1].remote.condition.name

    assert await asyncio.to_thread(work) == (proton.Delivery.REJECTED, "amqp:transaction:unknown-id")


@pytest.mark.parametrize("jms", [True, False])
async def test_a_second_consumer_of_a_durable_subscription_is_refused_to_jms_clients_only(
    client: raw_client.Raw, jms: bool
):
    """JMS 8.3.3 demands an error, AMQP 2.6.1 that the link is stolen."""

    def work() -> list[str | None]:
        links = []
        for session in (client.session, _second_session(client)):
            link = session.receiver("news")
            link.source.address = "topic:news"
            link.source.durability = proton.Terminus.DELIVERIES
            if jms:
                link.source.capabilities.put_symbol("topic")
            links.append(link)
            link.open()
            client.until(lambda: not link.state & proton.Endpoint.REMOTE_UNINIT)  # noqa: B023
        client.until(lambda: any(link.state & proton.Endpoint.REMOTE_CLOSED for link in links))
        return [link.remote_condition.name if link.remote_condition else None for link in links]

    expected = [None, "amqp:resource-locked"] if jms else ["amqp:link:stolen", None]
    assert await asyncio.to_thread(work) == expected


@pytest.mark.parametrize("source", [QUEUE, DURABLE], ids=["queue", "durable"])
async def test_2_6_1_a_link_is_stolen_within_its_session(
    frame_client: raw_client.FrameClient, dial: conftest.Dial, source: list[bytes]
):
    producer = (await dial()).session().producer(destinations.Destination.parse(source[0][2:].decode()))
    loop = asyncio.get_running_loop()

    def work() -> tuple[object, ...]:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, source))
        raw.until(frames.ATTACH)
        raw.send(*raw.attach_receiver(7, source), *raw.flow(0, 5))  # the flow of the old link is late
        detach = raw.until(frames.DETACH)
        attach = raw.until(frames.ATTACH)
        raw.send(*raw.flow(7, 1), frames.DETACH, [amqp_types.uint(0), TRUE])
        asyncio.run_coroutine_threadsafe(producer.send("one"), loop).result()
        transfer = raw.until(frames.TRANSFER, frames.CLOSE, frames.END)
        return raw_client.condition(detach), attach[2], transfer[0], transfer[2] == attach[3]

    assert await asyncio.to_thread(work) == ("amqp:link:stolen", "in", frames.TRANSFER, True)


async def test_a_durable_subscription_is_attached_again_before_the_detach_is_answered(
    frame_client: raw_client.FrameClient, monkeypatch: pytest.MonkeyPatch
):
    async def wait_long(box: outbox.ConnectionOutbox, timeout_s: float | None = None) -> None:
        """As while acknowledgements are stored, before a consumer is detached."""
        for _ in range(5):
            await box._connection.request(protocol.Ping(box._connection.name))

    monkeypatch.setattr(outbox.ConnectionOutbox, "wait_idle", wait_long)

    def work() -> list[int]:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, DURABLE))
        raw.until(frames.ATTACH)
        answers = []
        for handle in range(1, 6):
            detach = [frames.DETACH, [amqp_types.uint(handle - 1)]]
            raw.send(*detach, *raw.attach_receiver(handle, DURABLE))
            answers += [raw.until(frames.ATTACH, frames.DETACH)[0] for _ in range(2)]
        return answers

    assert await asyncio.to_thread(work) == [frames.DETACH, frames.ATTACH] * 5


@pytest.mark.parametrize("closed", [TRUE, NULL])
async def test_2_6_a_link_that_is_detached_while_it_is_attached_is_answered(
    frame_client: raw_client.FrameClient, closed: bytes
):
    def work() -> list[int]:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, DURABLE), frames.DETACH, [amqp_types.uint(0), closed])
        return [raw.until(frames.ATTACH, frames.DETACH, frames.CLOSE)[0] for _ in range(2)]

    assert await asyncio.to_thread(work) == [frames.ATTACH, frames.DETACH]


@pytest.mark.parametrize("closed", [TRUE, b"\x42"])
@pytest.mark.parametrize("handle", [0, 1])
async def test_2_6_4_a_link_is_attached_again_before_its_detach_is_answered(
    frame_client: raw_client.FrameClient, dial: conftest.Dial, closed: bytes, handle: int
):
    """The new one is another link, and receives."""
    await (await dial()).session().producer(ORDERS).send("one")

    def work() -> tuple[list[list[Any]], bytes]:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, QUEUE))
        raw.until(frames.ATTACH)
        raw.send(
            *(frames.DETACH, [amqp_types.uint(0), closed]),
            *raw.attach_receiver(handle, QUEUE),
            *(frames.DETACH, [amqp_types.uint(handle), closed]),
            *raw.attach_receiver(0, QUEUE),
            *raw.flow(0, 1),
        )
        answers = [raw.until(frames.ATTACH, frames.DETACH, frames.CLOSE, frames.END) for _ in range(4)]
        return answers, raw.until(frames.TRANSFER)[1]

    answers, payload = await asyncio.to_thread(work)
    assert [answer[0] for answer in answers] == [frames.DETACH, frames.ATTACH, frames.DETACH, frames.ATTACH]
    assert b"one" in payload


ENDING = {
    "accepted": (raw_client.described(frames.ACCEPTED, []), []),
    "rejected": (raw_client.described(frames.REJECTED, []), ["one"]),
}
RETURNING = {
    "none": (NULL, 0),
    "released": (raw_client.described(frames.RELEASED, []), 0),
    "modified": (raw_client.described(frames.MODIFIED, [TRUE]), 1),
}


def _receive_without_outcome(client: raw_client.FrameClient, default: bytes) -> None:
    """Settle a message of a source with this default outcome, without an outcome."""
    client.send(*client.attach_receiver(0, [*QUEUE, *[NULL] * 7, default]))
    assert frames.default_outcome(client.until(frames.ATTACH)[7]) == (None if default == NULL else default)
    client.send(*client.flow(0, 2))
    number = client.until(frames.TRANSFER)[3]
    client.send(frames.DISPOSITION, [TRUE, amqp_types.uint(number), NULL, TRUE])


@pytest.mark.parametrize("outcome", ENDING)
async def test_3_5_3_the_default_outcome_of_a_source_ends_a_message(
    frame_client: raw_client.FrameClient, dial: conftest.Dial, outcome: str
):
    connection = await dial()
    await connection.session().producer(ORDERS).send("one")
    default, letters = ENDING[outcome]
    await asyncio.to_thread(_receive_without_outcome, frame_client, default)

    async def has_ended() -> bool:
        rows = (await connection.request(protocol.ListQueues())).queues
        return all((row.depth, row.in_flight) == (0, 0) for row in rows if row.queue == ORDERS.name)

    await eventually.eventually(has_ended)
    dead = destinations.queue(destinations.DEAD_LETTERS)
    assert [message.body() async for message in connection.session().browse(dead)] == letters


@pytest.mark.parametrize("outcome", RETURNING)
async def test_3_5_3_the_default_outcome_of_a_source_returns_a_message(
    frame_client: raw_client.FrameClient, dial: conftest.Dial, outcome: str
):
    await (await dial()).session().producer(ORDERS).send("one")
    default, count = RETURNING[outcome]

    def work() -> tuple[object, int]:
        _receive_without_outcome(frame_client, default)
        message = proton.Message()
        message.decode(frame_client.until(frames.TRANSFER)[1])
        return message.body, message.delivery_count

    assert await asyncio.to_thread(work) == ("one", count)


async def _depth(connection: client_api.Connection) -> tuple[int, int]:
    (row,) = [
        row for row in (await connection.request(protocol.ListQueues())).queues if row.queue == ORDERS.name
    ]
    return row.depth, row.in_flight


async def test_4_4_2_a_message_without_an_outcome_is_not_part_of_its_transaction(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    connection = await dial()
    await connection.session().producer(ORDERS).send("one")

    def commit() -> tuple[test_outcomes.Transacting, Any]:
        client = test_outcomes.Transacting(gateway.port)
        name = client.declare()
        _, delivery = client.receive()
        delivery.local.data = [name]
        delivery.update(frames.TRANSACTIONAL)
        discharged = client.say("discharge", [name, False])
        client.raw.until(lambda: discharged.remote_state)
        return client, delivery

    client, delivery = await asyncio.to_thread(commit)
    assert await _depth(connection) == (1, 1), "the client has it, and has not acknowledged it"

    def accept() -> None:
        delivery.local.data = None
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
        client.raw.write()

    await asyncio.to_thread(accept)

    async def is_done() -> bool:
        return await _depth(connection) == (0, 0)

    await eventually.eventually(is_done)
    client.raw.socket.close()


@pytest.mark.parametrize("outcome", [None, proton.Delivery.RELEASED, proton.Delivery.MODIFIED])
@pytest.mark.parametrize("address", ["queue:orders", "topic:news"])
async def test_4_4_2_what_a_transaction_does_not_accept_is_delivered_again_after_its_commit(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, address: str, outcome: int | None
):
    """Without an outcome, it has the default outcome of its source, which is none here."""
    producer = (await dial()).session().producer(destinations.Destination.parse(address))
    loop = asyncio.get_running_loop()

    def work() -> tuple[object, ...]:
        client = test_outcomes.Transacting(gateway.port, address=address)
        asyncio.run_coroutine_threadsafe(producer.send("one"), loop).result()
        name = client.declare()
        _, delivery = client.receive()
        failed = [True] if outcome == proton.Delivery.MODIFIED else []
        state = [proton.Described(proton.ulong(outcome), failed)] if outcome else []
        delivery.local.data = [name, *state]
        delivery.update(frames.TRANSACTIONAL)
        delivery.settle()
        discharged = client.say("discharge", [name, False])
        client.raw.until(lambda: discharged.remote_state)
        message, _ = client.receive()
        client.raw.socket.close()
        return discharged.remote_state, message.body, message.delivery_count

    counted = int(outcome == proton.Delivery.MODIFIED)
    assert await asyncio.to_thread(work) == (proton.Delivery.ACCEPTED, "one", counted)


async def test_2_6_14_aborted_messages_use_up_no_credit_for_good(frame_client: raw_client.FrameClient):
    def work() -> int:
        raw = frame_client
        raw.send(*raw.attach_sender(0, raw_client.described(0x29, QUEUE)))
        credit = raw.until(frames.FLOW)[8]
        for number in range(credit):
            raw.send(*raw.transfer(0, number, aborted=True))
        raw.send(frames.DETACH, [amqp_types.uint(0), TRUE])
        granted = 0
        while (frame := raw.until(frames.FLOW, frames.DETACH))[0] == frames.FLOW:
            if len(frame) > 8 and frame[8] is not None:
                granted = frame[7] + frame[8] - credit  # delivery count and credit
        return granted

    assert await asyncio.to_thread(work) > 0


async def test_2_6_14_an_incomplete_message_that_is_aborted_is_discarded(
    frame_client: raw_client.FrameClient, dial: conftest.Dial
):
    connection = await dial()

    def work() -> int:
        raw = frame_client
        raw.send(*raw.attach_sender(0, raw_client.described(0x29, QUEUE)))
        raw.until(frames.FLOW)
        raw.send(*raw.transfer(0, 0, more=True), *raw.transfer(0, 0, aborted=True))
        raw.send(frames.DETACH, [amqp_types.uint(0), TRUE])
        return int(raw.until(frames.DISPOSITION, frames.DETACH)[0])

    assert await asyncio.to_thread(work) == frames.DETACH
    assert not any(row.depth for row in (await connection.request(protocol.ListQueues())).queues)


@pytest.mark.parametrize("frame", [frames.FLOW, frames.TRANSFER])
async def test_2_7_a_frame_of_an_unattached_handle_ends_the_session(
    frame_client: raw_client.FrameClient, frame: int
):
    def work() -> str:
        raw = frame_client
        raw.send(*(raw.flow(9, 1) if frame == frames.FLOW else raw.transfer(9, 0)))
        return str(frames.state_fields(raw.until(frames.END)[2])[0])

    assert await asyncio.to_thread(work) == "amqp:session:unattached-handle"


async def test_2_6_7_a_drain_without_credit_is_answered(frame_client: raw_client.FrameClient):
    def work() -> tuple[object, ...]:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, QUEUE))
        raw.until(frames.ATTACH)
        raw.send(*raw.flow(0, 0, NULL, TRUE))
        frame = raw.until(frames.FLOW)
        return frame[7], frame[8], frame[10]

    assert await asyncio.to_thread(work) == (0, 0, True)


async def test_2_6_13_resumed_deliveries_are_delivered_again(
    frame_client: raw_client.FrameClient, dial: conftest.Dial
):
    """The gateway keeps no deliveries of detached links: its attach names none as unsettled."""
    await (await dial()).session().producer(ORDERS).send("one")

    def work() -> tuple[object, ...]:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, QUEUE))
        raw.until(frames.ATTACH)
        raw.send(*raw.flow(0, 1))
        tag = raw.until(frames.TRANSFER)[4]
        raw.send(frames.DETACH, [amqp_types.uint(0)])
        raw.until(frames.DETACH)
        code, fields = raw.attach_receiver(1, QUEUE)
        unsettled = amqp_types.encoded_map([tag, raw_client.described(frames.ACCEPTED, [])])
        raw.send(code, [*fields, unsettled])
        attach = raw.until(frames.ATTACH)
        raw.send(*raw.flow(1, 1))
        transfer = raw.until(frames.TRANSFER, frames.CLOSE, frames.END)
        message = proton.Message()
        message.decode(transfer[1])
        return (attach[9:10] or [None])[0], message.body, message.delivery_count

    assert await asyncio.to_thread(work) == (None, "one", 0)


async def test_4_4_3_acquisition_in_a_transaction_is_refused(frame_client: raw_client.FrameClient):
    def work() -> tuple[str, int]:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, QUEUE))
        raw.until(frames.ATTACH)
        properties = amqp_types.mapping({"txn-id": amqp_types.binary(b"t")}, symbols=True)
        raw.send(*raw.flow(0, 1, NULL, NULL, NULL, properties))
        condition = raw_client.condition(raw.until(frames.DETACH))
        raw.send(frames.DETACH, [amqp_types.uint(0), TRUE], *raw.attach_receiver(1, QUEUE))
        return condition, raw.until(frames.ATTACH, frames.CLOSE)[0]

    assert await asyncio.to_thread(work) == ("amqp:not-implemented", frames.ATTACH)


U = amqp_types.uint


@pytest.mark.parametrize(
    ("code", "items", "missing"),
    [
        (frames.BEGIN, [NULL, NULL, U(1), U(1)], "next-outgoing-id"),
        (frames.BEGIN, [NULL, U(0)], "incoming-window and outgoing-window"),
        (frames.FLOW, [U(0), NULL, U(0), U(1)], "incoming-window"),
        (frames.FLOW, [U(0), U(1), U(0)], "outgoing-window"),
        (frames.FLOW, [], "incoming-window and next-outgoing-id and outgoing-window"),
    ],
)
async def test_2_7_mandatory_fields_are_required(
    frame_client: raw_client.FrameClient, code: int, items: list[bytes], missing: str
):
    def work() -> list[Any]:
        frame_client.send(code, items, channel=1 if code == frames.BEGIN else 0)
        return frame_client.until(frames.CLOSE)

    error = frames.state_fields((await asyncio.to_thread(work))[2])
    assert error[0] == "amqp:decode-error"
    assert error[1].endswith(f"without {missing}")


async def test_2_7_1_an_open_names_its_container(gateway: amqp_gateway.AmqpGateway):
    def work() -> list[Any]:
        client = raw_client.FrameClient(gateway.port, None)
        with client.socket:
            return client.until(frames.CLOSE)

    error = frames.state_fields((await asyncio.to_thread(work))[2])
    assert error == ["amqp:decode-error", "a malformed frame: an open without container-id"]
