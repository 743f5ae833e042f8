"""Reads of contexts by one client while another identity floods the node with requests over one connection.

The figure is the p99 of the client's reads, in multiples of the p99 without a flood.  The node, the broker,
the flood and the client are processes of their own; the frames of the flood are encoded once.  Rounds without
and with the flood take turns, and the best of each count: on a machine with few cores the processes also wait
for each other.
"""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
import time

import msgspec

from benchmarks import harness, inform_worlds, measure
from muster.bus.brokers import broker, config
from muster.bus.client import client
from muster.bus.rpc import admission
from muster.inform import client as inform_client
from muster.inform import protocol

PER_S = 20_000
GOAL = 3.0
PAUSE_S = 0.002

SMALL_READ = ("read.any.get", protocol.encode(protocol.GetContext("k")))
FLOODS = {  # operation, data, and how many are sent at once
    "malformed reads": ("read.any.get", b"{}", 20),
    "requests without an operation": ("read.any.nothing", b"", 20),
    "small reads": (*SMALL_READ, 20),
    "small reads, 500 at once": (*SMALL_READ, 500),
    "linearizable reads": ("read.any.get", protocol.encode(protocol.GetContext("k", 0.0)), 20),
    "searches": ("read.any.find", protocol.encode(protocol.FindContexts("a = 1", 10_000)), 20),
}
ROUNDS = 5


def run(quick: bool) -> list[harness.Row]:
    with tempfile.TemporaryDirectory() as folder:
        return measure.run_fast(_rows(pathlib.Path(folder), 0.6 if quick else 4.0))


async def _rows(folder: pathlib.Path, seconds: float) -> list[harness.Row]:
    settings = config.BrokerConfig(name="broker", directory=folder / "broker")
    async with broker.Broker(settings) as served:
        encoded = msgspec.json.encode(inform_worlds.inform_settings(replicas=1)).decode()
        view = f"{folder}/n.db"
        with measure.Worker(
            "benchmarks.inform_worker", served.url, "n", view, encoded, admission.SHARE
        ) as node:
            node.hear()
            async with await client.connect((served.url,), identity="quiet") as bus:
                return await _measured(served.url, inform_client.InformClient(bus), seconds)


async def _measured(url: str, contexts: inform_client.InformClient, seconds: float) -> list[harness.Row]:
    for number in range(1_000):
        await contexts.put(f"k{number}" if number else "k", b"v" * 1_700, attributes={"a": number % 10})
    await _p99_ms(contexts, 0.5)
    rows = []
    for name, (operation, data, at_once) in FLOODS.items():
        head = f"PUB muster.inform.from.flood.{operation} _R.@inform.flood.s.1 {len(data)}\r\n"
        frame = head.encode() + data + b"\r\n"
        quiet_ms, flooded_ms, rates, samples = [], [], [], 0
        for _ in range(ROUNDS):
            quiet_ms.append((await _p99_ms(contexts, seconds))[0])
            with measure.Worker("benchmarks.admission_worker", url, frame.hex(), PER_S, at_once) as flood:
                flood.hear()
                await asyncio.sleep(1.0)  # its first second is within its budget
                p99_ms, number = await _p99_ms(contexts, seconds)
                flood.tell("end")
                rates.append(flood.hear())
            flooded_ms.append(p99_ms)
            samples += number
        rows.append(
            harness.Row(
                metric=f"p99 of a client's reads during {PER_S:,} {name} per second",
                ours=min(flooded_ms) / min(quiet_ms),
                unit="x",
                better="lower",
                goal=GOAL,
                samples=samples // ROUNDS,
                load=f"one node; at least {min(rates):,.0f} per second sent, {at_once} at once; best of "
                f"{ROUNDS} rounds each: {min(quiet_ms):.2f} and {min(flooded_ms):.2f} ms",
            )
        )
    return rows


async def _p99_ms(contexts: inform_client.InformClient, seconds: float) -> tuple[float, int]:
    times_ms, until_s = [], time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        began_s = time.perf_counter()
        await contexts.get("k")
        times_ms.append(1000 * (time.perf_counter() - began_s))
        await asyncio.sleep(PAUSE_S)
    return measure.percentile(times_ms, 99), len(times_ms)
