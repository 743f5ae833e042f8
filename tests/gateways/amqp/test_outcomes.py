"""The outcomes that the AMQP gateway sends to a client: only those it knows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.core import errors  # noqa: E402
from muster.gateways.amqp import gateway as amqp_gateway  # noqa: E402
from muster.message import destinations  # noqa: E402
from muster.message.client import outbox  # noqa: E402
from tests.gateways.amqp import raw_client  # noqa: E402
from tests.message import conftest  # noqa: E402

ORDERS = destinations.queue("orders")


class Transacting:
    """A client with a receiver of orders and a coordinator."""

    def __init__(self, port: int, container: str = "transacting", address: str = "queue:orders") -> None:
        self.raw = raw_client.Raw(port, container)
        self.receiver = raw_client.receiver(self.raw, address)
        self.coordinator = self.raw.session.sender("transactions")
        self.coordinator.target.type = proton.Terminus.COORDINATOR
        self.coordinator.open()
        self.raw.until(lambda: self.coordinator.credit > 0)

    def say(self, kind: str, values: list[Any]) -> Any:
        delivery = self.coordinator.delivery(kind)
        body = proton.Described(proton.symbol(f"amqp:{kind}:list"), values)
        self.coordinator.send(proton.Message(body=body).encode())
        self.coordinator.advance()
        return delivery

    def declare(self) -> Any:
        declared = self.say("declare", [None])
        self.raw.until(lambda: declared.remote_state)
        (name,) = declared.remote.data
        return name

    def receive(self) -> tuple[Any, Any]:
        return raw_client.receive(self.raw, self.receiver)

    def accept_in(self, transaction: Any, delivery: Any) -> None:
        delivery.local.data = [transaction, proton.Described(proton.ulong(proton.Delivery.ACCEPTED), [])]
        delivery.update(0x34)
        delivery.settle()

    def wait_for_the_end(self) -> str:
        self.raw.until(lambda: self.raw.connection.state & proton.Endpoint.REMOTE_CLOSED)
        self.raw.socket.close()
        return str(self.raw.connection.remote_condition.name)


async def test_a_message_settled_in_a_finished_transaction_comes_again_marked(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    await (await dial()).session().producer(ORDERS).send("one")

    def work() -> tuple[object, ...]:
        client = Transacting(gateway.port)
        _, delivery = client.receive()
        over = client.declare()
        discharged = client.say("discharge", [over, True])
        client.raw.until(lambda: discharged.remote_state)
        client.accept_in(over, delivery)
        client.raw.until(lambda: client.receiver.state & proton.Endpoint.REMOTE_CLOSED)
        condition = client.receiver.remote_condition.name
        client.receiver.close()
        again, _ = raw_client.receive(client.raw, raw_client.receiver(client.raw, "queue:orders"))
        client.raw.socket.close()
        return condition, again.body, again.delivery_count

    assert await asyncio.to_thread(work) == ("amqp:transaction:unknown-id", "one", 1)


def _no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when no dispatcher replies for a minute: the request may have been executed."""

    async def unanswered(*_: object, **__: object) -> None:
        raise errors.TimedOut("no answer")

    for works in (outbox.OwnWorks, outbox.SharedWorks):
        monkeypatch.setattr(works, "store", unanswered)


async def test_a_commit_in_doubt_has_no_outcome(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    connection = await dial()
    await connection.session().producer(ORDERS).send("one")

    def work() -> tuple[object, object]:
        client = Transacting(gateway.port)
        transaction = client.declare()
        _, delivery = client.receive()
        client.accept_in(transaction, delivery)
        _no_answer(monkeypatch)
        discharged = client.say("discharge", [transaction, False])
        condition = client.wait_for_the_end()
        return discharged.remote_state, condition

    assert await asyncio.to_thread(work) == (0, "amqp:connection:forced"), "neither done nor rolled back"
    monkeypatch.undo()
    again = await (await connection.session().consumer(ORDERS)).receive(30)
    assert again is not None
    assert again.redelivered


async def test_a_send_in_doubt_has_no_outcome(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    def work() -> tuple[object, object]:
        raw = raw_client.Raw(gateway.port, "sending")
        sender = raw.session.sender("out")
        sender.target.address = "queue:orders"
        sender.open()
        raw.until(lambda: sender.credit > 0)
        _no_answer(monkeypatch)
        delivery = sender.delivery("one")
        sender.send(proton.Message(body="one", durable=True).encode())
        sender.advance()
        raw.until(lambda: raw.connection.state & proton.Endpoint.REMOTE_CLOSED)
        raw.socket.close()
        return delivery.remote_state, str(raw.connection.remote_condition.name)

    assert await asyncio.to_thread(work) == (0, "amqp:connection:forced")


async def test_3_4_4_undeliverable_here_goes_to_another_consumer(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    """Not to the same one again, and not to the dead letters."""
    connection = await dial()
    await connection.session().producer(ORDERS).send("one")

    def work() -> object:
        first, second = raw_client.Raw(gateway.port, "first"), raw_client.Raw(gateway.port, "second")
        receiver = raw_client.receiver(first, "queue:orders")
        _, delivery = raw_client.receive(first, receiver)
        delivery.local.undeliverable = True
        delivery.local.failed = True
        delivery.update(proton.Delivery.MODIFIED)
        delivery.settle()
        first.write()
        message, _ = raw_client.receive(second, raw_client.receiver(second, "queue:orders"))
        assert not receiver.queued
        for raw in (first, second):
            raw.socket.close()
        return message.body, message.delivery_count

    assert await asyncio.to_thread(work) == ("one", 1)
    dead = destinations.queue(destinations.DEAD_LETTERS)
    assert [message async for message in connection.session().browse(dead)] == []
