"""The other side of ``bench-notify``: a notifier, and clients with many parties.

python -m benchmarks.notify_worker memory RECEIVERS
python -m benchmarks.notify_worker notifier URL
python -m benchmarks.notify_worker fill URL RECEIVERS
python -m benchmarks.notify_worker client URL NAME FIRST COUNT GROUPS
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import measure, notify_world
from muster.bus import client as bus_client
from muster.notify import client, engine, protocol, service
from muster.notify import model as models
from muster.predicates import types

POLICY = "alert AND threat_level >= 4"
ALERT = models.Model("alert", {"threat_level": types.INT, "sent_ns": types.INT}, models.Kind.EVENT)


def say(fact: Any) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def memory(receivers: int) -> None:
    """Bytes for each receiver: of the whole process, with and without them."""
    kernels = engine.fastest()
    notify_world.build(1000, 1000, kernels)
    gc.collect()
    before = measure.resident_bytes(os.getpid())
    held = notify_world.build(receivers, 1000, kernels)
    gc.collect()
    say((measure.resident_bytes(os.getpid()) - before) / len(held))


async def notifier(url: str) -> None:
    async with (
        await bus_client.connect([url], identity="n1", audit_s=0) as bus,
        service.Notifier(bus) as served,
    ):
        await served.serving()
        say("ready")
        while await asyncio.to_thread(sys.stdin.readline):
            await asyncio.to_thread(engine.warmed)  # so that all there is to load has been
            gc.collect()
            resident = measure.resident_bytes(os.getpid())
            say({"parties": len(served.engine), "resident_bytes": resident})


async def join(mine: client.Parties, first: int, count: int, groups: int, policies: int = 1) -> None:
    """Parties, ten thousand at a time, in columns."""
    for start in range(first, first + count, 10_000):
        numbers = range(start, min(start + 10_000, first + count))
        some = sorted({number % policies for number in numbers})
        joins = protocol.Joins(
            parties=tuple(f"web-{number}" for number in numbers),
            model="WebServer",
            values={
                "region": [f"region{number % groups}" for number in numbers],
                "application": ["IIS"] * len(numbers),
                "load": [0.5] * len(numbers),
            },
            policies=tuple(f"{POLICY} AND sent_ns >= {one}" if one else POLICY for one in some),
            which=[some.index(number % policies) for number in numbers] if policies > 1 else [],
        )
        await mine.change([joins])


async def fill(url: str, count: int) -> None:
    async with (
        await bus_client.connect([url], identity="farm", audit_s=0) as bus,
        client.Parties(bus) as mine,
    ):
        await mine.define(notify_world.WEB_SERVER)
        await mine.define(ALERT)
        await join(mine, 0, count, 100, policies=100)
    say("ready")


async def receivers(url: str, name: str, first: int, count: int, groups: int) -> None:
    """Joins, and then tells how long each event took and how many deliveries there were.

    An address that names one of the groups means all receivers in it.
    """
    latencies: list[float] = []
    delivered = 0

    def on_event(names: Sequence[str], event: client.Event) -> None:
        nonlocal delivered
        delivered += len(names)
        sent: Any = event.content["sent_ns"]
        latencies.append((time.monotonic_ns() - sent) / 1e6)

    async with (
        await bus_client.connect([url], identity=name, audit_s=0) as bus,
        client.Parties(bus, on_event=on_event) as mine,
    ):
        await mine.define(notify_world.WEB_SERVER)
        await mine.define(ALERT)
        await join(mine, first, count, groups)
        say("ready")
        while await asyncio.to_thread(sys.stdin.readline):
            say({"delivered": delivered, "latencies_ms": latencies[-2000:]})
            latencies.clear()


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "memory":
        memory(int(rest[0]))
    elif role == "fill":
        asyncio.run(fill(rest[0], int(rest[1])))
    elif role == "notifier":
        asyncio.run(notifier(rest[0]))
    else:
        asyncio.run(receivers(rest[0], rest[1], *map(int, rest[2:])))
