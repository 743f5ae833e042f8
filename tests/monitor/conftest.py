from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from muster.bus import api
from muster.bus.client import client
from muster.core import messages
from muster.core.reports import columns
from muster.monitor import protocol
from muster.monitor.channel import channel as channel_channel
from muster.monitor.channel import interpreters


@pytest.fixture
async def connect(broker):
    """Connections under any name, closed after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(identity: str) -> client.NatsBus:
            return await stack.enter_async_context(
                await client.connect([broker.url], identity=identity, audit_s=0)
            )

        yield make


@pytest.fixture
async def channel(connect):
    """Start channels: ``await channel("c1", parents=("root",))``."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(name, *, parents=(protocol.ROOT,), interpreter="concat", **settings):
            to = interpreters.ForwardTarget("up", tuple(parents), interpreter=interpreter)
            settings = {"hold_s": 0.1, "beat_s": 0.1, "subscriptions": (to,), **settings}
            return await stack.enter_async_context(
                channel_channel.Channel(await connect(name), channel_channel.ChannelOptions(**settings))
            )

        yield start


@pytest.fixture
def report():
    def make(machine, sequence=1, **more):
        fields = {"at_ms": int(time.time() * 1000), "period_s": 10.0, "metrics": {"cpu_percent": 5.0}, **more}
        return messages.NodeReport(machine=machine, sequence=sequence, **fields)

    return make


async def stored(bus: api.Bus, stream: str = columns.REPORTS_STREAM) -> list[tuple[Any, columns.BatchInfo]]:
    """All batches of the stream, with their facts."""
    opened = await bus.open_stream(stream)
    last = (await opened.state()).last_sequence
    return [columns.decode(message.data) async for message in opened.read(1, last)] if last else []


@pytest.fixture
def rows(connect):
    """The node reports in the stream now."""

    async def read(bus):
        return [row for batch, _ in await stored(bus) for row in columns.from_batch(batch)]

    return read
