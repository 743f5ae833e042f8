"""A domain whose only broker is killed while a whole fleet is connected to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import os
import pathlib
import signal
import sys
import time

import psutil

from muster.core import errors
from muster.manage import client as manage_client
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.faults import outages
from tests.storm import fleet_process

BACK_S_MAX = 300.0
START_S_MAX = 900.0
LOOK_S = 0.5
STEADY_S = 10.0  # before the broker is killed
PART = 1_000  # resources in one manifest
SETTINGS = ("web.enabled=false", "notify.enabled=false", "inform.enabled=false", "manage.agent=false")


@dataclasses.dataclass
class Storm:
    """What happened after the broker was killed; times are seconds since then."""

    agents: int
    sensors: int
    replaced_s: float | None = None  # another broker process accepts connections
    connected_s: float | None = None  # all agents
    beating_s: float | None = None  # all agents
    registered_s: float | None = None  # all agents
    up_s: float | None = None  # all resources, after the last moment at which one was not
    reports_s: float | None = None  # the first reports are stored
    reports_lost: int = 0  # batches that were given up
    half_s: float | None = None  # half of the agents are connected
    attempts: int = 0
    attempts_per_s: float = 0.0  # the most in a second
    not_up: int = 0  # the most resources whose state was not up
    broker_restarts: int = 0
    broker_cores: float = 0.0  # the most in an interval
    broker_bytes: int = 0  # the most
    used_cores: dict[str, float] = dataclasses.field(default_factory=dict)  # before, by kind of process
    cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)  # used until all agents sent heartbeats
    load: float = 0.0  # of the machine before

    @property
    def is_over(self) -> bool:
        done = (self.connected_s, self.beating_s, self.registered_s, self.up_s, self.reports_s)
        return None not in done


class FleetProcess:
    def __init__(self, kind: str, process: asyncio.subprocess.Process) -> None:
        self.kind = kind
        self._process = process
        self.counts = fleet_process.StormCounts()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.counts = fleet_process.StormCounts(**json.loads(line))

    async def until_ready(self) -> None:
        async with asyncio.timeout(START_S_MAX):
            while not self.counts.ready:
                if self._reading.done():
                    raise RuntimeError("a process of the fleet has ended")
                await asyncio.sleep(LOOK_S)  # pace

    @property
    def pid(self) -> int:
        return self._process.pid

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading


class StormDomain(outages.Drill):
    async def storm(self, agents: int, sensors: int, processes: int) -> Storm:
        load = os.getloadavg()[0]
        flags = [part for setting in SETTINGS for part in ("--set", setting)]
        await self.command("init", "--port", "0", *flags)
        await self.command("up", "--detach", "--timeout", "140s")
        fleet: list[FleetProcess] = []
        try:
            async with self._stack:
                self.servers = [(await self.status())["brokers"][0]["url"]]
                ends = [agents * number // processes for number in range(processes + 1)]
                for first, end in itertools.pairwise(ends):
                    fleet.append(await self._start("agents", first, end))
                fleet.append(await self._start("sensors", 0, sensors))
                for process in fleet:
                    await process.until_ready()
                report(f"{agents:,} agents are connected")
                bus = await self._connect("storm-operator", roles.Role.OPERATOR, self.servers[0])
                manage = manage_client.ManageClient(bus)
                await self._manage(manage, agents)
                report(f"{agents:,} resources are up")
                return await self._measure(fleet, manage, Storm(agents, sensors, load=round(load, 1)))
        finally:
            for process in fleet:
                await process.end()
            await self.command("down", "--force")

    async def _start(self, kind: str, first: int, end: int) -> FleetProcess:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.storm.fleet_process", kind, self.servers[0]),
            *(str(self.settings().keys_folder), str(first), str(end)),
            stdout=asyncio.subprocess.PIPE,
        )
        return FleetProcess(kind, process)

    async def _manage(self, manage: manage_client.ManageClient, agents: int) -> None:
        for first in range(0, agents, PART):
            numbers = range(first, min(agents, first + PART))
            entries = [
                {"name": f"resource-{number:05}", "type": "memory", "agent": f"storm-{number:05}"}
                for number in numbers
            ]
            await manage.apply(json.dumps({"resources": entries}))
        await eventually(functools.partial(self._all_up, manage, agents), timeout_s=START_S_MAX)

    async def _all_up(self, manage: manage_client.ManageClient, agents: int) -> bool:
        return await self._not_up(manage, agents) == 0

    async def _not_up(self, manage: manage_client.ManageClient, agents: int) -> int | None:
        """None: the registry does not answer."""
        try:
            async with asyncio.timeout(5.0):
                return agents - (await manage.summary()).states.get("up", 0)
        except (errors.MusterError, TimeoutError):
            return None

    async def _cpu_s(self, fleet: list[FleetProcess]) -> dict[str, float]:
        """The processor time of the running processes, by their kind."""
        status = await self.status()
        pids = [(process.kind, process.pid) for process in fleet]
        pids += [("broker", row["pid"]) for row in status["brokers"] if row["pid"]]
        pids += [(page["process"].rstrip("-0123456789"), page["pid"]) for page in status["pages"]]
        used_s: dict[str, float] = {}
        for kind, pid in pids:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                used_s[kind] = used_s.get(kind, 0.0) + times.user + times.system
        return used_s

    async def _measure(
        self, fleet: list[FleetProcess], manage: manage_client.ManageClient, storm: Storm
    ) -> Storm:
        cpu_s = await self._cpu_s(fleet)
        await asyncio.sleep(STEADY_S)  # pace
        idle_cpu_s, cpu_s = cpu_s, await self._cpu_s(fleet)
        storm.used_cores = {
            kind: round((cpu_s[kind] - idle_cpu_s.get(kind, 0.0)) / STEADY_S, 2) for kind in cpu_s
        }
        report(f"cores used: {storm.used_cores}")
        before = _sum(fleet)
        killed = (await self.status())["brokers"][0]["pid"]
        began_s = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        counting = asyncio.create_task(self._watch_states(manage, storm, began_s))
        watching = asyncio.create_task(self._watch_broker(storm, killed, began_s))
        try:
            attempts, at_s = before.attempts, began_s
            while (elapsed_s := time.monotonic() - began_s) < BACK_S_MAX and not storm.is_over:
                await asyncio.sleep(2 * LOOK_S)  # pace
                now_s, counts = time.monotonic(), _sum(fleet)
                elapsed_s = now_s - began_s
                storm.attempts = counts.attempts - before.attempts
                rate = (counts.attempts - attempts) / (now_s - at_s)
                storm.attempts_per_s = round(max(storm.attempts_per_s, rate))
                attempts, at_s = counts.attempts, now_s
                reached = {
                    "half_s": 2 * counts.reconnected >= storm.agents,
                    "connected_s": counts.reconnected == storm.agents,
                    "beating_s": counts.beating == storm.agents,
                    "registered_s": counts.registered == storm.agents,
                    "reports_s": storm.replaced_s is not None and counts.rows > before.rows,
                }
                for name, is_reached in reached.items():
                    if is_reached and getattr(storm, name) is None:
                        setattr(storm, name, round(elapsed_s, 1))
                if storm.replaced_s is None:
                    before.rows = counts.rows  # stored before the broker ended
                if storm.beating_s is not None and not storm.cpu_s:
                    cpu_s["broker"] = 0.0  # it is another process
                    storm.cpu_s = {
                        kind: round(used_s - cpu_s.get(kind, 0.0), 1)
                        for kind, used_s in (await self._cpu_s(fleet)).items()
                    }
                    report(f"processor time: {storm.cpu_s}")
                storm.reports_lost = counts.failed - before.failed
                report(f"{elapsed_s:5.1f} s: {counts}, at most {storm.not_up:,} resources not up")
        finally:
            for task in (counting, watching):
                task.cancel()
            await asyncio.gather(counting, watching, return_exceptions=True)
        return storm

    async def _watch_states(self, manage: manage_client.ManageClient, storm: Storm, began_s: float) -> None:
        while True:
            await asyncio.sleep(2 * LOOK_S)  # pace
            not_up = await self._not_up(manage, storm.agents)
            if not_up == 0 and storm.beating_s is not None:
                storm.up_s = storm.up_s or round(time.monotonic() - began_s, 1)
            elif not_up != 0:
                storm.up_s = None
                storm.not_up = max(storm.not_up, not_up or 0)

    async def _watch_broker(self, storm: Storm, last_pid: int, began_s: float) -> None:
        process: psutil.Process | None = None
        cpu_s, at_s = 0.0, 0.0
        while True:
            await asyncio.sleep(LOOK_S)  # pace
            with contextlib.suppress(errors.MusterError, psutil.Error, TimeoutError):
                row = (await self.status())["brokers"][0]
                if row["pid"] not in (None, last_pid):
                    last_pid, process = row["pid"], psutil.Process(row["pid"])
                    storm.broker_restarts += 1
                    storm.replaced_s = storm.replaced_s or round(time.monotonic() - began_s, 1)
                    cpu_s, at_s = 0.0, time.monotonic() - (time.time() - process.create_time())
                if process is not None:
                    times, now_s = process.cpu_times(), time.monotonic()
                    used_s = times.user + times.system
                    storm.broker_cores = max(storm.broker_cores, round((used_s - cpu_s) / (now_s - at_s), 2))
                    cpu_s, at_s = used_s, now_s
                    storm.broker_bytes = max(storm.broker_bytes, process.memory_info().rss)


def _sum(fleet: list[FleetProcess]) -> fleet_process.StormCounts:
    return functools.reduce(operator.add, (process.counts for process in fleet))


def report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


async def storm(folder: pathlib.Path, agents: int, sensors: int, processes: int) -> Storm:
    return await StormDomain(folder / "home").storm(agents, sensors, processes)
