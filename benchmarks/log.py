"""The owned log: appends, one after the other and by many writers, confirmed reads, replay and takeover.

The peer of an append is a fenced publish of the same bytes, without a log: one writer after the other, and by
many writers each publish on its own subject, as the contexts of the information service are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pathlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from benchmarks import harness, measure
from muster.bus import api
from muster.bus.brokers import broker, config
from muster.bus.client import client
from muster.bus.log import owned_log
from tests.bus import keyed_state

WRITERS = 64
VALUE = b"v" * 512
PEER = "fenced publishes"

_number = itertools.count(1)


def run(quick: bool) -> list[harness.Row]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_rows(pathlib.Path(folder), quick))


@contextlib.asynccontextmanager
async def _opened(stream: api.Stream, name: str) -> AsyncIterator[owned_log.OwnedLog]:
    log = owned_log.OwnedLog(stream, f"log.{name}", keyed_state.KeyedState(), bytes_max=4 << 30)
    await log.start()
    try:
        yield log
    finally:
        await log.stop()


async def _rows(folder: pathlib.Path, quick: bool) -> list[harness.Row]:
    few, many, records = (300, 6_400, 20_000) if quick else (3_000, 128_000, 1_000_000)
    async with (
        broker.Broker(config.BrokerConfig(name="b", directory=folder)) as server,
        await client.connect([server.url], identity="owner", audit_s=0) as bus,
    ):
        settings = api.StreamSettings("logs", ("log.>",), max_bytes=8 << 30, max_age_s=0, allow_delete=True)
        stream = await bus.stream(settings)
        async with _opened(stream, "appends") as log:
            await log.own(1)
            rows = await _appends(stream, log, few, many)
        rows += await _replay(stream, records)
    return rows


async def _appends(stream: api.Stream, log: owned_log.OwnedLog, few: int, many: int) -> list[harness.Row]:
    last = 0

    async def append(writer: int) -> None:
        await log.append([(b"%d/%d" % (writer, next(_number) % 1000), VALUE)])

    async def publish(_: int) -> None:
        nonlocal last
        last = await stream.publish("log.peer", VALUE, expected_last_subject_sequence=last)

    lasts = [0] * WRITERS

    async def publish_own(writer: int) -> None:
        lasts[writer] = await stream.publish(
            f"log.peer.{writer}", VALUE, expected_last_subject_sequence=lasts[writer]
        )

    async def confirm(_: int) -> None:
        await log.confirm()

    one = {name: await _times(act, few) for name, act in (("ours", append), ("peer", publish))}
    confirmed = await _times(confirm, few)
    ours = await _rate(append, many)
    peer = await _rate(publish_own, many)
    confirms = await _rate(confirm, many)
    load = f"{few:,} appends of 512 B, synced"
    return [
        harness.Row(
            metric="append, one after the other, p50",
            ours=measure.percentile(one["ours"], 50) * 1e3,
            unit="ms",
            better="lower",
            peer=measure.percentile(one["peer"], 50) * 1e3,
            peer_name=PEER,
            samples=few,
            load=load,
        ),
        harness.Row(
            metric=f"appends, {WRITERS} writers",
            ours=ours,
            unit="/s",
            better="higher",
            peer=peer,
            peer_name=PEER,
            load=f"{many:,} appends of 512 B by {WRITERS} writers, synced",
        ),
        harness.Row(
            metric="confirmed read, one reader, p50",
            ours=measure.percentile(confirmed, 50) * 1e3,
            unit="ms",
            better="lower",
            samples=few,
            load=f"{few:,} confirmations, each an empty page",
        ),
        harness.Row(
            metric=f"confirmed reads, {WRITERS} readers",
            ours=confirms,
            unit="/s",
            better="higher",
            load=f"{many:,} confirmations by {WRITERS} readers, which share pages",
        ),
    ]


async def _replay(stream: api.Stream, records: int) -> list[harness.Row]:
    async with _opened(stream, "replay") as log, _opened(stream, "replay") as standby:
        await log.own(1)
        for first in range(0, records, 500):
            await log.append([(b"%d" % n, VALUE) for n in range(first, first + 500)])
        began = time.perf_counter()
        async with _opened(stream, "replay"):
            replay_s = time.perf_counter() - began
        began = time.perf_counter()
        await standby.own(2)
        takeover_s = time.perf_counter() - began
    load = f"a log of {records:,} records of 512 B"
    return [
        harness.Row(metric="replay", ours=records / replay_s, unit="records/s", better="higher", load=load),
        harness.Row(
            metric="takeover by a follower", ours=takeover_s * 1e3, unit="ms", better="lower", load=load
        ),
    ]


async def _times(act: Callable[[int], Awaitable[None]], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await act(0)
        times.append(time.perf_counter() - began)
    return times


async def _rate(act: Callable[[int], Awaitable[None]], count: int) -> float:
    async def work(writer: int) -> None:
        for _ in range(count // WRITERS):
            await act(writer)

    began = time.perf_counter()
    await asyncio.gather(*map(work, range(WRITERS)))
    return count / (time.perf_counter() - began)
