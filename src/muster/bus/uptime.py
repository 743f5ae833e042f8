"""A clock for ages and deadlines that outlast a suspend.

The event loop's clock (CLOCK_MONOTONIC) stands still while a machine sleeps, so eight hours of sleep look
like no time at all, and what expired meanwhile looks fresh.  CLOCK_BOOTTIME counts them.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Seconds since some moment, with time in suspend where the system counts it.

    A loop with a clock of its own (virtual time) keeps that one.  uvloop has its own method for the same
    clock as asyncio's.
    """
    kind = type(loop)
    is_monotonic = kind.time is asyncio.BaseEventLoop.time or kind.__module__.partition(".")[0] == "uvloop"
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    if boottime is None or not is_monotonic:
        return loop.time
    return functools.partial(time.clock_gettime, boottime)
