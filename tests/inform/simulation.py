"""Information nodes under a seeded nemesis, in virtual time: workload, nemesis, history, checker.

One seed is one run: a failure names it, and ``python -m tests.inform.simulation SEED`` repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys

import msgspec

from muster.bus.memory import connection, network
from muster.core import errors
from muster.inform import client, protocol, settings
from muster.inform.node import node as node_node
from muster.inform.node.log import context_log
from muster.testing import virtual_clock

NODES = ("n1", "n2", "n3", "n4")
KEYS = ("alpha", "beta", "gamma")
TROUBLE_S = 60.0
SETTLE_S = 60.0
WRITES_PER_KEY_MAX = 40

SETTINGS = msgspec.convert(
    {
        "replicas": 3,
        "timeout_s": 2.0,
        "refresh_s": 1.0,
        "lost_after_s": 6.0,
        "interval_s": 10.0,
        "history": 64,
    },
    settings.InformSettings,
)


class Run:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        faults = network.NetworkFaults(
            delay_s_max=self.chance.choice([0.001, 0.05]),
            loss=self.chance.choice([0, 0.02, 0.1]),
            duplication=self.chance.choice([0, 0.05]),
            reordering=self.chance.choice([0, 0.1]),
            silence_s=self.chance.uniform(1, 10),
        )
        self.net = network.SimulatedNetwork(seed, faults=faults)
        self.nodes: dict[str, node_node.InformationNode] = {}
        self.buses: dict[str, connection.SimulatedBus] = {}
        self.acknowledged: dict[str, dict[int, bytes]] = {key: {} for key in KEYS}
        self.attempts = dict.fromkeys(KEYS, 0)
        self.watched: dict[str, list[int]] = {key: [] for key in KEYS}
        self.history: list[str] = []

    def note(self, what: str) -> None:
        self.history.append(f"{asyncio.get_running_loop().time():.3f} {what}")

    # The processes.

    async def node(self, name: str) -> None:
        """A node that starts again whenever its process was killed. It keeps nothing: the log has it all."""
        while True:
            try:
                bus = await self.net.connect(name)
                self.buses[name] = bus
                node = await node_node.start(bus, settings=SETTINGS, now_ns=self.net.now_ns)
            except errors.Unavailable:
                await asyncio.sleep(0.5)
                continue
            self.nodes[name] = node
            self.note(f"{name} serves")
            try:
                while bus.state.value != "closed":
                    await asyncio.sleep(0.2)
                    failure = node.failure()
                    if failure is not None and errors.NotConnected.__name__ not in failure:
                        raise AssertionError(failure)
            finally:
                self.nodes.pop(name, None)
                await node.close()
            await asyncio.sleep(1.0)

    async def writer(self, name: str, chance: random.Random) -> None:
        contexts = client.InformClient(await self.net.connect(name), timeout_s=15.0)
        while True:
            await asyncio.sleep(chance.uniform(0.2, 3.0))
            key = chance.choice(KEYS)
            if self.attempts[key] >= WRITES_PER_KEY_MAX:
                continue
            self.attempts[key] += 1
            value = f"{name} {self.attempts[key]}".encode()
            try:
                written = await contexts.put(
                    key, value, ack="replicated" if chance.random() < 0.3 else "logged"
                )
            except (errors.Unavailable, errors.Conflict) as error:
                self.note(f"{name} wrote {key} {value!r}: {error}")
                continue
            self.acknowledged[key][written.version] = value
            self.note(f"{name} wrote {key} {value!r}: version {written.version} by {written.primary}")

    async def reader(self, name: str, chance: random.Random) -> None:
        contexts = client.InformClient(await self.net.connect(name), timeout_s=15.0)
        while True:
            await asyncio.sleep(chance.uniform(0.1, 2.0))
            key = chance.choice(KEYS)
            known = max(self.acknowledged[key], default=0)
            fresh = chance.random() < 0.5
            try:
                entry = await contexts.get(key, max_staleness_s=0.0 if fresh else None)
            except errors.Unavailable:
                continue
            except errors.NotFound as error:
                if known:
                    raise AssertionError(f"{key} was acknowledged: {error}") from error
                continue
            if fresh:
                assert entry.version >= known, f"{key}: read {entry.version} after {known} was acknowledged"

    async def watcher(self, key: str) -> None:
        contexts = client.InformClient(await self.net.connect(f"watch-{key}"), timeout_s=30.0)
        async for change in contexts.watch(key):
            assert change.version > max(self.watched[key], default=0), f"{key}: watched out of order"
            self.watched[key].append(change.version)

    async def nemesis(self) -> None:
        chance = self.chance
        while True:
            await asyncio.sleep(chance.uniform(1, 8))
            victims = [name for name in NODES if chance.random() < 0.35]
            act = chance.choice(["cut", "heal", "heal", "disconnect", "crash"])
            self.note(f"{act} {victims}")
            if act == "heal":
                self.net.heal()
            elif act == "cut":
                self.net.cut(*victims)
            else:
                for name in victims:
                    bus = self.buses.get(name)
                    if bus is not None and bus.state.value != "closed":
                        (self.net.crash if act == "crash" else self.net.disconnect)(bus)

    # The judgement.

    def entries(self, key: str) -> list[context_log.ContextLogEntry]:
        log = self.net.log(protocol.STREAM)
        subject = protocol.log_subject(key)
        return [
            context_log.parse_entry(stored)
            for _, stored in sorted(log.messages.items())
            if stored.subject == subject
        ]

    def check_log(self) -> None:
        for key in KEYS:
            entries = self.entries(key)
            values = {entry.sequence: entry.record.value for entry in entries if entry.record.reason == "put"}
            for version, value in self.acknowledged[key].items():
                assert values.get(version) == value, f"{key}: acknowledged version {version} is lost"
            for before, after in itertools.pairwise(entries):
                if after.record.reason == "place":
                    assert after.record.value == before.record.value, f"{key}: a move changed the value"
                    assert after.version == before.version
                else:
                    assert after.record.holders == before.record.holders
                    assert after.record.stamped_by == before.record.holders[0], f"{key}: two primaries"
                    assert after.record.stamp > before.record.stamp, f"{key}: stamps out of order"

    def settled(self) -> str | None:
        """What is still missing."""
        if len(self.nodes) < len(NODES):
            return f"only {sorted(self.nodes)} serve"
        for key in KEYS:
            entries = self.entries(key)
            if not entries:
                continue
            last = entries[-1]
            if len(last.record.holders) != 3:
                return f"{key} has copies on {last.record.holders}"
            for name, node in self.nodes.items():
                copy = node.state.replicas.index.get(key)
                held = copy is not None and not copy.temporary
                if held != (name in last.record.holders):
                    return f"{name} {'holds' if held else 'lacks'} {key}: {last.record.holders}"
                if copy is not None and held and copy.sequence != last.sequence:
                    return f"{name} has {key} at {copy.sequence}, not {last.sequence}"
            versions = [entry.sequence for entry in entries if entry.record.reason != "place"]
            if self.watched[key] != versions:
                return f"the watcher of {key} heard {self.watched[key]} of {versions}"
        return None


async def simulate(seed: int) -> Run:
    run = Run(seed)
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(run.node(name)) for name in NODES]
    tasks += [asyncio.create_task(run.writer(f"w{n}", random.Random(f"{seed}/w{n}"))) for n in range(2)]
    tasks.append(asyncio.create_task(run.reader("r", random.Random(f"{seed}/r"))))
    tasks += [asyncio.create_task(run.watcher(key)) for key in KEYS]
    trouble = asyncio.create_task(run.nemesis())
    try:
        while loop.time() < TROUBLE_S:
            await asyncio.sleep(1.0)
            _raise_failures([*tasks, trouble])
        run.check_log()
        trouble.cancel()
        run.net.heal()
        run.net.faults = network.NetworkFaults()
        run.attempts = dict.fromkeys(KEYS, WRITES_PER_KEY_MAX)
        while (missing := run.settled()) is not None:
            await asyncio.sleep(0.5)
            _raise_failures(tasks)
            assert loop.time() < TROUBLE_S + SETTLE_S, f"not restored: {missing}"
        run.check_log()
    except BaseException:
        run.note("the judgement failed")
        raise
    finally:
        for task in (*tasks, trouble):
            task.cancel()
        await asyncio.gather(*tasks, trouble, return_exceptions=True)
    return run


def _raise_failures(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def run(seed: int) -> Run:
    try:
        return virtual_clock.run_virtual(simulate(seed))
    except (AssertionError, errors.MusterError) as error:
        raise AssertionError(
            f"seed {seed}: {error}\nreplay: python -m tests.inform.simulation {seed}"
        ) from error


if __name__ == "__main__":
    done = run(int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write("\n".join(done.history) + "\n")
