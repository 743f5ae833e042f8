"""A fair queue: one item of each sender in turn, so a sender that floods delays only itself."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Generic, TypeVar

T = TypeVar("T")

BYTES_MAX: Final = 16 << 20  # for each sender


class FairQueue(Generic[T]):
    def __init__(self, each_max: int) -> None:
        self._each_max = each_max
        self._waiting: dict[str, deque[tuple[T, int]]] = {}
        self._sizes: dict[str, int] = {}
        self._turns: deque[str] = deque()
        self._some = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def put(self, sender: str, item: T, size: int = 0) -> bool:
        """Add an item. False if this sender has too many waiting already."""
        own = self._waiting.get(sender)
        if own is None:
            own = self._waiting[sender] = deque()
            self._sizes[sender] = 0
            self._turns.append(sender)
        elif len(own) >= self._each_max or self._sizes[sender] + size > BYTES_MAX:
            return False
        own.append((item, size))
        self._sizes[sender] += size
        self._some.set()
        return True

    def take(self) -> T:
        """Remove and return the next item; the queue must not be empty."""
        sender = self._turns.popleft()
        own = self._waiting[sender]
        item, size = own.popleft()
        self._sizes[sender] -= size
        if own:
            self._turns.append(sender)
        else:
            del self._waiting[sender], self._sizes[sender]
        return item

    async def get(self) -> T:
        while not self._turns:
            self._some.clear()
            await self._some.wait()
        return self.take()
