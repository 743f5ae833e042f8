"""Decides whether and when a crashed process is restarted. Pure.

A process that crashed once is restarted at once. After repeated crashes the delay grows. After too many
crashes within a time window the process is not restarted any more, because the problem needs an operator: a
crash loop only fills the log and hides the first error message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    # crashes within `window_s` after which there is no further restart; 0: never restarted
    crashes_max: int = 5
    window_s: float = 60.0
    pause_s: float = 0.1  # doubled with each crash in the window after the first
    pause_s_max: float = 10.0


NO_RESTART = BackoffPolicy(crashes_max=0)


def recent(supervision: BackoffPolicy, crashes_at_s: Sequence[float], now_s: float) -> list[float]:
    """The crashes within the time window."""
    return [at_s for at_s in crashes_at_s if now_s - at_s <= supervision.window_s]


def next_delay_s(supervision: BackoffPolicy, crashes: int) -> float | None:
    """The delay in seconds before the next start after this many crashes, the current one included; None: no
    restart."""
    if crashes >= supervision.crashes_max:
        return None
    if crashes <= 1:
        return 0.0
    return float(min(supervision.pause_s_max, supervision.pause_s * 2.0 ** min(crashes - 2, 30)))
