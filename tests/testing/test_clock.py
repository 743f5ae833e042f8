from __future__ import annotations

import asyncio
import socket
import time

import pytest

from muster.core import errors
from muster.testing import virtual_clock


async def ticks(count: int, every_s: float) -> float:
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()
    for _ in range(count):
        arrived.clear()
        loop.call_later(every_s, arrived.set)
        await arrived.wait()
    return loop.time()


def test_a_day_passes_in_no_time():
    start = time.monotonic()
    assert virtual_clock.run_virtual(ticks(1440, 60.0)) == pytest.approx(86_400)
    assert time.monotonic() - start < 5


@pytest.mark.virtual_time
async def test_the_marker_gives_a_virtual_loop():
    assert isinstance(asyncio.get_running_loop(), virtual_clock.VirtualLoop)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await asyncio.Event().wait()


async def test_without_the_marker_time_is_real():
    assert not isinstance(asyncio.get_running_loop(), virtual_clock.VirtualLoop)


@pytest.mark.virtual_time
async def test_virtual_time_stops_while_a_thread_works():
    before = asyncio.get_running_loop().time()
    async with asyncio.timeout(0.001):
        assert await asyncio.to_thread(sum, range(1_000_000)) == 499_999_500_000
    assert asyncio.get_running_loop().time() == before


@pytest.mark.virtual_time
async def test_sockets_are_refused():
    with socket.socket() as listener, pytest.raises(errors.InvalidInput, match="virtual time"):
        asyncio.get_running_loop().add_reader(listener, print)


def test_waiting_for_nothing_is_an_error_and_not_a_hang():
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_clock.VirtualTimeDeadlock, match="deadlock: every task waits"):
        virtual_clock.run_virtual(forever())


def test_timers_fire_in_order_of_time_even_far_out():
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        fired: list[float] = []
        done = asyncio.Event()
        for delay in (1e9 + 0.3, 0.1, 1e9 + 0.1, 0.2):
            loop.call_later(delay, fired.append, delay)
        loop.call_later(1e9 + 1, done.set)
        await done.wait()
        return fired

    assert virtual_clock.run_virtual(main()) == [0.1, 0.2, 1e9 + 0.1, 1e9 + 0.3]


def test_a_fake_clock_can_be_set(fake_clock: virtual_clock.FakeClock):
    start_ns = fake_clock.time_ns()
    fake_clock.advance(1.5)
    assert fake_clock.time_ns() - start_ns == 1_500_000_000
    fake_clock.step_back(2)
    assert fake_clock.time_ns() - start_ns == -500_000_000
    with pytest.raises(errors.InvalidInput):
        fake_clock.advance(-1)


@pytest.mark.virtual_time
async def test_a_fake_clock_moves_with_virtual_time(fake_clock: virtual_clock.FakeClock):
    start_ns = fake_clock.time_ns()
    await ticks(6, 10.0)
    assert fake_clock.time_ns() - start_ns == 60_000_000_000
