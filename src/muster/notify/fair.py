"""A queue in which a sender that floods waits for itself: one item of each sender in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    def __init__(self, each_max: int) -> None:
        self._each_max = each_max
        self._waiting: dict[str, deque[T]] = {}
        self._turns: deque[str] = deque()
        self._some = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def put(self, sender: str, item: T) -> bool:
        """False if this sender has too much waiting already."""
        own = self._waiting.get(sender)
        if own is None:
            own = self._waiting[sender] = deque()
            self._turns.append(sender)
        elif len(own) >= self._each_max:
            return False
        own.append(item)
        self._some.set()
        return True

    def take(self) -> T:
        """The next, of those that are there."""
        sender = self._turns.popleft()
        own = self._waiting[sender]
        item = own.popleft()
        if own:
            self._turns.append(sender)
        else:
            del self._waiting[sender]
        return item

    async def get(self) -> T:
        while not self._turns:
            self._some.clear()
            await self._some.wait()
        return self.take()
