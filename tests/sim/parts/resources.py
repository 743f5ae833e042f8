"""Registries, managers and agents; an operator who changes the desired state, one who releases versions of
services, of which some never work or soon end, and one who moves resources from machines that may be cut off.

Other resources move by themselves when their machine is lost. An observer, which no fault concerns, sees what
runs on all machines: none of them ever runs twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import random

import msgspec

from muster.bus.rpc import client as rpc
from muster.core import errors, health
from muster.manage import client, protocol, rows
from muster.manage.adapters import base
from muster.manage.agent import agent, resource_host, watchdog
from muster.manage.manager import manager
from muster.manage.registry import endpoint
from tests.sim import domain as domain_
from tests.sim import history, host

REGISTRIES = 2
MANAGERS = 2
AGENTS = 2
RESOURCES = 5
TIMEOUT_S = 12.0
ACT_S_MAX = 0.4
RELEASES = ("release-1", "release-2")
BEGIN_S = 0.3  # until a version that works is up
LIVES_S = (None, None, 0.0, 0.5, 1.5)  # of versions: None: it works; 0: it is never healthy
RELEASE_S = 12.0  # the time for a release to become healthy
SPARES = ("spare-1", "spare-2")  # agents of the resources that are moved
MOVED = ("m0", "m1", "m2")
MOVING = ("k0", "k1", "k2")  # resources that are rescheduled, among the other agents
AFTER_S = 6.0
TWICE_S = watchdog.TICK_S + 0.1  # how long a machine that was suspended may run what moved meanwhile


class SimulatedConfig(msgspec.Struct, frozen=True, kw_only=True):
    value: int = 0


class Machine:
    """What runs on a machine: it outlives the agent's process."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.running: set[str] = set()
        self.releases: dict[str, tuple[float | None, float | None]] = {}  # life, and when the run began
        self.renewal = (0.0, 0.0)  # what its agent has given to its watchdog

    def renewed_at(self) -> float | None:
        return self.renewal[0] or None

    def keep(self, renewed_at: float, first_s: float) -> None:
        self.renewal = renewed_at, first_s

    def look(self, now: float) -> None:
        """As the watchdog does; all that moves has the same time."""
        renewed_at, first_s = self.renewal
        if first_s and now - renewed_at >= first_s * watchdog.KILL_SHARE:
            self.running -= {*MOVING}


class SimulatedAdapter(base.Adapter):
    type_name = "simulated"
    config_type = SimulatedConfig
    machine: Machine
    chance: random.Random

    async def _take_time(self) -> None:
        await asyncio.sleep(self.chance.uniform(0.0, ACT_S_MAX))

    async def create(self, config: SimulatedConfig, *, start: bool) -> None:
        await self._take_time()
        self.machine.values[self.context.name] = config.value
        if start:
            await self.do_start()

    async def put(self, config: SimulatedConfig) -> None:
        await self._take_time()
        self.machine.values[self.context.name] = config.value

    async def delete(self) -> None:
        await self._take_time()
        self.machine.values.pop(self.context.name, None)
        self.machine.running.discard(self.context.name)

    async def observe(self) -> protocol.ObservedState:
        name = self.context.name
        state = health.HealthState.UP if name in self.machine.running else health.HealthState.DOWN
        return protocol.ObservedState(name in self.machine.values, state)

    async def resume(self, config: SimulatedConfig) -> None:
        pass

    async def do_start(self) -> None:
        await self._take_time()
        self.machine.running.add(self.context.name)
        self.context.report_state(await self.observe())

    async def do_stop(self) -> None:
        await self._take_time()
        self.machine.running.discard(self.context.name)
        self.context.report_state(await self.observe())


