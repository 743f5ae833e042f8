"""The information service beside etcd, for `benchmarks.inform`: reads and durable writes of a client.

One node and one broker against one etcd, each in processes of their own, on the same disk, in turns.

Reads are compared at equal freshness.  A read of any age may be answered from memory, as etcd's serializable
read.  A linearizable read is confirmed after the request came: here by the log, in etcd by its leader.  A
read with a maximum age has no equal in etcd: beside it stands etcd's linearizable read, the weakest there
that bounds the age.

Many writes at once are compared with a client of etcd that combines them (`etcd.Combining`), as our node does
with its appends; a row without a goal shows etcd with a request for each write.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import time

import msgspec

from benchmarks import etcd, harness, inform_worlds, measure
from muster.bus.client import client
from muster.inform import client as inform_client

TOGETHER = 64
KEYS = 100
ROUNDS = 3
MAX_AGE_S = 1.0

#: Ours, its equal in etcd, and the goal for the ratio.
READS = (
    ("any age", "serializable", 1.0),
    (f"at most {MAX_AGE_S:g} s old", "linearizable", None),
    ("linearizable", "linearizable", 1.0),
)
WRITE_GOAL = 0.667


async def per_second(act: measure.Act, count: int) -> float:
    numbers = iter(range(count))

    async def client_run() -> None:
        for number in numbers:
            await act(number)

    start = time.perf_counter()
    await asyncio.gather(*(client_run() for _ in range(TOGETHER)))
    return count / (time.perf_counter() - start)


async def rows(url: str, folder: pathlib.Path, count: int) -> list[harness.Row]:
    """``count``: samples of each kind of read and of write by one client alone."""
    value = inform_worlds.VALUE
    load = (
        f"beside etcd: {KEYS} keys of {len(value):,} bytes in turn; p50 and p99 of one client that waits for "
        f"each answer; {TOGETHER} callers at once on one connection, best of {ROUNDS} runs of {3 * count:,} "
        f"reads or {count:,} writes; all kinds in turns, {ROUNDS} rounds, each after 50 calls that are not "
        "counted; one node and one broker, one etcd; writes are synced before they are acknowledged"
    )
    binary = await asyncio.to_thread(etcd.find)
    async with contextlib.AsyncExitStack() as stack:
        chosen = msgspec.json.encode(inform_worlds.inform_settings(replicas=1)).decode()
        inform_worlds.make(folder)
        worker = stack.enter_context(
            measure.Worker("benchmarks.inform_worker", url, "peer", f"{folder}/peer.db", chosen)
        )
        worker.hear()
        bus = await stack.enter_async_context(await client.connect((url,), identity="c"))
        acts = _ours(inform_client.InformClient(bus, node="peer"), value)
        if binary is not None:
            port = await stack.enter_async_context(etcd.running(binary, folder / "etcd"))
            peer = await stack.enter_async_context(await etcd.Client.connect(port))
            acts |= _etcd(peer, etcd.Combining(peer), value)
        for side, what in (("ours", "write"), ("etcd", "write")):
            for number in range(KEYS if (side, what) in acts else 0):
                await acts[side, what](number)
        alone, together = await _measured(acts, count)
    return harness.under(load, _rows(alone, together))


Figures = dict[tuple[str, str], list[float]]  # by side and kind


def _ours(contexts: inform_client.InformClient, value: bytes) -> dict[tuple[str, str], measure.Act]:
    def key(number: int) -> str:
        return f"k{number % KEYS}"

    return {
        ("ours", READS[0][0]): lambda n: contexts.get(key(n)),
        ("ours", READS[1][0]): lambda n: contexts.get(key(n), max_staleness_s=MAX_AGE_S),
        ("ours", READS[2][0]): lambda n: contexts.get(key(n), max_staleness_s=0.0),
        ("ours", "write"): lambda n: contexts.put(key(n), value),
    }


def _etcd(peer: etcd.Client, combining: etcd.Combining, value: bytes) -> dict[tuple[str, str], measure.Act]:
    def key(number: int) -> bytes:
        return b"k%d" % (number % KEYS)

    return {
        ("etcd", "serializable"): lambda n: peer.get(key(n), serializable=True),
        ("etcd", "linearizable"): lambda n: peer.get(key(n)),
        ("etcd", "write"): lambda n: peer.put(key(n), value),
        ("etcd", "combined write"): lambda n: combining.put(key(n), value),
    }


async def _measured(acts: dict[tuple[str, str], measure.Act], count: int) -> tuple[Figures, Figures]:
    """Milliseconds of each call by one client alone, and calls in a second of many at once."""
    alone: Figures = {kind: [] for kind in acts}
    together: Figures = {kind: [] for kind in acts}
    for number in range(ROUNDS):
        for kind in sorted(acts, key=list(acts).index, reverse=number % 2 == 1):
            writes = kind[1].endswith("write")
            alone[kind] += await inform_worlds.times_ms(acts[kind], -(-count // ROUNDS))
            together[kind].append(await per_second(acts[kind], count if writes else 3 * count))
    return alone, together


def _rows(alone: Figures, together: Figures) -> list[harness.Row]:
    table: list[harness.Row] = []
    for ours, theirs, goal in READS:
        pair = ("ours", ours), ("etcd", theirs)
        name = f"remote read by a client, {ours}"
        table += [_latency(name, percent, alone, *pair, goal) for percent in (50, 99)]
        table.append(_rate(f"remote reads by clients, {ours}, {TOGETHER} at once", together, *pair, goal))
    pair = ("ours", "write"), ("etcd", "write")
    name = "durable write by a client"
    table += [_latency(name, percent, alone, *pair, WRITE_GOAL) for percent in (50, 99)]
    name = f"durable writes by clients, {TOGETHER} at once"
    table.append(_rate(name, together, pair[0], ("etcd", "combined write"), WRITE_GOAL))
    table.append(_rate(f"{name}, a request each", together, *pair, None))
    return table


def _latency(
    name: str,
    percent: int,
    alone: Figures,
    ours: tuple[str, str],
    theirs: tuple[str, str],
    goal: float | None,
) -> harness.Row:
    figures = {kind: measure.percentile(alone[kind], percent) for kind in (ours, theirs) if kind in alone}
    samples = len(alone[ours])
    return _row(f"{name}, p{percent}", "ms", figures[ours], figures.get(theirs), theirs, goal, samples)


def _rate(
    name: str, together: Figures, ours: tuple[str, str], theirs: tuple[str, str], goal: float | None
) -> harness.Row:
    figures = {kind: max(together[kind]) for kind in (ours, theirs) if kind in together}
    return _row(name, "/s", figures[ours], figures.get(theirs), theirs, goal)


def _row(
    metric: str,
    unit: str,
    ours: float,
    peer: float | None,
    theirs: tuple[str, str],
    goal: float | None,
    samples: int | None = None,
) -> harness.Row:
    return harness.Row(
        metric=metric,
        ours=ours,
        unit=unit,
        better="lower" if unit == "ms" else "higher",
        peer=peer,
        peer_name=None if peer is None else f"etcd, {theirs[1]}",
        goal=None if peer is None else goal,
        goal_is="ratio",
        samples=samples,
    )
