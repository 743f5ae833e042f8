from __future__ import annotations

import asyncio

import pytest

from muster.testing.eventually import eventually, throughout


@pytest.mark.virtual_time
async def test_returns_the_first_true_value():
    values = iter([0, None, "", "there"])
    assert await eventually(lambda: next(values)) == "there"


@pytest.mark.virtual_time
async def test_awaits_a_coroutine_function():
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(3, event.set)

    async def is_set() -> bool:
        return event.is_set()

    assert await eventually(is_set, timeout_s=5)


@pytest.mark.virtual_time
async def test_an_assertion_that_fails_is_not_true_yet():
    tries: list[int] = []

    def third_time() -> bool:
        tries.append(1)
        assert len(tries) == 3
        return True

    assert await eventually(third_time)


@pytest.mark.virtual_time
async def test_failure_shows_the_last_value_and_takes_the_given_time():
    start = asyncio.get_running_loop().time()
    with pytest.raises(AssertionError, match=r"three parts.*2 s; last value: \[\]"):
        await eventually(list, timeout_s=2, what="three parts")
    assert asyncio.get_running_loop().time() - start == pytest.approx(2)


@pytest.mark.virtual_time
async def test_failure_shows_the_last_assertion():
    def never() -> bool:
        raise AssertionError("5 of 10 are here")

    with pytest.raises(AssertionError, match=r"never did not become true.*5 of 10 are here"):
        await eventually(never, timeout_s=1)


@pytest.mark.virtual_time
async def test_a_condition_that_hangs_is_given_up():
    async def hangs() -> bool:
        await asyncio.Event().wait()
        return True

    with pytest.raises(AssertionError, match="it never returned"):
        await eventually(hangs, timeout_s=1)


@pytest.mark.virtual_time
async def test_other_errors_pass_through():
    def broken() -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await eventually(broken)


@pytest.mark.virtual_time
async def test_a_timeout_of_the_conditions_own_passes_through():
    def broken() -> bool:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await eventually(broken)


@pytest.mark.virtual_time
async def test_throughout_takes_its_time():
    start = asyncio.get_running_loop().time()
    await throughout(lambda: True, for_s=3)
    assert asyncio.get_running_loop().time() - start == pytest.approx(3)


@pytest.mark.virtual_time
async def test_throughout_fails_at_once_when_it_is_over():
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(1, event.set)

    async def quiet() -> bool:
        return not event.is_set()

    with pytest.raises(AssertionError, match=r"quiet was no longer true after 1\.0\d\d s; value: False"):
        await throughout(quiet, for_s=60)
