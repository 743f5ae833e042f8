"""The part of ``bench-notify`` that runs a notifier: its memory, its restart, events through the bus."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks import harness, measure
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config as broker_config
from muster.bus.client import client as bus_client
from muster.core import errors
from muster.notify import client
from muster.predicates import types

WORKER = "benchmarks.notify_worker"
MOMENTS = 5
MEMORY_GOAL = 200.0
CLIENTS, MATCHES = 4, 100


@contextlib.asynccontextmanager
async def _broker() -> AsyncIterator[brokers.Broker]:
    with tempfile.TemporaryDirectory() as folder:
        settings = broker_config.BrokerConfig(name="bench", directory=Path(folder) / "broker")
        async with brokers.Broker(settings) as broker:
            yield broker


async def memory(receivers: int, policies: int) -> list[harness.Row]:
    """Of a notifier that takes them in, and of one that reads them from the logs: how long that takes too."""
    with measure.Worker(WORKER, "memory", receivers, policies) as worker:
        tables = await asyncio.to_thread(worker.hear, timeout_s=300)
    async with _broker() as broker:
        with measure.Worker(WORKER, "notifier", broker.url) as notifier:
            await asyncio.to_thread(notifier.hear)
            empty = await _held_by(notifier)
            with measure.Worker(WORKER, "fill", broker.url, receivers, policies) as filler:
                await asyncio.to_thread(filler.hear, timeout_s=600)
            filled = await _held_by(notifier)
        started = time.perf_counter()
        with measure.Worker(WORKER, "notifier", broker.url) as notifier:
            await asyncio.to_thread(notifier.hear, timeout_s=300)
            took_s = time.perf_counter() - started
            again = await _held_by(notifier)
    for counters in (filled, again):
        if counters["receivers"] != receivers:
            raise errors.InvariantViolation(f"{counters['receivers']} of {receivers} receivers are held")
    of = f"{receivers:,} receivers, {policies:,} policies"

    def row(what: str, each: float, goal: float | None = None) -> harness.Row:
        return harness.Row(
            metric=f"memory for each of {of}: {what}", ours=each, unit="bytes", better="lower", goal=goal
        )

    return harness.under(
        "one notifier, one broker; receivers join over the bus in messages of 10,000",
        [
            row(
                "the notifier's process",
                (filled["resident_bytes"] - empty["resident_bytes"]) / receivers,
                MEMORY_GOAL,
            ),
            row("the same restarted", (again["resident_bytes"] - empty["resident_bytes"]) / receivers),
            row("the tables alone", tables),
            harness.Row(metric=f"restart of a notifier with {of}", ours=took_s, unit="s", better="lower"),
        ],
    )


async def _held_by(notifier: measure.Worker) -> dict[str, Any]:
    notifier.tell("count")
    counters: dict[str, Any] = await asyncio.to_thread(notifier.hear, timeout_s=180)
    return counters


async def end_to_end(receivers: int, events: int) -> list[harness.Row]:
    """Through the bus: an event sent, the callbacks of its receivers run in other processes."""
    async with _broker() as broker:
        with contextlib.ExitStack() as stack:
            notifier = stack.enter_context(measure.Worker(WORKER, "notifier", broker.url))
            await asyncio.to_thread(notifier.hear)
            each, groups = receivers // CLIENTS, receivers // MATCHES
            clients = [
                stack.enter_context(
                    measure.Worker(WORKER, "client", broker.url, f"farm-{place}", place * each, each, groups)
                )
                for place in range(CLIENTS)
            ]
            for worker in clients:
                await asyncio.to_thread(worker.hear, timeout_s=400)
            async with (
                await bus_client.connect([broker.url], identity="watch", audit_s=0) as bus,
                client.NotifyClient(bus) as mine,
            ):
                latencies_ms: dict[bool, list[float]] = {False: [], True: []}
                for moment in range(MOMENTS):
                    for new in (True, False) if moment % 2 else (False, True):
                        latencies_ms[new] += await _send(mine, clients, events // MOMENTS, groups, new)
                before = await _delivered(clients)
                started = time.perf_counter()
                await _flood(mine, events, groups)
                total = await _until_quiet(clients)
                rate = (total - before) / (time.perf_counter() - started)
    of = f"end to end, {receivers:,} receivers, {MATCHES} matches an event"
    return harness.under(
        f"{CLIENTS} client processes, one notifier, one broker; {groups:,} repeated addresses, or a new one "
        f"for each event; an event every 2 ms, {MOMENTS} moments in turns; deliveries: 20 senders as quickly "
        "as possible",
        [
            *(
                harness.Row(
                    metric=f"{of}{', new address' if new else ''}: p50",
                    ours=statistics.median(delays),
                    unit="ms",
                    better="lower",
                    goal=5,
                    samples=events,
                )
                for new, delays in latencies_ms.items()
            ),
            harness.Row(metric="end to end: deliveries", ours=rate, unit="deliveries/s", better="higher"),
        ],
    )


async def _one(mine: client.NotifyClient, number: int, groups: int, limit: float | None = None) -> None:
    """To one group; a limit above every receiver's load makes the address a new one and selects the same."""
    content: dict[str, types.Value] = {"threat_level": 5, "sent_ns": time.monotonic_ns()}
    group = f"region = 'region{number % groups}'"
    await mine.send(
        "watch", "alert", content, to=group if limit is None else f"{group} AND load < {limit:.9f}"
    )


async def _send(
    mine: client.NotifyClient, clients: list[measure.Worker], events: int, groups: int, new: bool
) -> list[float]:
    """Milliseconds from sending to the callback, of each client that has receivers of an event."""
    for number in range(50):
        await _one(mine, number, groups)
    await _delivered(clients)
    for number in range(events):
        await _one(mine, number, groups, random.uniform(0.6, 1.0) if new else None)
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.5)
    latencies_ms: list[float] = []
    for worker in clients:
        worker.tell("count")
        latencies_ms += (await asyncio.to_thread(worker.hear))["latencies_ms"]
    return latencies_ms


async def _flood(mine: client.NotifyClient, events: int, groups: int) -> None:
    async def send_batch(first: int) -> None:
        for number in range(first, first + events // 20):
            await _one(mine, number, groups)

    await asyncio.gather(*(send_batch(place * 50) for place in range(20)))


async def _delivered(clients: list[measure.Worker]) -> int:
    total = 0
    for worker in clients:
        worker.tell("count")
        counters: dict[str, Any] = await asyncio.to_thread(worker.hear)
        total += counters["delivered"]
    return total


async def _until_quiet(clients: list[measure.Worker]) -> int:
    last, now = -1, await _delivered(clients)
    while now != last:
        await asyncio.sleep(0.1)
        last, now = now, await _delivered(clients)
    return now
