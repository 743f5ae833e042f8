"""A process of the storm: real agents, each with a connection of its own, or simulated sensors.

It prints its counts as JSON lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from muster.app.supervisor import worker
from muster.bus import api
from muster.bus.client import client as bus_client
from muster.bus.client import reconnection
from muster.core import errors
from muster.core.telemetry import log
from muster.manage.agent import agent
from muster.simulate import fleet, playback
from muster.trust import credentials, keyring
from muster.trust.permissions import roles

T = TypeVar("T")

CONNECTING_AT_ONCE = 20
CHANNELS = 10  # connections that carry the reports of all sensors
LOOK_S = 0.5
PERIOD_S = 10.0  # of the sensors


@dataclasses.dataclass
class StormCounts:
    ready: int = 0
    attempts: int = 0  # to connect, since the start
    connected: int = 0
    reconnected: int = 0  # and connected
    beating: int = 0  # have sent a heartbeat since they reconnected
    registered: int = 0  # the registry has answered since they reconnected
    rows: int = 0  # reports stored
    failed: int = 0  # batches of reports that could not be stored

    def __add__(self, other: StormCounts) -> StormCounts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return StormCounts(*(mine + its for mine, its in pairs))


class ObservedTransport:
    """The bus of an agent, which remembers over which connection the agent was last successful."""

    def __init__(self, bus: bus_client.NatsBus) -> None:
        self.bus = bus
        self.identity = bus.identity
        self.subscribe = bus.subscribe
        self.beat_over = self.registered_over = self.reconnects = 0
        self.state = bus.state
        bus.on_state(self._changed)

    def _changed(self, state: api.ConnectionState) -> None:
        self.state = state
        self.reconnects += self.is_connected

    @property
    def is_connected(self) -> bool:
        return self.state is api.ConnectionState.CONNECTED

    async def publish(self, subject: str, data: bytes) -> None:
        await self.bus.publish(subject, data)
        if self.is_connected:
            self.beat_over = self.reconnects

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> api.Message:
        answer = await self.bus.request(subject, data, timeout_s=timeout_s)
        self.registered_over = self.reconnects
        return answer


def count_attempts(counts: StormCounts) -> None:
    original = reconnection.ReconnectionPlan.next_delay_s

    def next_delay_s(self: reconnection.ReconnectionPlan, now_s: float, random: float) -> float:
        counts.attempts += 1
        return original(self, now_s, random)

    reconnection.ReconnectionPlan.next_delay_s = next_delay_s  # type: ignore[method-assign]


async def persist(act: Callable[[], Awaitable[T]]) -> T:
    """Repeat it until it succeeds, as a process that is restarted does."""
    while True:
        with contextlib.suppress(errors.Unavailable):
            return await act()
        await asyncio.sleep(random.random())  # pace


async def run_agents(url: str, issue: Any, names: list[str]) -> None:
    counts = StormCounts()
    count_attempts(counts)
    transports: list[ObservedTransport] = []
    room = asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def start(name: str) -> None:
        async with room:
            creds = await asyncio.to_thread(issue, name, roles.Role.AGENT)
            bus = await persist(functools.partial(bus_client.connect, [url], creds=creds))
            transport: Any = ObservedTransport(bus)
            transports.append(transport)
            await persist(agent.Agent(transport, types=("memory",)).start)

    await asyncio.gather(*(start(name) for name in names))
    while True:
        back = [each for each in transports if each.reconnects and each.is_connected]
        counts.ready = 1
        counts.connected = sum(each.is_connected for each in transports)
        counts.reconnected = len(back)
        counts.beating = sum(each.beat_over == each.reconnects for each in back)
        counts.registered = sum(each.registered_over == each.reconnects for each in back)
        _print(counts)
        await asyncio.sleep(LOOK_S)  # pace of the lines


async def run_sensors(url: str, issue: Any, names: list[str]) -> None:
    counts, players = StormCounts(), []
    async with asyncio.TaskGroup() as group:
        for number in range(CHANNELS):
            identity = f"storm-channel-{number}"
            creds = await asyncio.to_thread(issue, identity, roles.Role.CHANNEL)
            bus = await persist(functools.partial(bus_client.connect, [url], creds=creds))
            machines = len(names[number::CHANNELS])
            plan = fleet.FleetPlan(machines=machines, period_s=PERIOD_S, prefix=identity)
            players.append(playback.FleetPlayer(bus, fleet.VirtualFleet(plan), form="batches"))
            group.create_task(players[-1].run())
        while True:
            counts.rows = sum(player.statistics.rows for player in players)
            counts.failed = sum(player.statistics.failed for player in players)
            counts.ready = int(counts.rows > 0)
            _print(counts)
            await asyncio.sleep(LOOK_S)  # pace of the lines


def issue(trust: keyring.Keyring, identity: str, role: roles.Role) -> credentials.Credentials:
    trust.issue(identity, role)
    return trust.credentials(identity)


def _print(counts: StormCounts) -> None:
    sys.stdout.write(json.dumps(dataclasses.asdict(counts)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    kind, url, keys, first, end = sys.argv[1:]
    log.configure(sys.stderr, level="warning", form="text")  # with the reasons that brokers give
    worker.relax_gc()  # as in a domain
    os.fsync = lambda fd: None  # keys of a simulated fleet: six syncs each, one agent after the other
    members = [f"storm-{number:05}" for number in range(int(first), int(end))]
    issuing = functools.partial(issue, keyring.Keyring.open(pathlib.Path(keys)))
    running = {"agents": run_agents, "sensors": run_sensors}[kind](url, issuing, members)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        asyncio.run(running)
