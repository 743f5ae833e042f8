from __future__ import annotations

import asyncio

import msgspec
import pytest

from muster.bus.rpc import single_flight
from muster.core import errors
from muster.manage.agent import operation_log


async def test_all_callers_get_the_result_if_the_first_is_cancelled():
    done, gate = 0, asyncio.Event()

    async def work() -> int:
        nonlocal done
        await gate.wait()
        done += 1
        return done

    under_way = single_flight.SingleFlight[int]()
    first, second = (asyncio.create_task(under_way.once("x", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    third = asyncio.create_task(under_way.once("x", work))
    await asyncio.sleep(0)
    gate.set()
    assert [await second, await third] == [1, 1]
    assert await under_way.once("x", work) == 2, "it has ended, so it is done anew"


async def test_every_error_reaches_all_callers():
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        raise KeyError("oops")

    under_way = single_flight.SingleFlight[int]()
    requests = [asyncio.create_task(under_way.once("x", work)) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    for task in requests:
        with pytest.raises(KeyError):
            await task


async def test_it_is_cancelled_with_its_last_caller():
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    under_way = single_flight.SingleFlight[None]()
    task = asyncio.create_task(under_way.once("x", work))
    await asyncio.sleep(0)
    task.cancel()
    await ended.wait()


def test_an_agent_that_restarts_still_rejects_a_manager_that_was_replaced():
    before = operation_log.OperationHistory(operation_log.OperationRecord(name="a"))
    before.check(7, "new")
    stored = msgspec.json.decode(before.to_store(), type=operation_log.OperationRecord)
    after = operation_log.OperationHistory(stored)
    with pytest.raises(errors.StaleEpoch):
        after.check(6, "old")
    after.check(7, "new")
