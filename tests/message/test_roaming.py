"""A client that loses its connection: what was on its way to it comes again, and nothing twice."""

from __future__ import annotations

import pytest

from muster.bus import api, line
from muster.message import client, destinations, service
from muster.testing import eventually
from tests.message import conftest

ORDERS = destinations.queue("orders")


async def test_what_was_delivered_into_a_broken_connection_comes_again(
    dispatcher: service.Service, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(line, "RECONNECT_BASE_S", 2.0)  # so that it is away while something is delivered
    receiving, sending = await dial(), await dial()
    session = receiving.session(client.Mode.CLIENT)
    consumer = await session.consumer(ORDERS)
    producer = sending.session().producer(ORDERS)
    await producer.send("held")
    held = await consumer.receive(10)
    assert held is not None
    receiving.bus._wire._transport._io_writer.transport.abort()  # type: ignore[attr-defined]
    await eventually.eventually(lambda: receiving.bus.state is api.ConnectionState.RECONNECTING)
    for number in range(3):
        await producer.send(f"{number}")
    for number in range(3):
        message = await consumer.receive(30)
        assert message is not None, "it was lost on its way"
        assert message.body() == f"{number}", "what the application holds does not come again"
        await message.acknowledge()
    assert [one.body() async for one in session.browse(ORDERS)] == []
