"""Decides whether and when a crashed process or task is restarted. Pure.

After the first crash the restart is immediate. After each further crash in a row the delay doubles. A run
that lasts for the policy's window is stable: earlier crashes no longer count. After too many crashes within
the window there is no restart any more, because the problem needs an operator: a crash loop only fills the
log and hides the first error message.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    # crashes within `window_s` after which there is no further restart; 0: never restarted, None: no limit
    crashes_max: int | None = 5
    window_s: float = 60.0
    pause_s: float = 0.1  # doubled with each crash in a row after the second
    pause_s_max: float = 10.0


LOOP_CRASHES = 3
NO_RESTART = BackoffPolicy(crashes_max=0)


class CrashHistory:
    """The crashes of one process or task since its last stable run. Times are those of one clock."""

    def __init__(self, policy: BackoffPolicy) -> None:
        self._policy = policy
        self._started_at_s: float | None = None
        self._in_a_row = 0
        self._at_s: list[float] = []  # crashes within the window; empty without a limit

    @property
    def count(self) -> int:
        """Crashes within the window, if their number is limited; otherwise since the last stable run."""
        return len(self._at_s) or self._in_a_row

    def is_looping(self, now_s: float) -> bool:
        """Whether it crashed `LOOP_CRASHES` times in a row and has had no stable run since."""
        since_s = now_s if self._started_at_s is None else self._started_at_s
        return self._in_a_row >= LOOP_CRASHES and now_s - since_s < self._policy.window_s

    def started(self, now_s: float) -> None:
        self._started_at_s = now_s

    def crashed(self, now_s: float) -> float | None:
        """Record a crash, or a start that failed. Returns the delay in seconds before the next start; None:
        no restart."""
        if self._started_at_s is not None and now_s - self._started_at_s >= self._policy.window_s:
            self._in_a_row = 0
        self._started_at_s = None
        self._in_a_row += 1
        limit = self._policy.crashes_max
        if limit is not None:
            self._at_s = [at_s for at_s in self._at_s if now_s - at_s <= self._policy.window_s] + [now_s]
            if len(self._at_s) >= limit:
                return None
        return _delay_s(self._policy, self._in_a_row)


def _delay_s(policy: BackoffPolicy, crashes: int) -> float:
    if crashes <= 1:
        return 0.0
    return float(min(policy.pause_s_max, policy.pause_s * 2.0 ** min(crashes - 2, 30)))
