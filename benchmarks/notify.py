"""Selective notification: who gets an event, among a million receivers, on one core.

Beside our figure stand the same decision in plain Python (every receiver asked, its policy a compiled
closure), in DuckDB (one thread, receivers in a table, the accepting policies given to it for nothing), and
the time that one core needs merely to read the bytes that a match touches.  The wall-clock figures suffer
from neighbours; the 99th percentiles are of CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness, measure, notify_world
from muster.bus import client as bus_client
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config as broker_config
from muster.notify import client, engine, plain, reference
from muster.predicates import ast, closure, parser, types

WORKER = "benchmarks.notify_worker"
SHARES = ("0.01%", "1%", "50%")
GOALS = {"0.01%": 120.0, "1%": 120.0, "50%": 250.0}
CLIENTS = 4

Work = list[tuple[dict[str, types.Value], ast.Condition]]


def run(quick: bool) -> list[harness.Row]:
    receivers, many, few = (50_000, 2_000, 200) if quick else (1_000_000, 100_000, 1_000)
    kernels = engine.fastest()
    rows: list[harness.Row] = []
    held = notify_world.build(receivers, many, kernels)
    gc.collect()
    gc.freeze()
    naive = _naive(held, 20_000 if quick else 100_000)
    rows += [row for share in SHARES for row in _matching(held, share, many, quick, naive)]
    rows.append(_floor(held))
    rows.append(_duckdb(held, quick))
    rows += _sustained(held, 3.0 if quick else 60.0)
    if kernels is not plain:
        held.use(plain)
        rows += [_plainly(held, share, many) for share in SHARES]
    held = notify_world.build(receivers, few, kernels)
    rows.append(_rate(held, few))
    del held
    with measure.Worker(WORKER, "memory", max(receivers, 200_000)) as worker:
        rows.append(
            harness.Row(
                metric="memory for each receiver",
                ours=worker.hear(timeout_s=300),
                unit="bytes",
                better="lower",
                goal=200,
            )
        )
    rows += asyncio.run(_end_to_end(8_000 if quick else 100_000, 200 if quick else 2000))
    return rows


def _work(share: str, count: int = 200) -> Work:
    dice = random.Random(share)
    return [(notify_world.event(dice), parser.parse(notify_world.address(dice, share))) for _ in range(count)]


def _match(held: engine.Engine, share: str, event: dict[str, types.Value], address: ast.Condition) -> int:
    if share == "50%":
        return held.find_bits(event, address)[1]
    return sum(len(found.rows) for found in held.find(event, address))


def _timed(held: engine.Engine, share: str, rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds of each match: on the wall, and of CPU."""
    work = _work(share)
    for event, address in work:
        _match(held, share, event, address)
    wall, cpu = [], []
    for _ in range(rounds):
        for event, address in work:
            start, used = time.perf_counter_ns(), time.thread_time_ns()
            _match(held, share, event, address)
            cpu.append((time.thread_time_ns() - used) / 1e3)
            wall.append((time.perf_counter_ns() - start) / 1e3)
    return wall, cpu


def _matching(
    held: engine.Engine, share: str, policies: int, quick: bool, naive: dict[str, float]
) -> Iterator[harness.Row]:
    wall, cpu = _timed(held, share, 3 if quick else 20)
    of = f"{share} addressed, {policies:,} policies"
    yield harness.Row(
        metric=f"match, {of}: p50",
        ours=statistics.median(wall),
        unit="µs",
        better="lower",
        peer=naive[share],
        peer_name="naive Python",
        goal=GOALS[share],
    )
    yield harness.Row(
        metric=f"match, {of}: CPU p99",
        ours=measure.percentile(cpu, 99),
        unit="µs",
        better="lower",
        goal=300.0 if share != "50%" else None,
    )


def _plainly(held: engine.Engine, share: str, policies: int) -> harness.Row:
    wall, _ = _timed(held, share, 1)
    return harness.Row(
        metric=f"match without numba, {share} addressed, {policies:,} policies: p50",
        ours=statistics.median(wall),
        unit="µs",
        better="lower",
    )


