"""Concurrent requests with the same key are executed once, and all callers get the outcome.

A caller cannot know whether a broker that failed had the request, had the reply, or neither; so it soon
repeats the same request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    def __init__(self) -> None:
        self._outcomes: dict[Hashable, asyncio.Task[T]] = {}
        self._waiting: dict[Hashable, int] = {}

    def __contains__(self, what: Hashable) -> bool:
        """Whether it is being executed."""
        return what in self._outcomes

    async def once(self, what: Hashable, do: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The outcome of ``do``, or of the one that was begun for the same ``what`` and has not ended.

        It is shared by all callers: it is cancelled when the last of them is.
        """
        if (task := self._outcomes.get(what)) is None:
            task = self._outcomes[what] = asyncio.create_task(do())
        self._waiting[what] = self._waiting.get(what, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[what] -= 1
            if not self._waiting[what]:
                del self._waiting[what], self._outcomes[what]
                task.cancel()
