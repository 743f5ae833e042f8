"""The other side of ``bench-notify``: a notifier, and clients with many parties.

python -m benchmarks.notify_worker memory RECEIVERS
python -m benchmarks.notify_worker notifier URL
python -m benchmarks.notify_worker client URL NAME FIRST COUNT
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
GROUPS = 1000  # of receivers: an address that names one means a thousandth of them


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
            say({"counts": dict(served.counts), "parties": len(served.engine)})


async def receivers(url: str, name: str, first: int, count: int) -> None:
    """Joins, and then tells how long each event took and how many deliveries there were."""
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
        for start in range(first, first + count, 5000):
            await mine.change(
                [
                    protocol.Join(
                        party=f"web-{number}",
                        model="WebServer",
                        state={"region": f"region{number % GROUPS}", "application": "IIS", "load": 0.5},
                        policy=POLICY,
                    )
                    for number in range(start, min(start + 5000, first + count))
                ]
            )
        say("ready")
        while await asyncio.to_thread(sys.stdin.readline):
            say({"delivered": delivered, "latencies_ms": latencies[-2000:]})
            latencies.clear()


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "memory":
        memory(int(rest[0]))
    elif role == "notifier":
        asyncio.run(notifier(rest[0]))
    else:
        asyncio.run(receivers(rest[0], rest[1], int(rest[2]), int(rest[3])))
