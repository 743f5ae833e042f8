"""Timers of requests: when they expire, and that they do not add up in the event loop."""

from __future__ import annotations

import asyncio

import pytest

from muster.bus.client import request_timers

pytestmark = [pytest.mark.asyncio, pytest.mark.virtual_time]


class Clock:
    """Records when each item expires, in seconds after the start."""

    def __init__(self) -> None:
        self.timers = request_timers.RequestTimers(self._expired)
        self.expired: list[tuple[str, float]] = []
        self._began_s = asyncio.get_running_loop().time()

    def _expired(self, item: str) -> None:
        self.expired.append((item, round(asyncio.get_running_loop().time() - self._began_s, 3)))
        if item == "broken":
            raise RuntimeError(item)


def scheduled() -> int:
    return len([timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()])  # type: ignore[attr-defined]


async def test_each_item_expires_at_its_own_time():
    clock = Clock()
    clock.timers.start("long", 5.0)
    for item in ("a", "b"):
        clock.timers.start(item, 2.0)
        await asyncio.sleep(1)
    await asyncio.sleep(10)
    assert clock.expired == [("a", 2.0), ("b", 3.0), ("long", 5.0)]


async def test_an_item_that_is_stopped_does_not_expire_and_can_be_started_again():
    clock = Clock()
    clock.timers.start("a", 2.0)
    clock.timers.start("b", 2.0)
    clock.timers.stop("a", 2.0)
    clock.timers.stop("never started", 9.0)
    await asyncio.sleep(1)
    clock.timers.start("a", 2.0)
    await asyncio.sleep(10)
    assert clock.expired == [("b", 2.0), ("a", 3.0)]


async def test_an_error_of_one_item_does_not_concern_the_others():
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    clock = Clock()
    for item in ("broken", "a"):
        clock.timers.start(item, 2.0)
    await asyncio.sleep(1)
    clock.timers.start("b", 2.0)
    await asyncio.sleep(10)
    assert clock.expired == [("broken", 2.0), ("a", 2.0), ("b", 3.0)]
    assert len(errors) == 1


async def test_requests_that_wait_equally_long_share_one_timer_of_the_loop():
    clock, before = Clock(), scheduled()
    for number in range(10_000):
        clock.timers.start(str(number), 2.0)
        clock.timers.stop(str(number), 2.0)
    assert scheduled() == before + 1
    await asyncio.sleep(3)
    assert scheduled() == before, "and none without a request"


async def test_intervals_that_occur_once_do_not_add_up():
    clock, before = Clock(), scheduled()
    for number in range(10_000):
        clock.timers.start(str(number), 100 + number / 1000)
        clock.timers.stop(str(number), 100 + number / 1000)
    assert scheduled() <= before + request_timers.IDLE_MAX
