"""Who writes a key when."""

from __future__ import annotations

import asyncio

import pytest

from muster.inform.node import key_locks


async def test_turns_are_taken_in_the_order_of_coming():
    all_turns, done = key_locks.KeyLocks(), []

    async def write(name: str) -> None:
        async with all_turns.of("k"):
            done.append(name)
            await asyncio.sleep(0)

    assert all_turns.take_now("k")
    waiting = [asyncio.create_task(write(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert not all_turns.take_now("k")
    assert all_turns.take_now("another")
    waiting[1].cancel()
    all_turns.give("k")
    await asyncio.wait(waiting)
    assert done == ["a", "c"]
    assert all_turns.take_now("k")


async def test_a_turn_given_to_one_who_goes_at_that_moment_is_passed_on():
    all_turns, done = key_locks.KeyLocks(), []

    async def write(name: str) -> None:
        async with all_turns.of("k"):
            done.append(name)

    assert all_turns.take_now("k")
    first, second = asyncio.create_task(write("first")), asyncio.create_task(write("second"))
    await asyncio.sleep(0)
    all_turns.give("k")
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert done == ["second"]
    assert all_turns.take_now("k")
