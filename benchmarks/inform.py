"""The information service, by its paper's method: contexts of 1.7 kB, means of 1,000 with outliers filtered.

One process for each node, real brokers that sync before they acknowledge.  What the paper calls overhead is
measured on loopback, and again over links as long as the paper's (a process that hands on what it got so
much later, so its own work is part of the figure), less the length of the link.  What a part of an activity
costs is measured by itself, in the same run; the rest is the work of the nodes.  etcd runs on the same
machine in the same run, with its data on the same disk.
"""

from __future__ import annotations

import pathlib
import tempfile
import urllib.parse
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

#: Table 4: the distances (there and back), and what was found over them with one and with two brokers.
DISTANCES_MS = {2.42: (3.59, 4.79), 36.05: (3.55, 4.78), 66.0: (3.63, 4.92)}
#: Table 6: the same for updates.
UPDATE_DISTANCES_MS = {2.42: (4.05, 5.32), 36.05: (3.83, 5.03), 66.0: (4.07, 5.49)}
LONG_MS = 10.0  # over such a distance a fifth of the observations will do


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
        road, append = await _road(caller, count), await _append(node, count)
        rows += [
            _ms(f"remote access, {where}", access, ACCESS_MS[column], (1.0, 1.5)[column]),
            _ms(f"remote access, {where}: the road", road),
            _ms(f"remote access, {where}: the nodes' work", max(0.0, access - road)),
            _ms(
                f"update at a remote primary, synced, {where}",
                update,
                UPDATE_MS[column],
                1.5 if column == 0 else None,
            ),
            _ms(f"update, {where}: the road", road),
            _ms(f"update, {where}: append to the log, synced", append),
            _ms(f"update, {where}: the nodes' work", max(0.0, update - road - append)),
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


async def _road(caller: api.Bus, count: int) -> float:
    """A question and its answer, which nobody works on."""
    subject = inform_worker.echo_of("b0")
    return await _mean(lambda _: caller.request(subject, VALUE), count)


async def _append(node: node_node.InformationNode, count: int) -> float:
    run = uuid.uuid4().hex

    async def append(number: int) -> None:
        record = protocol.ContextRecord(f"alone/{run}/{number}", (node.name,), 1 << 16, node.name, VALUE)
        await node.state.log.append(record, 0, timeout_s=10.0)

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
        _ms(f"{name}: to the copies, and hearing from them", max(0.0, made - append)),
    ]


async def over_distances(folder: pathlib.Path, count: int) -> list[harness.Row]:
    rows: list[harness.Row] = []
    for distance_ms in DISTANCES_MS:
        many = count if distance_ms < LONG_MS else count // 5
        part = folder / f"{distance_ms:g}"
        async with brokers.Broker(config.BrokerConfig(name="one", directory=part / "one")) as server:
            address = urllib.parse.urlsplit(server.url)
            with inform_worlds.link(address.hostname or "", address.port or 0, distance_ms) as port:
                far = f"nats://127.0.0.1:{port}"
                rows += await _far(server.url, far, part / "a", many, distance_ms, 0)
        async with inform_worlds.far_brokers(part, distance_ms) as (near, far):
            rows += await _far(near, far, part / "b", many, distance_ms, 1)
    return rows


async def _far(
    here: str, there: str, folder: pathlib.Path, count: int, distance_ms: float, column: int
) -> list[harness.Row]:
    """What an access and an update at a remote primary take beyond the distance.

    With one broker, which is near, the primary is far from its log: an update crosses the distance twice.
    """
    where = ("one broker", "two brokers")[column]
    async with inform_worlds.fleet(here, there, folder, 1, 1) as (node, caller):
        away = inform_client.InformClient(caller, node="b0")
        for number in range(10):
            await away.put(f"far/{number}", VALUE)
        access_ms = await _mean(lambda n: node.reader.get(protocol.GetContext(f"far/{n % 10}"), "c"), count)
        update_ms = await _mean(
            lambda n: node.writer.write(protocol.PutContext(f"far/{n % 10}", VALUE), "c"), count
        )
    return [
        _ms(
            f"{name} over {distance_ms:g} ms, {where}: overhead",
            max(0.0, took_ms - distance_ms),
            paper[distance_ms][column],
        )
        for name, took_ms, paper in (
            ("remote access", access_ms, DISTANCES_MS),
            ("synced update", update_ms, UPDATE_DISTANCES_MS),
        )
    ]


async def measured(quick: bool) -> list[harness.Row]:
    count = 200 if quick else 1_000
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = pathlib.Path(name)
        made = config.BrokerConfig(name="one", directory=folder / "broker")
        async with brokers.Broker(made) as server:
            rows += await overheads(server.url, server.url, folder / "one", 0, count)
        made = config.BrokerConfig(name="peer", directory=folder / "peer-broker")
        async with brokers.Broker(made) as server:
            rows += await inform_peer.rows(server.url, folder / "peers", count)
        async with network.mesh(2, folder / "mesh") as mesh:
            here, there = (broker.url for broker in mesh.brokers.values())
            rows += await overheads(here, there, folder / "two", 1, count)
        rows += await over_distances(folder / "far", count // 4 if quick else count)
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
