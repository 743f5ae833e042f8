"""Leases under a seeded nemesis, in virtual time: workload, nemesis, history, checker.

One seed is one run: a failure names it, and `run(seed)` repeats it.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from muster.bus import leases
from muster.bus.memory import connection, network
from muster.core import errors
from muster.testing import virtual_clock

NAME = "sim.lease"
TTL_S = 3.0
MINUTES_S = 90.0


class Checker:
    """Judges every act as a receiver without a fence would suffer it, and as one with a fence sees it."""

    def __init__(self) -> None:
        self.holders: dict[str, leases.Lease] = {}
        self.history: list[str] = []
        self.fence = leases.EpochFence()
        self.tenures = 0
        self.bounded = 0  # tenures whose holder knew when the time of the former one ends
        self._all: list[leases.Lease] = []

    def gained(self, who: str, lease: leases.Lease) -> None:
        self.tenures += 1
        self.holders[who] = lease
        self.history.append(f"{asyncio.get_running_loop().time():.3f} {who} holds epoch {lease.epoch}")
        assert lease.epoch > self.fence.epoch, f"epochs must grow: {self.history}"
        self.fence.check(lease.epoch)
        if lease.former_until is not None:
            self.bounded += 1
            ends = max((former._run.candidate._deadline for former in self._all), default=0.0)
            assert ends <= lease.former_until, f"a former holder may act until {ends:.3f}: {self.history}"
        self._all.append(lease)

    def look(self) -> None:
        acting = [who for who, lease in self.holders.items() if lease.held]
        assert len(acting) <= 1, f"{acting} act at once: {self.history}"


async def candidate(who: str, net: network.SimulatedNetwork, checker: Checker, chance: random.Random) -> None:
    """A process that wants the lease, works, sometimes lets go, and starts again when it was killed."""
    while True:
        try:
            bus = await net.connect(who)
            mine = await leases.Leases.open(bus, ttl_s=TTL_S)
            while True:
                lease = await mine.acquire(NAME)
                checker.gained(who, lease)
                try:
                    async with asyncio.timeout(chance.uniform(1, 20)):
                        await lease.lost.wait()
                except TimeoutError:
                    await lease.release()
        except errors.Unavailable:
            await asyncio.sleep(chance.uniform(0.1, 2))


async def nemesis(net: network.SimulatedNetwork, chance: random.Random, history: list[str]) -> None:
    while True:
        await asyncio.sleep(chance.uniform(0.5, 8))
        victims: list[connection.SimulatedBus] = [bus for bus in net._buses if chance.random() < 0.4]
        act = chance.choice(["cut", "unplug", "heal", "disconnect", "crash"])
        history.append(f"{asyncio.get_running_loop().time():.3f} {act} {[bus.identity for bus in victims]}")
        if act == "cut":
            net.cut(*(bus.node for bus in victims))
        elif act == "unplug":
            net.unplug(*(bus.node for bus in victims))
        elif act == "heal":
            net.heal()
        for bus in victims:
            if act == "disconnect":
                net.disconnect(bus)
            elif act == "crash":
                net.crash(bus)


async def simulate(seed: int) -> Checker:
    chance = random.Random(seed)
    faults = network.NetworkFaults(
        delay_s_max=chance.choice([0.001, 0.2]),
        loss=chance.choice([0, 0.05]),
        silence_s=chance.uniform(1, 20),
    )
    net, checker = network.SimulatedNetwork(seed, faults=faults), Checker()
    tasks = [
        asyncio.create_task(candidate(f"n{n}", net, checker, random.Random(f"{seed}/{n}"))) for n in range(3)
    ]
    tasks.append(asyncio.create_task(nemesis(net, chance, checker.history)))
    loop = asyncio.get_running_loop()
    while loop.time() < MINUTES_S:
        await asyncio.sleep(0.05)
        checker.look()
        for task in tasks:
            if task.done():
                task.result()
    tasks[-1].cancel()
    net.heal()
    net.faults = network.NetworkFaults()
    before = checker.tenures
    while not any(lease.held for lease in checker.holders.values()):
        await asyncio.sleep(0.05)
        checker.look()
        assert loop.time() < MINUTES_S + 60, (
            f"the lease has no holder after the network healed: {checker.history}"
        )
    checker.history.append(f"healed after {checker.tenures - before} more")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return checker


def run(seed: int) -> Checker:
    return virtual_clock.run_virtual(simulate(seed))


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_never_two_at_once_and_always_one_again(first: int):
    tenures = bounded = 0
    for seed in range(first, first + 20):
        try:
            checker = run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        tenures, bounded = tenures + checker.tenures, bounded + checker.bounded
    assert tenures > 100, "the lease changed its holder"
    assert bounded > 0, "holders know until when a former one may act"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_seeds():
    for seed in range(1000, 2000):
        try:
            run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_seed_is_a_run():
    assert run(3).history == run(3).history


@pytest.mark.virtual_time
@pytest.mark.parametrize("after_ms", range(8))
async def test_an_attempt_ends_when_the_storage_is_lost_in_the_middle(after_ms: int):
    net = network.SimulatedNetwork(seed=3)
    loop = asyncio.get_running_loop()
    async with await net.connect("one") as bus, await leases.Leases.open(bus, ttl_s=TTL_S) as mine:
        loop.call_later(after_ms / 2000, net.cut, "one")
        try:
            async with asyncio.timeout(60):
                lease = await mine.try_acquire(NAME, timeout_s=10)
        except errors.TimedOut:
            lease = None
        assert loop.time() < 60
        assert lease is None or after_ms > 1


@pytest.mark.virtual_time
async def test_of_many_attempts_at_once_one_gets_the_lease():
    net = network.SimulatedNetwork(seed=3)
    buses = [await net.connect(f"n{number}") for number in range(5)]
    all_leases = [await leases.Leases.open(bus, ttl_s=TTL_S) for bus in buses]
    outcomes = await asyncio.gather(*(mine.try_acquire(NAME) for mine in all_leases))
    assert [type(outcome) for outcome in outcomes].count(leases.Lease) == 1
    for mine, bus in zip(all_leases, buses, strict=True):
        await mine.close()
        await bus.close()
