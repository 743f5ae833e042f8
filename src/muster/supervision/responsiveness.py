"""Decides whether a process that does not reply is killed. Pure.

A missing reply does not prove that a process is frozen: on a machine with too much work it may only wait for
a core, and its successor would wait as well, in addition to the work of a start. So the activity of the
process during the probe counts:

- *frozen*: it was stopped, or neither ran nor waited for a core. It is killed after ``failures_max`` such
  probes in a row.
- *starved*: it ran or waited for a core. It has ``busy_s`` for a reply and is killed then, because a process
  that runs forever without replying is faulty as well.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

PROGRESS_SHARE = 0.1  # of the time; with less, only timers of the process ran


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePolicy:
    """A child that is frozen is killed after at most ``failures_max * (period_s + timeout_s)``, one that is
    starved or busy after ``busy_s`` and at most one more probe."""

    period_s: float = 1.0
    timeout_s: float = 2.0  # of one probe
    failures_max: int = 3  # in a row
    grace_s: float = 30.0  # after a start, until the first response
    busy_s: float = 30.0  # without a reply, for a process that makes progress; 0: it is treated as frozen


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """The activity of a process until ``at_s``."""

    at_s: float
    active_ns: Mapping[int, int]  # by thread: time on a core and time waiting for one
    is_stopped: bool = False  # by a signal or a debugger
    is_runnable: bool = False  # at this moment a thread runs, or waits for a core


class SilenceReason(enum.Enum):
    """Why a process did not reply. The values are labels of a metric."""

    FROZEN = "frozen"  # it is killed
    STARVED = "starved"  # it makes progress and gets more time
    BUSY = "busy"  # it made progress for too long; it is killed


def makes_progress(before: ProcessActivity | None, after: ProcessActivity | None) -> bool:
    """Whether a process ran or waited for a core between two moments. False if that is unknown."""
    if before is None or after is None or after.is_stopped:
        return False
    if after.is_runnable:  # the time of a wait is not counted before its end
        return True
    active_ns = sum(
        max(0, active - before.active_ns.get(thread, 0)) for thread, active in after.active_ns.items()
    )
    return active_ns > PROGRESS_SHARE * (after.at_s - before.at_s) * 1e9


class ProbeHistory:
    """The failed probes of one process since its last reply. Times are those of one clock."""

    def __init__(self, policy: ProbePolicy) -> None:
        self._policy = policy
        self._since_s = 0.0
        self._without_progress = 0  # in a row
        self.failures = 0

    def replied(self) -> None:
        self.failures = self._without_progress = 0

    def failed(self, began_s: float, now_s: float, *, progress: bool) -> SilenceReason | None:
        """A probe failed; returns what is known then. None: it is too early to decide."""
        if not self.failures:
            self._since_s = began_s
        self.failures += 1
        self._without_progress = 0 if progress else self._without_progress + 1
        if self.failures < self._policy.failures_max:
            return None
        if now_s - self._since_s >= self._policy.busy_s:
            return SilenceReason.BUSY if progress and self._policy.busy_s else SilenceReason.FROZEN
        if self._without_progress >= self._policy.failures_max:
            return SilenceReason.FROZEN
        return SilenceReason.STARVED
