"""JMS through the Python API, and what a selector costs among many.

The set-up of the paper's section 5: 100 subscribers on 10 connections and a measuring one; payloads of 100
to 6,000 bytes at 25 messages a second, small ones at up to 1,000.  Its figures are lost, so there is no
column of them.
"""

from __future__ import annotations

import asyncio
import pathlib
import statistics
import tempfile

from benchmarks import harness, measure
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config
from muster.message import messages, selectors


def run(quick: bool) -> list[harness.Row]:
    return [*_indexed(quick), *asyncio.run(_measure(quick))]


def _indexed(quick: bool) -> list[harness.Row]:
    """Time of a message among subscriptions of which one matches."""
    took_us = {}
    meta = messages.Meta(properties={"region": "r7", "size": 4})
    for count in (100, 10_000):
        index: selectors.Index[int] = selectors.Index()
        for number in range(count):
            index.add(number, f"region = 'r{number}' AND size > 3")
        took_us[count] = (
            measure.nanoseconds_a_call(lambda index=index: list(index.matching(meta))) / 1000  # type: ignore[misc]
        )
    return [
        harness.Row(
            metric="a message among 10,000 selectors, one matching",
            ours=took_us[10_000],
            unit="µs",
            better="lower",
            peer=took_us[100],
            peer_name="among 100",
        )
    ]


async def _measure(quick: bool) -> list[harness.Row]:
    with tempfile.TemporaryDirectory(prefix="bench-message") as folder:
        settings = config.BrokerConfig(name="bench", directory=pathlib.Path(folder) / "broker")
        async with brokers.Broker(settings) as broker:
            return await asyncio.to_thread(_roads, broker.url, quick)


def _roads(url: str, quick: bool) -> list[harness.Row]:
    rows: list[harness.Row] = []
    worker = "benchmarks.message_worker"
    with measure.Worker(worker, "publisher", url) as publisher:
        publisher.hear()
        with measure.Worker(worker, "subscriber", url) as subscriber:
            subscriber.tell([10, 101])
            subscriber.hear()
            for size, rate in ((100, 25), (6000, 25), (100, 1000)):
                count = rate * (2 if quick else 10)
                subscriber.tell([count])
                publisher.tell([count, size, rate])
                publisher.hear()
                delays_us = subscriber.hear()["delays_us"]
                name = f"{size} B at {rate}/s to 101 subscribers"
                rows += [
                    _row(f"transit delay p50, {name}", measure.percentile(delays_us, 50), "µs", "lower"),
                    _row(f"transit delay deviation, {name}", statistics.pstdev(delays_us), "µs", "lower"),
                ]
        with measure.Worker(worker, "subscriber", url) as subscriber:
            subscriber.tell([1, 1])
            subscriber.hear()
            count = 20_000 if quick else 100_000
            subscriber.tell([count])
            publisher.tell([count, 100, 0])
            sent, got = publisher.hear(), subscriber.hear()
            rows += [
                _row(
                    "non-persistent end to end", len(got["delays_us"]) / got["took_s"], "/s", "higher", 60_000
                ),
                _row("CPU to send one", 1e6 * sent["cpu_s"] / count, "µs", "lower"),
                _row("CPU to receive one", 1e6 * got["cpu_s"] / count, "µs", "lower"),
            ]
    with (
        measure.Worker(worker, "dispatcher", url) as dispatcher,
        measure.Worker(worker, "sender", url) as sender,
    ):
        dispatcher.hear()
        sender.hear()
        count = 5_000 if quick else 50_000
        sender.tell([count, 50])
        took_s = sender.hear(timeout_s=300)["took_s"]
        rows.append(
            _row("persistent, synced, acknowledged, 50 senders", count / took_s, "/s", "higher", 10_000)
        )
    return rows


def _row(
    metric: str, ours: float, unit: str, better: measure.Better, goal: float | None = None
) -> harness.Row:
    return harness.Row(metric=metric, ours=ours, unit=unit, better=better, goal=goal)
