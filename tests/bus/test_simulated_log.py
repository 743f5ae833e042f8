"""Owned logs under a seeded nemesis, in virtual time: workload, nemesis, history, checker.

The nodes take the log from each other without any lease: only the fence of its pages protects it. One seed is
one run: a failure names it, and `run(seed)` repeats it.
"""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from muster.bus import api
from muster.bus.log import journal, owned_log, pages
from muster.bus.memory import network
from muster.core import errors
from muster.testing import virtual_clock
from tests.bus import keyed_state, test_simulated_leases

STREAM = api.StreamSettings("logs", subjects=("log.>",), max_bytes=1 << 30, max_age_s=0, allow_delete=True)
NAME = "log.sim"
MINUTES_S = 60.0
KEYS = 6


class Checker:
    """Every record that any node has applied, and what was acknowledged."""

    def __init__(self) -> None:
        self.history: list[str] = []
        self.values: dict[int, pages.OwnedRecord] = {}  # by version
        self.versions: dict[bytes, int] = {}  # of values, which are unique
        self.acknowledged: dict[bytes, int] = {}
        self.refused: set[bytes] = set()
        self.epochs = itertools.count(1)
        self.owners = self.repeats = self.trims = self.confirmed = 0

    def applied(self, record: pages.OwnedRecord, version: int) -> None:
        known = self.values.setdefault(version, record)
        assert (known.key, known.value) == (record.key, record.value), f"two records have version {version}"
        if record.value is not None:
            assert self.versions.setdefault(record.value, version) == version, (
                f"{record.value!r} is there twice"
            )

    def end(self, state: keyed_state.KeyedState) -> None:
        for value, position in self.acknowledged.items():
            assert self.versions.get(value) == position, f"{value!r} was acknowledged at {position}"
        assert not self.refused & self.versions.keys(), "refused, and stored all the same"
        for number in range(KEYS):
            key = b"k%d" % number
            last = max((version for version, each in self.values.items() if each.key == key), default=0)
            present = state.records.get(key)
            expected = self.values[last].value if last else None
            assert (present.value if present else None) == expected
            assert present is None or present.version == last


class CheckedState(keyed_state.KeyedState):
    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    def apply(self, record: pages.OwnedRecord, version: int, position: int) -> None:
        self._checker.applied(record, version)
        super().apply(record, version, position)


async def node(name: str, net: network.SimulatedNetwork, checker: Checker, chance: random.Random) -> None:
    numbers = itertools.count()
    doubtful: list[tuple[bytes, bytes]] = []
    in_doubt: set[bytes] = set()

    async def write(log: owned_log.OwnedLog) -> None:
        for _ in range(chance.randint(1, 20)):
            if doubtful and chance.random() < 0.5:
                key, value = doubtful.pop()
            else:
                key, value = b"k%d" % chance.randrange(KEYS), f"{name}/{next(numbers)}".encode()
            value += b"x" * chance.choice([0, 0, 0, 0, 30, 400]) if b"x" not in value else b""
            changes: list[tuple[bytes, bytes | None]] = [(key, value)]
            if chance.random() < 0.2:
                changes.insert(0, (b"k%d" % chance.randrange(KEYS), None))
            try:
                position = await log.append(changes, request=value.decode())
            except errors.TimedOut:
                doubtful.append((key, value))
                in_doubt.add(value)
                return
            except errors.Unavailable:
                if value not in in_doubt:
                    checker.refused.add(value)
                return
            checker.repeats += isinstance(position, api.Duplicate)
            checker.acknowledged[value] = int(position)
            await asyncio.sleep(chance.choice([0, 0, 0.01]))

    async def confirm(log: owned_log.OwnedLog) -> None:
        await asyncio.sleep(chance.choice([0, 0, 0.01]))
        if not log.is_owned:
            return
        acknowledged = max(checker.acknowledged.values(), default=0)
        try:
            await log.confirm()
        except errors.Unavailable:
            assert not log.is_owned, "an owner was refused"
        else:
            checker.confirmed += 1
            assert log.position > acknowledged, "confirmed without what was acknowledged before"

    while True:
        log = None
        try:
            async with await net.connect(name) as bus:
                log = owned_log.OwnedLog(await bus.stream(STREAM), NAME, CheckedState(checker))
                await log.start()
                while True:
                    await asyncio.sleep(chance.uniform(0, 3))
                    if chance.random() < 0.5:
                        epoch = next(checker.epochs)
                        await log.own(epoch)
                        checker.owners += 1
                        checker.history.append(f"{asyncio.get_running_loop().time():.3f} {name} owns {epoch}")
                    if log.is_owned:
                        writes = [write(log) for _ in range(chance.randint(1, 4))]
                        await asyncio.gather(*writes, *(confirm(log) for _ in range(2)))
                    if chance.random() < 0.1:
                        break
        except errors.Unavailable:
            await asyncio.sleep(chance.uniform(0.1, 1))
        finally:
            if log is not None:
                checker.trims += log._journal.pages[0].sequence > 1 if log._journal.pages else 0
                await log.stop()


async def simulate(seed: int) -> Checker:
    chance = random.Random(seed)
    faults = network.NetworkFaults(
        delay_s_max=chance.choice([0.001, 0.05]),
        loss=chance.choice([0, 0.02]),
        silence_s=chance.uniform(1, 10),
    )
    net, checker = network.SimulatedNetwork(seed, faults=faults), Checker()
    tasks = [asyncio.create_task(node(f"n{n}", net, checker, random.Random(f"{seed}/{n}"))) for n in range(3)]
    tasks.append(asyncio.create_task(test_simulated_leases.nemesis(net, chance, checker.history)))
    loop = asyncio.get_running_loop()
    while loop.time() < MINUTES_S:
        await asyncio.sleep(1)
        for task in tasks:
            if task.done():
                task.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    net.heal()
    net.faults = network.NetworkFaults()
    async with await net.connect("reader") as bus:
        state = CheckedState(checker)
        log = owned_log.OwnedLog(await bus.stream(STREAM), NAME, state)
        await log.start()
        checker.end(state)
        await log.stop()
    return checker


def run(seed: int) -> Checker:
    return virtual_clock.run_virtual(simulate(seed))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, bodies and trimming within a minute."""
    monkeypatch.setattr(pages, "PAGE_BYTES", 300)
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 4000)
    monkeypatch.setattr(journal, "TRIM_BATCH_BYTES", 1000)
    monkeypatch.setattr(journal, "WINDOW_MS", 10**12)
    monkeypatch.setattr(owned_log, "PURGE_PAGES", 3)


@pytest.mark.parametrize("first", range(0, 12, 4))
def test_acknowledged_records_stay_and_each_is_there_once(first: int):
    owners = trims = confirmed = 0
    for seed in range(first, first + 4):
        try:
            checker = run(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        owners, trims = owners + checker.owners, trims + checker.trims
        confirmed += checker.confirmed
    assert owners > 20
    assert confirmed > 20
    assert trims > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_hundred_seeds():
    repeats = 0
    for seed in range(1000, 1500):
        try:
            repeats += run(seed).repeats
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert repeats > 0, "requests in doubt were repeated"
