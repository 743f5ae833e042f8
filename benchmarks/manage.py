"""Management: event response, the loss of a manager or registry, a command to all, topologies, overhead.

Registries, managers, simulated adapters and the agent that makes brokers are processes of their own, a
thousand adapters on each connection; all are real.  The paper's figures stand beside ours: its manager was
good for 200 resources.  Percentiles of a full run are of at least `SAMPLES` samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness, measure
from benchmarks.manage_worker import BEAT_S
from muster.app import domain, identities
from muster.app import settings as app_settings
from muster.bus import api, leases
from muster.bus.brokers import broker, config
from muster.bus.client import client as bus_client
from muster.bus.rpc import client as rpc
from muster.core import errors, messages
from muster.core.settings import loader
from muster.manage import client, protocol
from muster.manage.manager import agent_calls, manager
from muster.manage.registry import endpoint
from muster.trust import keyring
from muster.trust.permissions import roles

WORKER = "benchmarks.manage_worker"
ON_A_CONNECTION = 1_000
LOSSES = (("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP))
TAKE_OVER_S = {"kill -9": 2.0, "SIGSTOP": leases.TTL_S + 2.0}  # a frozen one keeps its lease until it ends
BETWEEN_S = 2.0  # two losses of a registry: the one on standby reads the log
MANY = 100_000
PER_MANIFEST = 2_000
UP_S_MAX = 600
RUN_S_MAX = 1800
QUICK_S_MAX = 300  # the loss of a frozen manager alone takes half a minute
LOST, LOST_S = 1_000, 5.0  # resources of a lost machine, and after how long without contact it is lost
ROUNDS = 3
SAMPLES = 1_000
RATE_MIN = 500  # events a second
PAPER_D, PAPER_Z = 200, 800
Z = 10_000  # where `benchmarks.bus` has not measured it
N = 100_000
IN_TIME_MS = {"mean": 20.0, "p99": 200.0}
PAPER_TABLE_1_MS = {  # cold, initialised
    "set config": (1110, 46.75),
    "create broker": (734, 132.75),
    "create link": (94, 43.0),
    "delete link": (109, 35.25),
    "delete broker": (110, 187.5),
}


def run(quick: bool) -> list[harness.Row]:
    measure.raise_file_limit(20_000)
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        rows += asyncio.run(_command(place / "command", 2_000 if quick else 10_000))
        rows += asyncio.run(_topologies(place / "topologies", 4 if quick else 20))
        rows += asyncio.run(_responses(place, quick))
    rows += _overhead(_largest(rows, _AT_ONCE), _largest(rows, _STEADY), _measured_z())
    return rows


def _sizes(quick: bool) -> list[int]:
    return [100, 2_000] if quick else [100, 200, 1_000, 10_000, 20_000]


_FLEET = (
    f"{ON_A_CONNECTION} simulated resources on one agent and connection, all agents in one process; "
    f"heartbeats every {BEAT_S:g} s; a renewal lasts {endpoint.MANAGER_TTL_S:g} s; "
    "one broker, synced, which also has the registry's log; everything on one machine"
)
_AT_ONCE, _STEADY = "resources at once, 1 manager(s)", "resources on one manager"


def _largest(rows: list[harness.Row], load: str) -> int:
    """The largest fleet that one manager answered in time (`IN_TIME_MS`), of those tried; 0 if none."""
    answered: dict[int, list[bool]] = {}
    for row in rows:
        limit = next(
            (ms for what, ms in IN_TIME_MS.items() if row.metric.endswith((what, f"{what} response"))), None
        )
        if load in row.metric and limit is not None:
            size = next(int(word) for word in row.metric.split() if word.isdecimal())
            answered.setdefault(size, []).append(row.ours <= limit)
    return max((size for size, met in answered.items() if all(met)), default=0)


def _measured_z() -> int:
    """Connections that one broker held, as `benchmarks.bus` measured."""
    try:
        load = json.loads((harness.RESULTS / "bus.json").read_text())["rows"]
    except OSError:
        return Z
    return next((int(row["ours"]) for row in load if row["metric"] == "idle connections held"), Z)


def overhead_percent(d: float, z: float) -> float:
    """The paper's section 3.4: management processes in a hundred processes."""
    return (1 - 1 / (1 + 2 / z + 1 / d)) * 100


