"""The order of writers of one key."""

from __future__ import annotations

import asyncio

import pytest

from muster.inform.node import key_locks


async def test_turns_are_taken_in_the_order_of_coming():
    locks, done = key_locks.KeyLocks(), []

    async def write(name: str) -> None:
        async with locks.hold("k"):
            done.append(name)
            await asyncio.sleep(0)

    assert locks.try_acquire("k")
    waiting = [asyncio.create_task(write(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert not locks.try_acquire("k")
    assert locks.try_acquire("another")
    waiting[1].cancel()
    locks.release("k")
    await asyncio.wait(waiting)
    assert done == ["a", "c"]
    assert locks.try_acquire("k")


async def test_a_lock_granted_to_a_cancelled_waiter_is_passed_on():
    locks, done = key_locks.KeyLocks(), []

    async def write(name: str) -> None:
        async with locks.hold("k"):
            done.append(name)

    assert locks.try_acquire("k")
    first, second = asyncio.create_task(write("first")), asyncio.create_task(write("second"))
    await asyncio.sleep(0)
    locks.release("k")
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert done == ["second"]
    assert locks.try_acquire("k")
