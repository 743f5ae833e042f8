"""A broker with a dispatcher, and JMS connections to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio

from muster.message import client, service, settings
from muster.testing import fixtures

Dial = Callable[..., Awaitable[client.Connection]]


@contextlib.asynccontextmanager
async def serving(
    connect: fixtures.Connect,
    identity: str = "dispatcher",
    wanted: settings.Message | None = None,
    max_bytes: int = 1 << 30,
) -> AsyncIterator[service.Service]:
    started = service.Service(await connect(identity), wanted, lease_ttl_s=2, max_bytes=max_bytes)
    running = asyncio.create_task(started.run())
    try:
        yield started
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest_asyncio.fixture
async def dispatcher(connect: fixtures.Connect) -> AsyncIterator[service.Service]:
    async with serving(connect) as started:
        await started.acting.wait()
        yield started


@pytest_asyncio.fixture
async def dial(connect: fixtures.Connect) -> AsyncIterator[Dial]:
    """JMS connections, closed when the test ends."""
    async with contextlib.AsyncExitStack() as stack:
        numbers = iter(range(1000))

        async def make(client_id: str | None = None) -> client.Connection:
            bus = await connect(f"client-{next(numbers)}")
            return await stack.enter_async_context(client.Connection(bus, client_id=client_id))

        yield make
