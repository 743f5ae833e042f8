"""The bus: messages, requests, durable publishes, idle connections, and times to start.

Publishers and subscribers are processes of their own, with a real broker between them.  The peer is plain
nats-py, doing the same through the same broker, in turns with us.  The paper is the one on managing
grid services: its broker carries 5,000 messages/s of 512 bytes or 4,500 of 1,024, and holds 800 connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

from benchmarks import harness, measure
from muster.bus.brokers import broker, config
from muster.core import errors
from muster.trust import keyring
from muster.trust.permissions import roles

PEER = "nats-py"
SIDES = {"ours": "ours", "peer": "peer"}  # and whose methods they use
DIRECT = "direct"  # ours, with a link between the processes
PAPER_RATE = {512: 5000, 1024: 4500}
PAPER_CONNECTIONS = 800
RATIO_GOAL = 0.8
DIRECT_RATIO_GOAL = 2.0

WORKER = "benchmarks.bus_worker"
SUBSCRIBERS = 10
BACKLOG_BYTES_MAX = 48 << 20  # the broker cuts off a subscriber that is 64 MiB behind
SENDERS = 50
IDLE = 10_000
IDLE_PROCESSES = 4

_number = itertools.count()


def run(quick: bool) -> list[harness.Row]:
    measure.raise_file_limit(IDLE + 1000)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        place = pathlib.Path(folder)
        with _broker(runner, place, "plain") as plain:
            rows = [*_throughput(plain.url, quick), *_requests(plain.url, place, quick)]
        with _broker(runner, place, "synced") as synced:
            rows.append(_durable(synced.url, "durable publishes, synced", quick))
        with _broker(runner, place, "unsynced", config.BrokerStorage(sync_interval_s=120)) as unsynced:
            rows.append(_durable(unsynced.url, "durable publishes, sync off", quick))
        with _broker(runner, place, "crowded") as crowded:
            rows += _idle(crowded, hold_s=2 if quick else 45)
        rows.append(_start(place, rounds=2 if quick else 5))
    rows.append(_help(rounds=5 if quick else 15))
    return rows


@contextlib.contextmanager
def _broker(
    runner: asyncio.Runner, place: pathlib.Path, name: str, storage: config.BrokerStorage | None = None
) -> Iterator[broker.Broker]:
    settings = config.BrokerConfig(
        name=name, directory=place / name, storage=storage or config.BrokerStorage()
    )
    started = broker.Broker(settings)
    runner.run(started.start())
    try:
        yield started
    finally:
        runner.run(started.stop())


@contextlib.contextmanager
def _workers(url: str, each: int, names: dict[str, str] = SIDES) -> Iterator[dict[str, list[measure.Worker]]]:
    """So many for each side, connected."""
    with contextlib.ExitStack() as stack:
        sides = {
            side: [stack.enter_context(measure.Worker(WORKER, name, url)) for _ in range(each)]
            for side, name in names.items()
        }
        for workers in sides.values():
            for worker in workers:
                worker.hear()
        yield sides


def _throughput(url: str, quick: bool) -> list[harness.Row]:
    rows = []
    with _workers(url, 1 + SUBSCRIBERS) as sides:
        for subscribers, size in itertools.product((1, SUBSCRIBERS), PAPER_RATE):
            messages = min(BACKLOG_BYTES_MAX // size, 100_000 if subscribers == 1 else 20_000)
            outcomes = measure.in_turns(
                {
                    side: functools.partial(
                        _one_to_many,
                        workers[0],
                        workers[1 : 1 + subscribers],
                        messages // 4 if quick else messages,
                        size,
                    )
                    for side, workers in sides.items()
                },
                rounds=3 if quick else 7,
            )
            metric = f"1 to {subscribers}, {size:,} bytes"
            rows.append(_beside_peer(metric, outcomes, "messages/s", "higher", PAPER_RATE[size]))
    return harness.under(
        "a process for the publisher and for each subscriber; not durable; 48 MiB or 20,000 to 100,000 "
        f"messages a round{', a quarter of it' if quick else ''}, until every subscriber has the last; best "
        "round of each side",
        rows,
    )


def _one_to_many(
    publisher: measure.Worker, listeners: list[measure.Worker], messages: int, size: int
) -> float:
    """Messages a second, from the first publish until every subscriber has the last one."""
    subject = f"bench.{next(_number)}"
    for listener in listeners:
        listener.tell({"do": "count", "subject": subject, "messages": messages})
    for listener in listeners:
        listener.hear()
    publisher.tell({"do": "publish", "subject": subject, "messages": messages, "size": size})
    last_ns: int = max(listener.hear()["last_ns"] for listener in listeners)
    start_ns: int = publisher.hear()["start_ns"]
    return messages / ((last_ns - start_ns) / 1e9)


def _requests(url: str, place: pathlib.Path, quick: bool) -> list[harness.Row]:
    """Over the broker, and over a direct connection: the peer has the broker only."""
    requests = 1000 if quick else 10_000
    with _workers(url, 2) as sides, _workers(url, 2, {DIRECT: "ours"}) as linked:
        answerer, asker = linked[DIRECT]
        _link(answerer, asker, place)
        sides |= linked
        for side, (answerer, _) in sides.items():
            answerer.tell({"do": "answer", "subject": f"topic.answer.{side}"})
            answerer.hear()

        outcomes = measure.in_turns(
            {side: functools.partial(_ask, side, asker, requests) for side, (_, asker) in sides.items()},
            rounds=3 if quick else 5,
        )
    rows = [
        _beside_peer(
            f"request{way} {percent}",
            {
                side: [round_[f"{percent}_ns"] / 1e6 for round_ in outcomes[of]]
                for side, of in (("ours", ours), ("peer", "peer"))
            },
            "ms",
            "lower",
            goal=goal,
            samples=requests,
        )
        for ours, way, goal in (
            ("ours", "", RATIO_GOAL),
            (DIRECT, " over a direct connection", DIRECT_RATIO_GOAL),
        )
        for percent in ("p50", "p99")
    ]
    return harness.under(
        f"512 B there and back, one request at a time, {requests:,} a round; the peer's over the broker; "
        "best round of each side",
        rows,
    )


def _link(answerer: measure.Worker, asker: measure.Worker, place: pathlib.Path) -> None:
    """Have requests of ``asker`` to ``answerer`` take a direct connection."""
    trust = keyring.Keyring.create(place / "keys", "bench")
    trust.issue("bench", roles.Role.OPERATOR)
    answerer.tell({"do": "listen", "keys": str(trust.folder)})
    asker.tell({"do": "dial", "keys": str(trust.folder), "address": answerer.hear()})
    asker.hear()


def _ask(side: str, asker: measure.Worker, requests: int) -> dict[str, float]:
    asker.tell({"do": "ask", "subject": f"topic.answer.{side}", "requests": requests, "size": 512})
    answer: dict[str, float] = asker.hear()
    return answer


def _durable(url: str, metric: str, quick: bool) -> harness.Row:
    with _workers(url, 1) as sides:
        outcomes = measure.in_turns(
            {
                side: functools.partial(_store, worker, 1.0 if quick else 3.0)
                for side, (worker,) in sides.items()
            },
            rounds=2 if quick else 5,
        )
    row = _beside_peer(f"{metric}, {SENDERS} senders", outcomes, "messages/s", "higher", goal=None)
    return replace(
        row,
        load=f"{SENDERS} senders of one process and connection, each waiting for acknowledgements; 512 B; "
        "one stream in one broker, of the same settings on both sides; best round of each side",
    )


def _store(worker: measure.Worker, seconds: float) -> float:
    name = f"bench-{next(_number)}"
    worker.tell({"do": "store", "name": name, "senders": SENDERS, "size": 512, "seconds": seconds})
    rate: float = worker.hear()["rate"]
    return rate


def _beside_peer(
    metric: str,
    rounds: dict[str, list[float]],
    unit: str,
    better: measure.Better,
    paper: float | None = None,
    goal: float | None = RATIO_GOAL,
    samples: int | None = None,
) -> harness.Row:
    return harness.Row(
        metric=metric,
        ours=measure.best(rounds["ours"], better),
        unit=unit,
        better=better,
        paper=paper,
        peer=measure.best(rounds["peer"], better),
        peer_name=PEER,
        goal=goal,
        goal_is="ratio",
        samples=samples,
    )


def _idle(crowded: broker.Broker, hold_s: float) -> list[harness.Row]:
    """As many connections as the goal says, held while the broker pings them."""
    assert crowded.pid is not None
    address = urlsplit(crowded.url)
    before = measure.resident_bytes(crowded.pid)
    with contextlib.ExitStack() as stack:
        holders = [
            stack.enter_context(
                measure.Worker(WORKER, "idle", address.hostname, address.port, IDLE // IDLE_PROCESSES)
            )
            for _ in range(IDLE_PROCESSES)
        ]
        for holder in holders:
            holder.hear()
        time.sleep(hold_s)
        held = asyncio.run(crowded.monitoring_page("varz"))["connections"]
        memory = measure.resident_bytes(crowded.pid) - before
    return harness.under(
        f"{IDLE_PROCESSES} processes, connected and answering pings, held for {hold_s:g} s",
        [
            harness.Row(
                metric="idle connections held",
                ours=held,
                unit="connections",
                better="higher",
                paper=PAPER_CONNECTIONS,
                goal=IDLE,
            ),
            harness.Row(metric="memory an idle connection", ours=memory / held, unit="bytes", better="lower"),
        ],
    )


def _start(place: pathlib.Path, rounds: int) -> harness.Row:
    """``muster up`` of three brokers with empty stores: from the command until the domain is up."""

    def once(number: int) -> float:
        home = ("--home", str(place / f"domain-{number}"))
        _muster("init", "--brokers", "3", "--port", "0", *home)
        took_s = measure.seconds(lambda: _muster("up", "--detach", *home))
        _muster("down", *home)
        return took_s

    took_s = [once(number) for number in range(rounds)]
    return harness.Row(
        metric="start of a 3-broker domain",
        ours=statistics.median(took_s),
        unit="s",
        better="lower",
        goal=3.0,
        load=f"empty stores, from the command until the domain is up; median of {rounds}",
    )


def _help(rounds: int) -> harness.Row:
    _muster("--help")  # the first one reads from the disk
    took_ms = [measure.seconds(lambda: _muster("--help")) * 1000 for _ in range(rounds)]
    return harness.Row(
        metric="muster --help",
        ours=statistics.median(took_ms),
        unit="ms",
        better="lower",
        goal=300,
        load=f"a process each, files cached; median of {rounds}",
    )


def _muster(*arguments: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(measure.ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "muster", *arguments], env=env, check=True, stdout=subprocess.PIPE
    )
    if not done.stdout:
        raise errors.Unavailable(f"muster {' '.join(arguments)} printed nothing")
