"""The information service beside etcd, for `benchmarks.inform`: reads and durable writes of a client.

One node with one broker, or with three that replicate its log, against one etcd or a cluster of three, each
in processes of their own, on the same disk, in turns.  Our client has a direct connection to the node, as a
client of a domain has after its first requests.  The client of etcd is its own, in Go; ours is Python.

Reads are compared at equal freshness.  A read of any age may be answered from memory, as etcd's serializable
read.  A linearizable read is confirmed after the request came: here by the log, in etcd by its leader.  Where
nodes have the option that the primary answers from memory while it has its lease, which depends on clocks,
that has rows of its own.  A read with a maximum age has no equal in etcd: beside it stands etcd's
linearizable read, the weakest there that bounds the age.

Many writes at once are compared with a request for each write, and with a client of etcd that combines them,
as our node does with its appends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pathlib
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec

from benchmarks import etcd, harness, inform_worlds, measure
from muster.bus.brokers import network
from muster.bus.client import client, credential_source
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import dialer, frames
from muster.inform import client as inform_client
from muster.inform import settings
from muster.testing import eventually
from muster.trust import keyring
from muster.trust.permissions import roles

TOGETHER = 64
KEYS = 100
ROUNDS = 3
MAX_AGE_S = 1.0
LEASE_OPTION = "reads_by_lease"
LEASE = "linearizable by lease (depends on clocks)"
WRITE = "write"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of our calls, its equal in etcd, and the goals for the ratios."""

    ours: str
    etcd: str
    p50_goal: float | None = None
    p99_goal: float | None = None
    rate_goal: float | None = None


READS = (
    Kind("any age", "serializable", 2.0, 1.0, 3.0),
    Kind(f"at most {MAX_AGE_S:g} s old", "linearizable"),
    Kind("linearizable", "linearizable", 0.55, 1.0, 1.5),
    Kind(LEASE, "linearizable", 2.0, None, 3.0),
)
WRITES = Kind(WRITE, "write", 0.7, 0.667, 1.2)
COMBINED = Kind(WRITE, "combined write", rate_goal=0.6)


class Calls(Protocol):
    """Of one side."""

    async def times_ms(self, kind: str, count: int) -> list[float]: ...
    async def per_second(self, kind: str, count: int, callers: int) -> float: ...


class OurCalls:
    def __init__(self, contexts: inform_client.InformClient, leased: inform_client.InformClient) -> None:
        def key(number: int) -> str:
            return f"k{number % KEYS}"

        self.acts: dict[str, measure.Act] = {
            READS[0].ours: lambda n: contexts.get(key(n)),
            READS[1].ours: lambda n: contexts.get(key(n), max_staleness_s=MAX_AGE_S),
            READS[2].ours: lambda n: contexts.get(key(n), max_staleness_s=0.0),
            LEASE: lambda n: leased.get(key(n), max_staleness_s=0.0),
            WRITE: lambda n: contexts.put(key(n), inform_worlds.VALUE),
        }

    async def times_ms(self, kind: str, count: int) -> list[float]:
        return await inform_worlds.times_ms(self.acts[kind], count)

    async def per_second(self, kind: str, count: int, callers: int) -> float:
        numbers, act = iter(range(count)), self.acts[kind]

        async def call() -> None:
            for number in numbers:
                await act(number)

        start = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(callers)))
        return count / (time.perf_counter() - start)


async def rows(folder: pathlib.Path, count: int) -> list[harness.Row]:
    """``count``: samples of each kind of read and of write by one client alone."""
    return [*await _beside(folder / "one", 1, count), *await _beside(folder / "three", 3, count)]


async def _beside(folder: pathlib.Path, brokers: int, count: int) -> list[harness.Row]:
    has_lease = LEASE_OPTION in settings.InformSettings.__struct_fields__
    binary, program = await asyncio.to_thread(etcd.find), await asyncio.to_thread(etcd.client)
    async with contextlib.AsyncExitStack() as stack:
        contexts = await _node(stack, folder / "ours", brokers)
        leased = contexts
        if has_lease:
            leased = await _node(stack, folder / "leased", brokers, **{LEASE_OPTION: True})
        sides: dict[str, Calls] = {"ours": OurCalls(contexts, leased)}
        if binary is not None and program is not None:
            ports = await stack.enter_async_context(etcd.running(binary, folder / "etcd", brokers))
            sides["etcd"] = stack.enter_context(await asyncio.to_thread(etcd.Client, program, ports))
        reads = [read for read in READS if has_lease or read.ours != LEASE]
        alone, together = await _measured(sides, (*reads, WRITES, COMBINED), count)
    size = "one node with one broker, one etcd"
    if brokers > 1:
        size = f"one node with {brokers} brokers and as many replicas of the log, {brokers} etcds"
    load = (
        f"beside etcd: {KEYS} keys of {len(inform_worlds.VALUE):,} bytes in turn; p50 and p99 of one client "
        f"that waits for each answer; {TOGETHER} callers at once on one connection, best of {ROUNDS} runs of "
        f"{3 * count:,} reads or {count:,} writes; all kinds in turns, {ROUNDS} rounds, each after 50 calls "
        f"that are not counted; {size}; writes are synced before they are acknowledged; etcd's client is in "
        "Go, ours in Python"
    )
    return harness.under(load, _rows(reads, alone, together, brokers))


