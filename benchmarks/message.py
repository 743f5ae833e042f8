"""JMS through the Python API and through the AMQP gateway, beside other JMS providers.

The set-up of the paper's section 5: 100 subscribers on 10 connections; payloads of 100 to 6,000 bytes at 25
messages a second, small ones at 100 to 1,000.  Every subscriber is measured, and the slowest one's p99 shows
whether they are served alike.  The paper's figures are lost, so there is no column of them.  The Java
clients' part is in `benchmarks.message_peers`.
"""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import Callable

import numpy as np

from benchmarks import harness, measure, message_partitions, message_peers
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config, network
from muster.core import errors
from muster.message import messages, selectors

WORKER = "benchmarks.message_worker"
RUN_S_MAX = 1800  # 1,000 messages at 25 a second take 40 s, for each size and provider
QUICK_S_MAX = 600  # it took 300 s beside other work
REPLICAS = 3
CONNECTIONS, SUBSCRIBERS = message_peers.CONNECTIONS, message_peers.SUBSCRIBERS


def run(quick: bool) -> list[harness.Row]:
    return [*_indexed(), *asyncio.run(_measure(quick))]


def _indexed() -> list[harness.Row]:
    """Time of a message among subscriptions of which one matches."""
    took_us = {}
    meta = messages.MessageMeta(properties={"region": "r7", "size": 4})
    for count in (100, 10_000):
        index: selectors.SelectorIndex[int] = selectors.SelectorIndex()
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
            load="one message in one process; selectors of two conditions, each for its own region",
        )
    ]


async def _measure(quick: bool) -> list[harness.Row]:
    with tempfile.TemporaryDirectory(prefix="bench-message") as folder:
        settings = config.BrokerConfig(name="bench", directory=pathlib.Path(folder) / "broker")
        async with brokers.Broker(settings) as broker:
            pid = broker.pid
            assert pid is not None
            rows = await asyncio.to_thread(_roads, broker.url, pid, quick)
    with tempfile.TemporaryDirectory(prefix="bench-message") as folder:
        async with network.mesh(REPLICAS, pathlib.Path(folder)) as mesh:
            url = next(iter(mesh.brokers.values())).url
            rows += await asyncio.to_thread(_tried, _replicated, url, quick)
    with tempfile.TemporaryDirectory(prefix="bench-message") as folder:  # without earlier partitions
        settings = config.BrokerConfig(name="bench", directory=pathlib.Path(folder) / "broker")
        async with brokers.Broker(settings) as broker:
            assert broker.pid is not None
            return rows + await asyncio.to_thread(
                _tried, message_partitions.rows, broker.url, broker.pid, quick
            )


def _roads(url: str, broker_pid: int, quick: bool) -> list[harness.Row]:
    with measure.Worker(WORKER, "dispatcher", url) as dispatcher:
        dispatcher.hear()
        rows = _tried(_light, url, quick)
        rows += _tried(_persistent, url, quick)
        rows += _tried(_transactions, url, quick)
        with measure.Worker(WORKER, "gateway", url) as gateway:
            port = gateway.hear()["port"]
            rows += _tried(_batching, port, gateway, quick)
            rows += _tried(message_peers.rows, quick, port, (gateway.pid, broker_pid))
        rows += _tried(_durable, url, dispatcher, quick)
    return rows


def _replicated(url: str, quick: bool) -> list[harness.Row]:
    with (
        measure.Worker(WORKER, "dispatcher", url, REPLICAS) as dispatcher,
        measure.Worker(WORKER, "gateway", url) as gateway,
    ):
        dispatcher.hear()
        return message_peers.replicated_rows(quick, gateway.hear()["port"], REPLICAS)


def _tried(part: Callable[..., list[harness.Row]], *arguments: object) -> list[harness.Row]:
    """A part that fails or takes too long says so, and the others still count."""
    name = part.__name__.strip("_")
    with measure.step(name):
        try:
            return part(*arguments)
        except (errors.MusterError, OSError) as error:
            print(f"{name}: no figures: {error}", flush=True)
            return []


