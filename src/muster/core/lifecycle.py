"""What ``async with`` does with an object that is closed, and with a service that is started and stopped.

A class inherits one of these and defines only `close`, or `start` and `stop`. A start that fails part of the
way is undone: subscriptions and tasks of the first half would otherwise stay, and answer beside the next
attempt.
"""

from __future__ import annotations

import abc
from typing import Self


class ClosingContext(abc.ABC):
    """Open when it exists; ``async with`` closes it."""

    __slots__ = ()

    @abc.abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class ServiceContext(abc.ABC):
    """``async with`` starts it, and stops it at the end and after a failed start."""

    __slots__ = ()

    @abc.abstractmethod
    async def start(self) -> None: ...

    @abc.abstractmethod
    async def stop(self) -> None:
        """Also after a start that failed part of the way."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
