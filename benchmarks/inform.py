"""The information service, by its paper's method: contexts of 1.7 kB, means of 1,000 with outliers filtered.

One process for each node, real brokers that sync before they acknowledge.  Distances are not injected here:
on loopback the network's own part is next to nothing, so what is measured is the paper's "overhead".  etcd
runs on the same machine in the same run, with its data on the same disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from benchmarks import etcd, harness, inform_demand, measure
from muster.bus import api, client
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config, network
from muster.inform import client as inform_client
from muster.inform import contextlog, protocol, service, settings

VALUE = b"x" * 1_700
Z_CUTOFF = 3.0  # the paper filters without naming its own
TOGETHER = 64

#: The paper's tables 4, 5 and 6: one broker, two brokers; Bloomington to Indianapolis, in ms.
ACCESS_MS = (3.59, 4.79)
REPLICA_MS = ((4.02, 5.27), (4.54, 5.67), (5.13, 6.24))
UPDATE_MS = (4.05, 5.32)


def filtered_mean(values: list[float]) -> float:
    """The paper's Z-filtering: drop what is too many deviations from the mean, until nothing is dropped."""
    while True:
        mean, deviation = statistics.fmean(values), statistics.pstdev(values)
        kept = [value for value in values if deviation == 0 or abs(value - mean) / deviation <= Z_CUTOFF]
        if len(kept) == len(values):
            return mean
        values = kept


async def times_ms(act: Callable[[int], Awaitable[object]], count: int) -> list[float]:
    for number in range(min(50, count)):
        await act(-1 - number)
    found = []
    for number in range(count):
        start = time.perf_counter()
        await act(number)
        found.append((time.perf_counter() - start) * 1000)
    return found


async def per_second(act: Callable[[int], Awaitable[object]], count: int) -> float:
    numbers = iter(range(count))

    async def one() -> None:
        for number in numbers:
            await act(number)

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(TOGETHER)))
    return count / (time.perf_counter() - start)


