"""When a periodic job runs. Pure.

The registry stores up to which time it has considered what is due, together with the runs that follow from
it. So a run is created once, whichever registry is active, and whenever that ended: a run that could not
start in time, because none was active or no machine was suitable, is a missed one.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import math
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from muster.manage import cron, protocol

AHEAD_MS_MAX = 3_600_000  # of the clock, until it is set back: nothing that has run is due again
QUEUE_MAX = 100  # runs that are due and have not begun
SPANS_MS = (7_200_000, 172_800_000, 3_456_000_000, math.inf)  # of many missed runs, the last ones count


class ScheduleState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``at_ms``: up to when due times of this schedule were considered. ``queue``: those of runs that have
    not begun. ``skipped``, because another run had not ended; ``missed``: numbers since the job exists."""

    cron: str
    time_zone: str
    at_ms: int
    queue: tuple[int, ...] = ()
    skipped: int = 0
    missed: int = 0


class DueRuns(NamedTuple):
    """``starts``: due times of runs that begin now; ``stops``: whether the active ones are to end first."""

    state: ScheduleState
    starts: tuple[int, ...] = ()
    stops: bool = False


def current(policy: protocol.JobSchedule, stored: ScheduleState | None, now_ms: int) -> ScheduleState:
    """The state of a schedule that may have changed: then its times count from now on; also if the clock was
    wrong before, and far ahead."""
    is_same = stored is not None and (stored.cron, stored.time_zone) == (policy.cron, policy.time_zone)
    if stored is not None and is_same and stored.at_ms <= now_ms + AHEAD_MS_MAX:
        return stored
    before = stored or ScheduleState(cron="", time_zone="", at_ms=now_ms)
    return msgspec.structs.replace(
        before, cron=policy.cron, time_zone=policy.time_zone, at_ms=now_ms, queue=()
    )


def next_ms(state: ScheduleState) -> int | None:
    """The next due time; None: there is none."""
    return _next_ms(state.cron, state.time_zone, state.at_ms)


@functools.lru_cache(maxsize=1 << 14)  # of thousands of jobs, which are looked at again and again
def _next_ms(text: str, time_zone: str, at_ms: int) -> int | None:
    return cron.parse(text, time_zone).next_after(at_ms)


def suspend(state: ScheduleState, now_ms: int) -> ScheduleState:
    """What is due while the job is to be down does not run later either."""
    at_ms = next_ms(state)
    if not state.queue and (at_ms is None or at_ms > now_ms):
        return state  # nothing to store
    return msgspec.structs.replace(state, at_ms=max(state.at_ms, now_ms), queue=())


def decide(
    policy: protocol.JobSchedule, state: ScheduleState, active: Collection[str], now_ms: int
) -> DueRuns:
    """``active``: the runs that have not ended."""
    state = _consider(policy, state, bool(active), now_ms)
    if not state.queue or (active and policy.concurrency == "forbid"):
        return DueRuns(state)
    if policy.concurrency == "replace":
        return DueRuns(state, () if active else state.queue[-1:], bool(active))
    return DueRuns(state, state.queue if policy.concurrency == "allow" else state.queue[:1])


def begun(state: ScheduleState, starts: Collection[int]) -> ScheduleState:
    return msgspec.structs.replace(state, queue=tuple(at for at in state.queue if at not in starts))


def without_late(policy: protocol.JobSchedule, state: ScheduleState, now_ms: int) -> ScheduleState:
    """Runs of the queue cannot begin now: those that are late by now are missed."""
    late = [at for at in state.queue if _is_late(policy, at, now_ms)]
    if policy.missed == "all" or not late:
        return state
    dropped = late if policy.missed == "skip" or len(late) < len(state.queue) else late[:-1]
    return msgspec.structs.replace(begun(state, dropped), missed=state.missed + len(dropped))


def _consider(
    policy: protocol.JobSchedule, state: ScheduleState, is_busy: bool, now_ms: int
) -> ScheduleState:
    """The queue with what has become due."""
    passed = _passed(state, now_ms)
    if not passed:
        return state
    late = [at for at in passed if _is_late(policy, at, now_ms)]
    in_time = passed[len(late) :]
    made_up = {"skip": [], "last": [] if in_time else late[-1:], "all": late}[policy.missed]
    queue, skipped = [*state.queue], 0
    for at in (*made_up, *in_time):
        waits = at in late and policy.missed == "all"
        if policy.concurrency == "replace":
            skipped += len(queue)
            queue = [at]
        elif policy.concurrency == "forbid" and (is_busy or queue) and not waits:
            skipped += 1
        else:
            queue.append(at)
    over = max(0, len(queue) - QUEUE_MAX)
    return msgspec.structs.replace(
        state,
        at_ms=passed[-1],
        queue=tuple(queue[over:]),
        skipped=state.skipped + skipped,
        missed=state.missed + len(late) - len(made_up) + over,
    )


def _passed(state: ScheduleState, now_ms: int) -> list[int]:
    """The due times that were not considered yet: the last ones, if they are many."""
    if (first_ms := next_ms(state)) is None or first_ms > now_ms:
        return []
    times = cron.parse(state.cron, state.time_zone)
    passed: list[int] = []
    for span_ms in SPANS_MS:
        after_ms = max(state.at_ms, 0 if math.isinf(span_ms) else now_ms - int(span_ms))
        passed = list(itertools.takewhile(lambda at: at <= now_ms, times.times_after(after_ms)))
        if after_ms == state.at_ms or len(passed) >= QUEUE_MAX:
            break
    return passed[-QUEUE_MAX:]


def _is_late(policy: protocol.JobSchedule, at_ms: int, now_ms: int) -> bool:
    return now_ms - at_ms > policy.within_s * 1000


def run_name(job: str, due_ms: int) -> str:
    """Of the run that is due at this time: the same from any registry."""
    at = datetime.datetime.fromtimestamp(due_ms / 1000, datetime.UTC)
    return f"{job}-{at:%Y%m%dT%H%M}"


def run_spec(spec: protocol.ResourceSpec, name: str) -> protocol.ResourceSpec:
    """The run of a periodic job, before its agent is selected."""
    return msgspec.structs.replace(
        spec, name=name, schedule=None, entry=spec.name, where=spec.where if spec.reschedule else ""
    )
