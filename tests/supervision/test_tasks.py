"""Supervised tasks: a failure is logged, counted and shown, and the loop is restarted or the service ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest

from muster.core import backoff, errors
from muster.supervision import tasks
from muster.testing.eventually import eventually

pytestmark = [pytest.mark.asyncio, pytest.mark.virtual_time]


async def test_a_failed_loop_is_counted_shown_and_restarted():
    supervisor = tasks.TaskSupervisor("service")
    starts = []

    async def run():
        starts.append(asyncio.get_running_loop().time())
        if len(starts) < 3:
            raise RuntimeError("broken")
        await asyncio.Event().wait()

    supervisor.loop("work", run)
    await asyncio.sleep(1)
    assert len(starts) == 3
    assert supervisor.failures == {"work": 2}
    assert supervisor.problem() == "service: work failed: RuntimeError: broken"
    assert tasks.problems() == ["service: work failed: RuntimeError: broken"]
    await asyncio.sleep(tasks.POLICY.window_s + 1)
    assert supervisor.problem() is None, "it has run for a whole window since"
    await supervisor.close()


async def test_the_cancellation_of_something_awaited_is_a_failure():
    """Only that of the task itself ends it."""
    failed: list[Exception] = []
    supervisor = tasks.TaskSupervisor("service", on_fatal=failed.append)
    awaited: list[asyncio.Future[None]] = []

    async def run() -> None:
        awaited.append(asyncio.get_running_loop().create_future())
        await awaited[-1]

    supervisor.loop("work", run)
    await asyncio.sleep(0)
    supervisor.spawn("once", run(), on_failure=tasks.OnFailure.FATAL)
    await asyncio.sleep(0)
    for future in awaited:
        future.cancel()
    await asyncio.sleep(1)
    assert len(awaited) == 3, "the loop runs again"
    assert supervisor.failures == {"work": 1, "once": 1}
    assert "awaited was cancelled" in str(failed)
    await supervisor.close()
    assert supervisor.failures == {"work": 1, "once": 1}


async def test_the_delay_grows_and_starts_again_after_a_healthy_period():
    policy = backoff.BackoffPolicy(crashes_max=1000, window_s=10.0, pause_s=1.0, pause_s_max=4.0)
    supervisor = tasks.TaskSupervisor("service", policy=policy)
    starts = []

    async def run():
        starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(100 if len(starts) == 5 else 0)
        raise RuntimeError("broken")

    supervisor.loop("work", run)
    await asyncio.sleep(120)
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(starts)]
    assert pauses[:4] == [0, 1, 2, 4]
    assert pauses[4:6] == [100, 1], "the first failure after a healthy period is followed by a start at once"
    await supervisor.close()


async def test_a_fatal_failure_reaches_the_owner_once_and_stays():
    fatal: list[Exception] = []
    supervisor = tasks.TaskSupervisor("service", on_fatal=fatal.append)

    async def run():
        raise OSError("no disk")

    supervisor.loop("one", run, on_failure=tasks.OnFailure.FATAL)
    supervisor.loop("two", run, on_failure=tasks.OnFailure.FATAL)
    await asyncio.sleep(0.1)
    assert len(fatal) == 1
    assert supervisor.problem() == "service: OSError: no disk"
    assert supervisor.loops == ()
    await supervisor.close()


async def test_a_task_that_runs_once_is_counted_when_it_fails():
    supervisor = tasks.TaskSupervisor("service")
    before = tasks.failures()

    async def fail() -> None:
        raise ValueError("odd")

    async def succeed() -> int:
        return 3

    supervisor.spawn("reply", fail())
    assert await supervisor.spawn("reply", succeed()) == 3
    await asyncio.sleep(0)
    assert supervisor.failures == {"reply": 1}
    assert supervisor.problem() is None
    assert supervisor.pending == 0
    await supervisor.close()
    assert tasks.failures() - before == {("service", "reply"): 1}, "the count outlives the supervisor"


async def test_an_injected_error_fails_the_run_and_its_cleanup_is_awaited():
    supervisor = tasks.TaskSupervisor("service")
    ended = []

    async def run():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    supervisor.loop("work", run)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    supervisor.inject("work", RuntimeError("injected"))
    await asyncio.sleep(0.1)
    assert ended == [True]
    assert supervisor.failures == {"work": 1}
    assert supervisor.loops == ("work",)
    await supervisor.close()
    assert ended == [True, True]


async def test_a_loop_that_returns_is_finished_and_close_cancels_the_others():
    supervisor = tasks.TaskSupervisor("service")

    async def once():
        return

    async def forever():
        await asyncio.Event().wait()

    supervisor.loop("once", once)
    supervisor.loop("forever", forever)
    await asyncio.sleep(0.1)
    assert supervisor.loops == ("forever",)
    await supervisor.close()
    assert supervisor.pending == 0
    assert tasks.problems() == []


async def test_the_problems_of_a_supervisor_that_is_used_after_its_end_are_listed():
    supervisor = tasks.TaskSupervisor("service")

    async def fail():
        raise RuntimeError("broken")

    for _ in range(2):
        supervisor.loop("work", fail)
        await asyncio.sleep(0.1)
        assert tasks.problems() == ["service: work failed: RuntimeError: broken"]
        await supervisor.close()
        assert tasks.problems() == []


async def test_closing_twice_does_not_interrupt_the_cleanup():
    supervisor = tasks.TaskSupervisor("service")
    ended = []

    async def run():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append(True)

    supervisor.loop("work", run)
    await asyncio.sleep(0.1)
    await asyncio.gather(supervisor.close(), supervisor.close())
    assert ended == [True]


async def test_a_cancelled_loop_does_nothing_further():
    """Not even with what had arrived: its successor may handle that already."""
    arrived: asyncio.Queue[int] = asyncio.Queue()
    handled = []

    async def handle() -> None:
        while True:
            handled.append(await arrived.get())

    supervisor = tasks.TaskSupervisor("test")
    loop = supervisor.loop("handler", handle)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    arrived.put_nowait(1)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert handled == []
    await supervisor.close()


async def test_close_ends_a_loop_whose_timeout_expires_at_the_same_moment():
    supervisor = tasks.TaskSupervisor("service")

    async def nested(depth: int) -> None:  # a cancellation passes through one task after another
        await (asyncio.create_task(nested(depth - 1)) if depth else asyncio.Event().wait())

    async def run():
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await nested(5)

    task = supervisor.loop("work", run)
    await asyncio.sleep(1.0)
    assert task.cancelling(), "its timeout expires"
    async with asyncio.timeout(10.0):
        await supervisor.close()
    assert supervisor.pending == 0


async def test_close_ends_a_loop_that_lost_its_cancellation():
    supervisor = tasks.TaskSupervisor("service")
    changed = asyncio.Event()

    async def run():
        while True:
            with contextlib.suppress(asyncio.CancelledError):  # as `wait_for` does if a result is there
                await changed.wait()
            await asyncio.sleep(3600)

    supervisor.loop("work", run)
    await asyncio.sleep(0)
    async with asyncio.timeout(60.0):
        await supervisor.close()
    assert supervisor.pending == 0


async def test_a_clean_up_is_completed_before_a_cancellation_takes_effect():
    steps: list[str] = []
    proceed = asyncio.Event()

    async def clean_up() -> None:
        steps.append("begun")
        await proceed.wait()
        steps.append("complete")

    task = asyncio.create_task(tasks.finish(clean_up()))
    await eventually(lambda: steps == ["begun"])
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["begun", "complete"]


async def test_a_clean_up_that_fails_does_not_lose_the_cancellation():
    proceed = asyncio.Event()

    async def clean_up() -> None:
        await proceed.wait()
        raise errors.Unavailable("the disk is gone")

    task = asyncio.create_task(tasks.finish(clean_up()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(errors.Unavailable):
        await tasks.finish(clean_up())
