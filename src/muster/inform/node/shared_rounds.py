"""One request on behalf of many callers.

A caller may use the result of a request that was sent after the caller arrived, and of no earlier one.  So
one request runs at a time, and all callers that arrive meanwhile share the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from muster.core import errors

T = TypeVar("T")


class SharedRounds(Generic[T]):
    def __init__(self, send: Callable[[], Awaitable[T]]) -> None:
        self._send = send
        self._next: asyncio.Future[T] | None = None  # of the request that has not been sent yet
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def next(self) -> asyncio.Future[T]:
        """The result of a request that is sent from now on; of many callers, so none may cancel it."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            if self._closed:
                waiting, self._next = self._next, None
                _fail(waiting, errors.Unavailable("this node is closing"))
                return waiting
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="shared request")
        return self._next

    async def _run(self) -> None:
        try:
            while (waiting := self._next) is not None:
                self._next = None
                try:
                    result = await self._send()
                except asyncio.CancelledError:
                    _fail(waiting, errors.Unavailable("this node is closing"))
                    raise
                except Exception as error:  # noqa: BLE001  (passed to the callers)
                    _fail(waiting, error)
                else:
                    waiting.set_result(result)
        finally:
            self._task = None
            if (waiting := self._next) is not None:
                self._next = None
                _fail(waiting, errors.Unavailable("this node is closing"))

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _fail(waiting: asyncio.Future[T], error: Exception) -> None:
    waiting.set_exception(error)
    waiting.exception()  # all callers may have been cancelled
