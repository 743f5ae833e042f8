"""What is asked again while it is under way is done once, and all who asked are told its outcome.

Whoever asks cannot know whether a broker that died had the request, had the answer, or neither; so it asks
again soon, in the same words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from muster.core import errors

T = TypeVar("T")


class UnderWay(Generic[T]):
    def __init__(self) -> None:
        self._outcomes: dict[Hashable, asyncio.Future[T]] = {}

    async def once(self, what: Hashable, do: Callable[[], Awaitable[T]]) -> T:
        """The outcome of ``do``, or of the one that was begun for the same ``what`` and has not ended."""
        known = self._outcomes.get(what)
        if known is not None:
            return await asyncio.shield(known)
        outcome = self._outcomes[what] = asyncio.get_running_loop().create_future()
        try:
            result = await do()
        except errors.MusterError as error:
            outcome.set_exception(error)
            outcome.exception()  # nobody else may have asked
            raise
        else:
            outcome.set_result(result)
            return result
        finally:
            del self._outcomes[what]
            outcome.cancel()
