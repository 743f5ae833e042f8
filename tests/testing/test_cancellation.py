"""The helper that cancels coroutines finds what they lose."""

from __future__ import annotations

import asyncio

import pytest

from tests import cancellation


class Slots:
    def __init__(self) -> None:
        self.free = 1
        self.waiting = 0

    async def careless(self) -> None:
        self.free -= 1
        await asyncio.sleep(0)
        self.free += 1

    async def loses_a_result(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._take)
        except asyncio.CancelledError:
            return
        self.free += 1

    def _take(self) -> None:
        self.free -= 1

    async def careful(self) -> str:
        self.free -= 1
        try:
            await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(None, int)
        finally:
            self.free += 1
        return "done"

    async def check(self) -> None:
        assert self.free == 1


async def test_a_careful_coroutine_is_cancelled_at_each_await():
    slots, results = Slots(), []

    async def undo(result: str) -> None:
        results.append(result)

    assert await cancellation.at_each_await(slots.careful, slots.check, undo=undo) == 4
    assert results == ["done", "done"]


async def test_what_is_left_behind_is_found_with_its_place():
    slots = Slots()
    with pytest.raises(AssertionError) as caught:
        await cancellation.at_each_await(slots.careless, slots.check)
    assert caught.value.__notes__[0].startswith("cancelled at await 0 (sleep")


async def test_a_swallowed_cancellation_is_found():
    slots = Slots()
    with pytest.raises(AssertionError, match="it ended with None"):
        await cancellation.at_each_await(slots.loses_a_result, slots.check)