def _make(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def wanted(**changes: object) -> settings.Inform:
    return msgspec.convert({"copies": 1, "refresh_s": 1.0, "interval_s": 1e6, **changes}, settings.Inform)


@contextlib.asynccontextmanager
async def fleet(
    here: str, there: str, folder: pathlib.Path, copies: int, others: int
) -> AsyncIterator[tuple[service.Node, api.Bus]]:
    """A node in this process at broker ``here``, ``others`` in their own at ``there``; and a client's bus."""
    chosen = wanted(copies=copies)
    encoded = msgspec.json.encode(chosen).decode()
    _make(folder)
    with contextlib.ExitStack() as workers:
        started = [
            workers.enter_context(
                measure.Worker(
                    "benchmarks.inform_worker", there, f"b{number}", f"sqlite:{folder}/b{number}.db", encoded
                )
            )
            for number in range(others)
        ]
        for worker in started:
            worker.hear()
        async with (
            await client.connect((here,), identity="a") as bus,
            await client.connect((here,), identity="c") as caller,
            await service.start(bus, settings=chosen, max_bytes=4 << 30) as node,
        ):
            for _ in range(400):
                if len(node.desk.directory.nodes) == others:
                    break
                await asyncio.sleep(0.05)
            yield node, caller


async def overheads(
    here: str, there: str, folder: pathlib.Path, column: int, count: int
) -> list[harness.Row]:
    where = ("one broker", "two brokers")[column]
    rows: list[harness.Row] = []
    async with fleet(here, there, folder, 1, 1) as (node, caller):
        away = inform_client.Client(caller, node="b0")
        for number in range(10):
            await away.put(f"far/{number}", VALUE)
        access = await times_ms(lambda n: node.reader.get(protocol.Get(f"far/{n % 10}"), "c"), count)
        update = await times_ms(lambda n: node.writer.write(protocol.Put(f"far/{n % 10}", VALUE), "c"), count)
        rows.append(_ms(f"remote access, {where}", access, ACCESS_MS[column], (1.0, 1.5)[column]))
        rows.append(
            _ms(
                f"update at a remote primary, synced, {where}",
                update,
                UPDATE_MS[column],
                1.5 if column == 0 else None,
            )
        )
        if column == 0:
            await node.writer.write(protocol.Put("near", VALUE), "c")
            local_ns = measure.nanoseconds_a_call(lambda: node.reader.local("near"))
            rows.append(
                harness.Row(metric="local read", ours=local_ns / 1000, unit="µs", better="lower", goal=10.0)
            )
            rows.append(
                harness.Row(
                    metric="local reads", ours=1e9 / local_ns, unit="/s", better="higher", goal=100_000.0
                )
            )
    for replicas in (1, 2, 3):
        part = folder / f"r{replicas}"
        async with fleet(here, there, part, replicas + 1, replicas) as (node, _):
            made = await times_ms(
                lambda n, node=node, part=part: node.writer.write(  # type: ignore[misc]
                    protocol.Put(f"{part.name}/{where}/{n}", VALUE, ack="replicated"), "c"
                ),
                count,
            )
            rows.append(
                _ms(
                    f"{replicas} replica{'s' if replicas > 1 else ''} created, {where}",
                    made,
                    REPLICA_MS[replicas - 1][column],
                    (1.5, 2.0, 2.5)[replicas - 1] if column == 0 else None,
                )
            )
    return rows


def _ms(metric: str, values: list[float], paper: float, goal: float | None) -> harness.Row:
    return harness.Row(
        metric=metric, ours=filtered_mean(values), unit="ms", better="lower", paper=paper, goal=goal
    )


async def beside_etcd(url: str, folder: pathlib.Path, count: int) -> list[harness.Row]:
    """A client's remote reads and durable writes, ours and etcd's in turns."""
    binary = await asyncio.to_thread(etcd.find)
    async with contextlib.AsyncExitStack() as stack:
        node, caller = await stack.enter_async_context(fleet(url, url, folder, 1, 1))
        del node
        ours = inform_client.Client(caller, node="b0")
        sides: dict[str, tuple[Callable[[int], Awaitable[object]], Callable[[int], Awaitable[object]]]] = {
            "ours": (lambda n: ours.get(f"k{n % 100}"), lambda n: ours.put(f"k{n % 100}", VALUE))
        }
        if binary is not None:
            port = await stack.enter_async_context(etcd.running(binary, folder / "etcd"))
            peer = await stack.enter_async_context(await etcd.Client.connect(port))
            sides["etcd"] = (
                lambda n: peer.get(b"k%d" % (n % 100)),
                lambda n: peer.put(b"k%d" % (n % 100), VALUE),
            )
        found: dict[tuple[str, str], list[float]] = {}
        rates: dict[tuple[str, str], list[float]] = {}
        for _, put in sides.values():
            for number in range(100):
                await put(number)
        for _ in range(3):
            for side, (get, put) in sides.items():
                for what, act, many in (("write", put, count // 3), ("read", get, count)):
                    found.setdefault((side, what), []).extend(await times_ms(act, many // 3 + 1))
                    rates.setdefault((side, what), []).append(await per_second(act, many))
    rows = []
    for what, goal in (("read", 1.0), ("write", 1 / 1.5)):
        name = "remote read by a client" if what == "read" else "durable write by a client"
        rows += [
            harness.Row(
                metric=f"{name}, p{percent}",
                ours=measure.percentile(found["ours", what], percent),
                unit="ms",
                better="lower",
                peer=measure.percentile(found["etcd", what], percent) if "etcd" in sides else None,
                peer_name="etcd" if "etcd" in sides else None,
                goal=round(goal, 3) if "etcd" in sides else None,
                goal_is="ratio",
            )
            for percent in (50, 99)
        ]
        rows.append(
            harness.Row(
                metric=f"{name.replace(' by a client', 's by clients')}, {TOGETHER} at once",
                ours=max(rates["ours", what]),
                unit="/s",
                better="higher",
                peer=max(rates["etcd", what]) if "etcd" in sides else None,
                peer_name="etcd" if "etcd" in sides else None,
                goal=round(goal, 3) if "etcd" in sides else None,
                goal_is="ratio",
            )
        )
    return rows


async def many(url: str, folder: pathlib.Path, contexts: int, memory_bytes: int) -> list[harness.Row]:
    """A node with very many contexts: filled from the log, then started again with its view."""
    async with await client.connect((url,), identity="filler") as bus:
        with contextlib.suppress(Exception):
            await bus.delete_stream(protocol.STREAM)
        await contextlog.ContextLog.open(bus, max_bytes=4 << 30)
        stream = await bus.open_stream(protocol.STREAM)
        for first in range(0, contexts, 500):
            batch = [
                api.Outgoing(
                    protocol.log_subject(key := f"many/{number:07}"),
                    protocol.encode(
                        protocol.Record(key, ("big",), (1_700_000_000_000 + number) << 16, "big", VALUE)
                    ),
                )
                for number in range(first, min(first + 500, contexts))
            ]
            await stream.publish_batch(batch, timeout_s=60.0)
    _make(folder)
    chosen = msgspec.json.encode(wanted(memory_bytes=memory_bytes, tombstone_s=1e9)).decode()
    arguments = ("benchmarks.inform_worker", url, "big", f"sqlite:{folder}/big.db", chosen)
    with measure.Worker(*arguments) as first_time:
        filled = await asyncio.to_thread(first_time.hear, timeout_s=600)
        await asyncio.sleep(0)
        await _saved(folder)
    with measure.Worker(*arguments) as again:
        started = await asyncio.to_thread(again.hear, timeout_s=600)
        assert started["contexts"] == contexts, started
    named = f"{contexts:,} contexts on one node"
    return [
        harness.Row(
            metric=f"{named}: first start, from the log", ours=filled["start_s"], unit="s", better="lower"
        ),
        harness.Row(
            metric=f"{named}: start with its view",
            ours=started["start_s"],
            unit="s",
            better="lower",
            goal=30.0,
        ),
        harness.Row(
            metric=f"{named}: memory for them, of {memory_bytes >> 20} MiB configured",
            ours=(started["resident_bytes"] - started["empty_bytes"]) / 2**20,
            unit="MiB",
            better="lower",
            goal=float(memory_bytes >> 20),
        ),
    ]


def _size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("big.db*"))


async def _saved(folder: pathlib.Path) -> None:
    """Until the view no longer grows."""
    before = -1
    for _ in range(600):
        size = _size(folder)
        if size == before:
            return
        before = size
        await asyncio.sleep(1.5)


async def measured(quick: bool) -> list[harness.Row]:
    count = 200 if quick else 1_000
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = pathlib.Path(name)
        made = config.BrokerConfig(name="one", directory=folder / "broker")
        async with brokers.Broker(made) as one:
            rows += await overheads(one.url, one.url, folder / "one", 0, count)
            rows += await beside_etcd(one.url, folder / "peers", count)
            rows += await many(
                one.url, folder / "many", *((20_000, 64 << 20) if quick else (1_000_000, 1 << 30))
            )
        async with network.mesh(2, folder / "mesh") as mesh:
            here, there = (broker.url for broker in mesh.brokers.values())
            rows += await overheads(here, there, folder / "two", 1, count)
    return rows


def run(quick: bool) -> list[harness.Row]:
    demand = inform_demand.rows(quick, harness.RESULTS / "inform-demand.png")
    return asyncio.run(measured(quick)) + demand
