"""The chapter ``roaming``: JMS clients on three brokers, one of which freezes under them.

A frozen process (SIGSTOP, a hung virtual machine, a full disk) keeps its connections open, so its clients
have to detect it.  A producer sends persistent messages all the time; a durable subscriber is on the broker
that freezes, and moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

from muster.app import domain
from muster.bus import api
from muster.core import errors
from muster.demo import tour
from muster.message import destinations
from muster.message.client import api as jms
from muster.message.client import consumers
from muster.trust.permissions import roles

FLAGS = {"bus.port": 0, "bus.brokers": 3, "web.enabled": False}
ORDERS = destinations.topic("orders")
PACE_S = 0.05
BEFORE, AFTER = 60, 120  # messages received before the fault, and after it
PATIENCE_S = 90.0


async def scenes(running: domain.Domain) -> AsyncIterator[tour.Scene]:
    names = list(await _pids(running))
    yield tour.Scene(
        "brokers", f"{len(names)} brokers share one network: {', '.join(names)}", {"brokers": names}
    )
    shop = await running.connect("shop", roles.Role.USER)
    async with shop, jms.Connection(shop) as connected:
        subscriber = _Subscriber(running)
        await subscriber.start()
        sender = asyncio.create_task(_send(connected))
        try:
            await subscriber.until(BEFORE)
            yield tour.Scene(
                "orders",
                f"the shop, on {shop.broker}, sends an order every {PACE_S * 1000:.0f} ms. A durable "
                f"subscriber, on {subscriber.broker}, has received {len(subscriber.numbers)}",
            )
            async for scene in _freeze(running, subscriber):
                yield scene
            async for scene in _move(running, subscriber):
                yield scene
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sender
            await subscriber.close()
        yield _conclude(subscriber, _SENT)


async def _pids(running: domain.Domain) -> dict[str, int | None]:
    assert running.brokers is not None
    return {broker.name: broker.pid for broker in await running.brokers.describe()}


async def _freeze(running: domain.Domain, subscriber: _Subscriber) -> AsyncIterator[tour.Scene]:
    victim = subscriber.broker
    pid = (await _pids(running)).get(victim or "")
    tour.expect(pid is not None, f"{victim} is not a broker of this domain")
    assert pid is not None
    count = len(subscriber.numbers)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    yield tour.Scene(
        "frozen",
        f"{victim} gets SIGSTOP: it neither works nor closes its connections. Its clients have to notice",
        {"broker": victim},
    )
    try:
        await subscriber.until(count + AFTER)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the domain has replaced it
            os.kill(pid, signal.SIGCONT)
    yield tour.Scene(
        "moved",
        f"the subscriber is on {subscriber.broker} now. It waited {subscriber.longest_s:.1f} s for an order, "
        f"and has received {len(subscriber.numbers)}",
        {"broker": subscriber.broker, "longest_s": subscriber.longest_s, "after_s": time.monotonic() - began},
    )


async def _move(running: domain.Domain, subscriber: _Subscriber) -> AsyncIterator[tour.Scene]:
    left = subscriber.broker
    await subscriber.close()
    count = len(subscriber.numbers)
    await asyncio.sleep(2.0)  # orders that are sent meanwhile
    await subscriber.start()
    await subscriber.until(count + AFTER // 2)
    yield tour.Scene(
        "roamed",
        f"the subscriber disconnected from {left} and returned two seconds later on {subscriber.broker}: "
        "its subscription had stored the orders",
        {"from": left, "to": subscriber.broker},
    )


_SENT: list[int] = []


async def _send(connected: jms.Connection) -> None:
    """Send numbers; a number counts as sent when the domain has stored it."""
    _SENT.clear()
    async with connected.session() as session:
        producer = session.producer(ORDERS)
        number = 0
        while True:
            try:
                await producer.send(str(number))
            except errors.TimedOut:
                continue  # in doubt: the same number again
            _SENT.append(number)
            number += 1
            await asyncio.sleep(PACE_S)


class _Subscriber:
    """A durable subscriber that can leave and come back."""

    def __init__(self, running: domain.Domain) -> None:
        self._running = running
        self._bus: api.Bus | None = None
        self._stack = contextlib.AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._last_s = 0.0
        self.numbers: list[int] = []
        self.longest_s = 0.0
        self.broker: str | None = None  # that of the last order; the connection has none while it is moving

    async def start(self) -> None:
        self._bus = await self._stack.enter_async_context(
            await self._running.connect("kitchen", roles.Role.USER)
        )
        connected = await self._stack.enter_async_context(jms.Connection(self._bus, client_id="kitchen"))
        session = await self._stack.enter_async_context(connected.session())
        consumer = await session.durable_consumer(ORDERS, "all-orders")
        self._last_s = time.monotonic()
        self._task = asyncio.create_task(self._receive(consumer))

    async def _receive(self, consumer: consumers.Consumer) -> None:
        async for message in consumer:
            self.longest_s = max(self.longest_s, time.monotonic() - self._last_s)
            self._last_s = time.monotonic()
            assert self._bus is not None
            self.broker = self._bus.broker or self.broker
            self.numbers.append(int(str(message.body())))
            self._changed.set()

    async def until(self, count: int) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(self.numbers) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise errors.TimedOut(
                f"the subscriber has {len(self.numbers)} of {count} orders after {PATIENCE_S:g} s"
            ) from None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._stack.aclose()


def _conclude(subscriber: _Subscriber, sent: list[int]) -> tour.Scene:
    """Every order up to the last one received must have arrived once and in order."""
    numbers = subscriber.numbers
    due = [number for number in sent if number <= numbers[-1]]
    missing = len(set(due) - set(numbers))
    repeated = len(numbers) - len(set(numbers))
    tour.expect(not missing, f"{missing} stored orders did not arrive")
    return tour.Scene(
        "checked",
        f"{len(numbers)} orders received, {missing} missing, {repeated} repeated, "
        f"{'in order' if numbers == sorted(numbers) else 'out of order'}",
        {"received": len(numbers), "missing": missing, "repeated": repeated},
    )
