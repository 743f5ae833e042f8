"""Supervised child processes: real processes that end, freeze, cannot start, or do not end when asked."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from muster.core import backoff, errors
from muster.supervision import children, tasks
from muster.testing.eventually import eventually

State = children.ChildState
QUICK = backoff.BackoffPolicy(crashes_max=None, pause_s=0.01, pause_s_max=0.05)


def python(code: str) -> Callable[[], Awaitable[children.ProcessHandle]]:
    async def launch() -> children.ProcessHandle:
        return await asyncio.create_subprocess_exec(sys.executable, "-c", code)

    return launch


SLEEP = python("import time; time.sleep(600)")
BUSY = python("while True: pass")
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(int(sys.argv[1]), b'.')
time.sleep(600)
"""


async def test_a_child_that_is_killed_is_restarted():
    states: list[State] = []
    child = children.ChildSupervisor("a", SLEEP, on_change=lambda: states.append(child.state))
    await child.start()
    first = child.pid
    assert first
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: child.restarts == 1)
    assert child.pid != first
    assert child.reason == "ended with code -9"
    await child.stop()
    assert states == [State.STARTING, State.RUNNING, State.RESTARTING, State.RUNNING, State.STOPPED]
    assert child.pid is None


async def test_a_frozen_child_is_killed_and_replaced():
    """The process exists all the time: only the missing reply shows that it does not work."""

    async def responds() -> bool:
        pid = child.pid
        with open(f"/proc/{pid}/stat") as file:  # noqa: ASYNC230  (procfs does not block)
            return file.read().rpartition(")")[2].split()[0] != "T"

    quick = children.ProbePolicy(period_s=0.01, failures_max=3, grace_s=0.0)
    child = children.ChildSupervisor("a", SLEEP, policy=QUICK, probe=responds, probe_policy=quick)
    await child.start()
    frozen = child.pid
    assert frozen
    os.kill(frozen, signal.SIGSTOP)
    await eventually(lambda: child.state is State.RUNNING and child.pid != frozen)
    assert child.reason == "it did not respond and was killed"
    await child.stop()


async def never_replies() -> bool:
    await asyncio.Event().wait()
    return True


async def test_a_busy_child_has_longer_for_its_reply():
    """A busy machine is like a busy child: both only delay the reply."""
    quick = children.ProbePolicy(period_s=0.01, timeout_s=0.05, failures_max=2, grace_s=0.0, busy_s=1.0)
    child = children.ChildSupervisor(
        "busy", BUSY, policy=backoff.NO_RESTART, probe=never_replies, probe_policy=quick
    )
    await child.start()
    began_s = time.monotonic()
    await eventually(lambda: child.state is State.FAILED)
    assert time.monotonic() - began_s >= quick.busy_s
    assert child.reason == "it was busy without a reply for 1 s and was killed"
    assert {key: n for key, n in children.silences().items() if key[0] == "busy"} == {
        ("busy", "starved"): 1,
        ("busy", "busy"): 1,
    }
    await child.stop()


async def test_a_busy_child_that_replies_late_is_kept():
    late = asyncio.Event()

    async def probe() -> bool:
        return await late.wait()

    quick = children.ProbePolicy(period_s=0.01, timeout_s=0.05, failures_max=2, grace_s=0.0)
    child = children.ChildSupervisor("late", BUSY, probe=probe, probe_policy=quick)
    await child.start()
    await eventually(lambda: children.silences()["late", "starved"] == 1)
    assert not child.is_responding
    late.set()
    await eventually(lambda: child.is_responding)
    assert (child.starts, child.killed_for) == (1, None)
    await child.stop()


async def test_a_busy_child_that_freezes_is_killed_at_once():
    quick = children.ProbePolicy(period_s=0.01, timeout_s=0.05, failures_max=2, grace_s=0.0, busy_s=600.0)
    child = children.ChildSupervisor(
        "freezing", BUSY, policy=backoff.NO_RESTART, probe=never_replies, probe_policy=quick
    )
    await child.start()
    await eventually(lambda: children.silences()["freezing", "starved"] == 1)
    assert child.pid
    os.kill(child.pid, signal.SIGSTOP)
    await eventually(lambda: child.state is State.FAILED)
    assert child.reason == "it did not respond and was killed"
    assert children.silences()["freezing", "frozen"] == 1
    await child.stop()


