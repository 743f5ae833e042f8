"""Owned logs: calls that are cancelled at each of their awaits leave nothing half done."""

from __future__ import annotations

import asyncio
import itertools

from muster.bus import api
from muster.bus.log import owned_log
from muster.bus.memory import network
from muster.testing.eventually import eventually
from tests import cancellation
from tests.bus import keyed_state

STREAM = api.StreamSettings("logs", ("log.>",), max_bytes=1 << 30, max_age_s=0, allow_delete=True)


async def test_calls_of_an_owned_log(simulated_network: network.SimulatedNetwork):
    async with await simulated_network.connect("a") as bus:
        stream = await bus.stream(STREAM)
        state = keyed_state.KeyedState()
        log, copy = owned_log.OwnedLog(stream, "log.x", state), keyed_state.KeyedState()
        standby = owned_log.OwnedLog(stream, "log.x", copy)
        await log.start()
        await standby.start()
        epochs, numbers = itertools.count(1), itertools.count(1)
        await log.own(next(epochs))

        async def append() -> None:
            number = next(numbers)
            await log.append([(b"%d" % number, b"x" * 700_000)], request=f"{number}")

        async def confirm() -> None:
            await log.confirm()

        async def check_owned() -> None:
            assert log.is_owned
            await log.append([(b"last", b"%d" % next(numbers))])
            await eventually(lambda: not log._futures and not log._pending)
            await eventually(lambda: copy.records == state.records, timeout_s=30)

        assert await cancellation.at_each_await(append, check_owned)
        assert await cancellation.at_each_await(confirm, check_owned)

        async def own() -> None:
            await standby.own(next(epochs))

        async def check_after_own() -> None:
            """Whoever owns it can resign, and the other one become the owner."""
            await standby.resign()
            await log.resign()
            await log.own(next(epochs))
            await check_owned()

        assert await cancellation.at_each_await(own, check_after_own, undo=lambda _: check_after_own())

        async def resign() -> None:
            values = (b"during", b"x" * 600_000)
            ended.extend(asyncio.create_task(log.append([(b"resigned", value)])) for value in values)
            await asyncio.sleep(0)
            await log.resign()

        ended: list[asyncio.Task[int]] = []

        async def check_resigned() -> None:
            await log.resign()
            await asyncio.wait(ended, timeout=5)
            assert all(task.done() for task in ended), "an append waits for nothing"
            for task in ended:
                task.exception()
            ended.clear()
            await eventually(lambda: log._following is not None)
            await log.own(next(epochs))
            await check_owned()

        assert await cancellation.at_each_await(resign, check_resigned, undo=lambda _: check_resigned())
        await log.stop()
        await standby.stop()


async def test_the_start_of_an_owned_log(simulated_network: network.SimulatedNetwork):
    async with await simulated_network.connect("a") as bus:
        stream = await bus.stream(STREAM)
        logs: list[owned_log.OwnedLog] = []

        async def start() -> None:
            logs.append(owned_log.OwnedLog(stream, "log.x", keyed_state.KeyedState()))
            await logs[-1].start()

        async def check() -> None:
            await logs[-1].stop()
            assert not logs[-1]._tasks.pending

        assert await cancellation.at_each_await(start, check, undo=lambda _: check())
