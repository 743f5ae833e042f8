"""The other side of ``bench-notify``: a notifier, and clients with many receivers.

python -m benchmarks.notify_worker memory RECEIVERS POLICIES
python -m benchmarks.notify_worker notifier URL
python -m benchmarks.notify_worker fill URL RECEIVERS POLICIES
python -m benchmarks.notify_worker client URL NAME FIRST COUNT GROUPS
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import measure, notify_world
from muster.bus.client import client as bus_client
from muster.notify import client, models, protocol
from muster.notify import settings as settings_
from muster.notify.matcher import matcher
from muster.notify.notifier import notifier as notifier_notifier
from muster.notify.notifier.shards import shard_manager
from muster.predicates import types
from muster.predicates.syntax import printer
from muster.supervision import os_process

POLICY = "alert AND threat_level >= 4"
ALERT = models.Model("alert", {"threat_level": types.INT, "sent_ns": types.INT}, models.ModelKind.EVENT)


def say(fact: Any) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def memory(receivers: int, policies: int) -> None:
    """Bytes of the tables for each receiver: of a process with and without them."""
    kernels = matcher.warm_up()
    notify_world.build(1000, 10, kernels)
    before = measure.resident_bytes(os.getpid())
    held = notify_world.build(receivers, policies, kernels)
    gc.collect()
    os_process.trim_heap()
    say((measure.resident_bytes(os.getpid()) - before) / len(held))


async def notifier(url: str) -> None:
    settings = settings_.NotifySettings(stream_bytes=2 << 30, lease_s=60.0)
    async with (
        await bus_client.connect([url], identity="n1", audit_s=0) as bus,
        notifier_notifier.Notifier(bus, settings) as served,
    ):
        await served.serving()
        say("ready")
        while await asyncio.to_thread(sys.stdin.readline):
            await asyncio.to_thread(matcher.warm_up)  # so that all there is to load has been
            resident = await steady()
            say({"receivers": len(served.engine), "resident_bytes": resident})


async def steady() -> int:
    """The memory of this process, once it has given back all that it gives back."""
    before, now = 0, measure.resident_bytes(os.getpid())
    for _ in range(4):
        if abs(now - before) < 0.002 * now:
            break
        await asyncio.sleep(2 * shard_manager.QUIET_S + 2)  # it looks whether a whole such time was quiet
        before, now = now, measure.resident_bytes(os.getpid())
    return now


async def join(mine: client.NotifyClient, first: int, count: int, groups: int) -> None:
    """Receivers, ten thousand at a time, in columns."""
    for start in range(first, first + count, 10_000):
        numbers = range(start, min(start + 10_000, first + count))
        joins = protocol.JoinReceivers(
            receivers=tuple(f"web-{number}" for number in numbers),
            model="WebServer",
            values={
                "region": [f"region{number % groups}" for number in numbers],
                "application": ["IIS"] * len(numbers),
                "load": [0.5] * len(numbers),
            },
            policies=(POLICY,),
        )
        await mine.change([joins])


async def fill(url: str, count: int, policies: int) -> None:
    """The receivers of the other figures: their states, and policies of their kind."""
    dice, numbers = random.Random(policies), np.random.default_rng(count)
    texts = [printer.write(notify_world.policy(dice)) for _ in range(policies)]
    async with (
        await bus_client.connect([url], identity=notify_world.PROCESS, audit_s=0) as bus,
        client.NotifyClient(bus) as mine,
    ):
        for model in (notify_world.WEB_SERVER, notify_world.CONTROLLER, *notify_world.EVENTS):
            await mine.define(model)
        for start in range(0, count, 10_000):
            values = range(start, min(start + 10_000, count))
            own, which = np.unique(numbers.integers(0, policies, len(values)), return_inverse=True)
            columns = notify_world.columns(numbers, len(values))
            joins = protocol.JoinReceivers(
                receivers=tuple(f"web-{number}" for number in values),
                model="WebServer",
                values={name: [protocol.cell(cell) for cell in cells] for name, cells in columns.items()},
                policies=tuple(texts[index] for index in own.tolist()),
                which=which.tolist(),
            )
            await mine.change([joins])
    say("ready")


async def receivers(url: str, name: str, first: int, count: int, groups: int) -> None:
    """Joins, then prints how long each event took and how many deliveries there were.

    An address that names one of the groups means all receivers in it.
    """
    latencies: list[float] = []
    delivered = 0

    def on_event(names: Sequence[str], event: client.ReceivedEvent) -> None:
        nonlocal delivered
        delivered += len(names)
        sent: Any = event.content["sent_ns"]
        latencies.append((time.monotonic_ns() - sent) / 1e6)

    async with (
        await bus_client.connect([url], identity=name, audit_s=0) as bus,
        client.NotifyClient(bus, on_event=on_event) as mine,
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
        memory(*map(int, rest))
    elif role == "fill":
        asyncio.run(fill(rest[0], *map(int, rest[1:])))
    elif role == "notifier":
        asyncio.run(notifier(rest[0]))
    else:
        asyncio.run(receivers(rest[0], rest[1], *map(int, rest[2:])))