def processes(n: int, d: float, z: float) -> float:
    """… and how many that are: registry, bootstrap and managers in each of the leaf domains."""
    return (2 + z / d) * n / z


def _overhead(at_once: int, steady: int, z: int) -> list[harness.Row]:
    """Beside the paper's figures stand those of its method, where all resources fire at once.

    How long its manager may take for the 200 is not known here; ours has `IN_TIME_MS`.
    """
    d = max(at_once, 1)
    return [
        harness.Row(
            metric="D: resources one manager answers in time, all at once",
            ours=at_once,
            unit="resources",
            better="higher",
            paper=PAPER_D,
        ),
        harness.Row(
            metric="D: resources one manager answers in time, steady load",
            ours=steady,
            unit="resources",
            better="higher",
        ),
        harness.Row(
            metric="Z: idle connections one broker holds",
            ours=z,
            unit="connections",
            better="higher",
            paper=PAPER_Z,
        ),
        harness.Row(
            metric="management processes in all",
            ours=overhead_percent(d, z),
            unit="%",
            better="lower",
            paper=round(overhead_percent(PAPER_D, PAPER_Z), 2),
        ),
        harness.Row(
            metric="management processes in all, by D at a steady load",
            ours=overhead_percent(max(steady, 1), z),
            unit="%",
            better="lower",
        ),
        harness.Row(
            metric=f"management processes for {N} resources",
            ours=processes(N, d, z),
            unit="processes",
            better="lower",
            paper=processes(N, PAPER_D, PAPER_Z),
        ),
    ]


# A domain with managers and simulated adapters


class Fleet:
    applied_s = 0.0  # from the first manifest until all resources were up

    def __init__(self, running: domain.Domain, stack: contextlib.AsyncExitStack) -> None:
        self.running = running
        self.stack = stack
        self.workers: dict[str, measure.Worker] = {}

    def creds(self, identity: str, role: roles.Role) -> str:
        return str(identities.credentials_file(self.running.trust, identity, role))

    async def worker(self, name: str, kind: str, *arguments: str) -> measure.Worker:
        made = self.stack.enter_context(measure.Worker(WORKER, kind, self.running.servers[0], *arguments))
        assert await asyncio.to_thread(made.hear) == "ready"
        self.workers[name] = made
        return made

    async def registry(self, name: str) -> None:
        replicas = self.running.settings.bus.replicas
        await self.worker(name, "registry", self.creds(name, roles.Role.REGISTRY), str(replicas))

    async def admin(self) -> api.Bus:
        bus = await self.running.connect("admin", roles.Role.OPERATOR)
        return await self.stack.enter_async_context(bus)


