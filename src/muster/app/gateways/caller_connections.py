"""Bus connections for the callers of a gateway: one for each caller, closed some time after the last use.

A gateway therefore grants no caller more than the broker does, and the audit records the caller's name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from muster.bus import api
from muster.core import errors
from muster.supervision import tasks
from muster.trust.permissions import roles

IDLE_S = 60.0
CONNECTIONS_MAX = 256

Connect = Callable[[str, roles.Role], Awaitable[api.Bus]]


@dataclass
class _CallerConnection:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    bus: api.Bus | None = None
    users: int = 0
    idle_timer: asyncio.TimerHandle | None = None


class CallerConnections:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._connections: dict[tuple[str, str], _CallerConnection] = {}
        self._closing = tasks.TaskSupervisor("caller connections")

    def __len__(self) -> int:
        return len(self._connections)

    @contextlib.asynccontextmanager
    async def connect(self, name: str, role: str) -> AsyncIterator[api.Bus]:
        """The connection of a caller; it stays open while it is used, and for `IDLE_S` after that."""
        key = (name, role)
        connection = self._connections.get(key)
        if connection is None:
            if len(self._connections) >= CONNECTIONS_MAX:
                raise errors.Overloaded(
                    f"{CONNECTIONS_MAX} users are connected through this gateway", retry_after_s=IDLE_S
                )
            connection = self._connections[key] = _CallerConnection()
        connection.users += 1
        if connection.idle_timer is not None:
            connection.idle_timer.cancel()
            connection.idle_timer = None
        try:
            async with connection.lock:
                if connection.bus is None or connection.bus.state is api.ConnectionState.CLOSED:
                    connection.bus = await self._connect(name, roles.Role.named(role))
            yield connection.bus
        finally:
            connection.users -= 1
            if connection.users == 0:
                loop = asyncio.get_running_loop()
                connection.idle_timer = loop.call_later(
                    IDLE_S if connection.bus is not None else 0.0, self._close_idle, key
                )

    def _close_idle(self, key: tuple[str, str]) -> None:
        connection = self._connections.pop(key, None)
        if connection is not None and connection.bus is not None:
            self._closing.spawn("close", connection.bus.close())

    async def close(self) -> None:
        for key, connection in list(self._connections.items()):
            if connection.idle_timer is not None:
                connection.idle_timer.cancel()
            self._close_idle(key)
        await self._closing.wait_idle()
