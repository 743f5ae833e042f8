"""Registries, managers and agents under a seeded nemesis, in virtual time.

Checked: no operation is carried out for an older owner once a newer one was obeyed; no two owners' operations
on one resource overlap; at the end everything is assigned, up, and as desired.  One seed is one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import msgspec
import pytest

from muster.bus.memory import network
from muster.bus.rpc import client as rpc
from muster.core import errors, health
from muster.manage import protocol
from muster.manage.adapters import base
from muster.manage.agent import agent
from muster.manage.manager import manager
from muster.manage.registry import endpoint
from muster.store import database
from muster.testing import virtual_clock

RESOURCES = 12
AGENTS = 3
MANAGERS = 3
REGISTRIES = 2
STORM_S = 120.0
CALM_S = 120.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    value: int = 0


class World:
    """The resources themselves: what agents' crashes do not touch."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.values: dict[str, int] = {}
        self.running: dict[str, bool] = {}
        self.epochs: dict[str, int] = {}
        self.acting: dict[str, int] = {}
        self.history: list[str] = []
        self.violations: list[str] = []
        self.acts = 0

    def note(self, text: str) -> None:
        self.history.append(f"{asyncio.get_running_loop().time():.3f} {text}")


WORLD: World


class Simulated(base.Adapter):
    type_name = "simulated"
    config_type = Config

    async def _act(self, what: str) -> None:
        name, world = self.context.name, WORLD
        if name in world.acting:
            world.violations.append(f"two act on {name} at once")
        world.acting[name] = 1
        world.acts += 1
        try:
            await asyncio.sleep(world.chance.uniform(0, 0.5))
        finally:
            world.acting.pop(name, None)
        world.note(f"{what} {name}")

    async def create(self, config: Config, *, start: bool) -> None:
        await self._act("create")
        WORLD.values[self.context.name] = config.value
        if start:
            await self.do_start()

    async def put(self, config: Config) -> None:
        await self._act("put")
        WORLD.values[self.context.name] = config.value

    async def delete(self) -> None:
        await self._act("delete")
        WORLD.values.pop(self.context.name, None)
        WORLD.running.pop(self.context.name, None)

    async def observe(self) -> protocol.ObservedState:
        name = self.context.name
        state = health.HealthState.UP if WORLD.running.get(name) else health.HealthState.DOWN
        return protocol.ObservedState(name in WORLD.values, state)

    async def resume(self, config: Config) -> None:
        pass

    async def do_start(self) -> None:
        await self._act("start")
        WORLD.running[self.context.name] = True
        self.context.report_state(await self.observe())

    async def do_stop(self) -> None:
        await self._act("stop")
        WORLD.running[self.context.name] = False
        self.context.report_state(await self.observe())

    def die(self) -> None:
        WORLD.running[self.context.name] = False
        self.context.report_state(protocol.ObservedState(True, health.HealthState.DOWN, "killed"))


class Checked(agent.Agent):
    async def _run_operation(self, item: Any, operation: protocol.Operation) -> protocol.OperationResult:
        highest = WORLD.epochs.get(operation.resource, 0)
        if operation.epoch < highest:
            WORLD.violations.append(f"{operation} after epoch {highest}")
        WORLD.epochs[operation.resource] = operation.epoch
        return await super()._run_operation(item, operation)


class Stubborn(manager.Manager):
    """Acts whatever became of its renewal, as a process does whose clock stood still."""

    @property
    def acts(self) -> bool:
        return True

    def _apply_renewal(self, granted: protocol.RenewResult) -> None:
        super()._apply_renewal(msgspec.structs.replace(granted, released=()))


def wall() -> float:
    return 1_700_000_000 + asyncio.get_running_loop().time()


async def live(
    name: str, net: network.SimulatedNetwork, make: Any, chance: random.Random, calm: asyncio.Event
) -> None:
    """A process that is killed now and then, and started again."""
    while True:
        try:
            bus = await net.connect(name)
        except errors.Unavailable:
            await asyncio.sleep(1)
            continue
        part = make(bus)
        try:
            await part.start()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if calm.is_set() else chance.uniform(10, 60)):
                    await calm.wait()
            if calm.is_set():
                await asyncio.get_running_loop().create_future()
        except errors.MusterError as error:
            WORLD.note(f"{name} fell: {error}")
        finally:
            WORLD.note(f"kill {name}")
            net.crash(bus)
            if isinstance(part, manager.Manager):
                await part.abandon()
            else:
                await part.stop()
        await asyncio.sleep(chance.uniform(0.1, 3))


