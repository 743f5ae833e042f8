"""Which process that does not reply is killed, and when."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest

from muster.supervision import os_process, responsiveness
from muster.testing.eventually import eventually

Activity = responsiveness.ProcessActivity
Silence = responsiveness.SilenceReason
POLICY = responsiveness.ProbePolicy(failures_max=2, busy_s=30.0)
S = 1_000_000_000


def verdicts(policy: responsiveness.ProbePolicy, *progress: bool) -> list[Silence | None]:
    """Of probes that fail after 2 s each, with a pause of 1 s."""
    history = responsiveness.ProbeHistory(policy)
    return [
        history.failed(3.0 * number, 3.0 * number + 2.0, progress=made)
        for number, made in enumerate(progress)
    ]


@pytest.mark.parametrize(
    ("after", "progress"),
    [
        (Activity(2.0, {1: S, 2: 0}), False),
        (Activity(2.0, {1: S + S // 20}), False),
        (Activity(2.0, {1: S + S // 2}), True),
        (Activity(2.0, {1: S, 2: S}), True),
        (Activity(2.0, {1: S, 3: S}), True),
        (Activity(2.0, {2: 0}), False),
        (Activity(2.0, {1: S}, is_runnable=True), True),
        (Activity(2.0, {1: 2 * S}, is_stopped=True), False),
        (None, False),
    ],
    ids=[
        "idle",
        "timers only",
        "ran",
        "another thread ran",
        "a new thread ran",
        "a thread ended",
        "waits for a core all the time",
        "ran and was then stopped",
        "unknown",
    ],
)
def test_progress_is_time_on_a_core_or_waiting_for_one(after: Activity | None, progress: bool):
    assert responsiveness.makes_progress(Activity(0.0, {1: S, 2: 0}), after) is progress
    assert not responsiveness.makes_progress(None, after)


def test_a_process_without_progress_is_frozen_after_the_allowed_failures():
    assert verdicts(POLICY, False, False) == [None, Silence.FROZEN]


def test_a_process_with_progress_has_longer_and_not_forever():
    results = verdicts(POLICY, *[True] * 11)
    assert results == [None, *[Silence.STARVED] * 9, Silence.BUSY]


def test_a_starved_process_that_freezes_is_killed_after_the_allowed_failures():
    assert verdicts(POLICY, True, True, True, False, False)[2:] == [
        Silence.STARVED,
        Silence.STARVED,
        Silence.FROZEN,
    ]


def test_progress_does_not_count_if_the_policy_has_no_time_for_it():
    policy = responsiveness.ProbePolicy(failures_max=1, busy_s=0.0)
    assert verdicts(policy, True) == [Silence.FROZEN]


def test_a_reply_starts_the_time_again():
    history = responsiveness.ProbeHistory(POLICY)
    for began_s in range(0, 27, 3):
        history.failed(began_s, began_s + 2.0, progress=True)
    history.replied()
    assert history.failures == 0
    assert history.failed(30.0, 32.0, progress=True) is None
    assert history.failed(33.0, 35.0, progress=True) is Silence.STARVED


async def test_the_activity_of_all_threads_counts():
    """The first thread of a broker is idle all the time."""
    program = """
import threading
def run():
    while True: pass
threading.Thread(target=run).start()
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)

    def activity() -> Activity:
        sample = os_process.activity(process.pid, time.monotonic())
        assert sample is not None
        return sample

    try:
        await eventually(lambda: len(activity().active_ns) == 2)
        before = activity()

        def other_thread_ran() -> bool:
            after = activity()
            threads = {thread: ns for thread, ns in after.active_ns.items() if thread != process.pid}
            return responsiveness.makes_progress(before, Activity(after.at_s, threads))

        await eventually(other_thread_ran)
        process.send_signal(signal.SIGSTOP)
        await eventually(lambda: activity().is_stopped and not activity().is_runnable)
    finally:
        process.kill()
        await process.wait()
    assert os_process.activity(process.pid, time.monotonic()) is None
    assert os.getpid() in (os_process.activity(os.getpid(), 0.0) or Activity(0.0, {})).active_ns
