"""How a connection registers with the dispatcher: attempts that fail, are cancelled, or get no reply."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muster.bus import api
from muster.bus.rpc import client as rpc_client
from muster.core import errors
from muster.message import destinations, protocol
from muster.message.client import api as client_api
from muster.message.client import partition_link
from muster.message.dispatcher import leadership
from muster.testing import eventually, fixtures
from tests.message import conftest

ORDERS = destinations.queue("orders")
NEWS = destinations.topic("news")


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [errors.TimedOut("no reply"), asyncio.CancelledError()])
async def test_a_connection_receives_although_its_first_subscriptions_failed(
    dispatcher: leadership.DispatcherLeadership,
    dial: conftest.Dial,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    error: BaseException,
):
    connection = await dial()
    subscribe, calls = connection.bus.subscribe, 0

    async def fail_once(*arguments: Any, **options: Any) -> api.Subscription:
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise error
        return await subscribe(*arguments, **options)

    monkeypatch.setattr(connection.bus, "subscribe", fail_once)
    session = connection.session()
    try:
        consumer = await session.consumer(ORDERS)
    except asyncio.CancelledError:
        consumer = await session.consumer(ORDERS)
    await session.producer(ORDERS).send("four chairs")
    assert await conftest.take(consumer, 1) == ["four chairs"]
    assert len(connection.home._subscriptions) == 2


async def test_slow_consumers_hold_producers_although_their_first_subscription_failed(
    dispatcher: leadership.DispatcherLeadership, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    connection = await dial()
    with monkeypatch.context() as patch:

        async def fail(*_: Any, **__: Any) -> None:
            raise errors.TimedOut("no reply")

        patch.setattr(connection.bus, "subscribe", fail)
        with pytest.raises(errors.TimedOut):
            await connection.subscribe_slow_reports()
    await connection.subscribe_slow_reports()
    await connection.bus.flush()
    other = await dial(identity="dispatcher")
    await other.bus.publish(protocol.SLOW, protocol.encode(protocol.SlowConsumer("c", "news")))
    await eventually.eventually(lambda: connection.holds.is_held(NEWS))


async def test_the_client_id_of_a_connection_that_was_cancelled_is_free(
    dispatcher: leadership.DispatcherLeadership, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    """As when a client of a gateway is lost while it connects; its next connection has the same client id."""
    bus = await connect("client")
    exchange, done = rpc_client.exchange_once, asyncio.Event()

    async def lose_reply(sender: api.Bus, *arguments: Any, **options: Any) -> api.Message:
        reply = await exchange(sender, *arguments, **options)
        if sender is not bus:
            return reply
        done.set()
        await asyncio.Event().wait()
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(rpc_client, "exchange_once", lose_reply)
        opening = asyncio.ensure_future(client_api.Connection(bus, client_id="billing").__aenter__())
        await asyncio.wait_for(done.wait(), 30)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    async with client_api.Connection(bus, client_id="billing"):
        pass


async def test_the_consumers_of_a_connection_register_it_once(
    dial: conftest.Dial, connect: fixtures.Connect, monkeypatch: pytest.MonkeyPatch
):
    """Each attempt waits for a dispatcher that does not reply, and requests wait for all attempts."""
    connection = await dial()
    released, calls = asyncio.Event(), 0

    async def no_reply(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        await released.wait()
        raise errors.TimedOut("no reply")

    with monkeypatch.context() as patch:
        patch.setattr(rpc_client, "exchange_once", no_reply)
        session = connection.session()
        for _ in range(5):
            await session.consumer(NEWS)
        await eventually.eventually(lambda: calls == 1)
        released.set()
        await eventually.eventually(lambda: not connection.home._registration.locked())
        assert calls == 1
    async with conftest.serving(connect):
        await session.consumer(NEWS)
        await eventually.eventually(lambda: connection.home.is_registered)
        await connection.close()


async def test_a_reply_that_cannot_be_decoded_is_an_error_of_the_request(
    dial: conftest.Dial, connect: fixtures.Connect
):
    other = await connect("dispatcher")
    await other.subscribe(protocol.request_subject("client"), handler=lambda message: message.respond(b"?"))
    connection = await dial()
    with pytest.raises(errors.MusterError, match="cannot be decoded"):
        await connection.request(protocol.Ping(connection.name))


async def test_a_limit_that_the_dispatcher_has_reached_is_reported_once(
    dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    """A connection that has consumers of topics only can do without the dispatcher for long."""
    monkeypatch.setattr(partition_link, "PING_S", 0.01)
    connection = await dial()
    reported: list[errors.MusterError] = []
    connection.on_error = reported.append
    calls = 0

    async def refuse(*_: Any, **__: Any) -> None:
        nonlocal calls
        calls += 1
        raise errors.LimitExceeded("5000 connections")

    monkeypatch.setattr(rpc_client, "exchange_once", refuse)
    await connection.session().consumer(NEWS)
    await eventually.eventually(lambda: calls > 3)
    assert [str(error) for error in reported] == ["5000 connections"]
