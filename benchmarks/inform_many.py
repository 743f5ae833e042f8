"""Very many contexts on one node, for `benchmarks.inform`: from the log, then with its view."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib

import msgspec

from benchmarks import harness, inform_worlds, measure
from muster.bus.client import client
from muster.inform import protocol
from muster.inform.node.log import context_log

BATCH = 250
FIRST_START_S_MAX = 500


async def rows(url: str, folder: pathlib.Path, contexts: int, memory_bytes: int) -> list[harness.Row]:
    async with await client.connect((url,), identity="filler") as bus:
        with contextlib.suppress(Exception):
            await bus.delete_stream(protocol.STREAM)
        stream = await context_log.open_stream(bus, max_bytes=4 << 30)
        for sequence, first in enumerate(range(0, contexts, BATCH)):
            numbers = range(first, min(first + BATCH, contexts))
            page = protocol.ContextLogPage(sequence, [_written(number) for number in numbers])
            await stream.publish(protocol.page_subject("big"), protocol.encode(page), timeout_s=60.0)
    inform_worlds.make(folder)
    chosen = inform_worlds.inform_settings(memory_bytes=memory_bytes, tombstone_s=1e9)
    encoded = msgspec.json.encode(chosen).decode()
    arguments = ("benchmarks.inform_worker", url, "big", f"{folder}/big.db", encoded)
    with measure.Worker(*arguments) as first_time:
        filled = await asyncio.to_thread(first_time.hear, timeout_s=FIRST_START_S_MAX)
        await _saved(folder)
    with measure.Worker(*arguments) as again:
        started = await asyncio.to_thread(again.hear, timeout_s=FIRST_START_S_MAX)
        assert started["contexts"] == contexts, started
    named = f"{contexts:,} contexts on one node"
    return [
        harness.Row(
            metric=f"{named}: first start, from the log", ours=filled["start_s"], unit="s", better="lower"
        ),
        harness.Row(
            metric=f"{named}: start with its view",
            ours=started["start_s"],
            unit="s",
            better="lower",
            goal=15.0,
        ),
        harness.Row(
            metric=f"{named}: memory for them, of {memory_bytes >> 20} MiB configured",
            ours=(started["resident_bytes"] - started["empty_bytes"]) / 2**20,
            unit="MiB",
            better="lower",
            goal=float(memory_bytes >> 20),
        ),
    ]


def _written(number: int) -> protocol.ContextRecord:
    key = f"many/{number:07}"
    stamp = (1_700_000_000_000 + number) << 16
    request = f"{number:032x}"  # as a client's would be
    return protocol.ContextRecord(
        key, ("big",), stamp, "big", inform_worlds.VALUE, writer="filler", request=request
    )


def _size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("big.db*"))


async def _saved(folder: pathlib.Path) -> None:
    """Until the view no longer grows."""
    before = -1
    for _ in range(600):
        size = _size(folder)
        if size == before:
            return
        before = size
        await asyncio.sleep(1.5)
