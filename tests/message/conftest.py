"""A broker with a dispatcher, and JMS connections to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio

from muster.message import settings
from muster.message.client import api as client_api
from muster.message.client import consumers
from muster.message.dispatcher import leadership, rights
from muster.testing import fixtures

Dial = Callable[..., Awaitable[client_api.Connection]]


@contextlib.asynccontextmanager
async def serving(
    connect: fixtures.Connect,
    identity: str = "dispatcher",
    message_settings: settings.MessageSettings | None = None,
    max_bytes: int = 1 << 30,
    may: rights.May = rights.allow_all,
) -> AsyncIterator[leadership.DispatcherLeadership]:
    started = leadership.DispatcherLeadership(
        await connect(identity), message_settings, lease_ttl_s=2, max_bytes=max_bytes, may=may
    )
    running = asyncio.create_task(started.run())
    try:
        yield started
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest_asyncio.fixture
async def dispatcher(connect: fixtures.Connect) -> AsyncIterator[leadership.DispatcherLeadership]:
    async with serving(connect) as started:
        await started.acting.wait()
        yield started


@pytest_asyncio.fixture
async def dial(connect: fixtures.Connect) -> AsyncIterator[Dial]:
    """JMS connections, of one identity unless a test names others, closed when the test ends."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(client_id: str | None = None, identity: str = "client") -> client_api.Connection:
            bus = await connect(identity)
            return await stack.enter_async_context(client_api.Connection(bus, client_id=client_id))

        yield make


async def take(consumer: consumers.Consumer, count: int, timeout_s: float = 30.0) -> list[str]:
    """The bodies of the next ``count`` messages, each of which arrives within ``timeout_s``."""
    bodies: list[str] = []
    for _ in range(count):
        message = await consumer.receive(timeout_s)
        assert message is not None, f"only {len(bodies)} of {count} messages arrived"
        bodies.append(str(message.body()))
    return bodies
