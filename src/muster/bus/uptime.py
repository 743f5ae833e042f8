"""A clock for ages and deadlines that outlast a suspend.

The clock of the event loop (CLOCK_MONOTONIC) stops while a machine is suspended, so eight hours of suspend
look like no time, and expired data looks fresh. CLOCK_BOOTTIME includes suspend.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """A clock in seconds that includes suspend if the system supports it.

    A loop with its own clock (virtual time) is not changed. uvloop has its own method for the same clock as
    asyncio.
    """
    kind = type(loop)
    is_monotonic = kind.time is asyncio.BaseEventLoop.time or kind.__module__.partition(".")[0] == "uvloop"
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    if boottime is None or not is_monotonic:
        return loop.time
    return functools.partial(time.clock_gettime, boottime)
