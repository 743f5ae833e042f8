"""A broker with a dispatcher, and JMS connections to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from muster.bus import api
from muster.message import settings
from muster.message.client import api as client_api
from muster.message.dispatcher import leadership, state
from muster.testing import fixtures
from muster.trust.login import password_checker, passwords
from muster.trust.permissions import roles

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway

Dial = Callable[..., Awaitable[client_api.Connection]]


@contextlib.asynccontextmanager
async def serving(
    connect: fixtures.Connect,
    identity: str = "dispatcher",
    wanted: settings.MessageSettings | None = None,
    max_bytes: int = 1 << 30,
    may: state.May = state.allow_all,
) -> AsyncIterator[leadership.DispatcherLeadership]:
    started = leadership.DispatcherLeadership(
        await connect(identity), wanted, lease_ttl_s=2, max_bytes=max_bytes, may=may
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


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> passwords.PasswordStore:
    """Made once: that takes long on purpose."""
    made = passwords.PasswordStore(tmp_path_factory.mktemp("passwords"))
    made.set("ann", roles.Role.USER, "correct horse", mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))
    return made


@pytest_asyncio.fixture
async def gateway(
    dispatcher: leadership.DispatcherLeadership, connect: fixtures.Connect, verifiers: passwords.PasswordStore
) -> AsyncIterator[amqp_gateway.AmqpGateway]:
    pytest.importorskip("proton", reason="python-qpid-proton is not installed")
    from muster.gateways.amqp import gateway as amqp_gateway

    async def dial(login: passwords.PasswordLogin) -> api.Bus:
        return await connect(login.name)

    def may(identity: str, action: str, subject: str) -> bool:
        return not subject.startswith("topic.secret.")

    async with amqp_gateway.AmqpGateway(
        dial, password_checker.PasswordChecker(verifiers), anonymous="nobody", may=may
    ) as started:
        yield started
