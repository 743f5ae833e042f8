"""Turns: work that takes long, of which only some runs at once.

Requests that read much take a thread or a process each.  The others wait for their turn, so that those of one
person leave threads for the rest of the process, such as the checks of logins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from muster.core import errors

WAIT_S = 60.0
LONG_AT_ONCE = 2  # reads of the history, past reports and plans of manifests


class WorkTurns:
    """``what``: the name of the work in the error of those who wait for too long."""

    def __init__(self, at_once: int, what: str) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._what = what

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """`errors.Overloaded` after `WAIT_S` without a turn."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise errors.Overloaded(
                f"too many {self._what} are running", hint="try again later", retry_after_s=5.0
            ) from None
        try:
            yield
        finally:
            self._free.release()