def _light(url: str, quick: bool) -> list[harness.Row]:
    """Non-persistent messages through the Python API."""
    rows: list[harness.Row] = []
    with measure.Worker(WORKER, "publisher", url) as publisher:
        publisher.hear()
        with measure.Worker(WORKER, "subscriber", url) as subscriber:
            subscriber.tell([CONNECTIONS, SUBSCRIBERS])
            subscriber.hear()
            for size, rate in ((100, 25), (6000, 25), (100, 1000)):
                count = rate if quick else max(1000, 4 * rate)
                publisher.tell([count, size, rate])
                publisher.hear(timeout_s=60 + count / rate)
                subscriber.tell([count])
                arrived = subscriber.hear(timeout_s=180)
                delays_us = np.full((SUBSCRIBERS, count), np.nan)
                for row, delays in zip(delays_us, arrived["delays_us"], strict=True):
                    row[: len(delays)] = delays
                of = f"{size} B at {rate}/s to {SUBSCRIBERS} subscribers, Python"
                rows += harness.under(
                    f"{SUBSCRIBERS} subscribers on {CONNECTIONS} connections, evenly, in one process, the "
                    f"publisher in another; topic, non-persistent; every subscriber measured; a sample is a "
                    f"message with its {SUBSCRIBERS} delays, without those that were lost",
                    [
                        _row(f"{what}, {of}", figure(delays_us), "µs", "lower", samples=count)
                        for what, figure in (
                            ("transit p50", message_peers.p50),
                            ("transit p99", message_peers.p99),
                            ("slowest subscriber's transit p99", message_peers.slowest_p99),
                        )
                    ]
                    + [_row(f"lost, {of}", 100 * arrived["lost"] / delays_us.size, "%", "lower")],
                )
        with measure.Worker(WORKER, "subscriber", url) as subscriber:
            subscriber.tell([1, 1])
            subscriber.hear()
            count = 20_000 if quick else 100_000
            best: dict[str, float] = {}
            for _ in range(1 if quick else 3):
                subscriber.tell([count])
                publisher.tell([count, 100, 0])
                sent, got = publisher.hear(), subscriber.hear()
                if got["lost"]:
                    raise errors.InvariantViolation(f"{got['lost']} messages lost although producers wait")
                rate_now = count / got["took_s"]
                if rate_now > best.get("rate", 0):
                    best = {
                        "rate": rate_now,
                        "send": 1e6 * sent["cpu_s"] / count,
                        "receive": 1e6 * got["cpu_s"] / count,
                    }
            rows += harness.under(
                f"one publisher, one subscriber; 100 B, topic, non-persistent; {count:,} messages as quickly "
                "as possible; best round",
                [
                    _row("non-persistent end to end, Python", best["rate"], "/s", "higher", 60_000),
                    _row("CPU to send one, Python", best["send"], "µs", "lower"),
                    _row("CPU to receive one, Python", best["receive"], "µs", "lower"),
                    _row(
                        "CPU to send and receive one, Python",
                        best["send"] + best["receive"],
                        "µs",
                        "lower",
                        15,
                    ),
                ],
            )
    return rows


def _persistent(url: str, quick: bool) -> list[harness.Row]:
    with measure.Worker(WORKER, "sender", url) as sender:
        sender.hear()
        sender.tell([500, 50])  # warms up
        sender.hear(timeout_s=120)
        count = 5_000 if quick else 20_000
        rates = []
        for _ in range(1 if quick else 3):
            sender.tell([count, 50])
            rates.append(count / sender.hear(timeout_s=120)["took_s"])
        return harness.under(
            f"50 senders on one connection, each waiting for each acknowledgement; 100 B, queue; "
            f"{count:,} messages; nats-server syncs each before it acknowledges it; best of {len(rates)}",
            [
                _row(
                    "persistent, synced, acknowledged, 50 senders, Python", max(rates), "/s", "higher", 10_000
                )
            ],
        )


