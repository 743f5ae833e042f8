"""Connections to the bus as whoever came in at a door: one for each, kept while it is used and a bit longer.

So a door gives nobody more than the broker gives them, and what they do stands in the audit under their name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from muster.bus import api
from muster.core import errors
from muster.trust.permissions import roles

IDLE_S = 60.0
ALL_MAX = 256

Connect = Callable[[str, roles.Role], Awaitable[api.Bus]]


@dataclass
class _CallerConnection:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    bus: api.Bus | None = None
    users: int = 0
    leaving: asyncio.TimerHandle | None = None


class CallerConnections:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._here: dict[tuple[str, str], _CallerConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._here)

    @contextlib.asynccontextmanager
    async def visit(self, name: str, role: str) -> AsyncIterator[api.Bus]:
        key = (name, role)
        one = self._here.get(key)
        if one is None:
            if len(self._here) >= ALL_MAX:
                raise errors.Overloaded(
                    f"{ALL_MAX} users are connected through this door", retry_after_s=IDLE_S
                )
            one = self._here[key] = _CallerConnection()
        one.users += 1
        if one.leaving is not None:
            one.leaving.cancel()
            one.leaving = None
        try:
            async with one.lock:
                if one.bus is None or one.bus.state is api.ConnectionState.CLOSED:
                    one.bus = await self._connect(name, roles.Role.named(role))
            yield one.bus
        finally:
            one.users -= 1
            if one.users == 0:
                loop = asyncio.get_running_loop()
                one.leaving = loop.call_later(IDLE_S if one.bus is not None else 0.0, self._leave, key)

    def _leave(self, key: tuple[str, str]) -> None:
        one = self._here.pop(key, None)
        if one is not None and one.bus is not None:
            task = asyncio.get_running_loop().create_task(one.bus.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for key, one in list(self._here.items()):
            if one.leaving is not None:
                one.leaving.cancel()
            self._leave(key)
        await asyncio.gather(*self._closing, return_exceptions=True)