async def nemesis(
    net: network.SimulatedNetwork, chance: random.Random, hosts: dict[str, agent.Agent]
) -> None:
    while True:
        await asyncio.sleep(chance.uniform(2, 10))
        act = chance.choice(["cut", "heal", "die", "disconnect"])
        victims = [bus for bus in net._buses if chance.random() < 0.3]
        WORLD.note(f"{act} {[bus.identity for bus in victims]}")
        if act == "cut":
            net.cut(*(bus.node for bus in victims))
        elif act == "heal":
            net.heal()
        elif act == "disconnect":
            for bus in victims:
                net.disconnect(bus)
        else:
            for host in hosts.values():
                for resource in host.hosted.values():
                    if isinstance(resource.adapter, Simulated) and chance.random() < 0.3:
                        resource.adapter.die()


async def simulate(seed: int) -> World:
    global WORLD
    chance = random.Random(seed)
    WORLD = World(chance)
    net = network.SimulatedNetwork(seed, faults=network.NetworkFaults(delay_s_max=0.02, silence_s=8.0))
    calm = asyncio.Event()
    hosts: dict[str, agent.Agent] = {}
    kept: dict[str, dict[str, Any]] = {}

    def host(bus: Any) -> agent.Agent:
        made = Checked(bus, adapters=lambda _: Simulated, types=("simulated",), beat_s=2.0, clock=wall)
        # What a real one reads from its disk.
        for name, item in kept.get(bus.identity, {}).items():
            made._get_or_create(name, item.record)
            made.hosted[name].adapter = Simulated(made.hosted[name].context)
            if item.record.config is not None:
                state = health.HealthState.UP if WORLD.running.get(name) else health.HealthState.DOWN
                made.hosted[name].observed = protocol.ObservedState(
                    name in WORLD.values, state, "", item.record.digest
                )
        kept[bus.identity] = made.hosted
        hosts[bus.identity] = made
        return made

    async with await database.open("sqlite::memory:") as store:

        def registry(bus: Any) -> endpoint.RegistryEndpoint:
            return endpoint.RegistryEndpoint(bus, store, lease_ttl_s=4.0, manager_ttl_s=4.0)

        def one_manager(bus: Any) -> manager.Manager:
            kind = Stubborn if seed % 2 and bus.identity == "manager-0" else manager.Manager
            return kind(bus, tick_s=0.5, clock=wall)

        kinds = (
            ("registry", REGISTRIES, registry),
            ("manager", MANAGERS, one_manager),
            ("host", AGENTS, host),
        )
        tasks = [
            live(f"{kind}-{number}", net, make, random.Random(f"{seed}/{kind}{number}"), calm)
            for kind, count, make in kinds
            for number in range(count)
        ]
        running = [asyncio.create_task(coroutine) for coroutine in tasks]
        trouble = asyncio.create_task(nemesis(net, chance, hosts))
        user = await net.connect("ann")
        expected = await apply_often(user, chance)
        trouble.cancel()
        net.heal()
        calm.set()
        WORLD.note("calm")
        loop = asyncio.get_running_loop()
        until = loop.time() + CALM_S
        while not settled(expected):
            for task in running:
                if task.done():
                    task.result()
            assert loop.time() < until, f"not settled: {WORLD.values} {WORLD.running} {WORLD.history[-60:]}"
            await asyncio.sleep(0.5)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, trouble, return_exceptions=True)
    return WORLD


async def apply_often(user: Any, chance: random.Random) -> dict[str, int]:
    """Wishes change during the storm; what was acknowledged is what must be at the end."""
    expected: dict[str, int] = {}
    loop = asyncio.get_running_loop()
    value = 0
    while loop.time() < STORM_S or len(expected) < RESOURCES:
        value += 1
        names = [f"r{number}" for number in range(RESOURCES) if chance.random() < 0.5]
        entries = [
            {
                "name": name,
                "type": "simulated",
                "agent": f"host-{int(name[1:]) % AGENTS}",
                "config": {"value": value},
                "restart": {"attempts": 1000, "delay_s": 0.1, "delay_s_max": 2.0},
            }
            for name in names
        ]
        while True:  # what was not acknowledged may have been done: the same wish again, until it is
            with contextlib.suppress(errors.Unavailable):
                subject = protocol.request("ann", "apply")
                await rpc.call(user, subject, {"entries": entries}, timeout_s=60, try_s=5)
                break
            await asyncio.sleep(1)
        expected |= dict.fromkeys(names, value)
        await asyncio.sleep(chance.uniform(1, 15))
    return expected


def settled(expected: dict[str, int]) -> bool:
    return WORLD.values == expected and all(WORLD.running.get(name) for name in expected)


def run(seed: int) -> World:
    return virtual_clock.run_virtual(simulate(seed))


@pytest.mark.parametrize("seed", range(3))
def test_desired_state_is_kept_and_never_two_owners(seed: int):
    check(seed)


def check(seed: int) -> None:
    result = run(seed)
    assert not result.violations, f"seed {seed}: {result.violations} {result.history[-40:]}"
    assert result.acts > RESOURCES


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 130, 10))
def test_many_seeds(first: int):
    for seed in range(first, first + 10):
        try:
            check(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