class MovingAdapter(SimulatedAdapter):
    """What its watchdog ends is noticed."""

    type_name = "moving"
    can_move = True

    async def create(self, config: SimulatedConfig, *, start: bool) -> None:
        self.tasks.spawn("watch", self._watch())
        await super().create(config, start=start)

    async def resume(self, config: SimulatedConfig) -> None:
        self.tasks.spawn("watch", self._watch())

    async def do_start(self) -> None:
        await self._take_time()
        await self.context.save()  # may it run?
        self.machine.running.add(self.context.name)
        self.context.report_state(await self.observe())

    async def _watch(self) -> None:
        before = None
        while True:
            observed = await self.observe()
            if observed != before:
                self.context.report_state(observed)
            before = observed
            await asyncio.sleep(0.25)

    async def close(self) -> None:
        await self.tasks.close()


class ReleaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    value: int = 0
    life_s: float | None = None


class ReleaseAdapter(base.Adapter):
    """A service. Its run belongs to the machine, and goes on while no agent runs."""

    type_name = "release"
    config_type = ReleaseConfig
    machine: Machine

    async def create(self, config: ReleaseConfig, *, start: bool) -> None:
        self.machine.releases[self.context.name] = config.life_s, None
        if start:
            await self.do_start()

    async def put(self, config: ReleaseConfig) -> None:
        _, began = self.machine.releases[self.context.name]
        self.machine.releases[self.context.name] = config.life_s, None
        if began is not None:
            await self.do_start()

    async def delete(self) -> None:
        self.machine.releases.pop(self.context.name, None)

    async def observe(self) -> protocol.ObservedState:
        life_s, began = self.machine.releases.get(self.context.name, (None, None))
        age_s = 0.0 if began is None else asyncio.get_running_loop().time() - began
        if began is None or (life_s and age_s >= life_s):
            state = health.HealthState.DOWN
        elif life_s or (life_s is None and age_s >= BEGIN_S):
            state = health.HealthState.UP
        else:
            state = health.HealthState.STARTING
        return protocol.ObservedState(self.context.name in self.machine.releases, state)

    async def resume(self, config: ReleaseConfig) -> None:
        self.tasks.spawn("watch", self._watch())

    async def do_start(self) -> None:
        life_s, _ = self.machine.releases[self.context.name]
        self.machine.releases[self.context.name] = life_s, asyncio.get_running_loop().time()
        self.tasks.spawn("watch", self._watch())

    async def do_restart(self) -> None:
        await self.do_start()

    async def _watch(self) -> None:
        for _ in range(20):
            self.context.report_state(await self.observe())
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        await self.tasks.close()


class RecordedAgent(agent.Agent):
    """An agent whose operations are part of the history."""

    history: history.History

    async def _acquire(self, folder: pathlib.Path) -> None:
        """The kernel releases the lock of a process that is killed; a simulated one keeps its files open."""

    async def _run_operation(
        self, hosted: resource_host.HostedResource, operation: protocol.Operation
    ) -> protocol.OperationResult:
        act = self.history.begin(
            self.name,
            "act",
            key=operation.resource,
            verb=operation.verb.value,
            epoch=operation.epoch,
            manager=operation.manager,
            id=operation.id,
        )
        result = await super()._run_operation(hosted, operation)
        self.history.end(act, "ok", result.outcome.value)
        return result


