"""Brokers of a mesh killed under load, whichever leads the log; a checker reads the whole history."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from muster.bus import client as bus_client
from muster.bus.brokers import network
from muster.message import client, protocol, service, settings
from tests.message import history

Connect = Callable[[str], Awaitable[bus_client.Client]]


@contextlib.asynccontextmanager
async def _serving(connect: Connect, *names: str) -> AsyncIterator[None]:
    """Dispatchers, of which one acts."""
    services = [
        service.Service(
            await connect(name),
            settings.Message(checkpoint_records=30),
            max_bytes=64 << 20,
            lease_ttl_s=2,
            replicas=3,
        )
        for name in names
    ]
    running = [asyncio.create_task(one.run()) for one in services]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _leader(bus: bus_client.Client) -> str:
    return str((await bus.storage.call(f"STREAM.INFO.{protocol.STREAM}"))["cluster"]["leader"])


async def _kill_under_load(cluster: network.Network, *, kills: int, between: int) -> None:
    async with contextlib.AsyncExitStack() as stack:

        async def connect(identity: str) -> bus_client.Client:
            made = await bus_client.connect(cluster.urls, identity=identity)
            stack.push_async_callback(made.close)
            return made

        async def dial(client_id: str) -> client.Connection:
            return client.Connection(await connect(client_id), client_id=client_id)

        watching = await connect("watching")
        async with _serving(connect, "d1", "d2"), contextlib.AsyncExitStack() as connections:
            senders = 2
            count = (kills + 1) * between
            told = history.History(senders * count)
            users = [
                await connections.enter_async_context(await dial(name))
                for name in ("mover", "reader", "judge", "s0", "s1")
            ]
            mover, reader, judge, *sending = users
            reading = reader.session(client.Mode.CLIENT)
            following = await reading.durable_consumer(history.NEWS, "all", prefetch=10)

            async def kill() -> None:
                for number in range(kills):
                    await told.reached(senders * between * number + between)
                    leader = await _leader(watching)
                    await cluster[leader].kill()
                    await told.reached(len(told.moved) + 5)
                    await cluster[leader].start()
                    await cluster[leader].wait_healthy(timeout_s=60)

            async with asyncio.TaskGroup() as work:
                work.create_task(told.follow(following))
                work.create_task(told.move(mover))
                for number, connection in enumerate(sending):
                    work.create_task(told.send(connection, f"s{number}", count))
                work.create_task(kill())
            await told.judge(judge)


@pytest.mark.timeout(180)
async def test_the_leader_of_the_log_killed_under_load_costs_nothing(cluster: network.Network):
    await _kill_under_load(cluster, kills=1, between=40)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_brokers_killed_one_after_another_under_load_cost_nothing(cluster: network.Network):
    await _kill_under_load(cluster, kills=5, between=150)