def _transactions(url: str, quick: bool) -> list[harness.Row]:
    """What a transaction to several queues costs, beside one to a single queue."""
    count = 100 if quick else 500
    took_ms: dict[int, float] = {}
    with measure.Worker(WORKER, "transactions", url) as sender:
        sender.hear()
        for queues in (1, 8):
            sender.tell([50, queues])  # warms up
            sender.hear(timeout_s=120)
            sender.tell([count, queues])
            took_ms[queues] = measure.percentile(sender.hear(timeout_s=120)["took_ms"], 50)
    return harness.under(
        f"one session, {count} transactions of one message of 100 B to each queue, one after the other; "
        "nats-server syncs each before it is acknowledged",
        [
            harness.Row(
                metric="commit of a transaction to 8 queues, p50",
                ours=took_ms[8],
                unit="ms",
                better="lower",
                peer=took_ms[1],
                peer_name="to one queue",
            )
        ],
    )


def _batching(port: int, gateway: measure.Worker, quick: bool) -> list[harness.Row]:
    """A light AMQP client that sends and acknowledges many at a time; in and out are one message."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    cpu_us: list[float] = []
    with measure.Worker("benchmarks.message_amqp", "127.0.0.1", port) as client:
        client.hear()
        for persistent, count in ((False, 10_000 if quick else 60_000), (True, 3_000 if quick else 15_000)):
            for turn in range(2 if quick else 4):
                gateway.tell(0)
                before = gateway.hear()["cpu_s"]
                client.tell([count, 512, persistent])
                took_s = client.hear(timeout_s=120)["took_s"]
                gateway.tell(0)
                used_s = gateway.hear()["cpu_s"] - before
                if turn:  # the first warms up
                    rates[persistent].append(count / took_s)
                    if not persistent:
                        cpu_us.append(1e6 * used_s / count)
    return harness.under(
        f"one sender, one receiver, 512 B, up to 200 transfers a write, accepted in ranges; best of "
        f"{len(rates[True])}, after one that warms up",
        [
            _row("gateway, 512 B, acked, batching client", max(rates[False]), "/s", "higher", 40_000),
            _row("gateway's CPU a message, in and out", min(cpu_us), "µs", "lower", 15),
            _row("gateway, 512 B, persistent, synced, batching client", max(rates[True]), "/s", "higher"),
        ],
    )


def _durable(url: str, dispatcher: measure.Worker, quick: bool) -> list[harness.Row]:
    """What a message costs the dispatcher among few and many durable subscriptions with selectors."""
    many = 1_000 if quick else 10_000
    sent = 200 if quick else 1_000
    figures: dict[str, float] = {}
    took_s = 0.0
    with (
        measure.Worker(WORKER, "durables", url) as subscribers,
        measure.Worker(WORKER, "sender", url) as sender,
    ):
        subscribers.hear()
        sender.hear()

        def used_s() -> float:
            dispatcher.tell(0)
            return float(dispatcher.hear()["cpu_s"])

        def cost_us(regions: int) -> float:
            """The least of a few times, the first of which warms up."""
            costs = []
            for _ in range(4):
                before = used_s()
                sender.tell([sent, 20, regions])
                sender.hear(timeout_s=120)
                costs.append(1e6 * (used_s() - before) / sent)
            return min(costs)

        for count in (100, many):
            subscribers.tell(count)
            took_s = subscribers.hear(timeout_s=240)["took_s"]
            figures[f"among {count:,}"] = cost_us(1)
        return harness.under(
            f"{sent:,} persistent messages by 20 senders; selectors of one condition; 20 connections; least "
            "of 4 rounds",
            [
                harness.Row(
                    metric=f"dispatcher's CPU a message, {many:,} durable subscriptions, one matching",
                    ours=figures[f"among {many:,}"],
                    unit="µs",
                    better="lower",
                    peer=figures["among 100"],
                    peer_name="among 100",
                ),
                _row("durable subscriptions made", (many - 100) / took_s, "/s", "higher"),
            ],
        )


def _row(
    metric: str,
    ours: float,
    unit: str,
    better: measure.Better,
    goal: float | None = None,
    samples: int | None = None,
) -> harness.Row:
    return harness.Row(metric=metric, ours=ours, unit=unit, better=better, goal=goal, samples=samples)
