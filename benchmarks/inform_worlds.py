"""The worlds that `benchmarks.inform` measures in: nodes in processes, brokers, links with a length.

And the paper's way to take a mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import statistics
import time
from collections.abc import AsyncIterator, Iterator

import msgspec

from benchmarks import measure
from muster.bus import api
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config
from muster.bus.client import client
from muster.bus.rpc import admission
from muster.inform import settings
from muster.inform.node import node as node_node

VALUE = b"x" * 1_700
Z_CUTOFF = 3.0  # the paper filters without naming its own


def filtered_mean(values: list[float]) -> float:
    """The paper's Z-filtering: drop what is too many deviations from the mean, until nothing is dropped."""
    while True:
        mean, deviation = statistics.fmean(values), statistics.pstdev(values)
        kept = [value for value in values if deviation == 0 or abs(value - mean) / deviation <= Z_CUTOFF]
        if len(kept) == len(values):
            return mean
        values = kept


async def times_ms(act: measure.Act, count: int) -> list[float]:
    for number in range(min(50, count)):
        await act(-1 - number)
    durations_ms = []
    for number in range(count):
        start = time.perf_counter()
        await act(number)
        durations_ms.append((time.perf_counter() - start) * 1000)
    return durations_ms


def make(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def inform_settings(**changes: object) -> settings.InformSettings:
    return msgspec.convert(
        {"replicas": 1, "refresh_s": 1.0, "interval_s": 1e6, **changes}, settings.InformSettings
    )


@contextlib.asynccontextmanager
async def fleet(
    here: str, there: str, folder: pathlib.Path, copies: int, others: int
) -> AsyncIterator[tuple[node_node.InformationNode, api.Bus]]:
    """A node in this process at broker ``here``, ``others`` in their own at ``there``; and a client's bus."""
    chosen = inform_settings(replicas=copies)
    encoded = msgspec.json.encode(chosen).decode()
    make(folder)
    admission.of_loop(asyncio.get_running_loop()).share = 100.0
    with contextlib.ExitStack() as workers:
        started = [
            workers.enter_context(
                measure.Worker(
                    "benchmarks.inform_worker", there, f"b{number}", f"{folder}/b{number}.db", encoded
                )
            )
            for number in range(others)
        ]
        for worker in started:
            worker.hear()
        async with (
            await client.connect((here,), identity="a") as bus,
            await client.connect((here,), identity="c") as caller,
            await node_node.start(bus, settings=chosen, max_bytes=4 << 30) as node,
        ):
            for _ in range(400):
                if len(node.directory.nodes) == others:
                    break
                await asyncio.sleep(0.05)
            yield node, caller


@contextlib.contextmanager
def link(host: str, port: int, round_trip_ms: float) -> Iterator[int]:
    """The port of the near end of a link to there, so long."""
    with measure.Worker("benchmarks.inform_link", host, port, round_trip_ms / 2) as worker:
        yield int(worker.hear()["port"])


@contextlib.asynccontextmanager
async def far_brokers(folder: pathlib.Path, round_trip_ms: float) -> AsyncIterator[tuple[str, str]]:
    """Two brokers whose route to each other is so long; their addresses."""
    ports = {"near": free_port(), "far": free_port()}
    with contextlib.ExitStack() as links:
        ends = {
            name: links.enter_context(link("127.0.0.1", port, round_trip_ms)) for name, port in ports.items()
        }
        both = [
            brokers.Broker(
                config.BrokerConfig(
                    name=name,
                    directory=folder / name,
                    cluster=config.BrokerCluster(
                        name="long", port=ports[name], routes=(f"nats://127.0.0.1:{ends[other]}",)
                    ),
                )
            )
            for name, other in (("near", "far"), ("far", "near"))
        ]
        async with contextlib.AsyncExitStack() as stack:
            await asyncio.gather(*(stack.enter_async_context(broker) for broker in both))
            yield both[0].url, both[1].url


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
