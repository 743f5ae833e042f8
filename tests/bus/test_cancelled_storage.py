"""Leases, streams and buckets: calls that are cancelled at each of their awaits leave nothing half done."""

from __future__ import annotations

import functools

import pytest

from muster.bus import api, leases
from muster.bus.client import client
from muster.core import errors
from muster.testing import fixtures
from tests import cancellation

pytestmark = [pytest.mark.timeout(120)]
STREAM = api.StreamSettings("s", subjects=("s.>",), max_bytes=1 << 20, max_age_s=0, allow_delete=True)


def _subscriptions(bus: client.NatsBus) -> set[int]:
    return set(bus._wire.numbers())


async def test_an_acquire_that_is_cancelled_holds_no_lease(connect: fixtures.Connect):
    bus, other = await connect("a"), await connect("b")
    async with await leases.Leases.open(bus) as own, await leases.Leases.open(other) as others:
        before = _subscriptions(bus)

        async def check() -> None:
            assert not own._runs
            assert not own._tasks.pending
            assert _subscriptions(bus) == before
            async with await others.acquire("x", timeout_s=5) as lease:
                assert lease.held

        for call in (own.acquire, own.try_acquire):
            cancelled = await cancellation.at_each_await(
                functools.partial(call, "x"),
                check,
                undo=lambda lease: lease.release(),
            )
            assert cancelled
            await check()


async def test_releases_and_closes_that_are_cancelled_are_complete(connect: fixtures.Connect):
    bus, other = await connect("a"), await connect("b")
    async with await leases.Leases.open(bus) as own, await leases.Leases.open(other) as others:
        held: list[leases.Lease] = []

        async def release() -> None:
            await held[-1].release()

        async def acquired() -> None:
            held.append(await own.acquire("x", timeout_s=5))

        async def check() -> None:
            assert not held[-1].held
            async with await others.acquire("x", timeout_s=5):
                pass
            await acquired()

        await acquired()
        assert await cancellation.at_each_await(release, check)


async def test_readers_of_streams_that_are_cancelled_leave_nothing(connect: fixtures.Connect):
    bus = await connect("a")
    stream = await bus.stream(STREAM)
    for number in range(3):
        await stream.publish("s.a", b"%d" % number)
    bucket = await bus.key_value(api.KeyValueSettings("k", max_bytes=1 << 20))
    await bucket.put("a", b"1")
    before = _subscriptions(bus)

    async def follow() -> None:
        async with stream.follow(1) as following:
            for expected in (1, 2, 3):
                assert (await anext(following)).sequence == expected

    async def watch() -> None:
        async with await bucket.watch() as watching:
            async for entry in watching:
                assert entry is not None
                assert entry.key == "a"
                return

    async def read() -> None:
        assert [message.sequence async for message in stream.read(1)] == [1, 2, 3]

    async def check() -> None:
        assert _subscriptions(bus) == before
        assert (await stream.get(1)).data == b"0"

    for call in (follow, watch, read):
        assert await cancellation.at_each_await(call, check)


async def test_publishes_that_are_cancelled_are_stored_once_or_not(connect: fixtures.Connect):
    bus = await connect("a")
    stream = await bus.stream(STREAM)
    number = 0

    async def publish() -> None:
        nonlocal number
        number += 1
        id = str(number)
        await stream.publish_batch(
            [api.OutgoingMessage("s.a", f"{id}.{n}".encode(), {}, message_id=f"{id}.{n}") for n in range(2)]
        )

    async def check() -> None:
        stored = [message.data async for message in stream.read(1)] if (await stream.state()).messages else []
        assert len(stored) == len(set(stored))
        assert len(stored) % 2 == 0, "both or none"

    assert await cancellation.at_each_await(publish, check)


async def test_streams_and_buckets_that_are_made_twice_stay_usable(connect: fixtures.Connect):
    bus = await connect("a")

    async def make() -> None:
        stream = await bus.stream(STREAM)
        bucket = await bus.key_value(api.KeyValueSettings("k", max_bytes=1 << 20))
        with pytest.raises(errors.NotFound):
            await stream.delete(99)
        revision = await bucket.put("a", b"1")
        await bucket.delete("a", revision=revision)

    async def check() -> None:
        await make()

    assert await cancellation.at_each_await(make, check)
