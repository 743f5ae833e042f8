"""The limit on operations in progress: how many, in which order, and what a cancelled task leaves behind."""

from __future__ import annotations

import asyncio

import pytest

from muster.manage.manager import concurrency_limit

pytestmark = [pytest.mark.asyncio, pytest.mark.virtual_time]


class Crowd:
    """Tasks that take a place for a second each."""

    def __init__(self, limit: int) -> None:
        self.limit = concurrency_limit.ConcurrencyLimit(limit)
        self.began: list[int] = []
        self.inside = self.most = 0

    async def work(self, number: int) -> None:
        async with self.limit:
            self.began.append(number)
            self.inside += 1
            self.most = max(self.most, self.inside)
            try:
                await asyncio.sleep(1)
            finally:
                self.inside -= 1

    def start(self, count: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.work(number)) for number in range(count)]


async def test_so_many_at_a_time_in_the_order_in_which_they_came():
    crowd = Crowd(3)
    await asyncio.gather(*crowd.start(10))
    assert crowd.began == list(range(10))
    assert crowd.most == 3
    assert asyncio.get_running_loop().time() == pytest.approx(4, abs=0.1), "no place was left empty"


async def test_a_place_is_free_again_after_an_error():
    crowd = Crowd(1)
    with pytest.raises(ValueError, match="odd"):
        async with crowd.limit:
            raise ValueError("odd")
    await asyncio.gather(*crowd.start(2))
    assert crowd.began == [0, 1]


async def test_a_task_that_is_cancelled_while_it_waits_is_passed_over():
    crowd = Crowd(1)
    tasks = crowd.start(4)
    await asyncio.sleep(0.5)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert crowd.began == [0, 2, 3]
    assert crowd.most == 1
    await asyncio.gather(*crowd.start(1))


async def test_a_task_that_is_cancelled_at_its_turn_gives_its_place_to_the_next():
    crowd = Crowd(1)
    async with crowd.limit:
        tasks = crowd.start(3)
        await asyncio.sleep(0)
    tasks[0].cancel()  # it has the place, and has not run since
    await asyncio.wait(tasks)
    assert crowd.began == [1, 2]
    assert crowd.most == 1
    await asyncio.gather(*crowd.start(1))
