"""A lock for each key, acquired in the order of the requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class KeyLocks:
    def __init__(self) -> None:
        self._waiters: dict[str, deque[asyncio.Future[None]] | None] = {}  # and the waiters of each key

    def try_acquire(self, key: str) -> bool:
        """Acquire the lock if it is free. The caller must release it."""
        if key in self._waiters:
            return False
        self._waiters[key] = None
        return True

    def release(self, key: str) -> None:
        """Release the lock, or pass it to the next waiter."""
        waiting = self._waiters[key]
        while waiting:
            waiter = waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        del self._waiters[key]

    @contextlib.asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        if not self.try_acquire(key):
            waiting = self._waiters[key]
            if waiting is None:
                waiting = self._waiters[key] = deque()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if (
                    waiter.done() and not waiter.cancelled()
                ):  # it was passed to us just before the cancellation
                    self.release(key)
                raise
        try:
            yield
        finally:
            self.release(key)
