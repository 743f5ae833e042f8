"""Snapshots of streams, taken from and restored to a real broker."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from muster.bus import api
from muster.bus.brokers import broker as brokers
from muster.bus.client import client
from muster.bus.streams import jetstream, snapshots

SETTINGS = api.StreamSettings("log", ("log.>",), max_bytes=32 << 20)


async def fill(bus: client.NatsBus, count: int = 20, size: int = 50_000) -> list[bytes]:
    stream = await bus.stream(SETTINGS)
    contents = [os.urandom(size) for _ in range(count)]
    await asyncio.gather(*(stream.publish("log.a", data) for data in contents))
    return contents


async def take(bus: client.NatsBus) -> tuple[snapshots.StreamSnapshot, list[bytes]]:
    snapshot = snapshots.StreamSnapshot(bus, "log")
    return snapshot, [piece async for piece in snapshot]


async def restored(
    bus: client.NatsBus, snapshot: snapshots.StreamSnapshot, pieces: Sequence[bytes]
) -> list[bytes]:
    async def stored_pieces() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    await bus.delete_stream("log")
    await snapshots.restore(bus, snapshot.config, snapshot.state, stored_pieces())
    return [message.data async for message in (await bus.open_stream("log")).read(1)]


async def test_a_stream_of_many_pieces(bus: client.NatsBus):
    contents = await fill(bus)
    snapshot, pieces = await take(bus)
    assert len(pieces) > 3
    assert await restored(bus, snapshot, pieces) == contents


async def test_a_stream_has_another_mark_after_each_restore(bus: client.NatsBus):
    await fill(bus, 1, 10)
    marks = [(await (await bus.stream(SETTINGS)).state()).restored]
    for _ in range(2):
        await restored(bus, *await take(bus))
        marks.append((await (await bus.stream(SETTINGS)).state()).restored)
    assert marks[0] == ""
    assert len(set(marks)) == 3


async def test_two_at_once_under_one_identity(connect: Callable[[str], asyncio.Future[client.NatsBus]]):
    first, two = await connect("admin"), await connect("admin")
    contents = await fill(first, 60, 300_000)  # more than a broker sends without an acknowledgement
    begun = snapshots.StreamSnapshot(first, "log")
    pieces = aiter(begun)
    taken = [await anext(pieces)]
    other = await take(two)  # complete while the first is in progress
    taken += [piece async for piece in pieces]
    for snapshot, all_pieces in ((begun, taken), other):
        assert await restored(first, snapshot, all_pieces) == contents


@pytest.mark.may_block(reason="the broker is stopped and continued")
async def test_a_broker_that_answers_late(bus: client.NatsBus, broker: brokers.Broker, monkeypatch):
    """A repeated request would send the pieces of a second snapshot among those of the first."""
    contents = await fill(bus, 40, 300_000)
    monkeypatch.setattr(jetstream, "TRY_S", 0.2)
    pid, call = broker.pid, bus.storage.call
    assert pid

    async def late(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("STREAM.SNAPSHOT"):
            os.kill(pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGCONT)
        return await call(name, *args, **kwargs)

    monkeypatch.setattr(bus.storage, "call", late)
    snapshot, pieces = await take(bus)
    assert await restored(bus, snapshot, pieces) == contents
