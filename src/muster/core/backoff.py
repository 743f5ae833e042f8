"""Whether, and when, to start a crashed broker again. Pure.

A broker that fell once is started at once: its clients wait.  One that keeps falling is given longer and
longer pauses, and one that fell too often within a window is given up, because whatever is wrong needs a
human: a loop of crashes only burns the disk's log and hides the first, telling line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    crashes_max: int = 5  # this many within `window_s`, and it is given up; 0: never restarted
    window_s: float = 60.0
    pause_s: float = 0.1  # doubled with each crash in the window after the first
    pause_s_max: float = 10.0


NO_RESTART = BackoffPolicy(crashes_max=0)


def recent(supervision: BackoffPolicy, crashes_at_s: Sequence[float], now_s: float) -> list[float]:
    """Those that still count."""
    return [at_s for at_s in crashes_at_s if now_s - at_s <= supervision.window_s]


def next_delay_s(supervision: BackoffPolicy, crashes: int) -> float | None:
    """Seconds to wait before the next start after so many crashes, this one included; None: give up."""
    if crashes >= supervision.crashes_max:
        return None
    if crashes <= 1:
        return 0.0
    return float(min(supervision.pause_s_max, supervision.pause_s * 2.0 ** min(crashes - 2, 30)))