async def test_a_child_that_is_blocked_without_processor_time_is_frozen():
    quick = children.ProbePolicy(period_s=0.01, timeout_s=0.05, failures_max=2, grace_s=0.0, busy_s=600.0)
    child = children.ChildSupervisor(
        "blocked", SLEEP, policy=backoff.NO_RESTART, probe=never_replies, probe_policy=quick
    )
    await child.start()
    await eventually(lambda: child.state is State.FAILED)
    assert children.silences()["blocked", "frozen"] == 1
    await child.stop()


async def test_a_probe_that_hangs_or_fails_counts_as_no_response_and_one_reply_clears_the_count():
    outcomes = iter([True, None, errors.Unavailable("x"), True, OSError("y"), False, None])

    async def probe() -> bool:
        outcome = next(outcomes)
        if outcome is None:
            await asyncio.Event().wait()
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    quick = children.ProbePolicy(period_s=0.001, timeout_s=0.01, failures_max=3, busy_s=0.0)
    child = children.ChildSupervisor("a", SLEEP, policy=backoff.NO_RESTART, probe=probe, probe_policy=quick)
    await child.start()
    await eventually(lambda: child.state is State.FAILED)
    assert next(outcomes, "all were used") == "all were used"
    await child.stop()


@pytest.mark.may_block(reason="the supervising process is busy")
@pytest.mark.parametrize("turn_s", [0.06, 0.3], ids=["busy", "frozen"])
async def test_a_child_is_not_killed_because_its_supervisor_was_late(turn_s):
    probes = 0

    async def probe() -> bool:
        nonlocal probes
        probes += 1
        while True:
            time.sleep(turn_s)  # noqa: ASYNC251  # pace: the event loop does not run
            await asyncio.sleep(0)

    quick = children.ProbePolicy(period_s=0.001, timeout_s=0.2, failures_max=2, grace_s=0.0)
    child = children.ChildSupervisor("a", SLEEP, policy=QUICK, probe=probe, probe_policy=quick)
    await child.start()
    await eventually(lambda: probes > 3)
    assert (child.starts, child.is_responding) == (1, True)
    await child.stop()


async def test_a_child_has_time_for_its_first_response():
    probes = itertools.count()

    async def probe() -> bool:
        return next(probes) >= 20

    quick = children.ProbePolicy(period_s=0.001, failures_max=2)
    child = children.ChildSupervisor("a", SLEEP, probe=probe, probe_policy=quick)
    await child.start()
    await eventually(lambda: next(probes) > 30)
    assert child.restarts == 0
    await child.stop()


async def test_a_child_that_crashes_too_often_is_given_up():
    limited = backoff.BackoffPolicy(crashes_max=3, pause_s=0.001)
    child = children.ChildSupervisor("a", python("raise SystemExit(3)"), policy=limited)
    child.start_soon()
    await eventually(lambda: child.state is State.FAILED)
    assert (child.starts, child.crashes, child.reason) == (3, 3, "ended with code 3")
    await child.stop()


async def test_a_child_may_end_by_itself():
    child = children.ChildSupervisor("a", python(""), restart_after_success=False)
    child.start_soon()
    await eventually(lambda: child.state is State.FINISHED)
    assert child.starts == 1
    await child.stop()


async def test_a_start_that_fails_is_raised_at_first_and_repeated_later():
    async def fail() -> children.ProcessHandle:
        raise OSError("no memory")

    child = children.ChildSupervisor("a", fail, policy=QUICK)
    with pytest.raises(OSError, match="no memory"):
        await child.start()
    assert child.state is State.STOPPED
    child.start_soon()
    await eventually(lambda: child.crashes > 3)
    assert child.reason == "no memory"
    await child.stop()