async def _node(
    stack: contextlib.AsyncExitStack, folder: pathlib.Path, brokers: int, **changes: object
) -> inform_client.InformClient:
    """A node that has all keys, in a process of its own; a client of it."""
    mesh = await stack.enter_async_context(network.mesh(brokers, folder / "brokers"))
    urls = [broker.url for broker in mesh.brokers.values()]
    chosen = msgspec.json.encode(inform_worlds.inform_settings(**changes)).decode()
    trust = await asyncio.to_thread(keyring.Keyring.create, folder / "keys", "bench")
    for identity in ("peer", "c"):
        await asyncio.to_thread(trust.issue, identity, roles.Role.OPERATOR)
    arguments = (urls[0], "peer", f"{folder}/peer.db", chosen, 100, brokers, trust.folder)
    worker = stack.enter_context(measure.Worker("benchmarks.inform_worker", *arguments))
    address = (await asyncio.to_thread(worker.hear))["address"]
    bus = await stack.enter_async_context(await client.connect(urls[:1], identity="c"))
    direct = direct_bus.DirectBus(bus, "c", lambda _: direct_bus.ANY)
    access = credential_source.PeerAccess(functools.partial(trust.credentials, "c"), None)
    links = await stack.enter_async_context(dialer.DirectDialer(direct, access))
    links.keep(msgspec.convert(address, frames.PeerAddress))
    await eventually.eventually(lambda: bool(direct.links))
    contexts = inform_client.InformClient(direct.as_bus(), node="peer")
    for number in range(KEYS):
        await contexts.put(f"k{number}", inform_worlds.VALUE)
    return contexts


Figures = dict[tuple[str, str], list[float]]  # by side and kind


async def _measured(sides: dict[str, Calls], kinds: tuple[Kind, ...], count: int) -> tuple[Figures, Figures]:
    """Milliseconds of each call by one client alone, and calls in a second of many at once."""
    pairs = dict.fromkeys(
        (side, kind.ours if side == "ours" else kind.etcd) for kind in kinds for side in sides
    )
    alone: Figures = {pair: [] for pair in pairs}
    together: Figures = {pair: [] for pair in pairs}
    for number in range(ROUNDS):
        for side, kind in sorted(pairs, key=list(pairs).index, reverse=number % 2 == 1):
            alone[side, kind] += await sides[side].times_ms(kind, -(-count // ROUNDS))
            calls = count if kind.endswith(WRITE) else 3 * count
            together[side, kind].append(await sides[side].per_second(kind, calls, TOGETHER))
    return alone, together


def _rows(reads: list[Kind], alone: Figures, together: Figures, brokers: int) -> list[harness.Row]:
    """Goals are for one broker."""
    of = "" if brokers == 1 else f", {brokers} brokers"
    table: list[harness.Row] = []
    for kind in reads:
        name = f"remote read by a client, {kind.ours}{of}"
        table += [_latency(name, percent, alone, kind, of) for percent in (50, 99)]
        name = f"remote reads by clients, {kind.ours}, {TOGETHER} at once{of}"
        table.append(_rate(name, together, kind, of))
    table += [_latency(f"durable write by a client{of}", percent, alone, WRITES, of) for percent in (50, 99)]
    name = f"durable writes by clients, {TOGETHER} at once"
    table.append(_rate(f"{name}{of}", together, COMBINED, of))
    table.append(_rate(f"{name}, a request each{of}", together, WRITES, of))
    return table


def _latency(name: str, percent: int, alone: Figures, kind: Kind, of: str) -> harness.Row:
    sides = ("ours", kind.ours), ("etcd", kind.etcd)
    figures = [measure.percentile(alone[side], percent) for side in sides if side in alone]
    goal = kind.p50_goal if percent == 50 else kind.p99_goal
    return _row(f"{name}, p{percent}", "ms", figures, kind, None if of else goal, len(alone[sides[0]]))


def _rate(name: str, together: Figures, kind: Kind, of: str) -> harness.Row:
    sides = ("ours", kind.ours), ("etcd", kind.etcd)
    figures = [max(together[side]) for side in sides if side in together]
    return _row(name, "/s", figures, kind, None if of else kind.rate_goal)


def _row(
    metric: str,
    unit: str,
    figures: list[float],
    kind: Kind,
    goal: float | None,
    samples: int | None = None,
) -> harness.Row:
    has_peer = len(figures) == 2
    return harness.Row(
        metric=metric,
        ours=figures[0],
        unit=unit,
        better="lower" if unit == "ms" else "higher",
        peer=figures[1] if has_peer else None,
        peer_name=f"etcd, {kind.etcd}" if has_peer else None,
        goal=goal if has_peer else None,
        goal_is="ratio",
        samples=samples,
    )
