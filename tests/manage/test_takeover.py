"""A registry on standby takes over from one that is killed, frozen or lost with its broker.

The registries are processes of their own. A client writes all the time; every write that was acknowledged is
there in the end, and the first one after the lease of the lost registry ended is answered within two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.bus import api, leases
from muster.bus.brokers import network
from muster.bus.client import client as bus_client
from muster.bus.rpc import client as rpc
from muster.bus.rpc import request_audit
from muster.core import errors, messages
from muster.manage import client, protocol
from muster.testing import child_process, fixtures
from muster.testing.eventually import eventually

TTL_S = 2.0
TAKEOVER_S = 2.0
RESOURCES = 2_000
STREAMS = (protocol.STREAM, messages.DECISIONS_STREAM, f"KV_{leases.BUCKET}")
PROGRAM = """
import asyncio, sys
from muster.bus.client import client
from muster.manage.registry import endpoint

async def main(name, replicas, ttl_s, *servers):
    bus = await client.connect(servers, identity=name)
    made = endpoint.RegistryEndpoint(bus, lease_ttl_s=float(ttl_s), replicas=int(replicas))
    async with bus, made:
        print("started", flush=True)
        await made.acting.wait()
        print("acts", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


class Takeover:
    """Two registries in processes, and a client that writes."""

    def __init__(self, bus: api.Bus, processes: list[child_process.ChildProcess]) -> None:
        self.bus = bus
        self.is_watching = asyncio.Event()
        self.owner, self.standby = processes
        self.fleet = client.ManageClient(bus)
        self.acknowledged: list[tuple[float, str]] = []
        self.in_doubt: set[str] = set()

    async def _apply(self, *names: str) -> None:
        entries = [{"name": name, "type": "memory", "agent": "host-a"} for name in names]
        subject = protocol.request("ann", "apply")
        await rpc.call(self.bus, subject, {"entries": entries}, timeout_s=60, try_s=0.1)

    async def fill(self) -> None:
        await self._apply(*(f"r{number:04}" for number in range(RESOURCES)))

    async def write(self) -> None:
        for number in range(10**6):
            name = f"w{number:06}"
            try:
                await self._apply(name)
            except errors.TimedOut:
                self.in_doubt.add(name)
            else:
                self.acknowledged.append((asyncio.get_running_loop().time(), name))

    async def until_lease_ended(self) -> float:
        """When the lease of the owner has ended, and all streams have a leader."""
        bucket = await self.bus.key_value(api.KeyValueSettings(leases.BUCKET, max_bytes=16 << 20))
        async with await bucket.watch(protocol.LEASE) as watch:
            self.is_watching.set()
            async for entry in watch:
                if entry is not None and self.owner.name.encode() not in (entry.value or b""):
                    break
        for name in STREAMS:
            await self.has_leader(name)
        return asyncio.get_running_loop().time()

    async def has_leader(self, stream: str) -> None:
        async def answers() -> bool:
            with contextlib.suppress(errors.Unavailable):
                await (await self.bus.open_stream(stream)).state()
                return True
            return False

        await eventually(answers, timeout_s=60)

    async def first_write_after(self, at_s: float) -> float:
        def answered() -> float | None:
            return next((done_s for done_s, _ in self.acknowledged if done_s > at_s), None)

        done_s = await eventually(answered, timeout_s=60)
        assert done_s is not None
        return done_s - at_s

    async def check(self) -> None:
        stored = set(await self.fleet.names())
        written = {name for _, name in self.acknowledged}
        assert written <= stored, "a write that was acknowledged is lost"
        assert len(stored - written - self.in_doubt) <= RESOURCES + 1, "and one that is under way"


@contextlib.asynccontextmanager
async def registries(
    start_process: fixtures.StartProcess, bus: api.Bus, *servers: tuple[str, ...], replicas: int = 1
) -> AsyncIterator[tuple[Takeover, asyncio.Task[float]]]:
    await bus.stream(request_audit.stream_settings(replicas=replicas))  # as the domain's process does
    processes = []
    for number, known in enumerate(servers, start=1):
        name = f"registry-{number}"
        command = (sys.executable, "-c", PROGRAM, name, str(replicas), str(TTL_S), *known)
        processes.append(await start_process(*command, name=name))
        await processes[-1].line("acts" if number == 1 else "started")
    async with asyncio.TaskGroup() as group:
        takeover = Takeover(bus, processes)
        await takeover.fill()
        writing = group.create_task(takeover.write())
        await eventually(lambda: len(takeover.acknowledged) > 20)
        ended = group.create_task(takeover.until_lease_ended())
        await takeover.is_watching.wait()
        yield takeover, ended
        writing.cancel()
        await takeover.check()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_standby_answers_writes_two_seconds_after_the_lease_ended(
    broker: Any, connect: fixtures.Connect, start_process: fixtures.StartProcess, number: signal.Signals
):
    bus = await connect("ann")
    async with registries(start_process, bus, (broker.url,), (broker.url,)) as (takeover, ended):
        os.kill(takeover.owner.pid, number)
        assert await takeover.first_write_after(await ended) < TAKEOVER_S
        if number is signal.SIGSTOP:  # it goes on where it stopped, and is not the owner any more
            os.kill(takeover.owner.pid, signal.SIGCONT)
            await takeover.first_write_after(asyncio.get_running_loop().time() + TTL_S)
            assert await takeover.first_write_after(asyncio.get_running_loop().time()) < TAKEOVER_S


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_writes_go_on_after_the_broker_of_the_owner_is_killed(
    cluster: network.BrokerNetwork, start_process: fixtures.StartProcess
):
    """Its owner is connected to another broker in time, or replaced."""
    lost, *others = cluster.brokers.values()
    urls = tuple(member.url for member in others)
    async with (
        await bus_client.connect(urls, identity="ann") as bus,
        registries(start_process, bus, (lost.url, *urls), urls, replicas=3) as (takeover, ended),
    ):
        await lost.kill()
        for name in STREAMS:
            await takeover.has_leader(name)
        assert await takeover.first_write_after(asyncio.get_running_loop().time()) < TTL_S + TAKEOVER_S
        ended.cancel()


@pytest.mark.slow  # a cluster elects its leaders again
@pytest.mark.timeout(180)
async def test_a_standby_takes_over_from_a_machine_that_is_lost_with_its_broker(
    cluster: network.BrokerNetwork, start_process: fixtures.StartProcess
):
    lost, *others = cluster.brokers.values()
    urls = tuple(member.url for member in others)
    async with (
        await bus_client.connect(urls, identity="ann") as bus,
        registries(start_process, bus, (lost.url,), urls, replicas=3) as (takeover, ended),
    ):
        os.kill(takeover.owner.pid, signal.SIGKILL)
        await lost.kill()
        assert await takeover.first_write_after(await ended) < TAKEOVER_S
