from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from muster.app.supervisor import worker
from muster.manage import client
from muster.manage.adapters import base
from muster.manage.agent import agent
from muster.manage.manager import manager
from muster.manage.registry import endpoint
from muster.trust import keyring


class Fleet:
    """A domain's management in one process, each part with a connection of its own."""

    def __init__(self, connect: Any, folder: Any, stack: Any) -> None:
        self.connect = connect
        self.folder = folder
        self.stack = stack
        self.client: client.ManageClient

    async def registry(self, name: str = "registry-1", **options: Any) -> Any:
        options = {"lease_ttl_s": 3.0, "manager_ttl_s": 1.5, **options}
        made = endpoint.RegistryEndpoint(await self.connect(name), **options)
        return await self.stack.enter_async_context(made)

    async def manager(self, name: str = "manager-1") -> Any:
        made = manager.Manager(await self.connect(name), tick_s=0.05)
        return await self.stack.enter_async_context(made)

    async def agent(self, name: str = "host-a", **options: Any) -> Any:
        options = {"beat_s": 0.2, **options}
        made = agent.Agent(await self.connect(name), self.folder / name, **options)
        await self.stack.enter_async_context(made)
        self.stack.push_async_callback(_clear, made)
        return made


async def _clear(host: agent.Agent) -> None:
    """Whatever a test left running on an agent ends with it."""
    for resource in host.hosted.values():
        if resource.adapter is not None:
            await resource.adapter.delete()


@pytest.fixture
def trust(tmp_path) -> keyring.Keyring:
    return keyring.Keyring.create(tmp_path / "trust", "north")


@pytest.fixture
def broker_access(trust) -> Callable[[], Awaitable[base.BrokerAccess]]:
    """What an agent needs to make brokers."""
    return lambda: asyncio.to_thread(worker.broker_access, trust.folder)


@pytest.fixture
async def fleet(connect, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        made = Fleet(connect, tmp_path / "agents", stack)
        made.client = client.ManageClient(await connect("ann"))
        yield made


@pytest.fixture
def process_manifest() -> Callable[..., str]:
    def make(name: str = "sleeper", agent: str = "host-a", more: str = "") -> str:
        return f"""
resources:
  - name: {name}
    type: process
    agent: {agent}
    restart: {{delay_s: 0.05}}
    config:
      command: [sleep, "1000"]
{more}"""

    return make
