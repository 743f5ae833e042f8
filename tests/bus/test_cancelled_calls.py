"""A call on a connection that is cancelled, at any of its awaits, leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from muster.bus import api
from muster.bus.brokers import broker, config
from muster.bus.client import client, reconnection, transports
from muster.core import errors
from muster.testing.eventually import eventually
from tests import cancellation
from tests.bus import sockets


@pytest.fixture
async def url(tmp_path):
    async with broker.Broker(config.BrokerConfig(name="b", directory=tmp_path, storage=None)) as running:
        yield running.url


class Checked:
    """A connection with a service, and what holds for it between calls."""

    def __init__(self, bus: client.NatsBus) -> None:
        self.bus = bus
        self.numbers = bus._wire.numbers()
        self.listeners = len(bus._wire.on_state_change)

    async def check(self) -> None:
        wire = self.bus._wire
        assert wire.requests._calls == {}
        assert len(wire.on_state_change) == self.listeners
        await self.bus.flush()
        assert wire._session is not None
        assert not wire._session._pongs
        inboxes = {inbox.number for inbox in wire.requests._inboxes}
        assert set(wire.numbers()) - inboxes == set(self.numbers)
        assert await self.bus._held_by_broker() == set(wire.numbers())
        assert (await self.bus.request("echo", b"x", timeout_s=20)).data == b"x"


@pytest.fixture
async def checked(url, monkeypatch):
    monkeypatch.setattr(reconnection, "BASE_S", 0.001)
    monkeypatch.setattr(reconnection, "CAP_S", 0.001)
    async with await client.connect([url], identity="ann", audit_s=0) as bus:
        await bus.subscribe("echo", handler=lambda message: message.respond(message.data))
        yield Checked(bus)


async def _subscribe(bus: client.NatsBus) -> None:
    async with await bus.subscribe("s", group="g") as subscription:
        await bus.publish("s", b"1")
        await subscription.next()


CALLS = {
    "request": lambda bus: bus.request("echo", b"x"),
    "repeatable request": lambda bus: bus.request("echo", b"x", repeat=api.Repetition(0.001)),
    "gather": lambda bus: bus.gather("echo", b"x", enough=1),
    "flush": lambda bus: bus.flush(),
    "subscribe": _subscribe,
    "audit": lambda bus: bus.audit(),
    "is_closed": lambda bus: bus.is_closed(bus.connection),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_call(checked: Checked, call: Any):
    assert await cancellation.at_each_await(lambda: call(checked.bus), checked.check) >= 2


@pytest.mark.parametrize("call", [CALLS["request"], CALLS["flush"], CALLS["subscribe"]])
async def test_a_call_while_the_connection_is_away(checked: Checked, call: Any):
    async def away() -> None:
        sockets.cut(checked.bus)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await call(checked.bus)

    assert await cancellation.at_each_await(away, checked.check) >= 4


async def test_the_first_request(url):
    """It subscribes to the inbox, which all later requests use."""
    buses: list[client.NatsBus] = []

    async def first() -> None:
        buses.append(await client.connect([url], identity="ann", audit_s=0))
        await buses[-1].gather("nobody", b"")

    async def check() -> None:
        while buses:
            bus = buses.pop()
            subjects = [held.subject for held in bus._wire._subscriptions.active().values()]
            assert len(subjects) == len(set(subjects))
            with pytest.raises(errors.Unavailable, match="no subscriber"):
                await bus.request("nobody", b"")
            await bus.close()

    await cancellation.at_each_await(first, check)
    await check()


async def test_a_publish_that_waits_for_the_socket(checked: Checked, monkeypatch):
    wire = checked.bus._wire
    monkeypatch.setattr("muster.bus.client.connection.MAX_UNSENT_BYTES", 1000)

    async def flood() -> None:
        for _ in range(20):
            await checked.bus.publish("s", bytes(500_000))

    assert await cancellation.at_each_await(flood, checked.check) >= 2
    assert wire._unsent_bytes == 0


async def test_connect(url, monkeypatch):
    made: list[Any] = []
    connect = transports.connect

    async def note(*arguments: Any) -> Any:
        made.append(await connect(*arguments))
        return made[-1]

    monkeypatch.setattr(transports, "connect", note)
    before = asyncio.all_tasks()

    async def check() -> None:
        assert all(transport._transport.is_closing() for transport in made)
        await eventually(lambda: asyncio.all_tasks() <= before)

    async def call() -> client.NatsBus:
        return await client.connect([url], identity="ann")

    assert await cancellation.at_each_await(call, check, undo=client.NatsBus.close) >= 4


async def test_close(url):
    buses: list[client.NatsBus] = []
    ended: list[bytes] = []

    async def slow(message: api.Message) -> None:
        await asyncio.sleep(0.001)  # pace
        ended.append(message.data)

    async def close() -> None:
        bus = await client.connect([url], identity="ann", audit_s=0)
        buses.append(bus)
        await bus.subscribe("s", handler=slow)
        await bus.publish("s", b"1")
        await bus.close()

    async def check() -> None:
        while buses:
            bus = buses.pop()
            if bus._wire.is_closed:
                assert bus.state is api.ConnectionState.CLOSED
                assert bus._wire._session is None
            await bus.close()

    assert await cancellation.at_each_await(close, check) >= 6


async def test_a_handler_that_awaited_a_cancelled_task_fails_alone(url):
    """Messages that wait behind it keep their order."""
    async with await client.connect([url], identity="ann", audit_s=0) as bus:
        received: list[bytes] = []
        task = asyncio.create_task(asyncio.Event().wait())

        async def handler(message: api.Message) -> None:
            received.append(message.data)
            if message.data == b"0":
                await task

        subscription = await bus.subscribe("s", handler=handler)
        for number in range(5):
            await bus.publish("s", b"%d" % number)
        await eventually(lambda: subscription.statistics().pending == 4)
        task.cancel()
        await bus.publish("s", b"5")
        await eventually(lambda: received == [b"%d" % number for number in range(6)])
        assert subscription.statistics().failed == 1


async def test_a_handler_that_raises_a_cancellation_does_not_end_the_connection(url):
    async with await client.connect([url], identity="ann", audit_s=0) as bus:
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        plain = await bus.subscribe("s", handler=lambda _: cancelled.result())
        bulk = await bus.subscribe("s", bulk=lambda *_: cancelled.result())
        await bus.publish("s", b"1")
        await bus.flush()
        assert (plain.statistics().failed, bulk.statistics().failed) == (1, 1)
        assert bus.statistics().reconnects == 0


async def test_one_deadline_for_a_request_to_a_frozen_broker(tmp_path):
    """Also for the first one, which subscribes to the inbox, and while the connection is away."""
    async with broker.Broker(config.BrokerConfig(name="b", directory=tmp_path, storage=None)) as running:
        bus = await client.connect([running.url], identity="ann", audit_s=0)
        loop = asyncio.get_running_loop()
        with frozen(running):
            for _ in range(2):
                began_s = loop.time()
                with pytest.raises(errors.TimedOut):
                    await bus.request("s", b"", timeout_s=0.3)
                assert loop.time() - began_s < 2
        await bus.flush()
        await bus.close()


@contextlib.contextmanager
def frozen(running: broker.Broker) -> Iterator[None]:
    assert running.pid
    os.kill(running.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, running.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        os.kill(running.pid, signal.SIGCONT)
