"""Simulated processes, and which one runs."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any


class Process:
    """One life of a simulated process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = False
        self.killed = False
        self.disk_delay_s: Callable[[], float] = lambda: 0.0
        self.clock_ahead_ns: Callable[[], int] = lambda: 0
        self.waiting: deque[asyncio.Handle] = deque()
        self.tasks: set[asyncio.Task[Any]] = set()  # not to be collected: that would run their ``finally``

    @property
    def runs(self) -> bool:
        return not (self.frozen or self.killed)


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
