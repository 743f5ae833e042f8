"""Starts and stops that are cancelled at each of their awaits: no process is left, all tasks end."""

from __future__ import annotations

import asyncio

from muster.supervision import children, tasks
from tests import cancellation


async def test_a_child_is_stopped_whatever_was_cancelled():
    launched: list[asyncio.subprocess.Process] = []

    async def launch() -> asyncio.subprocess.Process:
        launched.append(await asyncio.create_subprocess_exec("sleep", "60"))
        return launched[-1]

    child = children.ChildSupervisor("sleeper", launch)

    async def check() -> None:
        await child.stop()
        assert child.state is children.ChildState.STOPPED
        assert all(process.returncode is not None for process in launched)

    async def start_and_stop() -> None:
        await child.start()
        await child.stop()

    assert await cancellation.at_each_await(start_and_stop, check)
    await check()


async def test_supervised_tasks_end_whatever_was_cancelled():
    supervisor = tasks.TaskSupervisor("service")
    cleaned: list[int] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(1)

    async def spawn_and_close() -> None:
        cleaned.clear()
        supervisor.spawn("work", work())
        supervisor.loop("loop", work)
        await asyncio.sleep(0)
        await supervisor.close()

    async def check() -> None:
        await supervisor.close()
        assert not supervisor.pending
        assert len(cleaned) == 2
        assert supervisor.problem() is None

    assert await cancellation.at_each_await(spawn_and_close, check)
