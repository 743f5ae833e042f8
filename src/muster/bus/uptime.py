"""Clocks beside that of the event loop: one that includes suspend, and one of the processor.

The clock of the event loop (CLOCK_MONOTONIC) stops while a machine is suspended, so eight hours of suspend
look like no time, and expired data looks fresh. CLOCK_BOOTTIME includes suspend.

A loop with its own clock (virtual time) is asked instead: there, computing takes no time.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """A clock in seconds that includes suspend if the system supports it."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    if boottime is None or _is_virtual(loop):
        return loop.time
    return functools.partial(time.clock_gettime, boottime)


def processor_clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """A clock in seconds that this thread has used the processor: waiting for it does not count. (The time of
    uvloop has a resolution of 1 ms.)"""
    return _running_time if _is_virtual(loop) else time.thread_time


def _running_time() -> float:
    return asyncio.get_running_loop().time()


def _is_virtual(loop: asyncio.AbstractEventLoop) -> bool:
    """uvloop has its own method for the same clock as asyncio."""
    kind = type(loop)
    return kind.time is not asyncio.BaseEventLoop.time and kind.__module__.partition(".")[0] != "uvloop"
