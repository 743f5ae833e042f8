"""Brokers of a mesh killed under load; a checker reads the whole history.

The first broker killed is the one of all clients, and of no server: messages on their way to clients are
lost, and only their own reconnection shows it.  Then the leader of the log is killed, with whatever is
connected to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from muster.bus.brokers import network
from muster.bus.client import client as bus_client
from muster.message import partitions, settings
from muster.message.client import api
from muster.message.dispatcher import leadership
from tests.message import history

Connect = Callable[..., Awaitable[bus_client.NatsBus]]


@contextlib.asynccontextmanager
async def _serving(connect: Connect, at: str, *names: str) -> AsyncIterator[None]:
    """Dispatchers, of which one acts."""
    acting: list[asyncio.Task[Any]] = []
    services = [
        leadership.DispatcherLeadership(
            await connect(name, at),
            settings.MessageSettings(checkpoint_records=30),
            max_bytes=64 << 20,
            lease_ttl_s=2,
            replicas=3,
        )
        for name in names
    ]
    running = [asyncio.create_task(service.run()) for service in services]
    try:
        acting = [asyncio.create_task(service.acting.wait()) for service in services]
        await asyncio.wait(acting, return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        for task in (*acting, *running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _leader(bus: bus_client.NatsBus) -> str:
    return str((await bus.storage.call(f"STREAM.INFO.{partitions.stream(0)}"))["cluster"]["leader"])


async def _kill_under_load(cluster: network.BrokerNetwork, *, kills: int, between: int) -> None:
    async with contextlib.AsyncExitStack() as stack:

        async def connect(identity: str, *first: str) -> bus_client.NatsBus:
            made = await bus_client.connect([*first, *cluster.urls], identity=identity, in_order=bool(first))
            stack.push_async_callback(made.close)
            return made

        home = next(iter(cluster.brokers.values()))  # of the dispatchers
        watching = await connect("watching", home.url)
        async with _serving(connect, home.url, "d1", "d2"), contextlib.AsyncExitStack() as connections:
            senders = 2
            count = (kills + 1) * between
            sent_history = history.TransferHistory(senders * count)
            spared = (await _leader(watching), home.name)
            first = next(name for name in cluster.brokers if name not in spared)
            users = [
                await connections.enter_async_context(
                    api.Connection(await connect(name, cluster[first].url), client_id=name)
                )
                for name in ("mover", "reader", "judge", "s0", "s1")
            ]
            mover, reader, judge, *sending = users
            reading = reader.session(api.AcknowledgeMode.CLIENT)
            following = await reading.durable_consumer(history.NEWS, "all", prefetch=10)

            async def kill() -> None:
                for number in range(kills):
                    await sent_history.reached(senders * between * number + between)
                    victim = cluster[await _leader(watching) if number else first]
                    await victim.kill()
                    await sent_history.reached(min(len(sent_history.moved) + 5, sent_history.total))
                    await victim.start()
                    await victim.wait_healthy(timeout_s=60)

            async with asyncio.TaskGroup() as work:
                work.create_task(sent_history.follow(following))
                work.create_task(sent_history.move(mover))
                for number, connection in enumerate(sending):
                    work.create_task(sent_history.send(connection, f"s{number}", count))
                work.create_task(kill())
            await sent_history.judge(judge)


@pytest.mark.timeout(180)
async def test_brokers_killed_under_load_cost_nothing(cluster: network.BrokerNetwork):
    await _kill_under_load(cluster, kills=2, between=25)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_many_brokers_killed_one_after_another_under_load_cost_nothing(cluster: network.BrokerNetwork):
    await _kill_under_load(cluster, kills=5, between=150)
