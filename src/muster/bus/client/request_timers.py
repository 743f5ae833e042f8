"""The timers of requests: one of the event loop for all requests that wait equally long.

Nearly every request gets its reply long before. With a timer of the loop for each, most of them would be
created, sorted into the loop's heap, and cancelled there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

IDLE_MAX = 16  # intervals whose timer runs on without a request; there are few intervals in a process


class _Interval(Generic[T]):
    """What waits equally long: in the order in which it is due."""

    __slots__ = ("due", "timer")

    def __init__(self) -> None:
        self.due: OrderedDict[T, float] = OrderedDict()  # by the clock of the loop
        self.timer: asyncio.TimerHandle


class RequestTimers(Generic[T]):
    """Calls ``expired`` for each item whose time is over. An item has one timer.

    An item that is stopped at the same moment may still be passed to ``expired``.
    """

    def __init__(self, expired: Callable[[T], None]) -> None:
        self._expired = expired
        self._intervals: dict[float, _Interval[T]] = {}

    def start(self, item: T, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + interval_s
        interval = self._intervals.get(interval_s)
        if interval is None:
            interval = self._intervals[interval_s] = _Interval()
            interval.timer = loop.call_at(due_s, self._ring, interval_s)
        interval.due[item] = due_s

    def stop(self, item: T, interval_s: float) -> None:
        """End the timer of an item, if it has not expired. ``interval_s``: as it was started."""
        interval = self._intervals.get(interval_s)
        if interval is None:
            return
        interval.due.pop(item, None)
        if not interval.due and len(self._intervals) > IDLE_MAX:
            interval.timer.cancel()
            del self._intervals[interval_s]

    def _ring(self, interval_s: float) -> None:
        loop, interval = asyncio.get_running_loop(), self._intervals[interval_s]
        due, now_s = interval.due, loop.time()
        expired = list(itertools.takewhile(lambda item: due[item] <= now_s, due))
        for item in expired:
            del due[item]
            loop.call_soon(self._expired, item)
        if due:
            interval.timer = loop.call_at(next(iter(due.values())), self._ring, interval_s)
        else:
            del self._intervals[interval_s]
