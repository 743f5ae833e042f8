"""Starts, stops and restarts of one resource: one at a time, each in a task of its own.

So a transition continues if its operation is cancelled, the next operation waits for it, and a grace period
may be longer than an operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Transitions:
    def __init__(self, name: str) -> None:
        self._name = name
        self._goal = ""
        self._task: asyncio.Task[None] | None = None

    def is_underway(self, goal: str = "") -> bool:
        """Whether one is under way: any, or one with this goal."""
        return self._task is not None and not self._task.done() and goal in ("", self._goal)

    async def reach(self, goal: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work``, or wait for the current transition if it has the same goal."""
        if not self.is_underway(goal):
            await self.idle()
            self._goal = goal
            self._task = asyncio.create_task(work(), name=f"{goal} {self._name}")
            self._task.add_done_callback(_retrieved)
        assert self._task is not None
        await asyncio.shield(self._task)

    async def idle(self) -> None:
        """Wait for the current transition; its outcome belongs to the operation that started it."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def close(self, *, completes: bool) -> None:
        """End the current transition, or wait until it ``completes``."""
        if self._task is not None:
            if not completes:
                self._task.cancel()
            await asyncio.wait([self._task])


def _retrieved(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a transition whose operation was cancelled; the state reports it."""
    if not task.cancelled():
        task.exception()