def _naive(held: engine.Engine, sample: int) -> dict[str, float]:
    """Microseconds an event, scaled up from a sample of the receivers."""
    table = held.tables[0]
    step = max(1, table.used // sample)
    rows = range(0, table.used, step)
    compiled: dict[int, closure.Matches] = {}
    receivers = []
    for row in rows:
        policy = int(table.policy_of[row])
        if policy not in compiled:
            compiled[policy] = closure.compile(held.policies.condition(policy))
        receivers.append(reference.Receiver(str(row), table.read(row), compiled[policy]))
    found = {}
    for share in SHARES:
        times = []
        for event, address in _work(share, 3):
            asks = closure.compile(address)
            started = time.perf_counter()
            reference.match(receivers, event, asks)
            times.append((time.perf_counter() - started) * 1e6 * table.used / len(receivers))
        found[share] = statistics.median(times)
    return found


def _floor(held: engine.Engine) -> harness.Row:
    """Reading three bitmaps, a column of codes and the policies' rows, and nothing else."""
    table = held.tables[0]
    size = 4 * table.used // 8 + table.used + 7 * len(held.policies.true) * 8
    memory = np.ones(size // 8, np.uint64)
    times = []
    for _ in range(50):
        started = time.perf_counter()
        np.bitwise_or.reduce(memory)
        times.append((time.perf_counter() - started) * 1e6)
    return harness.Row(
        metric="floor: read once what a match reads", ours=min(times), unit="µs", better="lower"
    )


def _duckdb(held: engine.Engine, quick: bool) -> harness.Row:
    import duckdb
    import pyarrow as pa

    table = held.tables[0]
    count = table.used
    numbers = np.random.default_rng(3)
    states = notify_world.columns(numbers, count)
    frame = pa.table(
        {
            "application": states["application"],
            "services": [",".join(sorted(one)) for one in states["services"]],
            "load": states["load"],
            "policy": table.policy_of[:count],
        }
    )
    base = duckdb.connect(config={"threads": 1})
    base.register("frame", frame)
    base.execute("CREATE TABLE receivers AS SELECT row_number() OVER () AS id, * FROM frame")
    times, ours = [], []
    for event, address in _work("1%", 10 if quick else 30):
        started = time.perf_counter()
        _match(held, "1%", event, address)
        ours.append((time.perf_counter() - started) * 1e6)
        held.policies.ask(event)
        accepting = pa.table({"policy": held.policies.policies().copy()})
        base.register("accepting", accepting)
        started = time.perf_counter()
        base.execute(
            "SELECT id FROM receivers SEMI JOIN accepting USING (policy) "
            "WHERE application IN ('app1', 'app2') AND contains(services, 'xml') AND load < 0.7"
        ).fetchnumpy()
        times.append((time.perf_counter() - started) * 1e6)
    base.close()
    return harness.Row(
        metric="match, 1% addressed, beside DuckDB: p50",
        ours=statistics.median(ours),
        unit="µs",
        better="lower",
        peer=statistics.median(times),
        peer_name="DuckDB, one thread",
    )


def _rate(held: engine.Engine, policies: int) -> harness.Row:
    work = [pair for share in SHARES[:2] for pair in _work(share)]
    for event, address in work:
        held.find(event, address)
    rounds = 10
    used = measure.cpu_seconds(
        lambda: [held.find(event, address) for _ in range(rounds) for event, address in work]
    )
    return harness.Row(
        metric=f"events matched, {policies:,} policies",
        ours=rounds * len(work) / used,
        unit="events/s of CPU time",
        better="higher",
        goal=10_000,
    )


def _sustained(held: engine.Engine, length_s: float) -> list[harness.Row]:
    """Open loop: events are due at 5,000/s and updates at 50,000/s, whether or not we keep up."""
    events_s, updates_s, batch = 5000, 50_000, 1000
    dice = random.Random(5)
    work = [
        pair for share, count in (("0.01%", 140), ("1%", 50), ("50%", 10)) for pair in _work(share, count)
    ]
    dice.shuffle(work)
    numbers = np.random.default_rng(5)
    count = len(held)
    prepared = [
        (
            [f"farm/web-{one}" for one in numbers.integers(0, count, batch)],
            {"load": np.round(numbers.random(batch), 4).tolist()},
        )
        for _ in range(20)
    ]
    for event, address in work:
        held.find(event, address)
    events = updates = 0
    late: list[float] = []
    busy = 0.0
    started = time.perf_counter()
    while (now := time.perf_counter() - started) < length_s:
        if updates < now * updates_s:
            begun = time.perf_counter()
            held.update(*prepared[(updates // batch) % len(prepared)])
            updates += batch
            busy += time.perf_counter() - begun
        if events < now * events_s:
            begun = time.perf_counter()
            held.find(*work[events % len(work)])
            busy += time.perf_counter() - begun
            if events % 16 == 0:
                late.append(((time.perf_counter() - started) - events / events_s) * 1e6)
            events += 1
    total = time.perf_counter() - started
    return [
        harness.Row(
            metric=f"sustained for {length_s:.0f} s: events, with updates at once",
            ours=events / total,
            unit="events/s",
            better="higher",
            goal=4_990,
        ),
        harness.Row(
            metric="sustained: state updates meanwhile",
            ours=updates / total,
            unit="updates/s",
            better="higher",
            goal=49_500,
        ),
        harness.Row(
            metric="sustained: from due to decided, p50",
            ours=statistics.median(late),
            unit="µs",
            better="lower",
        ),
        harness.Row(metric="sustained: share of the core", ours=100 * busy / total, unit="%", better="lower"),
    ]


async def _end_to_end(receivers: int, events: int) -> list[harness.Row]:
    """Through the bus: an event sent, the callbacks of its receivers run in other processes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        settings = broker_config.BrokerConfig(name="bench", directory=Path(folder) / "broker")
        async with brokers.Broker(settings) as broker:
            notifier = stack.enter_context(measure.Worker(WORKER, "notifier", broker.url))
            await asyncio.to_thread(notifier.hear)
            each = receivers // CLIENTS
            clients = [
                stack.enter_context(
                    measure.Worker(WORKER, "client", broker.url, f"farm-{place}", place * each, each)
                )
                for place in range(CLIENTS)
            ]
            for one in clients:
                await asyncio.to_thread(one.hear, timeout_s=400)
            async with (
                await bus_client.connect([broker.url], identity="watch", audit_s=0) as bus,
                client.Parties(bus) as mine,
            ):
                latencies = await _send(mine, clients, events)
                before = await _delivered(clients)
                started = time.perf_counter()
                await _flood(mine, events)
                total = await _until_quiet(clients)
                rate = (total - before) / (time.perf_counter() - started)
    matches = receivers / 1000
    return [
        harness.Row(
            metric=f"end to end, {receivers:,} receivers, {matches:.0f} matches an event: p50",
            ours=statistics.median(latencies),
            unit="ms",
            better="lower",
            goal=5,
        ),
        harness.Row(metric="end to end: deliveries", ours=rate, unit="deliveries/s", better="higher"),
    ]


async def _one(mine: client.Parties, number: int) -> None:
    content: dict[str, types.Value] = {"threat_level": 5, "sent_ns": time.monotonic_ns()}
    await mine.send("watch", "alert", content, to=f"region = 'region{number % 1000}'")


async def _send(mine: client.Parties, clients: list[measure.Worker], events: int) -> list[float]:
    for number in range(50):
        await _one(mine, number)
    await _delivered(clients)
    for number in range(events):
        await _one(mine, number)
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.5)
    found: list[float] = []
    for one in clients:
        one.tell("count")
        found += (await asyncio.to_thread(one.hear))["latencies_ms"]
    return found


async def _flood(mine: client.Parties, events: int) -> None:
    async def some(first: int) -> None:
        for number in range(first, first + events // 20):
            await _one(mine, number)

    await asyncio.gather(*(some(place * 50) for place in range(20)))


async def _delivered(clients: list[measure.Worker]) -> int:
    total = 0
    for one in clients:
        one.tell("count")
        told: dict[str, Any] = await asyncio.to_thread(one.hear)
        total += told["delivered"]
    return total


async def _until_quiet(clients: list[measure.Worker]) -> int:
    last, now = -1, await _delivered(clients)
    while now != last:
        await asyncio.sleep(0.1)
        last, now = now, await _delivered(clients)
    return now
