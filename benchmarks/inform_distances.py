"""The paper's tables 4 and 6: what access and update at a remote primary take beyond the distance.

A link of the paper's length is a process that forwards its input after that delay; its own work is part of
the figures.  Where the log is not on the primary's side, as with one broker, which is near, an update crosses
the distance a second time, which counts as overhead.
"""

from __future__ import annotations

import pathlib
import tempfile
import urllib.parse

from benchmarks import harness, inform_worlds, measure
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config
from muster.inform import client as inform_client
from muster.inform import protocol

#: Table 4: the distances (there and back), and what was found over them with one and with two brokers, in ms.
ACCESS_MS = {2.42: (3.59, 4.79), 36.05: (3.55, 4.78), 66.0: (3.63, 4.92)}
#: Table 6: the same for updates.
UPDATE_MS = {2.42: (4.05, 5.32), 36.05: (3.83, 5.03), 66.0: (4.07, 5.49)}
LONG_MS = 10.0  # over such a distance a fifth of the observations will do


async def measured(folder: pathlib.Path, count: int) -> list[harness.Row]:
    rows: list[harness.Row] = []
    for distance_ms in ACCESS_MS:
        many = count if distance_ms < LONG_MS else count // 5
        part = folder / f"{distance_ms:g}"
        async with brokers.Broker(config.BrokerConfig(name="one", directory=part / "one")) as server:
            address = urllib.parse.urlsplit(server.url)
            with inform_worlds.link(address.hostname or "", address.port or 0, distance_ms) as port:
                far = f"nats://127.0.0.1:{port}"
                rows += await _overheads(server.url, far, part / "a", many, distance_ms, 0)
        async with inform_worlds.far_brokers(part, distance_ms) as (near, far):
            rows += await _overheads(near, far, part / "b", many, distance_ms, 1)
    return rows


async def _overheads(
    here: str, there: str, folder: pathlib.Path, count: int, distance_ms: float, column: int
) -> list[harness.Row]:
    async with inform_worlds.fleet(here, there, folder, 1, 1) as (node, caller):
        away = inform_client.InformClient(caller, node="b0")
        for number in range(10):
            await away.put(f"far/{number}", inform_worlds.VALUE)

        async def access(number: int) -> None:
            await node.reader.get(protocol.GetContext(f"far/{number % 10}"), "c")

        async def update(number: int) -> None:
            await node.writer.write(protocol.PutContext(f"far/{number % 10}", inform_worlds.VALUE), "c")

        return [
            harness.Row(
                metric=f"{name} over {distance_ms:g} ms, {('one broker', 'two brokers')[column]}: overhead",
                ours=max(
                    0.0,
                    inform_worlds.filtered_mean(await inform_worlds.times_ms(act, count)) - distance_ms,
                ),
                unit="ms",
                better="lower",
                paper=paper[distance_ms][column],
                samples=count,
            )
            for name, act, paper in (
                ("remote access", access, ACCESS_MS),
                ("synced update", update, UPDATE_MS),
            )
        ]


def run(quick: bool) -> list[harness.Row]:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        rows = measure.run_fast(measured(pathlib.Path(name), 50 if quick else 1_000))
    return harness.under(
        f"contexts of {len(inform_worlds.VALUE):,} bytes, one call at a time, means without outliers; "
        "each node in a process of its own; writes are synced before they are acknowledged",
        rows,
    )
