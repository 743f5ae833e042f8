"""The information service, by its paper's method: contexts of 1.7 kB, means of 1,000 with outliers filtered.

One process for each node, real brokers that sync before they acknowledge.  What the paper calls overhead is
measured on loopback; `inform_distances` measures it over links as long as the paper's.  What a part of an
activity costs is measured by itself, in the same run; the rest is the work of the nodes.  etcd runs on the
same machine in the same run, with its data on the same disk.
"""

from __future__ import annotations

import pathlib
import tempfile
import uuid

from benchmarks import harness, inform_many, inform_peer, inform_worker, inform_worlds, measure
from muster.bus import api
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config, network
from muster.inform import client as inform_client
from muster.inform import protocol
from muster.inform.node import node as node_node

VALUE = inform_worlds.VALUE

#: The paper's tables 4, 5 and 6: one broker, two brokers; Bloomington to Indianapolis, in ms.
ACCESS_MS = (3.59, 4.79)
REPLICA_MS = ((4.02, 5.27), (4.54, 5.67), (5.13, 6.24))
UPDATE_MS = (4.05, 5.32)


def _ms(metric: str, ours: float, paper: float | None = None, goal: float | None = None) -> harness.Row:
    return harness.Row(metric=metric, ours=ours, unit="ms", better="lower", paper=paper, goal=goal)


async def overheads(
    here: str, there: str, folder: pathlib.Path, column: int, count: int
) -> list[harness.Row]:
    where = ("one broker", "two brokers")[column]
    rows: list[harness.Row] = []
    async with inform_worlds.fleet(here, there, folder, 1, 1) as (node, caller):
        away = inform_client.InformClient(caller, node="b0")
        for number in range(10):
            await away.put(f"far/{number}", VALUE)
        access = await _mean(lambda n: node.reader.get(protocol.GetContext(f"far/{n % 10}"), "c"), count)
        update = await _mean(
            lambda n: node.writer.write(protocol.PutContext(f"far/{n % 10}", VALUE), "c"), count
        )
        network_s, append = await _network(caller, count), await _append(node, count)
        rows += [
            _ms(f"remote access, {where}", access, ACCESS_MS[column], (1.0, 1.5)[column]),
            _ms(f"remote access, {where}: the network path", network_s),
            _ms(f"remote access, {where}: the nodes' work", max(0.0, access - network_s)),
            _ms(
                f"update at a remote primary, synced, {where}",
                update,
                UPDATE_MS[column],
                1.5 if column == 0 else None,
            ),
            _ms(f"update, {where}: the network path", network_s),
            _ms(f"update, {where}: append to the log, synced", append),
            _ms(f"update, {where}: the nodes' work", max(0.0, update - network_s - append)),
        ]
        if column == 0:
            await node.writer.write(protocol.PutContext("near", VALUE), "c")
            local_ns = measure.nanoseconds_a_call(lambda: node.reader.local("near"))
            rows += [
                harness.Row(metric="local read", ours=local_ns / 1000, unit="µs", better="lower", goal=10.0),
                harness.Row(
                    metric="local reads", ours=1e9 / local_ns, unit="/s", better="higher", goal=100_000.0
                ),
            ]
    for replicas in (1, 2, 3):
        rows += await _replicas(here, there, folder / f"r{replicas}", column, count, replicas)
    return rows


async def _mean(act: measure.Act, count: int) -> float:
    return inform_worlds.filtered_mean(await inform_worlds.times_ms(act, count))


async def _network(caller: api.Bus, count: int) -> float:
    """A request and its reply without any work between them."""
    subject = inform_worker.echo_of("b0")
    return await _mean(lambda _: caller.request(subject, VALUE), count)


async def _append(node: node_node.InformationNode, count: int) -> float:
    run = uuid.uuid4().hex

    async def append(number: int) -> None:
        record = protocol.ContextRecord(f"alone/{run}/{number}", (node.name,), 1 << 16, node.name, VALUE)
        await node.log.append(record, node.log.applied)

    return await _mean(append, count)


async def _replicas(
    here: str, there: str, folder: pathlib.Path, column: int, count: int, replicas: int
) -> list[harness.Row]:
    where = ("one broker", "two brokers")[column]
    async with inform_worlds.fleet(here, there, folder, replicas + 1, replicas) as (node, _):
        made = await _mean(
            lambda n: node.writer.write(
                protocol.PutContext(f"{folder.name}/{where}/{n}", VALUE, ack="replicated"), "c"
            ),
            count,
        )
        append = await _append(node, count)
    plural = "s" if replicas > 1 else ""
    goal = (1.5, 2.0, 2.5)[replicas - 1] if column == 0 else None
    name = f"{replicas} replica{plural} created, {where}"
    return [
        _ms(name, made, REPLICA_MS[replicas - 1][column], goal),
        _ms(f"{name}: append to the log, synced", append),
        _ms(f"{name}: to the replicas and back", max(0.0, made - append)),
    ]


async def measured(quick: bool) -> list[harness.Row]:
    count = 200 if quick else 1_000
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = pathlib.Path(name)
        made = config.BrokerConfig(name="one", directory=folder / "broker")
        async with brokers.Broker(made) as server:
            rows += await overheads(server.url, server.url, folder / "one", 0, count)
        rows += await inform_peer.rows(folder / "peers", count)
        async with network.mesh(2, folder / "mesh") as mesh:
            here, there = (broker.url for broker in mesh.brokers.values())
            rows += await overheads(here, there, folder / "two", 1, count)
        unhurried = config.BrokerStorage(sync_interval_s=60.0)  # how the log is filled is not measured
        made = config.BrokerConfig(name="many", directory=folder / "many-broker", storage=unhurried)
        async with brokers.Broker(made) as server:
            size = (20_000, 64 << 20) if quick else (1_000_000, 1 << 30)
            rows += await inform_many.rows(server.url, folder / "many", *size)
    return harness.under(
        f"contexts of {len(VALUE):,} bytes, one call at a time, means of {count:,} without outliers; "
        "each node in a process of its own; writes are synced before they are acknowledged",
        rows,
    )


def run(quick: bool) -> list[harness.Row]:
    return measure.run_fast(measured(quick))
