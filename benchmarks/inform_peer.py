"""The information service beside etcd, for `benchmarks.inform`: reads and durable writes of a client.

One node and one broker against one etcd, each in processes of their own, on the same disk, in turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import time

import msgspec

from benchmarks import etcd, harness, inform_worlds, measure
from muster.bus import client
from muster.inform import client as inform_client

TOGETHER = 64


async def per_second(act: measure.Act, count: int) -> float:
    numbers = iter(range(count))

    async def one() -> None:
        for number in numbers:
            await act(number)

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(TOGETHER)))
    return count / (time.perf_counter() - start)


async def rows(url: str, folder: pathlib.Path, count: int) -> list[harness.Row]:
    value = inform_worlds.VALUE
    binary = await asyncio.to_thread(etcd.find)
    async with contextlib.AsyncExitStack() as stack:
        chosen = msgspec.json.encode(inform_worlds.wanted(copies=1)).decode()
        inform_worlds.make(folder)
        worker = stack.enter_context(
            measure.Worker("benchmarks.inform_worker", url, "peer", f"sqlite:{folder}/peer.db", chosen)
        )
        worker.hear()
        bus = await stack.enter_async_context(await client.connect((url,), identity="c"))
        ours = inform_client.Client(bus, node="peer")
        sides: dict[str, tuple[measure.Act, measure.Act]] = {
            "ours": (lambda n: ours.get(f"k{n % 100}"), lambda n: ours.put(f"k{n % 100}", value))
        }
        if binary is not None:
            port = await stack.enter_async_context(etcd.running(binary, folder / "etcd"))
            peer = await stack.enter_async_context(await etcd.Client.connect(port))
            sides["etcd"] = (
                lambda n: peer.get(b"k%d" % (n % 100)),
                lambda n: peer.put(b"k%d" % (n % 100), value),
            )
        found: dict[tuple[str, str], list[float]] = {}
        rates: dict[tuple[str, str], list[float]] = {}
        for _, put in sides.values():
            for number in range(100):
                await put(number)
        for _ in range(3):
            for side, (get, put) in sides.items():
                for what, act, many in (("write", put, count // 3), ("read", get, count)):
                    found.setdefault((side, what), []).extend(
                        await inform_worlds.times_ms(act, many // 3 + 1)
                    )
                    rates.setdefault((side, what), []).append(await per_second(act, many * 3))
    result = []
    for what, goal in (("read", 1.0), ("write", 0.667)):
        name = "remote read by a client" if what == "read" else "durable write by a client"
        result += [
            _row(
                f"{name}, p{percent}",
                "ms",
                {side: measure.percentile(found[side, what], percent) for side in sides},
                goal,
            )
            for percent in (50, 99)
        ]
        many_at_once = f"{name.replace(' by a client', 's by clients')}, {TOGETHER} at once"
        result.append(_row(many_at_once, "/s", {side: max(rates[side, what]) for side in sides}, goal))
    return result


def _row(metric: str, unit: str, figures: dict[str, float], goal: float) -> harness.Row:
    peer = figures.get("etcd")
    return harness.Row(
        metric=metric,
        ours=figures["ours"],
        unit=unit,
        better="lower" if unit == "ms" else "higher",
        peer=peer,
        peer_name=None if peer is None else "etcd",
        goal=None if peer is None else goal,
        goal_is="ratio",
    )