class ResourcePart:
    def __init__(self, domain: domain_.Domain) -> None:
        self._domain = domain
        self._history = domain.history
        agents = (*(f"agent-{number}" for number in range(1, AGENTS + 1)), *SPARES)
        self._machines = {name: Machine() for name in agents}
        self._idle = False  # the operator has ended
        self._last_change: list[str] = []
        self._registries: dict[str, endpoint.RegistryEndpoint] = {}
        for number in range(1, REGISTRIES + 1):
            domain.add_host(f"registry-{number}", self._registry, role="registry", may_lose_disk=False)
        for number in range(1, MANAGERS + 1):
            domain.add_host(f"manager-{number}", self._manager, role="manager")
        for name in self._machines:
            domain.add_host(name, self._agent, role="agent", may_lose_disk=False)
        domain.add_host("operator", self._operator)
        domain.add_host("releaser", self._releaser)
        domain.add_host("mover", self._mover)
        domain.add_host("auditor", self._auditor)
        domain.add_host("rescheduler", self._rescheduler)
        domain.add_host("observer", self._observe)

    # Programs.

    async def _registry(self, machine: host.Host) -> None:
        bus = await machine.connect()
        made = endpoint.RegistryEndpoint(bus, lease_ttl_s=4.0, manager_ttl_s=4.0)
        await made.start()
        self._registries[machine.name] = made
        while True:
            await made.acting.wait()
            assert made.processor is not None
            loaded = made.processor.resources.items()
            values = {name: int(record.spec.config["value"]) for name, record in loaded if name in _names()}
            self._history.event(machine.name, "load", values=values)
            while made.acting.is_set():  # noqa: ASYNC110  (its end has no event)
                await asyncio.sleep(0.1)

    async def _manager(self, machine: host.Host) -> None:
        bus = await machine.connect()
        await manager.Manager(bus, tick_s=0.5, clock=machine.wall_s).start()
        await _forever()

    async def _agent(self, machine: host.Host) -> None:
        class Adapter(SimulatedAdapter):
            pass

        class Release(ReleaseAdapter):
            pass

        class Moving(MovingAdapter):
            pass

        Adapter.machine, Adapter.chance = self._machines[machine.name], machine.chance
        Moving.machine, Moving.chance = self._machines[machine.name], machine.chance
        Release.machine = self._machines[machine.name]
        bus = await machine.connect()
        made = RecordedAgent(
            bus,
            machine.folder,
            adapters=lambda name: {"release": Release, "moving": Moving}.get(name, Adapter),
            types=("simulated", "release", "moving"),
            guard=self._machines[machine.name],
            elapsed_s=asyncio.get_running_loop().time,
            beat_s=2.0,
            clock=machine.wall_s,
        )
        made.history = self._history
        await made.start()
        # The resources themselves fail now and then.
        while await self._domain.pause(machine.chance, 5.0, 20.0):
            for hosted in made.hosted.values():
                adapter = hosted.adapter
                if isinstance(adapter, SimulatedAdapter) and machine.chance.random() < 0.2:
                    self._history.note(machine.name, f"{hosted.record.name} dies")
                    adapter.machine.running.discard(hosted.record.name)
                    adapter.context.report_state(await adapter.observe())
        await _forever()

    async def _operator(self, machine: host.Host) -> None:
        chance, bus = machine.chance, await machine.connect()
        reader = client.ManageClient(bus, timeout_s=TIMEOUT_S)
        value = 0
        while await self._domain.pause(chance, 0.5, 4.0):
            name = f"r{chance.randrange(RESOURCES)}"
            if chance.random() < 0.4:
                await self._read(reader, machine.name, name)
                continue
            value += 1
            names = sorted({name, *(f"r{chance.randrange(RESOURCES)}" for _ in range(2))})
            operation = self._history.begin(machine.name, "apply", keys=names, value=value)
            self._last_change = names
            try:
                entries = [_entry(each, value) for each in names]
                await rpc.call(
                    bus,
                    protocol.request(machine.name, "apply"),
                    {"entries": entries},
                    timeout_s=TIMEOUT_S,
                    try_s=3,
                )
            except errors.MusterError as error:
                outcome = "unknown" if isinstance(error, errors.TimedOut) else error.code
                self._history.end(operation, outcome, error)
            else:
                self._history.end(operation, "ok")
        self._idle = True
        await _forever()

    async def _releaser(self, machine: host.Host) -> None:
        """Release versions, and restart what runs. Whatever is reported as done has to be healthy."""
        chance, bus = machine.chance, await machine.connect()
        fleet, value = client.ManageClient(bus, timeout_s=TIMEOUT_S), 0
        while await self._domain.pause(chance, 0.5, 3.0):
            life_s = chance.choice(LIVES_S)
            value += 1
            entries = [_entry(name, value, type="release", life_s=life_s) for name in RELEASES]
            operation = self._history.begin(machine.name, "release", key="releases", life_s=life_s)
            is_applied = False
            try:
                await rpc.call(
                    bus, protocol.request(machine.name, "apply"), {"entries": entries}, timeout_s=TIMEOUT_S
                )
                is_applied = True
                await fleet.wait_settled(*RELEASES, timeout_s=RELEASE_S)
            except errors.MusterError as error:
                self._history.end(operation, error.code, error)
            else:
                self._history.end(operation, "ok")
            if is_applied:
                await self._restart(machine, fleet, life_s)
        await _forever()

    async def _restart(self, machine: host.Host, fleet: client.ManageClient, life_s: float | None) -> None:
        operation = self._history.begin(machine.name, "rollout", key="releases", life_s=life_s)
        try:
            plan = rows.RolloutPlan(operation="restart", batch="1", healthy_s=RELEASE_S)
            row = await fleet.rollout(plan, *RELEASES)
            while row.state == "running":
                await asyncio.sleep(0.5)
                (row,) = await fleet.rollouts(row.id)
        except errors.MusterError as error:
            self._history.end(operation, error.code, error)
        else:
            self._history.end(operation, "ok" if row.state == "done" else row.state, row.reason)

    async def _mover(self, machine: host.Host) -> None:
        """Give up machines that may be cut off only, and run their resources elsewhere."""
        chance, bus = machine.chance, await machine.connect()
        fleet = client.ManageClient(bus, timeout_s=TIMEOUT_S)
        while await self._domain.pause(chance, 0.5, 6.0):
            lost, other = chance.sample(SPARES, 2)
            force = chance.random() < 0.2
            entries = [_entry(name, 0, agent=other) for name in MOVED]
            subject = protocol.request(machine.name, "apply")
            try:
                if chance.random() < 0.3:
                    await fleet.delete(
                        *(row.name for row in await fleet.get() if row.agent == lost), force=True
                    )
                else:
                    await fleet.forget(lost, force=force)
                    self._history.note(machine.name, f"{lost} is forgotten")
            except errors.MusterError as error:
                self._history.note(machine.name, f"{lost} stays: {error}")
            for act in (
                rpc.call(bus, subject, {"entries": entries}, timeout_s=TIMEOUT_S),
                fleet.undrain(lost),
            ):
                try:
                    await act
                except errors.MusterError as error:
                    self._history.note(machine.name, f"not moved: {error}")
        await _forever()

    async def _rescheduler(self, machine: host.Host) -> None:
        """Create what moves by itself, and change it now and then."""
        bus, value = await machine.connect(), 0
        where = " AND ".join(f"agent <> '{spare}'" for spare in SPARES)
        while True:
            value += 1
            entries = [_entry(name, value, type="moving") for name in MOVING]
            for entry in entries:
                del entry["agent"]
                entry |= {
                    "where": where,
                    "placement": {},
                    "reschedule": {"after_s": AFTER_S, "attempts": 1000},
                }
            with contextlib.suppress(errors.MusterError):
                subject = protocol.request(machine.name, "apply")
                await rpc.call(bus, subject, {"entries": entries}, timeout_s=TIMEOUT_S)
                if not await self._domain.pause(machine.chance, 5.0, 30.0):
                    await _forever()
            await asyncio.sleep(0.5)

    async def _observe(self, machine: host.Host) -> None:
        """Look at all machines, and record what runs on two of them for longer than a suspension explains."""
        loop, twice = asyncio.get_running_loop(), dict[str, float]()
        while True:
            for name, state in self._machines.items():
                state.look(loop.time())
                for resource in state.running & {*MOVING}:
                    others = [other for other in self._machines if resource in self._machines[other].running]
                    if others == [name]:
                        twice.pop(resource, None)
                    elif loop.time() - twice.setdefault(resource, loop.time()) > TWICE_S:
                        self._history.fact("twice", key=resource, machines=sorted(others))
            await asyncio.sleep(watchdog.TICK_S / 2)

    async def _auditor(self, machine: host.Host) -> None:
        """Read what changes together: all of it is old, or all of it is new."""
        reader = client.ManageClient(await machine.connect(), timeout_s=TIMEOUT_S)
        while await self._domain.pause(machine.chance, 0.1, 1.0):
            names = self._last_change or _names()
            for name in machine.chance.sample(names, len(names)):
                await self._read(reader, machine.name, name)
        await _forever()

    async def _read(self, reader: client.ManageClient, actor: str, name: str) -> int | None:
        operation = self._history.begin(actor, "describe", key=name)
        try:
            described = await reader.describe(name)
        except errors.MusterError as error:
            self._history.end(operation, error.code, error)
            return None
        value = int(described.spec.config["value"])
        self._history.end(operation, "ok", value)
        return value

    # The end.

    async def finish(self) -> None:
        reader = client.ManageClient(await self._domain.hosts["operator"].connect("finisher"))
        desired = {name: await self._read(reader, "finisher", name) for name in _names()}
        for machine, state in self._machines.items():
            for name in _names():
                if _agent_of(name) == machine:
                    self._history.fact(
                        "found",
                        key=name,
                        desired=desired[name],
                        value=state.values.get(name),
                        running=name in state.running,
                    )
        belongs = self._belongs()
        for machine, state in self._machines.items():
            for name in sorted(state.running & {*MOVED}):
                self._history.fact("runs", key=name, machine=machine, belongs=belongs.get(name))

    def _belongs(self) -> dict[str, str]:
        """The agents of the resources that are moved, as the registry says."""
        processor = next(made.processor for made in self._registries.values() if made.processor is not None)
        return {name: processor.resources[name].spec.agent for name in MOVED if name in processor.resources}

    def missing(self) -> str | None:
        """What is not as the registry says; an apply with an unknown outcome may have been stored."""
        if not self._idle:
            return "the operator waits for a reply"
        acting = [made for made in self._registries.values() if made.acting.is_set() and made.processor]
        if not acting or acting[0].processor is None:
            return "no registry is active"
        for name, record in acting[0].processor.resources.items():
            if name not in _names():
                continue
            machine, value = self._machines[_agent_of(name)], record.spec.config["value"]
            if machine.values.get(name) != value:
                return f"{name} is {machine.values.get(name)} instead of {value}"
            if name not in machine.running:
                return f"{name} does not run"
        belongs = self._belongs()
        for name, place in belongs.items():
            if name not in self._machines[place].running:
                return f"{name} does not run on {place}"
        for place, state in self._machines.items():
            for name in sorted(state.running & {*MOVED}):
                if belongs.get(name) != place:
                    return f"{name} still runs on {place}, although it belongs to {belongs.get(name)}"
        for name in MOVING:
            moving = acting[0].processor.resources.get(name)
            if moving is None or name not in self._machines[moving.spec.agent].running:
                return f"{name} does not run where it belongs"
        return None


def _names() -> list[str]:
    return [f"r{number}" for number in range(RESOURCES)]


def _agent_of(name: str) -> str:
    return f"agent-{1 + int(name[1:]) % AGENTS}"


def _entry(
    name: str, value: int, *, type: str = "simulated", agent: str = "", **config: object
) -> dict[str, object]:
    return {
        "name": name,
        "type": type,
        "agent": agent or _agent_of(name.replace("release-", "r")),
        "config": {"value": value, **config},
        "restart": {"attempts": 1000, "delay_s": 0.1, "delay_s_max": 2.0},
    }


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
