"""The other processes of `benchmarks.manage`: a manager, simulated adapters, agents that only answer.

JSON lines on standard input and output.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import pathlib
import random
import sys
import time
from typing import Any

from muster.app.supervisor import worker
from muster.bus import api
from muster.bus.client import client
from muster.core import messages
from muster.manage import protocol
from muster.manage.agent import agent, deadlines
from muster.manage.manager import manager
from muster.manage.registry import endpoint
from muster.trust import credentials

BEAT_S = 5.0


def say(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def next_command() -> Any:
    line = await asyncio.to_thread(sys.stdin.readline)
    return json.loads(line) if line else None


async def connect(url: str, creds: str | None = None, identity: str = "worker") -> api.Bus:
    if creds:
        read = await asyncio.to_thread(credentials.Credentials.load, pathlib.Path(creds))
        return await client.connect([url], creds=read)
    return await client.connect([url], identity=identity, audit_s=0)


async def registry(url: str, creds: str, replicas: str) -> None:
    worker.relax_gc()
    async with (
        await connect(url, creds) as bus,
        endpoint.RegistryEndpoint(bus, replicas=int(replicas)) as running,
    ):
        say("ready")
        while await next_command() is not None:
            say({"acts": running.acting.is_set()})


async def manage(url: str, creds: str) -> None:
    worker.relax_gc()  # as in a domain
    async with await connect(url, creds) as bus, manager.Manager(bus) as running:
        say("ready")
        while await next_command() is not None:
            say({"managed": len(running.managed)})


async def host(url: str, name: str, folder: str, trust: str) -> None:
    """An agent that may make brokers."""
    access = functools.partial(asyncio.to_thread, worker.broker_access, pathlib.Path(trust))
    async with (
        await connect(url, identity=name) as bus,
        agent.Agent(bus, pathlib.Path(folder), broker_access=access),
    ):
        say("ready")
        while await next_command() is not None:
            say({})


class EndsWithAgent(deadlines.ResourceWatchdog):
    """Nothing has to be killed when this process has ended: its resources are in its memory."""

    def renewed_at(self) -> float | None:
        return None

    def keep(self, renewed_at: float, first_s: float) -> None:
        pass


async def adapters(url: str, *creds: str, guard: deadlines.ResourceWatchdog | None = None) -> None:
    """One agent for each of the credentials; what is asked of them is measured here."""
    worker.relax_gc()
    async with contextlib.AsyncExitStack() as stack:
        hosts = []
        for cred in creds:
            bus = await stack.enter_async_context(await connect(url, cred))
            host = agent.Agent(bus, beat_s=BEAT_S, types=("memory",), guard=guard)
            hosts.append(await stack.enter_async_context(host))
        say("ready")
        await _obey(hosts)


async def _obey(hosts: list[agent.Agent]) -> None:
    watching: asyncio.Task[list[float]] | None = None
    while (wish := await next_command()) is not None:
        match wish["do"]:
            case "count":
                say(_owners(hosts))
            case "wait":
                await _wait(hosts, wish["total"], wish.get("not", ""))
                say({})
            case "watch":
                watching = asyncio.create_task(_reassigned(hosts, wish["manager"]))
                await asyncio.sleep(0)
                say({})
            case "watched":
                assert watching is not None
                say(await watching)
            case "burst":
                say(await _burst(hosts))
            case "steady":
                say(await _steady(hosts, wish["rate"], wish["seconds"]))


def _owners(hosts: list[agent.Agent]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for host in hosts:
        for resource in host.hosted.values():
            if resource.observed.exists and resource.observed.state.value == "up":
                counts[resource.record.manager] = counts.get(resource.record.manager, 0) + 1
    return counts


async def _wait(hosts: list[agent.Agent], total: int, gone: str) -> None:
    """Until so many are up under a manager that is not the one that is gone."""
    while True:
        began = time.perf_counter()
        owners = _owners(hosts)
        if sum(owners.values()) - owners.get(gone, 0) >= total:
            return
        await asyncio.sleep(max(0.05, 10 * (time.perf_counter() - began)))  # counting must not delay them


async def _reassigned(hosts: list[agent.Agent], former: str) -> list[float]:
    """Of each resource of this manager: when another one has claimed it, by the monotonic clock."""
    left = [
        resource for host in hosts for resource in host.hosted.values() if resource.record.manager == former
    ]
    reassigned_at: list[float] = []
    while left:
        await asyncio.sleep(0.02)
        now, still = time.monotonic(), [resource for resource in left if resource.record.manager == former]
        reassigned_at += [now] * (len(left) - len(still))
        left = still
    return reassigned_at


async def _ask(host: agent.Agent, name: str) -> float:
    resource = host.hosted[name]
    event = protocol.ResourceEvent(
        resource=name, what=protocol.CHANGED, observed=resource.observed, epoch=resource.record.epoch
    )
    began = time.perf_counter()
    subject = protocol.event(host.name, resource.record.manager)
    await host._bus.request(subject, messages.encode(event), timeout_s=60)
    return time.perf_counter() - began


async def _burst(hosts: list[agent.Agent]) -> list[float]:
    return await asyncio.gather(*(_ask(host, name) for host in hosts for name in host.hosted))


async def _steady(hosts: list[agent.Agent], rate: float, seconds: float) -> list[float]:
    everyone = [(host, name) for host in hosts for name in host.hosted]
    tasks, loop = [], asyncio.get_running_loop()
    began = loop.time()
    for number in itertools.count():
        due = began + number / rate
        if due > began + seconds:
            break
        await asyncio.sleep(max(0.0, due - loop.time()))
        tasks.append(asyncio.create_task(_ask(*random.choice(everyone))))
    return list(await asyncio.gather(*tasks))


async def answering(url: str, count: str) -> None:
    """So many agents on one connection, each with one resource, and as many bare echoes."""
    async with await connect(url, identity="crowd") as bus:
        for number in range(int(count)):
            host = agent.Agent(bus, name=f"a{number}", types=("memory",))
            await bus.subscribe(protocol.operations_of(host.name), handler=host._on_operation)
            await bus.subscribe(f"echo.{number}", handler=_echo)
        await bus.flush()
        say("ready")
        while await next_command() is not None:
            say({})


async def _echo(message: api.Message) -> None:
    await message.respond(message.data)


async def echo(url: str) -> None:
    async with await connect(url, identity="echo") as bus:
        await bus.subscribe("echo", handler=_echo)
        say("ready")
        while await next_command() is not None:
            say({})


async def ask_echo(url: str) -> None:
    """Bursts of bare requests, for comparison."""
    async with await connect(url, identity="asker") as bus:
        say("ready")

        async def ask() -> float:
            began = time.perf_counter()
            await bus.request("echo", b"x" * 200, timeout_s=60)
            return time.perf_counter() - began

        while (wish := await next_command()) is not None:
            say(await asyncio.gather(*(ask() for _ in range(wish["count"]))))


ROLES: dict[str, Any] = {
    "registry": registry,
    "manager": manage,
    "adapters": adapters,
    "movable": functools.partial(adapters, guard=EndsWithAgent()),
    "host": host,
    "answering": answering,
    "echo": echo,
    "ask-echo": ask_echo,
}

if __name__ == "__main__":
    asyncio.run(ROLES[sys.argv[1]](*sys.argv[2:]))
