"""A limit on how many tasks do something at a time; the others wait in the order in which they came.

`asyncio.Semaphore` does the same, but in Python 3.11 each release searches through the waiters that were
woken before, and there are thousands of them in a command to all agents. Here the next one is known.
"""

from __future__ import annotations

import asyncio
from collections import deque


class ConcurrencyLimit:
    """``async with limit: …``. Small, since there is one for each agent."""

    __slots__ = ("_free", "_waiting")

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: deque[asyncio.Future[None]] | None = None

    async def __aenter__(self) -> None:
        if self._free > 0:  # then no task waits
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was its turn already
                self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        """The place of this task is that of the next one."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise its task was cancelled
                turn.set_result(None)
                return
        self._free += 1
