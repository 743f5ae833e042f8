"""A process that simulates a share of a fleet of web servers: ``python -m muster.demo.web_farm``.

To the domain each server is real: a resource with an adapter, which an agent hosts and a manager manages; a
receiver that advertises its state and accepts commands by its policy; a machine in the reports of a
first-level channel.  Only the servers and the worm are simulated.  The worm moves between processes as
messages on a topic.

The process reads a `FarmConfig` from the first line of its input, writes a line when all its servers are up,
and ends when its input ends: the parent process holds the other end of the pipe.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import itertools
import pathlib
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.bus import api
from muster.bus.client import client as bus_client
from muster.core import errors, health, messages, topics
from muster.core.reports import columns
from muster.core.telemetry import log
from muster.demo import worm
from muster.manage import client as manage
from muster.manage.adapters import memory
from muster.manage.agent import agent
from muster.monitor import protocol as monitor
from muster.notify import client as notify
from muster.notify import protocol as notify_protocol
from muster.simulate import fleet
from muster.trust import credentials

events = log.EventLog("simulate")

MODEL = "WebServer"
STEP_S = 0.5
ORDER_S_MAX = 60.0
BATCH_MAX = 500  # servers in one request to a manager
REQUESTS_MAX = 2  # concurrent requests to each manager for each operation: patches must not delay others
#: What the report of a server says, by its condition: an isolated one is out of service.
STATES = np.array(
    [
        state.value
        for state in (
            health.HealthState.UP,
            health.HealthState.FAILED,
            health.HealthState.DRAINING,
            health.HealthState.UP,
        )
    ]
)
COMMANDED = "commanded"  # the condition of a server with a pending command, which needs no other
JOINS_MAX = 2_000  # in one request: with more, a busy machine would not reply in time
ATTACKS = "worm/attempts"
TALLIES = "worm/tallies"
RELEASE = "worm/release"


WORDS = (*(condition.word for condition in worm.ServerCondition), COMMANDED)


class FarmConfig(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of this farm
    servers: tuple[str, ...]
    creds: dict[str, str]  # agent, channel, worm: files of credentials
    ca: str | None = None
    plan: worm.WormPlan
    farms: tuple[tuple[str, int, int], ...]  # all farms: name, first server, number of servers
    period_s: float = 5.0
    channel: str = "channel-1"
    policies: dict[str, str] = {}  # by region
    log_level: str = "info"


class FarmStatistics(messages.WireMessage, frozen=True, kw_only=True, tag="worm-tally"):
    """Statistics of one farm, published in every step."""

    farm: str
    counts: dict[str, int]  # servers by condition
    regions: dict[str, int]  # infected servers by region
    accepted: dict[str, int]  # commands that receivers here accepted, by event
    first_accepted_at: float
    done: dict[str, int]  # executed operations
    not_done: int
    repeated: int  # events that a receiver got twice; there should be none
    up: int
    managers: dict[str, int]  # servers here, by manager
    commanded: int = 0  # servers with an accepted command that has not been executed
    dropped: int = 0  # messages that arrived faster than this farm processed them


class WebServer(memory.MemoryAdapter):
    """The adapter of a server, which can be isolated and patched. A subclass of each farm sets ``farm``."""

    farm: ClassVar[worm.WormFarm]

    async def do_isolate(self) -> None:
        self.farm.isolate([self._place])

    async def do_patch(self) -> None:
        self.farm.patch([self._place])

    @property
    def _place(self) -> int:
        return self.farm.plan.number(self.context.name) - self.farm.first


@dataclass
class AcceptedCommands:
    """Commands that receivers accepted and that have not been requested from their managers."""

    names: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (operation, id) -> servers
    pending: asyncio.Event = field(default_factory=asyncio.Event)


class WebFarm:
    def __init__(self, task: FarmConfig, agent_bus: api.Bus, channel_bus: api.Bus, worm_bus: api.Bus) -> None:
        self.task = task
        first, count = next((first, count) for name, first, count in task.farms if name == task.name)
        self.farm = worm.WormFarm(task.plan, first, count)
        self._names = self.farm.names
        self._bus, self._channel, self._worm = agent_bus, channel_bus, worm_bus
        self._receivers = notify.NotifyClient(agent_bus, on_event=self._accepted)
        here = type("WebServerHere", (WebServer,), {"farm": self.farm})
        self._agent = agent.Agent(agent_bus, types=("memory",), adapters=lambda _: here)
        self._manager = manage.ManageClient(agent_bus)
        self._ordered = AcceptedCommands()
        self._seen: set[tuple[str, str]] = set()
        self._tally = collections.Counter[str]()
        self._accepted_counts = collections.Counter[str]()
        self._first_accepted_at = 0.0
        self._commanded = np.zeros(count, np.int64)  # pending commands by server
        self._lanes = collections.defaultdict[tuple[str, str], asyncio.Semaphore](
            lambda: asyncio.Semaphore(REQUESTS_MAX)
        )
        self._advertised = self._conditions()
        self._released = asyncio.Event()
        self._boot = time.time_ns() // 1_000_000
        self._batches = 0
        self._played = fleet.VirtualFleet(
            fleet.FleetPlan(
                machines=task.plan.servers,
                period_s=task.period_s,
                seed=task.plan.seed,
                first=first,
                count=count,
            ),
            boot=self._boot,
        )

    async def run(self, ready: Any, stop: asyncio.Event) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._receivers)
            await stack.enter_async_context(self._agent)
            attempts = topics.Topic.parse(f"{ATTACKS}/{self.task.name}").subject
            await self._worm.subscribe(attempts, handler=self._attacked)
            await self._worm.subscribe(topics.Topic.parse(RELEASE).subject, handler=self._on_release)
            await self._join()
            ready()
            work = [
                asyncio.create_task(work_)
                for work_ in (self._report(), self._spread(), self._execute_commands(), self._advertise())
            ]
            ended = asyncio.create_task(stop.wait())
            try:
                done, _ = await asyncio.wait((*work, ended), return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ended}:
                    task.result()
            finally:
                for task in (*work, ended):
                    task.cancel()
                await asyncio.gather(*work, ended, return_exceptions=True)

    # Receivers

    async def _join(self) -> None:
        plan, farm = self.task.plan, self.farm
        for start in range(0, farm.count, JOINS_MAX):
            names = tuple(self._names[start : start + JOINS_MAX])
            versions = farm.version[start : start + JOINS_MAX].tolist()
            regions = farm.region[start : start + JOINS_MAX].tolist()
            joins = notify_protocol.JoinReceivers(
                receivers=names,
                model=MODEL,
                values={
                    "application": ["IIS"] * len(names),
                    "application_version": [plan.versions[code] for code in versions],
                    "region": [plan.regions[code] for code in regions],
                    "condition": [worm.ServerCondition.HEALTHY.word] * len(names),
                },
                policies=tuple(self.task.policies.get(region, "") for region in plan.regions),
                which=regions,
                durable=list(range(len(names))),
            )
            while not await self._joined(joins):
                pass  # repeated until it succeeds: the parent process has the time limit

    async def _joined(self, joins: notify_protocol.JoinReceivers) -> bool:
        try:
            await self._receivers.change([joins])
        except errors.Unavailable as error:
            events.warning("not-joined", farm=self.task.name, error=error)
            await asyncio.sleep(STEP_S)
            return False
        return True

    def _conditions(self) -> npt.NDArray[np.uint8]:
        """Return the condition of each server for its state, or that it has a pending command."""
        return np.where(self._commanded > 0, len(WORDS) - 1, self.farm.condition).astype(np.uint8)

    async def _advertise(self) -> None:
        """Update changed conditions in each step, all in one message."""
        while True:
            await asyncio.sleep(STEP_S)
            now = self._conditions()
            changed = np.flatnonzero(now != self._advertised)
            if not len(changed):
                continue
            words = [WORDS[code] for code in now[changed].tolist()]
            try:
                await self._receivers.update(
                    [self._names[place] for place in changed.tolist()], condition=words
                )
            except errors.Unavailable as error:
                events.warning("not-advertised", farm=self.task.name, error=error)
            else:
                self._advertised[changed] = now[changed]

    def _accepted(self, names: Sequence[str], event: notify.ReceivedEvent) -> None:
        """Handle an event from the notifier: the policies of these servers accepted it."""
        self._first_accepted_at = self._first_accepted_at or time.time()
        for name in names:
            key = (name, event.id)
            self._tally["repeated"] += key in self._seen
            self._seen.add(key)
        self._accepted_counts[event.id] += len(names)
        operation = event.content.get("operation")
        if isinstance(operation, str):
            np.add.at(self._commanded, self._places(names), 1)
            key = (operation, f"{event.sender['_id']}:{event.id}")
            self._ordered.names.setdefault(key, []).extend(names)
            self._ordered.pending.set()

    async def _execute_commands(self) -> None:
        """Request accepted commands from the managers of the servers; the same id is executed once."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._ordered.pending.wait()
                self._ordered.pending.clear()
                ordered, self._ordered.names = self._ordered.names, {}
                for (operation, id), names in ordered.items():
                    # Separate requests for each manager: a dead manager does not delay the others.
                    for manager, theirs in self._by_manager(names).items():
                        lane = self._lanes[operation, manager]
                        for start in range(0, len(theirs), BATCH_MAX):
                            batch = theirs[start : start + BATCH_MAX]
                            tasks.create_task(self._carry_out(operation, id, batch, lane))

    def _by_manager(self, names: Sequence[str]) -> dict[str, list[str]]:
        by_manager: dict[str, list[str]] = {}
        for name in names:
            by_manager.setdefault(self._agent.hosted[name].record.manager, []).append(name)
        return by_manager

    def _places(self, names: Sequence[str]) -> list[int]:
        return [self.task.plan.number(name) - self.farm.first for name in names]

    async def _carry_out(self, operation: str, id: str, names: list[str], lane: asyncio.Semaphore) -> None:
        async with lane:
            await self._request(operation, id, names)
        np.subtract.at(self._commanded, self._places(names), 1)

    async def _request(self, operation: str, id: str, names: list[str]) -> None:
        left, deadline = names, time.monotonic() + ORDER_S_MAX
        while left:
            try:
                answers = await self._manager.exec(operation, *left, id=id, timeout_s=10)
            except errors.Unavailable as error:
                events.warning("not-requested", farm=self.task.name, operation=operation, error=error)
                answers = []
            done = {
                answer.resource for answer in answers if answer.outcome == messages.DecisionOutcome.DONE.value
            }
            self._tally[operation] += len(done)
            left = [name for name in left if name not in done]
            if left and time.monotonic() > deadline:
                self._tally["not_done"] += len(left)
                return
            if left:  # their manager died: another one takes over soon
                await asyncio.sleep(STEP_S)

    # The worm

    def _on_release(self, _: api.Message) -> None:
        if not self._released.is_set():
            self.farm.release()
            self._released.set()

    def _attacked(self, message: api.Message) -> None:
        self.farm.struck(np.frombuffer(message.data, "<u4").astype(np.int64))

    async def _spread(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            tried = self.farm.attempts(STEP_S) if self._released.is_set() else np.zeros(0, np.int64)
            self.farm.struck(tried)
            for name, first, count in self.task.farms:
                theirs = tried[(tried >= first) & (tried < first + count)]
                if len(theirs) and name != self.task.name:
                    await self._publish(f"{ATTACKS}/{name}", theirs.astype("<u4").tobytes())
            await self._publish_statistics()

    async def _publish_statistics(self) -> None:
        counts = self.farm.tally()
        owners = collections.Counter(resource.record.manager for resource in self._agent.hosted.values())
        statistics = FarmStatistics(
            farm=self.task.name,
            regions=counts.pop("regions"),
            counts=counts,
            accepted=dict(self._accepted_counts),
            first_accepted_at=self._first_accepted_at,
            done={name: self._tally[name] for name in ("isolate", "patch")},
            not_done=self._tally["not_done"],
            repeated=self._tally["repeated"],
            up=sum(
                resource.observed.state is health.HealthState.UP for resource in self._agent.hosted.values()
            ),
            managers=dict(owners),
            commanded=int((self._commanded > 0).sum()),
            dropped=sum(bus.statistics().dropped for bus in (self._bus, self._channel, self._worm)),
        )
        await self._publish(f"{TALLIES}/{self.task.name}", messages.encode(statistics))

    async def _publish(self, topic: str, data: bytes) -> None:
        with contextlib.suppress(errors.Unavailable):  # the next step publishes newer ones
            await self._worm.publish(topics.Topic.parse(topic).subject, data)

    # Reports

    async def _report(self) -> None:
        """Publish a report of every server in each period, one slot at a time."""
        slots, period_s, tick = self._played.slots, self.task.period_s, 0
        began_s = time.monotonic()
        while True:
            for number, slot in enumerate(slots):
                due_s = began_s + (tick + number / len(slots)) * period_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                with contextlib.suppress(errors.Unavailable):
                    await self._channel.publish(
                        monitor.batch(self._channel.identity, self.task.channel), self._batch(slot, tick)
                    )
            tick += 1

    def _batch(self, slot: fleet.FleetSlot, tick: int) -> bytes:
        farm, plan = self.farm, self.task.plan
        at_ms = time.time_ns() // 1_000_000
        batch = self._played.batch(slot, tick, at_ms)
        low = slot.number - farm.first
        here = slice(low, low + batch.num_rows)
        infected = farm.condition[here] == worm.ServerCondition.INFECTED
        regions = np.asarray(plan.regions)[farm.region[here]]
        versions = np.asarray(plan.versions)[farm.version[here]]
        groups = np.char.add(np.char.add(regions, "-"), versions)
        values = np.empty(2 * batch.num_rows)
        values[0::2], values[1::2] = infected, farm.at_risk[here]
        extra = pa.MapArray.from_arrays(
            pa.array(np.arange(0, 2 * batch.num_rows + 1, 2, dtype=np.int32)),
            pa.array(["infected", "at_risk"] * batch.num_rows),
            pa.array(values),
        )
        out = batch.column("network_out_bytes_s").to_numpy() * np.where(infected, 30.0, 1.0)
        for name, column in (
            ("machine", pa.array(self._names[here])),
            ("group", pa.array(groups)),
            ("zone", pa.array(regions)),
            ("state", pa.array(STATES[farm.condition[here]])),
            ("network_out_bytes_s", pa.array(out)),
            ("extra", extra),
        ):
            place = batch.schema.get_field_index(name)
            batch = batch.set_column(
                place, batch.schema.field(place), column.cast(batch.schema.field(place).type)
            )
        self._batches += 1
        facts = columns.BatchInfo(
            channel=self._channel.identity,
            boot=self._boot,
            sequence=self._batches,
            machines=batch.num_rows,
            held_to_ms=at_ms,
        )
        return columns.encode(batch, facts)


def split_farm(stem: str, servers: int, farms: int) -> tuple[tuple[str, int, int], ...]:
    """Divide the servers among farms: name, first server, number of servers."""
    ends = [servers * number // farms for number in range(farms + 1)]
    return tuple(
        (f"{stem}-{number}", first, end - first)
        for number, (first, end) in enumerate(itertools.pairwise(ends), 1)
    )


async def _connect(task: FarmConfig, kind: str) -> api.Bus:
    creds = await asyncio.to_thread(credentials.Credentials.load, pathlib.Path(task.creds[kind]))
    tls = await asyncio.to_thread(ssl.create_default_context, cafile=task.ca) if task.ca else None
    return await bus_client.connect(task.servers, creds=creds, tls=tls)


async def _main() -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    reader = asyncio.StreamReader(limit=4 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    task = msgspec.json.decode(await reader.readline(), type=FarmConfig)
    gc.freeze()
    gc.set_threshold(20_000, 50, 1_000)  # hundreds of thousands of objects stay: collect rarely
    log.configure(sys.stderr, level=task.log_level, form="json")

    async def parent_ended() -> None:
        await reader.read()
        stop.set()

    def ready() -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()

    holding = asyncio.create_task(parent_ended())
    try:
        async with contextlib.AsyncExitStack() as stack:
            buses = [
                await stack.enter_async_context(await _connect(task, kind))
                for kind in ("agent", "channel", "worm")
            ]
            await WebFarm(task, *buses).run(ready, stop)
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C in a terminal: the parent process ends this one
        asyncio.run(_main())
