"""Whether, and when, to start a crashed broker again. Pure.
 A broker that fell once is started at once: its clients wait.  One that keeps falling is given longer and
longer pauses, and one that fell too often within a window is given up, because whatever is wrong needs a
human: a loop of crashes only burns the disk's log and hides the first, telling line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supervision:
    crashes_max: int = 5  # this many within `window_s`, and it is given up; 0: never restarted
    window_s: float = 60.0
    pause_s: float = 0.1  # doubled with each crash in the window after the first
    pause_s_max: float = 10.0


NO_RESTART = Supervision(crashes_max=0)


def next_pause_s(supervision: Supervision, crashes_at_s: Sequence[float], now_s: float) -> float | None:
    """Seconds to wait before the next start, or None to give up. ``crashes_at_s`` includes this one."""
    recent = sum(1 for at_s in crashes_at_s if now_s - at_s <= supervision.window_s)
    if recent >= supervision.crashes_max:
        return None
    if recent <= 1:
        return 0.0
    return float(min(supervision.pause_s_max, supervision.pause_s * 2.0 ** min(recent - 2, 30)))