async def test_a_child_that_ignores_sigterm_is_killed_unless_it_may_stay():
    near, far = os.pipe()

    async def launch() -> children.ProcessHandle:
        return await asyncio.create_subprocess_exec(sys.executable, "-c", STUBBORN, str(far), pass_fds=(far,))

    child = children.ChildSupervisor("a", launch)
    await child.start()
    process = child.process
    assert process is not None
    await asyncio.to_thread(os.read, near, 1)
    await child.stop((signal.SIGTERM, 0.05), kill=False)
    os.kill(process.pid, 0)  # it runs
    await children.end_process(process, (signal.SIGTERM, 0.05))
    assert await process.wait() == -signal.SIGKILL
    os.close(near)
    os.close(far)


async def test_a_signal_does_not_take_the_exit_code_of_the_child_away(monkeypatch):
    """As a poll does that finds the end of the child before asyncio does."""

    def poll(self: object) -> None:
        raise AssertionError("it may reap the child")

    process = await asyncio.create_subprocess_exec("sleep", "60")
    monkeypatch.setattr(subprocess.Popen, "poll", poll)
    children.send_signal(process, signal.SIGTERM)
    assert await process.wait() == -signal.SIGTERM
    children.send_signal(process, signal.SIGTERM)


async def test_a_stop_that_is_cancelled_ends_the_child_at_once():
    near, far = os.pipe()

    async def launch() -> children.ProcessHandle:
        return await asyncio.create_subprocess_exec(sys.executable, "-c", STUBBORN, str(far), pass_fds=(far,))

    child = children.ChildSupervisor("a", launch)
    await child.start()
    process = child.process
    assert process is not None
    await asyncio.to_thread(os.read, near, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await child.stop((signal.SIGTERM, 60.0))
    assert await process.wait() == -signal.SIGKILL
    assert (child.state, child.pid) == (State.STOPPED, None)
    os.close(near)
    os.close(far)


async def test_a_child_that_may_stay_is_known_after_a_cancelled_stop():
    child = children.ChildSupervisor("a", SLEEP)
    await child.start()
    process = child.process
    assert process is not None
    stopping = asyncio.create_task(child.stop((signal.SIGCONT, 60.0), kill=False))
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    os.kill(process.pid, 0)
    assert child.process is process
    await child.stop()
    assert await process.wait() == -signal.SIGTERM


async def test_an_error_of_the_supervisor_does_not_lose_the_child():
    child = children.ChildSupervisor("a", SLEEP, policy=QUICK)
    await child.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    child._tasks.inject("supervision", RuntimeError("injected"))
    await eventually(tasks.problems)
    assert tasks.problems() == ["child a: supervision failed: RuntimeError: injected"]
    pid = child.pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: child.restarts == 1)
    await child.stop()
    assert tasks.problems() == []


def test_the_delay_grows_with_crashes_in_a_row_and_a_stable_run_resets_it():
    policy = backoff.BackoffPolicy(crashes_max=None, window_s=60.0, pause_s=0.5, pause_s_max=30.0)
    history = backoff.CrashHistory(policy)
    now_s, delays = 0.0, []
    for _ in range(1000):
        history.started(now_s)
        now_s += 1.0
        delays.append(history.crashed(now_s))
        now_s += delays[-1] or 0.0
    assert delays[:9] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert set(delays[9:]) == {30.0}
    assert history.is_looping(now_s)
    history.started(now_s)
    assert history.is_looping(now_s + 59.0)
    assert not history.is_looping(now_s + 60.0)
    assert history.crashed(now_s + 60.0) == 0.0
    assert not history.is_looping(now_s + 60.0)


async def test_a_child_that_does_not_respond_is_reported_before_it_is_killed():
    replies = True

    async def probe() -> bool:
        return replies

    patient = children.ProbePolicy(period_s=0.001, failures_max=10**9, grace_s=0.0)
    child = children.ChildSupervisor("a", SLEEP, probe=probe, probe_policy=patient)
    await child.start()
    assert child.is_responding
    replies = False
    await eventually(lambda: not child.is_responding)
    replies = True
    await eventually(lambda: child.is_responding)
    await child.stop()


async def test_the_end_of_a_process_is_noticed_although_its_child_holds_the_output():
    program = (
        "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    survivor = int(await process.stdout.readline())
    process.kill()
    try:
        async with asyncio.timeout(20):
            assert await children.exit_code(process) == -signal.SIGKILL
    finally:
        os.kill(survivor, signal.SIGKILL)
    await process.communicate()
