"""One question on behalf of many callers.

A caller may use the answer to a question that was sent after the caller arrived, and no earlier one.  So one
question is under way at a time, and all callers that arrive meanwhile share the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from muster.core import errors

T = TypeVar("T")


class SharedRounds(Generic[T]):
    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._next: asyncio.Future[T] | None = None  # of the question that has not been sent yet
        self._task: asyncio.Task[None] | None = None

    async def answer(self) -> T:
        """Of a question that is sent from now on."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="shared question")
        return await asyncio.shield(self._next)  # a caller that is cancelled does not cancel the others

    async def _run(self) -> None:
        try:
            while (waiting := self._next) is not None:
                self._next = None
                try:
                    answer = await self._ask()
                except asyncio.CancelledError:
                    _fail(waiting, errors.Unavailable("this node is closing"))
                    raise
                except Exception as error:  # noqa: BLE001  (it belongs to the callers)
                    _fail(waiting, error)
                else:
                    waiting.set_result(answer)
        finally:
            self._task = None
            if (waiting := self._next) is not None:
                self._next = None
                _fail(waiting, errors.Unavailable("this node is closing"))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _fail(waiting: asyncio.Future[T], error: Exception) -> None:
    waiting.set_exception(error)
    waiting.exception()  # all callers may have given up meanwhile
