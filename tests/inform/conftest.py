from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest_asyncio

from muster.gateways.uddi import mount
from muster.inform import client, settings
from muster.inform.node import node as node_node

StartNode = Callable[..., Awaitable[node_node.InformationNode]]

#: Rounds short enough for tests; nothing else differs from the defaults.
QUICK = msgspec.convert({"refresh_s": 0.2, "lost_after_s": 2.0, "timeout_s": 2.0}, settings.InformSettings)


@pytest_asyncio.fixture
async def start_node(connect) -> AsyncIterator[StartNode]:
    """Information nodes on ``broker``, each with a connection of its own; they end with the test."""
    async with contextlib.AsyncExitStack() as nodes:

        async def start(name: str = "n1", **options: Any) -> node_node.InformationNode:
            changes = {
                key: options.pop(key)
                for key in list(options)
                if key in settings.InformSettings.__struct_fields__
            }
            options.setdefault("settings", msgspec.structs.replace(QUICK, **changes))
            options.setdefault("mount_backends", mount.BACKENDS)
            node = await node_node.start(await connect(name), **options)
            nodes.push_async_callback(node.close)
            return node

        yield start


@pytest_asyncio.fixture
async def inform(connect) -> client.InformClient:
    return client.InformClient(await connect("ann"))
