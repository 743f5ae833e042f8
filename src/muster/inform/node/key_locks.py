"""One writer of a key at a time, in the order in which they came."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class KeyLocks:
    def __init__(self) -> None:
        self._taken: dict[str, deque[asyncio.Future[None]] | None] = {}  # and who waits

    def take_now(self, key: str) -> bool:
        """If nobody has it. Whoever takes it gives it back."""
        if key in self._taken:
            return False
        self._taken[key] = None
        return True

    def give(self, key: str) -> None:
        """To the next who waits, if there is one."""
        waiting = self._taken[key]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._taken[key]

    @contextlib.asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        if not self.take_now(key):
            waiting = self._taken[key]
            if waiting is None:
                waiting = self._taken[key] = deque()
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was given to us at that very moment
                    self.give(key)
                raise
        try:
            yield
        finally:
            self.give(key)