@contextlib.asynccontextmanager
async def _fleet(
    place: pathlib.Path, managers: int, resources: int, *, registries: int = 1, brokers: int = 1
) -> Any:
    flags = {"domain.data_dir": str(place), "bus.brokers": brokers}
    settings = loader.load(app_settings.Settings, flags=flags)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(domain.Domain(settings))
        fleet = Fleet(running, stack)
        for number in range(1, registries + 1):
            await fleet.registry(f"registry-{number}")
        for number in range(1, managers + 1):
            name = f"manager-{number}"
            await fleet.worker(name, "manager", fleet.creds(name, roles.Role.MANAGER))
        hosts = [f"host-{number}" for number in range(-(-resources // ON_A_CONNECTION))]
        await fleet.worker("adapters", "adapters", *(fleet.creds(host, roles.Role.AGENT) for host in hosts))
        admin = await fleet.admin()
        began = time.perf_counter()
        for first in range(0, resources, PER_MANIFEST):
            entries = [
                {
                    "name": f"r{n}",
                    "type": "memory",
                    "agent": hosts[n // ON_A_CONNECTION],
                    "config": {"value": n},
                }
                for n in range(first, min(resources, first + PER_MANIFEST))
            ]
            await rpc.call(admin, protocol.request("admin", "apply"), {"entries": entries}, timeout_s=120)
        await _ask(fleet.workers["adapters"], {"do": "wait", "total": resources}, UP_S_MAX)
        fleet.applied_s = time.perf_counter() - began
        yield fleet


async def _ask(worker: measure.Worker, wish: Any, timeout_s: float = 120) -> Any:
    worker.tell(wish)
    return await asyncio.to_thread(worker.hear, timeout_s=timeout_s)


def _shared_by_managers(quick: bool) -> int:
    return 500 if quick else 10_000


async def _responses(place: pathlib.Path, quick: bool) -> list[harness.Row]:
    rows = []
    for size in _sizes(quick):
        async with _fleet(place / f"one-{size}", 1, size) as fleet:
            rows += await _burst(fleet, size, 1)
            if size >= (2_000 if quick else 10_000):
                rows += await _steady(fleet, size, 3 if quick else 30)
    if not quick:
        async with _fleet(place / "many", 2, MANY) as fleet:
            rows.append(_applied(fleet, MANY, 2))
    for brokers in (1, 3):
        size = 2_000 if quick else 10_000
        rows += await _take_over(place / f"take-over-{brokers}", size, brokers, 1 if quick else ROUNDS)
    rows.append(await _lose_machine(place / "lost", 100 if quick else LOST))
    for managers in (2, 4):
        size = _shared_by_managers(quick)
        async with _fleet(place / f"{managers}-{size}", managers, size) as fleet:
            rows += await _burst(fleet, size, managers)
            if managers == 2:
                rows += await _lose(fleet, size, signal.SIGSTOP, "SIGSTOP")
                os.kill(fleet.workers["manager-1"].pid, signal.SIGCONT)
                await _until_shared(fleet, size)
                rows += await _lose(fleet, size, signal.SIGKILL, "kill -9")
    return rows


def _applied(fleet: Fleet, size: int, managers: int, brokers: int = 1) -> harness.Row:
    return harness.Row(
        metric=f"{size} resources applied and up, {managers} manager(s){_of(brokers)}",
        ours=fleet.applied_s,
        unit="s",
        better="lower",
        goal=40 if size == MANY else None,
        load=f"{_on(brokers)}; manifests of {PER_MANIFEST:,} resources, one after the other",
    )


async def _burst(fleet: Fleet, size: int, managers: int) -> list[harness.Row]:
    """The paper's own method: all fire at once. In turns with as many bare requests over another broker."""
    adapters, ours, peer = fleet.workers["adapters"], [], []
    rounds = max(ROUNDS, -(-SAMPLES // size))
    with tempfile.TemporaryDirectory() as folder:
        plain = config.BrokerConfig(name="plain", directory=pathlib.Path(folder) / "plain", storage=None)
        async with broker.Broker(plain) as bare:
            with (
                measure.Worker(WORKER, "echo", bare.url) as echo,
                measure.Worker(WORKER, "ask-echo", bare.url) as asker,
            ):
                await asyncio.to_thread(echo.hear)
                await asyncio.to_thread(asker.hear)
                await _ask(adapters, {"do": "burst"})  # warms up both
                await _ask(asker, {"count": size})
                for _ in range(rounds):
                    ours += await _ask(adapters, {"do": "burst"})
                    peer += await _ask(asker, {"count": size})
    return [
        harness.Row(
            metric=f"all {size} resources at once, {managers} manager(s): {what} response",
            ours=of(ours) * 1000,
            unit="ms",
            better="lower",
            peer=of(peer) * 1000,
            peer_name="bare echo",
            samples=len(ours),
            load=f"{_FLEET}; each sends one event and waits for its answer, {rounds} times, in turns",
        )
        for what, of in _STATISTICS.items()
    ]


_STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.mean,
    "p50": lambda took: measure.percentile(took, 50),
    "p99": lambda took: measure.percentile(took, 99),
}


async def _steady(fleet: Fleet, size: int, seconds: float) -> list[harness.Row]:
    """Heartbeats, and events: the goal is for 10,000; more of them fire more in proportion."""
    rate = max(RATE_MIN, size // 20)
    wish = {"do": "steady", "rate": rate, "seconds": seconds / ROUNDS}
    await _ask(fleet.workers["adapters"], {**wish, "seconds": 2})  # what the bursts left behind settles
    took = [duration for _ in range(ROUNDS) for duration in await _ask(fleet.workers["adapters"], wish)]
    return [
        harness.Row(
            metric=f"{size} resources on one manager, {rate} events/s: response, {what}",
            ours=of(took) * 1000,
            unit="ms",
            better="lower",
            goal=IN_TIME_MS.get(what) if size <= 10_000 else None,
            samples=len(took),
            load=f"{_FLEET}; events of random resources",
        )
        for what, of in _STATISTICS.items()
    ]


# The loss of a manager


async def _lose(fleet: Fleet, size: int, number: signal.Signals, name: str) -> list[harness.Row]:
    """One of two managers is killed or frozen: how long each of its resources has none, and until all that
    there are have the other one and have been answered by it.

    The broker reports the connection of a process that ended; of one that is frozen nothing is heard until
    its time to live is over.
    """
    adapters = fleet.workers["adapters"]
    await _ask(adapters, {"do": "watch", "manager": "manager-1"})
    began = time.monotonic()
    os.kill(fleet.workers["manager-1"].pid, number)
    without_s = [at - began for at in await _ask(adapters, {"do": "watched"})]
    await _ask(adapters, {"do": "wait", "total": size, "not": "manager-1"})
    await _ask(adapters, {"do": "burst"})
    all_s = time.monotonic() - began
    lost = f"{name} of a manager, {size} resources"
    return [
        *(
            harness.Row(
                metric=f"{lost}: one without a manager, {what}",
                ours=_STATISTICS[what](without_s),
                unit="s",
                better="lower",
                samples=len(without_s),
                load=f"{_FLEET}; one of two managers",
            )
            for what in ("p50", "p99")
        ),
        harness.Row(
            metric=f"{lost}: all reassigned and answered",
            ours=all_s,
            unit="s",
            better="lower",
            goal=10 if number is signal.SIGKILL else None,
            load=f"{_FLEET}; one of two managers",
        ),
    ]


# The loss of a machine


async def _lose_machine(place: pathlib.Path, size: int) -> harness.Row:
    """A machine with resources that may move is killed: when the last of them is up on another one."""
    async with _fleet(place, 1, 0) as fleet:
        entry = {"type": "memory", "placement": {}, "reschedule": {"after_s": LOST_S}}
        entries = [{"name": f"r{number}", **entry} for number in range(size)]
        lost = await fleet.worker("lost", "movable", fleet.creds("lost", roles.Role.AGENT))
        admin = await fleet.admin()
        await _until_known(admin, 1)
        await rpc.call(admin, protocol.request("admin", "apply"), {"entries": entries}, timeout_s=120)
        await _ask(lost, {"do": "wait", "total": size}, UP_S_MAX)
        creds = [fleet.creds(name, roles.Role.AGENT) for name in ("other-1", "other-2")]
        others = await fleet.worker("others", "movable", *creds)
        await _until_known(admin, 3)
        began = time.monotonic()
        os.kill(lost.pid, signal.SIGKILL)
        await _ask(others, {"do": "wait", "total": size})
        return harness.Row(
            metric=f"kill -9 of a machine, {size} resources: all up on others",
            ours=time.monotonic() - began,
            unit="s",
            better="lower",
            goal=LOST_S + 10,
            load=f"one of three machines, in a process of its own; reschedule after {LOST_S:g} s; one broker",
        )


async def _until_known(admin: api.Bus, count: int) -> None:
    fleet = client.ManageClient(admin)
    while len(await fleet.agents()) < count:  # noqa: ASYNC110  (their announcement has no event)
        await asyncio.sleep(0.2)


async def _until_shared(fleet: Fleet, size: int) -> None:
    """Until the manager that goes on again has its part of the resources."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        owners = await _ask(fleet.workers["adapters"], {"do": "count"})
        if sum(owners.values()) == size and min(owners.get(f"manager-{n}", 0) for n in (1, 2)) >= size // 3:
            return
        await asyncio.sleep(0.2)
    raise errors.TimedOut("the resources were not shared again in 120 s")


# The loss of a registry


async def _take_over(place: pathlib.Path, size: int, brokers: int, rounds: int) -> list[harness.Row]:
    """The active one of two registries is killed or frozen: when a write is answered again."""
    took_s: dict[str, list[float]] = {}
    async with _fleet(place, 1, size, registries=2, brokers=brokers) as fleet:
        applied, admin, numbers = _applied(fleet, size, 1, brokers), await fleet.admin(), itertools.count(3)
        registries = ["registry-1", "registry-2"]
        for name, lost in LOSSES * rounds:
            await asyncio.sleep(BETWEEN_S)
            active = await _active(fleet, registries)
            began = time.monotonic()
            os.kill(fleet.workers[active].pid, lost)
            entry = {"name": "r0", "type": "memory", "agent": "host-0", "config": {"value": began}}
            await rpc.call(
                admin, protocol.request("admin", "apply"), {"entries": [entry]}, timeout_s=60, try_s=0.1
            )
            took_s.setdefault(name, []).append(time.monotonic() - began)
            if lost is signal.SIGSTOP:
                os.kill(fleet.workers[active].pid, signal.SIGCONT)
            else:
                registries.remove(active)
                registries.append(f"registry-{next(numbers)}")
                await fleet.registry(registries[-1])
    load = f"{_on(brokers)}; two registries, leases of {leases.TTL_S:g} s; the longest of {rounds}"
    return [
        applied,
        *(
            harness.Row(
                metric=f"{name} of the active registry, {size} resources{_of(brokers)}: a write is answered",
                ours=max(durations_s),
                unit="s",
                better="lower",
                goal=TAKE_OVER_S[name] if brokers == 1 else None,
                load=load,
            )
            for name, durations_s in took_s.items()
        ),
    ]


async def _active(fleet: Fleet, registries: list[str]) -> str:
    """One that was frozen has to notice first that it is not active any more."""
    while True:
        active = [name for name in registries if (await _ask(fleet.workers[name], {}))["acts"]]
        if len(active) == 1:
            return active[0]
        await asyncio.sleep(0.1)


def _on(brokers: int) -> str:
    return _FLEET if brokers == 1 else _FLEET.replace("one broker", f"{brokers} brokers")


def _of(brokers: int) -> str:
    return "" if brokers == 1 else f", {brokers} brokers"


# A command to everybody


async def _command(place: pathlib.Path, count: int) -> list[harness.Row]:
    settings_ = config.BrokerConfig(name="crowd", directory=place, storage=None)
    async with (
        broker.Broker(settings_) as server,
        await bus_client.connect([server.url], identity="m") as bus,
    ):
        with measure.Worker(WORKER, "answering", server.url, str(count)) as crowd:
            await asyncio.to_thread(crowd.hear, timeout_s=120)
            sender = manager.Manager(bus)
            sender.renewal.valid_until = asyncio.get_running_loop().time() + 3600
            ours, raw = [], []
            for _ in range(3):
                began = time.perf_counter()
                answers = await asyncio.gather(*(_operate(sender, number) for number in range(count)))
                ours.append(time.perf_counter() - began)
                assert all(answer.epoch == 1 for answer in answers)
                began = time.perf_counter()
                await asyncio.gather(
                    *(bus.request(f"echo.{number}", b"x" * 200, timeout_s=60) for number in range(count))
                )
                raw.append(time.perf_counter() - began)
    return [
        harness.Row(
            metric=f"a command to {count} agents and all answers back",
            ours=min(ours),
            unit="s",
            better="lower",
            goal=3,
            peer=min(raw),
            peer_name="bare requests",
        )
    ]


async def _operate(sender: manager.Manager, number: int) -> protocol.OperationResult:
    operation = protocol.Operation(
        id=sender._next_id(), verb=protocol.Verb.GET, resource="r", epoch=1, manager="m"
    )
    return await sender._agents.call(f"a{number}", operation)


# Topologies


async def _topologies(place: pathlib.Path, rounds: int) -> list[harness.Row]:
    rows = []
    async with contextlib.AsyncExitStack() as stack:
        hub = await stack.enter_async_context(
            broker.Broker(config.BrokerConfig(name="hub", directory=place / "hub"))
        )

        async def connect(name: str) -> Any:
            return await stack.enter_async_context(await bus_client.connect([hub.url], identity=name))

        await stack.enter_async_context(endpoint.RegistryEndpoint(await connect("registry-1")))
        await stack.enter_async_context(manager.Manager(await connect("manager-1")))
        trust = await asyncio.to_thread(keyring.Keyring.create, place / "trust", "bench")
        host = stack.enter_context(
            measure.Worker(WORKER, "host", hub.url, "host-a", place / "agent", trust.folder)
        )
        assert await asyncio.to_thread(host.hear) == "ready"
        fleet = client.ManageClient(await connect("ann"))
        rows += await _table_1(agent_calls.AgentCaller(await connect("table"), lambda: True), rounds)
        for shape, paper_ms in (("ring", 12_515), ("cluster", 15_968)):
            text = f"topologies: [{{name: {shape}, shape: {shape}, size: 8, agent: host-a}}]"
            names = [f"{shape}-{number}" for number in range(1, 9)]
            began = time.perf_counter()
            await fleet.apply(text)
            await asyncio.gather(*(fleet.wait(name, "up", timeout_s=60) for name in names))
            took_s = time.perf_counter() - began
            await fleet.delete(*names)
            await fleet.wait_gone(*names, timeout_s=60)
            rows.append(
                harness.Row(
                    metric=f"{shape} of 8 brokers deployed",
                    ours=took_s,
                    unit="s",
                    better="lower",
                    paper=paper_ms / 1000,
                    goal=5,
                )
            )
    return rows


async def _table_1(operator: agent_calls.AgentCaller, rounds: int) -> list[harness.Row]:
    """The paper's five operations, as a manager has them done: from its request to the agent's answer.

    Over a broker, by an agent in another process.  The first time, and the mean of the other rounds.
    """
    numbers = iter(range(10**6))
    took: dict[str, list[float]] = {name: [] for name in PAPER_TABLE_1_MS}

    async def do(what: str | None, verb: protocol.Verb, resource: str, **more: Any) -> None:
        operation = protocol.Operation(
            id=f"bench-{next(numbers)}",
            verb=verb,
            resource=resource,
            epoch=1,
            manager="table",
            type="broker",
            **more,
        )
        began = time.perf_counter()
        answer = await operator.call("host-a", operation)
        took_ms = (time.perf_counter() - began) * 1000
        assert answer.outcome is messages.DecisionOutcome.DONE, answer
        if what is not None:
            took[what].append(took_ms)

    verb = protocol.Verb
    await do(None, verb.CREATE, "far", config={})
    for _ in range(1 + rounds):
        await do("create broker", verb.CREATE, "near", config={})
        await do("set config", verb.PUT, "near", config={"connections_max": 1000})
        await do("create link", verb.EXECUTE, "near", operation="link", arguments={"far": "far"})
        await do("delete link", verb.EXECUTE, "near", operation="unlink", arguments={"far": "far"})
        await do("delete broker", verb.DELETE, "near")
    await do(None, verb.DELETE, "far")
    rows = []
    for name, (cold, warm) in PAPER_TABLE_1_MS.items():
        mean = statistics.mean(took[name][1:])
        for how, ours, paper in (("cold", took[name][0], cold), ("initialised", mean, warm)):
            rows.append(
                harness.Row(metric=f"{name}, {how}", ours=ours, unit="ms", better="lower", paper=paper)
            )
    load = "over a broker, the agent another process; cold: the first time; initialised: the mean of"
    return harness.under(f"{load} {rounds}", rows)
